"""Mapped files that may be cut: see ``mappings.c``. No torch."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from fleetfoot.native.loading import NativeUnavailableError, open_mappings


class CutFileError(OSError):
    """A file was cut while it was mapped. ``filename`` is the file, ``field`` the first tensor that is not whole."""

    def __init__(self, path: Path, field: str, size: int) -> None:
        problem = f"{field} is not whole: the file was cut to {size} bytes while it was mapped"
        super().__init__(errno.EIO, problem, str(path))
        self.field, self.size = field, size

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


class Guard:
    """Lets reads beyond the end of a mapped file that is cut give zeros, where they would end the process. Products of
    the C kernels then raise an error, as long as there is the guard."""

    def __init__(self, path: Path, address: int, size: int, field_at: Callable[[int], str]) -> None:
        """``field_at``: the name of what lies at a byte of the file. Raises OSError: it cannot be opened."""
        self._path, self._field_at, self._number = path, field_at, 0
        try:
            with path.open("rb") as file:
                self._number = open_mappings().ff_guard(address, size, file.fileno())
        except NativeUnavailableError:
            return
        if self._number:
            _GUARDS.append(self)

    def __bool__(self) -> bool:
        """Whether the mapping is guarded; else a read beyond the end ends the process."""
        return self._number > 0

    def check(self) -> None:
        """Raises CutFileError: the file is shorter than what is mapped."""
        if self._number and (size := open_mappings().ff_cut_at(self._number)) >= 0:
            raise CutFileError(self._path, self._field_at(size), size)

    def release(self) -> None:
        """Call it before the memory is unmapped."""
        if self._number:
            open_mappings().ff_unguard(self._number)
            _GUARDS.remove(self)
            self._number = 0


_GUARDS: list[Guard] = []
"""Those of the process, which a signal handler serves."""


def check_files() -> None:
    """Raises CutFileError for a guarded file that was cut."""
    for guard in tuple(_GUARDS):
        guard.check()


def check_status(status: int, kernel: str) -> None:
    """Raise the error of a kernel's return value."""
    if status == 3:
        check_files()
    if status == 1:
        raise MemoryError(f"{kernel}: no memory for the workspace")
    if status == 2:
        raise ValueError(
            f"{kernel}: the step's metadata is invalid: a block id, slot, position or length is outside of its tensor"
        )
