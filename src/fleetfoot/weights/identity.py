"""The identity of weights: a hash over every byte that is served, whatever the folder's path. No torch.

Files are hashed in a thread, beside the load that reads the same pages. A hash is kept in the user's cache, by what
changes with a file: its device, inode, size, and the times of its last change, of which no program can set ``ctime``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

from fleetfoot.config import env
from fleetfoot.records.weights import WeightError
from fleetfoot.utils.process import num_cores
from fleetfoot.weights.files import checkpoint_files

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 25
"""Bytes that are read at once. A mapped file that is cut short would end the process."""
_MAX_THREADS = 8
_RECENT_NS = 2_000_000_000
"""Later changes of a file may have the same times, in file systems that count in seconds."""


@dataclass(frozen=True, slots=True)
class FileState:
    """What differs once a file has been replaced or written to."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileState:
        """Raises OSError: there is no such file."""
        found = path.stat()
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def hash_file(path: Path, *, clock: Callable[[], int] = time.time_ns) -> tuple[FileState, str]:
    """The state of a file, and the BLAKE3 hash of its content, 64 hex digits. ``clock``: nanoseconds since 1970.

    Raises WeightError: the file has changed while it was read; OSError: it cannot be read.
    """
    from blake3 import blake3

    state, read_at = FileState.of(path), clock()
    kept = env.cache_folder() / "weights" / f"{state.device}-{state.inode}"
    key = " ".join(map(str, astuple(state)))
    if (digest := _kept(kept, key)) is not None:
        return state, digest
    # the load needs the other half
    hasher = blake3(max_threads=max(1, min(_MAX_THREADS, num_cores() // 2)))
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, state.size + 1)))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
    if FileState.of(path) != state:
        raise changed(path)
    if read_at - max(state.ctime_ns, state.mtime_ns) > _RECENT_NS:
        _keep(kept, f"{key} {hasher.hexdigest()}")
    return state, hasher.hexdigest()


def _kept(path: Path, key: str) -> str | None:
    try:
        known, _, digest = path.read_text().rpartition(" ")
    except (OSError, ValueError):
        return None
    return digest if known == key and len(digest) == 64 else None


def _keep(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new.write_text(text)
        new.replace(path)
    except OSError as error:
        logger.info("the hash of a weight file cannot be kept in %s, and is computed at each start: %s", path, error)


def changed(path: Path) -> WeightError:
    return WeightError(f"{path} was replaced or changed while it was loaded; start again once it is complete")


class WeightsIdentity:
    """The identity of the weights in some folders, or of random ones, computed when it is needed.

    Args:
        folders: each with a checkpoint.
        parts: further files that are served.
        drawn: what random weights depend on.

    A copy in another process computes it again, from that machine's files.
    """

    def __init__(self, folders: Iterable[Path] = (), parts: Iterable[Path] = (), drawn: str = "") -> None:
        self._folders, self._parts, self._drawn = tuple(folders), tuple(parts), drawn
        self._states: dict[Path, FileState] = {}
        self._value: str | None = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        self._computing = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return WeightsIdentity, (self._folders, self._parts, self._drawn)

    def note(self) -> None:
        """Note the states of the files, before they are loaded. A file that is absent is the load's to report."""
        try:
            self._states = {path: FileState.of(path) for path in self._files()}
        except (OSError, WeightError):
            self._states = {}

    def with_folder(self, folder: Path) -> WeightsIdentity:
        """The identity with another checkpoint in place of the model's."""
        return WeightsIdentity((folder, *self._folders[1:]), self._parts, self._drawn)

    def start(self) -> None:
        """`note`, and hash the files in a thread."""
        self.note()
        self._thread = threading.Thread(target=self._try, name="weights-identity", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise WeightError, which names the file, if one is not that of `note` any more. Files with another state and
        the content that was hashed are accepted."""
        for path, state in self._states.items():
            if not path.is_file() or FileState.of(path) != state:
                again = WeightsIdentity(self._folders, self._parts, self._drawn)
                if self._value is None or not path.is_file() or again.value() != self._value:
                    raise changed(path)

    def value(self) -> str:
        """32 hex digits: equal for equal contents. Raises WeightError: a file cannot be read, or has changed since
        `note`."""
        if self._thread is not None:
            self._thread.join()
        if self._value is None and self._error is None:
            self._try()
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value

    def _try(self) -> None:
        with self._computing:
            if self._value is None:
                try:
                    self._value = self._compute()
                except (WeightError, OSError) as error:
                    self._error = error if isinstance(error, WeightError) else WeightError(f"cannot be read: {error}")

    def _compute(self) -> str:
        lines = [f"drawn {self._drawn}"] if self._drawn else []
        for path in self._files():
            state, digest = hash_file(path)
            if state != self._states.setdefault(path, state):
                raise changed(path)
            lines.append(f"{path.name} {state.size} {digest}")
        return digest_of(lines)

    def _files(self) -> list[Path]:
        return [path for folder in self._folders for path in checkpoint_files(folder)] + list(self._parts)


def digest_of(lines: Iterable[str]) -> str:
    """32 hex digits over some lines."""
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()
