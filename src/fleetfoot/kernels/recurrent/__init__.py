"""Mixers with a state of fixed size per request: short convolutions, gated delta nets, Mamba-2.

`batch.py` says where a step reads and writes states; each other file is an operation, its reference in torch first.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from fleetfoot.records.forward_context import CHUNK, MAX_STEPS


def number_chunks(
    rows: Sequence[int], lengths: Sequence[int], snapshots: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[int, int]]:
    """The number in the step of the chunk before each of `SchedulerOutput.snapshots`, and its slot. ``lengths``: tokens
    of each of ``rows``, in batch order."""
    counts = (-(-length // CHUNK) if length > MAX_STEPS else 0 for length in lengths)
    first: Mapping[int, int] = dict(zip(rows, accumulate(counts, initial=0), strict=False))
    for row, num_tokens, slot in snapshots:
        yield first[row] + num_tokens // CHUNK - 1, slot
