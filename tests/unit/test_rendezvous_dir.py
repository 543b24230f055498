"""The folder in which an engine and its workers meet: it goes with its engine, or with the next one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fleetfoot.executor.processes import RendezvousDir

KILLED = """
import os, signal
from fleetfoot.executor.processes import RendezvousDir
folder = RendezvousDir()
(folder.path / "steps-0").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of child processes
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def age(folder: Path) -> None:
    """Make it look an hour old."""
    lock = folder / "lock"
    os.utime(lock, (lock.stat().st_atime, lock.stat().st_mtime - 3600))


def test_it_goes_with_its_engine(parent: Path) -> None:
    folder = RendezvousDir()
    assert folder.path.parent == parent
    assert folder.path.stat().st_mode & 0o077 == 0
    folder.remove()
    folder.remove()
    assert list(parent.iterdir()) == []


def test_what_a_killed_engine_leaves_goes_with_the_next_one(parent: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = parent.iterdir()
    first = RendezvousDir()
    assert left.exists()  # it might be that of an engine that is about to lock it
    age(left)
    second = RendezvousDir()
    assert not left.exists()
    assert set(parent.iterdir()) == {first.path, second.path}
    first.remove()
    second.remove()


def test_what_is_in_use_or_not_ours_stays(parent: Path) -> None:
    mine = RendezvousDir()
    age(mine.path)
    other = parent / "fleetfoot-notes"
    other.mkdir()
    RendezvousDir().remove()
    assert set(parent.iterdir()) == {mine.path, other}
    mine.remove()
