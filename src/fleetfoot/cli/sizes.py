"""Sizes in bytes, as people write and read them."""

from __future__ import annotations

import argparse
import re

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
}  # fmt: skip


def size_in_bytes(text: str) -> int:
    """``80GiB``, ``80GB``, ``512MiB`` or plain bytes; for argparse."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in _UNITS or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 80GiB, 80GB, 512MiB or a number of bytes")
    return round(float(found[1]) * _UNITS[found[2].upper()])


def readable(num_bytes: int) -> str:
    """``79.25 GiB``, ``512.0 MiB``, ``12 B``."""
    size = float(num_bytes)
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1)):
        if abs(size) < 1024:
            return f"{size:.{digits}f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
