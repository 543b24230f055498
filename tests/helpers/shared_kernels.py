"""Triton's cache for starts that share what they compile, and yet begin with nothing: ``TRITON_CACHE_MANAGER``.

Files lie in the folder ``SHARED_KERNELS``. ``TRITON_CACHE_DIR`` has an empty file for each that a start has compiled or
would have compiled: its engine finds no other. A kernel that another start is compiling is waited for.
"""

import fcntl
import os
import threading
from typing import Any, ClassVar, TextIO

from triton.runtime.cache import FileCacheManager

GROUP = "__grp__"


class SharedKernels(FileCacheManager):
    main_thread_compiles = False
    """Set where what the main thread compiles is counted: there it finds nothing that others have compiled."""
    _tried: ClassVar[set[str]] = set()
    """What this process has compiled, or failed to: it does not wait for itself."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override, dump)
        self._shared: Any = FileCacheManager.__new__(FileCacheManager)
        self._shared.key = key
        self._shared.cache_dir = os.path.join(os.environ["SHARED_KERNELS"], key)
        self._shared.lock_path = os.path.join(self._shared.cache_dir, "lock")
        os.makedirs(self._shared.cache_dir, exist_ok=True)
        self._lock: TextIO | None = None  # while this process compiles

    @property
    def _is_alone(self) -> bool:
        return self.main_thread_compiles and threading.current_thread() is threading.main_thread()

    def _may_take(self, filename: str) -> bool:
        """Whether this start has a file, from now on."""
        if not self.has_file(filename):
            if self._is_alone or not self._shared.has_file(filename):
                return False
            super().put("", filename)
        return True

    def get_file(self, filename: str) -> str | None:
        return self._shared.get_file(filename) if self._may_take(filename) else None

    def get_group(self, filename: str) -> dict[str, str] | None:
        if not self._may_take(GROUP + filename):
            if self._is_alone or self.key in self._tried:
                return None
            self._tried.add(self.key)
            self._lock = open(self._shared.lock_path, "w")  # noqa: SIM115
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if not self._may_take(GROUP + filename):
                return None
            self._lock.close()
        return self._shared.get_group(filename)

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        path: str = self._shared.put(data, filename, binary)
        super().put("", filename)
        return path

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        path = super().put_group(filename, group)
        if self._lock is not None:
            self._lock.close()
        return path
