"""Counts the lines of each room of the source, and compares them with ``tools/budgets.toml``.

A room is a package or a module of ``src/fleetfoot``; modules whose names begin with an underscore are one room. Lines
are those of the files of Python, C and CUDA that git tracks, as ``wc -l`` counts them.

    python tools/line_budgets.py
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

SOURCE = "src/fleetfoot"
SUFFIXES = (".py", ".c", ".h", ".cu", ".cuh")
BUDGETS = "tools/budgets.toml"


def count_lines(root: Path) -> Counter[str]:
    """Lines by room. ``root``: of the repository."""
    listed = subprocess.run(["git", "ls-files", "-z", SOURCE], cwd=root, check=True, capture_output=True).stdout
    rooms: Counter[str] = Counter()
    for name in map(PurePosixPath, filter(None, listed.decode().split("\0"))):
        if name.suffix in SUFFIXES and (root / name).is_file():
            room = name.relative_to(SOURCE).parts[0].removesuffix(".py")
            rooms["__init__" if room.startswith("_") else room] += (root / name).read_bytes().count(b"\n")
    return rooms


def problems(lines: Mapping[str, int], budgets: Mapping[str, int]) -> list[str]:
    """What differs from the budgets: a room above its own, or one that only one of both has."""
    found = []
    for room in sorted(lines.keys() | budgets.keys()):
        if room not in budgets:
            found.append(f"{room} has {lines[room]:,} lines and no budget; add it to {BUDGETS}")
        elif room not in lines:
            found.append(f"{room} has a budget and no lines; remove it from {BUDGETS}")
        elif lines[room] > budgets[room]:
            found.append(
                f"{room} has {lines[room]:,} lines, and {budgets[room]:,} are its budget; make it smaller, or raise it "
                f"in {BUDGETS} with the reason beside it"
            )
    return found


def main(root: Path) -> int:
    lines = count_lines(root)
    budgets = {room: entry["lines"] for room, entry in tomllib.loads((root / BUDGETS).read_text())["rooms"].items()}
    found = problems(lines, budgets)
    print("\n".join(found or [f"{sum(lines.values()):,} lines of source, in {len(lines)} rooms within their budgets"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
