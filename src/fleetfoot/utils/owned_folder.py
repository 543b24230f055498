"""Folders for files of a process, which are removed when it ends, or by the next process if it was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

_OWNER = ".owner"
"""A file that its process has locked. The lock ends with the process, however that ends."""


class OwnedFolder:
    """A new folder with a name that begins with ``prefix``; ``parent``: where, None: the system's folder for temporary
    files. First removes those of processes that have ended. Raises OSError: it cannot be made."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = Path(tempfile.gettempdir()) if parent is None else parent
        for folder in parent.glob(f"{prefix}*"):
            _remove_if_left(folder)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = os.open(self.path / f"{_OWNER}.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        (self.path / f"{_OWNER}.new").rename(self.path / _OWNER)  # is locked when it is seen
        self._finalizer = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def close(self) -> None:
        """Remove it, with all that is in it."""
        self._finalizer()


def _remove(path: Path, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # not in a fork
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _remove_if_left(folder: Path) -> None:
    try:
        lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # being made or removed, or another user's
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass
    finally:
        os.close(lock)
