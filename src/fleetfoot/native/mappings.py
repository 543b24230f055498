"""Mapped files that may be cut: see ``mappings.c``. No torch."""

from __future__ import annotations

from fleetfoot.native.loading import NativeUnavailableError, open_mappings


def guard_mapping(address: int, size: int) -> bool:
    """Let reads beyond the end of a file that was cut give zeros, and products an error. Returns whether they do; else
    such a read ends the process, and what is mapped must be copied."""
    try:
        return bool(open_mappings().ff_guard_mapping(address, size))
    except NativeUnavailableError:
        return False


def file_was_cut() -> bool:
    """Whether a read of a guarded mapping found no file."""
    try:
        return bool(open_mappings().ff_file_was_cut())
    except NativeUnavailableError:
        return False
