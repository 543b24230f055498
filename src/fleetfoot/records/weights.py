"""Where a checkpoint's tensors go: the names that a model reads, and the memory behind each. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


class WeightError(ValueError):
    """A checkpoint cannot be read, or does not fit the model; the message names files, tensors and shapes."""


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One tensor of a checkpoint and its place in the model.

    Specs serve the first load and every later update alike: write to ``destination()``, then call
    `process_weights_after_loading` once for all of them.
    """

    name: str
    """In the checkpoint: ``model.layers.0.self_attn.q_proj.weight``."""
    shape: tuple[int, ...]
    """Of the whole tensor, in the checkpoint."""
    destination: Callable[[], torch.Tensor]
    """Returns a tensor of the shape of ``part`` to write to, often a view into a larger one. It holds the current
    values, and is valid until the next `process_weights_after_loading`; call it again after that."""
    init: Literal["normal", "ones"] = "normal"
    """How dummy weights are initialised, unless they are integers."""
    is_integer: bool = False
    """Whether the checkpoint holds integers, as quantized or packed weights are."""
    aliases: tuple[str, ...] = ()
    """Further names under which a checkpoint may hold the same tensor, in place of ``name`` or beside it."""
    part: tuple[slice, ...] = ()
    """What this rank holds of the tensor: a slice with two bounds for each dimension. Empty: all of it."""
