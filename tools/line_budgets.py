"""Counts the lines of each room and ring of the source, and compares them with ``tools/budgets.toml``.

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
from typing import Any

SOURCE = "src/fleetfoot"
SUFFIXES = (".py", ".c", ".h", ".cu", ".cuh")
BUDGETS = "tools/budgets.toml"


def count_lines(root: Path) -> dict[str, Counter[str]]:
    """Lines by room, and by path in it. ``root``: of the repository."""
    listed = subprocess.run(["git", "ls-files", "-z", SOURCE], cwd=root, check=True, capture_output=True).stdout
    rooms: dict[str, Counter[str]] = {}
    for name in map(PurePosixPath, filter(None, listed.decode().split("\0"))):
        if name.suffix in SUFFIXES and (root / name).is_file():
            first, *rest = name.relative_to(SOURCE).parts
            room = "__init__" if first.startswith("_") else first.removesuffix(".py")
            rooms.setdefault(room, Counter())["/".join(rest)] += (root / name).read_bytes().count(b"\n")
    return rooms


def count_rings(rooms: Mapping[str, Mapping[str, int]], entries: Mapping[str, Any]) -> Counter[str]:
    """Lines by ring. ``entries``: rooms of the budgets; those that have none are left out."""
    rings: Counter[str] = Counter()
    for room in rooms.keys() & entries.keys():
        for path, lines in rooms[room].items():
            others = entries[room].get("also", {})
            found = [ring for ring, parts in others.items() if path.startswith(tuple(parts))]
            rings[f"ring {found[0] if found else entries[room]['ring']}"] += lines
    return rings


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
    rooms, budgets = count_lines(root), tomllib.loads((root / BUDGETS).read_text())
    rings = count_rings(rooms, budgets["rooms"])
    lines = {room: sum(parts.values()) for room, parts in rooms.items()}
    most = {room: entry["lines"] for room, entry in budgets["rooms"].items()}
    found = problems(lines, most) + problems(rings, {f"ring {ring}": most for ring, most in budgets["rings"].items()})
    each = ", ".join(f"{rings[ring]:,} in {ring}" for ring in sorted(rings))
    print(
        "\n".join(found or [f"{sum(lines.values()):,} lines of source in {len(rooms)} rooms, {each}: within budgets"])
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent.parent))
