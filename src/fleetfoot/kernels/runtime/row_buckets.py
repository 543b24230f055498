"""Numbers of rows that share kernels, so that a start can compile the kernels of every step.

Steps without a graph have any number of rows. What selects a kernel by that number is asked for the row bucket that
holds it: 1 to 8, then in steps of 16 to 64, of 32 to 256, and of 64 beyond.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from typing import TypeVar

_Chosen = TypeVar("_Chosen", bound=Hashable)
_choices: dict[Hashable, Callable[[int], Hashable]] = {}
"""A function for each question about rows that has been asked."""


def row_bucket(num_rows: int) -> int:
    """The smallest row bucket that holds ``num_rows``."""
    step = 1 if num_rows <= 8 else 16 if num_rows <= 64 else 32 if num_rows <= 256 else 64
    return -(-num_rows // step) * step


def row_buckets(most: int) -> list[int]:
    """All row buckets up to ``most``, which is the last one."""
    buckets = *range(1, 9), *range(16, 65, 16), *range(96, 257, 32), *range(320, most, 64)
    return [*(rows for rows in buckets if rows < most), most]


def chosen_by_rows(choose: Callable[..., _Chosen]) -> Callable[..., _Chosen]:
    """Decorate a function that selects a kernel: its first argument is a number of rows, and all have hashes. It is
    called with the bucket of the rows, and the result is kept, with the other arguments (`distinct_rows`)."""
    known: dict[Hashable, _Chosen] = {}

    @wraps(choose)
    def chosen(num_rows: int, *others: Hashable, **keywords: Hashable) -> _Chosen:
        key = row_bucket(num_rows), *others, *keywords.values()
        if key not in known:
            known[key] = choose(key[0], *others, **keywords)
            _choices.setdefault(
                (choose, key[1:]),
                lambda rows: chosen(rows, *others, **keywords),
            )
        return known[key]

    return chosen


def distinct_rows(most: int) -> list[int]:
    """Row buckets up to ``most``, the largest first, that together have all that is selected in any of them by the
    functions that have been asked so far."""
    choices = [*_choices.values()]
    seen: dict[tuple[Hashable, ...], int] = {}
    for rows in reversed(row_buckets(most)):
        seen.setdefault(tuple(choose(rows) for choose in choices), rows)
    return [*seen.values()]
