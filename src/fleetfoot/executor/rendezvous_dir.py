"""The folder in which an engine and its workers meet: sockets, and a file for torch.distributed.

It is removed when its engine ends. One that was killed by SIGKILL cannot do that, and leaves it to the next engine.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_PREFIX = "fleetfoot-"
_LOCK = "lock"
"""A file that an engine holds locked; the kernel unlocks it when the process ends, however that happens."""
_SETTLED_S = 60.0
"""How old a lock must be to be looked at: one that has just been made may not be locked yet."""


class MeetingFolder:
    """For this user alone."""

    def __init__(self) -> None:
        _remove_forgotten(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):  # where files cannot be locked, nobody else can lock it either
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """In any thread, and again."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)


def _remove_forgotten(parent: Path) -> None:
    """Remove folders of this user whose engines are no more."""
    for lock in parent.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # somebody else's, in use, or just removed
            if lock.stat().st_uid != os.getuid() or time.time() - lock.stat().st_mtime < _SETTLED_S:
                continue
            with open(lock, "rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(lock.parent, ignore_errors=True)
