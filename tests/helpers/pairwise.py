"""Few combinations of settings in which any two values meet that can."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

Cell = dict[str, str]
Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(cell: Mapping[str, str]) -> set[Pair]:
    """Of any two settings, what they are."""
    return set(itertools.combinations(cell.items(), 2))


def pairwise(
    axes: Mapping[str, Sequence[str]],
    can_meet: Callable[[Pair], bool],
    cost: Callable[[Cell], float] = lambda cell: 1.0,
    *,
    seed: int = 0,
    num_tries: int = 16,
) -> list[Cell]:
    """Cells, each with a value of every axis, that have all pairs of values that can meet. Each cell is the best of
    some random ones that have a pair which is still missing: it has the most of them for its cost."""
    rng = random.Random(seed)
    values = [(axis, value) for axis, all_of_axis in axes.items() for value in all_of_axis]
    missing = {pair for pair in itertools.combinations(values, 2) if pair[0][0] != pair[1][0] and can_meet(pair)}
    order = {axis: place for place, axis in enumerate(axes)}

    def fits(axis: str, value: str, cell: Cell) -> bool:
        sides = (sorted(((axis, value), other), key=lambda side: order[side[0]]) for other in cell.items())
        return all(can_meet((first, second)) for first, second in sides)

    def complete(cell: Cell) -> Cell | None:
        missing_axes = [axis for axis in axes if axis not in cell]
        for axis in sorted(missing_axes, key=lambda axis: (len(axes[axis]), rng.random()), reverse=True):
            options = [value for value in axes[axis] if fits(axis, value, cell)]
            if not options:
                return None
            cell = {**cell, axis: rng.choice(options)}
        return {axis: cell[axis] for axis in axes}

    cells = []
    while missing:
        wanted = sorted(missing)
        made = [cell for _ in range(num_tries) if (cell := complete(dict(rng.choice(wanted))))]
        best = max(made, key=lambda cell: len(pairs_of(cell) & missing) / cost(cell))
        missing -= pairs_of(best)
        cells.append(best)
    return cells
