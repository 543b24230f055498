"""Folders and sockets of one process: which are removed, and by whom."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fleetfoot.utils.own_files import OwnFolder, bound_unix_socket
from fleetfoot.utils.process import raise_file_limit

PREFIX = "fleetfoot-test-"


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def owner(source: str) -> subprocess.Popen[str]:
    """A process that runs ``source`` and then waits."""
    lines = ("import sys, tempfile", "tempfile.tempdir = sys.argv[1]", source, "print('ready', flush=True)", "input()")
    command = [sys.executable, "-c", "\n".join(lines), tempfile.gettempdir()]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def kill(process: subprocess.Popen[str]) -> None:
    with process:
        process.send_signal(signal.SIGKILL)


FOLDER = f"from fleetfoot.utils.own_files import OwnFolder; folder = OwnFolder({PREFIX!r}); (folder.path / 'a').mkdir()"


def test_folders_of_processes_that_were_killed_are_removed(parent: Path) -> None:
    other = owner(FOLDER)
    folder = OwnFolder(PREFIX)
    assert len(list(parent.iterdir())) == 2  # the other's owner lives
    kill(other)
    mine = OwnFolder(PREFIX)
    assert set(parent.iterdir()) == {folder.path, mine.path}
    for one in (folder, mine, mine):
        one.close()
    assert list(parent.iterdir()) == []


def test_a_folder_elsewhere_is_removed_with_its_process_and_with_its_object(parent: Path) -> None:
    place = parent / "elsewhere"
    place.mkdir()
    other = owner(
        f"import os; from pathlib import Path; from fleetfoot.utils.own_files import OwnFolder\n"
        f"folder = OwnFolder({PREFIX!r}, Path({str(place)!r}))\n"
        "if not (child := os.fork()): folder.close(); os._exit(0)  # it is its parent's\n"
        "os.waitpid(child, 0)"
    )
    mine = OwnFolder(PREFIX, place)
    assert len(list(place.iterdir())) == 2
    other.communicate("\n")  # it ends
    assert list(place.iterdir()) == [mine.path]
    del mine
    assert list(place.iterdir()) == []


def test_what_is_no_left_folder_stays(parent: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (parent / f"{PREFIX}file").write_text("")
    (parent / f"{PREFIX}plain").mkdir()  # without a lock: not of this program
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "lock").write_text("")
    (parent / f"{PREFIX}link").symlink_to(elsewhere)
    OwnFolder(PREFIX).close()
    assert len(list(parent.iterdir())) == 3 and (elsewhere / "lock").exists()


def test_a_socket_of_a_live_server_is_refused_and_one_that_was_left_is_replaced(parent: Path) -> None:
    path = str(parent / "socket")
    source = (
        f"from fleetfoot.utils.own_files import bound_unix_socket; c = bound_unix_socket({path!r}); s = c.__enter__()"
    )
    other = owner(source)  # it does not listen yet
    with pytest.raises(OSError, match="another server has this socket"), bound_unix_socket(path):
        pass
    assert Path(path).is_socket()
    kill(other)
    with bound_unix_socket(path) as listener:
        listener.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
    assert list(parent.iterdir()) == []


def test_a_socket_of_another_program(parent: Path) -> None:
    path = str(parent / "socket")
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen(0)
        for _ in range(3):  # its queue is full then
            with pytest.raises(OSError, match="another process listens on it"), bound_unix_socket(path):
                pass
        assert Path(path).is_socket()
    (parent / "file").write_text("kept")
    with pytest.raises(OSError, match="in use"), bound_unix_socket(str(parent / "file")):
        pass
    assert (parent / "file").read_text() == "kept"


def test_a_socket_that_another_one_has_replaced_stays(parent: Path) -> None:
    path = str(parent / "socket")
    with bound_unix_socket(path), socket.socket(socket.AF_UNIX) as other:
        os.unlink(path)
        other.bind(path)
    assert Path(path).is_socket()


def test_the_limit_of_open_files_is_raised() -> None:
    source = (
        "import resource as r; from fleetfoot.utils.process import raise_file_limit\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, 128))\nprint(raise_file_limit(), r.getrlimit(r.RLIMIT_NOFILE))"
    )
    found = subprocess.run([sys.executable, "-c", source], check=True, capture_output=True, text=True).stdout
    assert found == "128 (128, 128)\n"
    assert raise_file_limit() >= 128
