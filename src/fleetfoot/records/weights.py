"""Where a checkpoint's tensors go: the names that a model reads, and the memory behind each. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


Span = tuple[int, int]
"""Address and bytes of a piece of memory."""


class WeightError(ValueError):
    """A checkpoint cannot be read, or does not fit the model; the message names files, tensors and shapes."""


def _nothing() -> None:
    pass


Rows = slice | tuple[slice, ...]
"""Rows of a tensor: a slice with two bounds, or several slices in the order in which their rows are stored."""


def slices_of(rows: Rows) -> tuple[slice, ...]:
    """The slices of ``rows``, in the order of storage."""
    return (rows,) if isinstance(rows, slice) else rows


def count_rows(rows: Rows) -> int:
    return sum(run.stop - run.start for run in slices_of(rows))


def join_rows(runs: Iterable[slice]) -> Rows:
    """Slices in the order of storage; adjacent ones are joined."""
    joined: list[slice] = []
    for run in runs:
        if joined and joined[-1].stop == run.start:
            joined[-1] = slice(joined[-1].start, run.stop)
        elif run.start < run.stop:
            joined.append(run)
    return joined[0] if len(joined) == 1 else tuple(joined)


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One tensor of a checkpoint and its place in the model.

    Specs serve the first load and every later update alike: write to ``destination()``, then call
    `process_weights_after_loading` once for all of them.
    """

    name: str
    """In the checkpoint: ``model.layers.0.self_attn.q_proj.weight``."""
    shape: tuple[int, ...]
    """The shape of the whole tensor, in the checkpoint."""
    destination: Callable[[], torch.Tensor]
    """Returns a tensor of the shape of ``part`` to write to, often a view into a larger one. It holds the current
    values, and is valid until the next `process_weights_after_loading`; call it again after that."""
    init: Literal["normal", "zeros", "ones"] = "normal"
    """How dummy weights are initialised, unless they are integers."""
    is_integer: bool = False
    """Whether the checkpoint holds integers, as quantized or packed weights are."""
    aliases: tuple[str, ...] = ()
    """Further names under which a checkpoint may hold the same tensor, in place of ``name`` or beside it."""
    part: tuple[Rows, ...] = ()
    """What ``destination`` holds of the tensor: rows, in its order, and then a slice with two bounds for each further
    dimension, none if it holds all of that. Empty: the whole tensor in its own order."""
    filled: Callable[[], None] = _nothing
    """Call it after all values of ``destination()`` were replaced, which is not valid any more: a layer may bring its
    weight into the form that it reads before the next layer is written, so that one layer is in memory twice."""
    dtype: torch.dtype | None = None
    """The dtype of ``destination()``, where calling that is costly."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype that values are cast to."""
        return self.destination().dtype if self.dtype is None else self.dtype
