"""Folders that are removed with their process, however that ends."""

import signal
import subprocess
import sys
from pathlib import Path

from fleetfoot.utils.owned_folder import OwnedFolder

CHILD = """
import sys
from pathlib import Path
from fleetfoot.utils.owned_folder import OwnedFolder
folder = OwnedFolder("some-", Path(sys.argv[1]))
(folder.path / "file").write_text("x")
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_folders_of_processes(tmp_path: Path) -> None:
    (tmp_path / "some-thing").mkdir()  # of no owner
    mine = OwnedFolder("some-", tmp_path)
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    paths = []
    for child in children:
        assert child.stdout is not None
        paths.append(Path(child.stdout.readline().decode().strip()))
    assert all((path / "file").is_file() for path in paths) and mine.path.is_dir()
    children[0].communicate()  # it ends
    children[1].send_signal(signal.SIGKILL)
    children[1].communicate()
    assert [path.exists() for path in paths] == [False, True]
    other = OwnedFolder("some-", tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "some-thing", mine.path, other.path])
    mine.close()
    mine.close()
    del other
    assert [path.name for path in tmp_path.iterdir()] == ["some-thing"]
