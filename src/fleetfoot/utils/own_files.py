"""Folders and sockets of one process: another process never takes them, and removes them once their owner is gone.

The owner holds a lock (``flock``) on a file, which ends with the process, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = "lock"


class OwnFolder:
    """A new folder. Those with the same prefix that their owners have left are removed first.

    Args:
        prefix: of the name, such as ``fleetfoot-serve-``.
        parent: where; None: the system's folder for temporary files.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        for left in parent.glob(f"{prefix}*"):
            _remove_if_left(left)
        new = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))  # others do not look for this name
        lock = _opened(new / _LOCK)
        with contextlib.suppress(OSError):  # a file system without locks, where what is left stays
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = new.rename(parent / new.name[1:])
        self._finalizer = weakref.finalize(self, _remove_own, self.path, lock, os.getpid())

    def close(self) -> None:
        """Remove the folder, with all that is in it. Safe to call again."""
        self._finalizer()


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _locked(path: Path) -> int:
    """A file that this process has locked. Raises BlockingIOError: another one has."""
    descriptor = _opened(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _remove_own(path: Path, lock: int, pid: int) -> None:
    if os.getpid() == pid:  # not in a fork
        _remove(path, lock)


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(lock)


def _remove_if_left(path: Path) -> None:
    """Remove a folder of this user if it has a lock that is free."""
    with contextlib.suppress(OSError):  # it is in use, or another process removes it
        found = path.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and (path / _LOCK).exists():
            _remove(path, _locked(path / _LOCK))


@contextmanager
def bound_unix_socket(path: str) -> Iterator[socket.socket]:
    """A socket that is bound to ``path``, and in the end removed if it is still this one.

    One that a process has left is replaced. ``PATH.lock`` is locked meanwhile: until the socket listens, other
    processes could not tell it from one that was left.

    Raises:
        OSError: the path is in use, or cannot be bound.
    """
    lock_path = Path(f"{path}.lock")
    try:
        lock = _lock_beside(lock_path)
    except BlockingIOError:
        raise OSError(f"another server has this socket, and {lock_path} locked") from None
    listener = socket.socket(socket.AF_UNIX)
    own: os.stat_result | None = None
    try:
        _replace_left_socket(path)
        listener.bind(path)
        own = os.lstat(path)
        yield listener
    finally:
        listener.close()
        with contextlib.suppress(OSError):
            if own is not None and os.path.samestat(own, os.lstat(path)):
                os.unlink(path)
        lock_path.unlink(missing_ok=True)
        os.close(lock)


def _lock_beside(path: Path) -> int:
    while True:
        lock = _locked(path)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.stat()):
                return lock
        os.close(lock)  # its owner has removed it meanwhile


def _replace_left_socket(path: str) -> None:
    """Raises OSError: a process listens on it."""
    if not Path(path).is_socket():
        return  # there is nothing, or what cannot be bound
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
        except BlockingIOError:
            pass  # its queue is full
    raise OSError("another process listens on it")
