"""Entry points of installed packages."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def entry_points(*, group: str) -> metadata.EntryPoints:
    """`importlib.metadata.entry_points`, read once in a process: it lists every installed package, which takes 10 ms,
    and each start of an engine asks for several groups."""
    return metadata.entry_points(group=group)
