"""Giving memory of this process back to the operating system."""

from __future__ import annotations

import ctypes
import mmap
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path


@cache
def _c_library() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


def release_pages(address: int, size: int) -> None:
    """Give the pages within ``size`` bytes back: then they are those of the file that is mapped there, or zeros."""
    page = mmap.PAGESIZE
    first, end = -(-address // page) * page, (address + size) // page * page  # pages that it has alone
    if end > first:
        _c_library().madvise(first, end - first, mmap.MADV_DONTNEED)


def trim_heap() -> None:
    """Give the pages back that the C library's heap has free."""
    if hasattr(_c_library(), "malloc_trim"):
        _c_library().malloc_trim(0)


_CODE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r-xp .* /.*\n(?:\w+:.*\n)*?Anonymous: +0 kB$", re.MULTILINE)
"""Code of a program file, in Linux's ``smaps``, of which nothing was changed in memory."""


def release_code() -> None:
    """Give the pages of program files back that were executed: those that are executed again come from the system's
    cache of files. A start executes much that no step does; of torch's libraries it leaves some 70 MB resident."""
    try:
        mappings = Path("/proc/self/smaps").read_text()
    except OSError:  # not Linux
        return
    for begin, end in _CODE.findall(mappings):
        release_pages(int(begin, 16), int(end, 16) - int(begin, 16))


def use_small_pages(address: int, size: int) -> None:
    """Take memory page by page when it is first written; NumPy asks for huge pages, of which each takes all of its
    memory at once."""
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        first = address // mmap.PAGESIZE * mmap.PAGESIZE
        _c_library().madvise(first, address + size - first, mmap.MADV_NOHUGEPAGE)


_HUGE_PAGE = 2 << 20
_COLLAPSE = 25
"""``MADV_COLLAPSE`` of Linux 6.1: copies what is there to huge pages, now."""


def use_huge_pages(spans: Iterable[tuple[int, int]]) -> None:
    """Move memory that is read as a stream, ``(address, bytes)`` each, to huge pages, where the system has them: a
    processor prefetches within a page only. What lies between close spans moves too."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    regions: list[list[int]] = []
    for address, size in sorted(spans):
        if regions and address - regions[-1][1] < _HUGE_PAGE // 32:
            regions[-1][1] = address + size
        else:
            regions.append([address, address + size])
    for begin, end in regions:
        first, last = -(-begin // _HUGE_PAGE) * _HUGE_PAGE, end // _HUGE_PAGE * _HUGE_PAGE
        if first < last:
            for advice in (mmap.MADV_HUGEPAGE, _COLLAPSE):
                _c_library().madvise(first, last - first, advice)
