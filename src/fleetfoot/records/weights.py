"""Where a checkpoint's tensors go: the names that a model reads, and the memory behind each. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


Span = tuple[int, int]
"""Address and bytes of a piece of memory."""


class WeightError(ValueError):
    """A checkpoint cannot be read, or does not fit the model; the message names files, tensors and shapes."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """How a GGUF file stores the values of a tensor."""

    name: str
    number: int
    """In files."""
    size: int
    """Values of a block."""
    num_bytes: int
    """Number of bytes of a block."""

    @property
    def is_float(self) -> bool:
        return self.size == 1


BLOCK_TYPES: Mapping[int, BlockType] = {
    number: BlockType(name, number, size, num_bytes)
    for number, name, size, num_bytes in (
        (0, "F32", 1, 4), (1, "F16", 1, 2), (30, "BF16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22), (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (39, "MXFP4", 32, 17),
    )
}  # fmt: skip
"""By their numbers in files."""
BLOCK_TYPES_BY_NAME = {each.name: each for each in BLOCK_TYPES.values()}


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
class Stack:
    """A larger tensor, in checkpoints of another form, that holds a tensor."""

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    """The place of the smaller tensor, with two bounds for each of the first dimensions; its shape is that of the
    place without dimensions of length 1 at the front."""


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
    init: Literal["normal", "zeros", "ones"] | float | Callable[[torch.Tensor], object] = "normal"
    """How dummy weights are initialised: a number: all with it; a function: it fills ``destination()``."""
    kind: Literal["float", "integer", "fp8", "blocks"] = "float"
    """What the checkpoint holds: ``integer`` and ``fp8`` (e4m3) are quantized or packed weights, ``blocks`` those of a
    GGUF file, in bytes."""
    aliases: tuple[str, ...] = ()
    """Further names under which a checkpoint may hold the same tensor, in place of ``name`` or beside it."""
    stacks: tuple[Stack, ...] = ()
    """Larger tensors, one of which a checkpoint may hold in place of ``name``."""
    part: tuple[Rows, ...] = ()
    """What ``destination`` holds of the tensor: rows, in its order, and then a slice with two bounds for each further
    dimension, none if it holds all of that. Empty: the whole tensor in its own order."""
    filled: Callable[[], None] = _nothing
    """Call it after all values of ``destination()`` were replaced, which is not valid any more: a layer may bring its
    weight into the form that it reads before the next layer is written, so that one layer is in memory twice."""
    adopt: Callable[[torch.Tensor], None] | None = None
    """Takes the whole tensor in the memory of a mapped file, in place of a copy; None: it does not."""
    dtype: torch.dtype | None = None
    """The dtype of ``destination()``, where calling that is costly."""
    quantize: Callable[[Callable[[tuple[Rows, ...]], torch.Tensor]], None] | None = None
    """Takes a tensor of floats in the place of a quantized one, by a function that returns a part of it, and sets its
    scales too; None: it is not quantized."""
    patch: Callable[[torch.Tensor, torch.Tensor], None] | None = None
    """Takes single elements ``(indices, values)`` of floats for a quantized tensor, and sets its scales too; None: it
    takes values of ``kind`` alone."""
    scales: tuple[str, ...] = ()
    """Names of the tensors that ``quantize`` sets beside this one."""
    default: float | None = None
    """What it is filled with if the checkpoint does not have it; None: the checkpoint must."""
    patch_problem: Callable[[torch.Tensor, torch.Tensor], str] | None = None
    """Why single elements ``(indices, values)`` of the flat tensor cannot be changed, as the end of a sentence; empty:
    they can. None: they always can."""

    def takes(self, kind: str) -> bool:
        """Whether values of a kind can be written."""
        return kind == self.kind or (kind == "float" and self.quantize is not None)

    @property
    def stored_dtype(self) -> torch.dtype:
        """The dtype that values are cast to."""
        return self.destination().dtype if self.dtype is None else self.dtype

    def has_shape(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of ``shape`` is this one. Dimensions of 1 at the end count for nothing: files have scales as
        ``[n]`` and ``[n, 1]``, and a single one as ``[]`` and ``[1]``."""
        return _without_ones(shape) == _without_ones(self.shape)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
