"""Root mean square normalisation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import overload

import torch

from fleetfoot.kernels.norm.pending_norm import PendingNorm
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.linear import Linear
from fleetfoot.layers.slots import WeightSlot


class RMSNorm:
    """RMSNorm (Zhang and Sennrich 2019), alone or fused with the residual sum before it."""

    __slots__ = ("_add_rms_norm", "_rms_norm", "eps", "weight")

    def __init__(self, context: ModelContext, size: int, eps: float) -> None:
        self.weight = torch.empty(size, dtype=context.dtype, device=context.device)
        self.eps = eps
        self._rms_norm = context.ops.rms_norm
        self._add_rms_norm = context.tensor_group.reducing(context.ops.add_rms_norm)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x [num_tokens, size]`` -> the same shape."""
        return self._rms_norm(x, self.weight, self.eps)

    @overload
    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def add(
        self, x: torch.Tensor | PendingNorm, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor | PendingNorm, torch.Tensor]: ...
    def add(
        self, x: torch.Tensor | PendingNorm, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor | PendingNorm, torch.Tensor]:
        """``(norm(x + residual), x + residual)``; no residual yet, or ``x`` is it: ``(norm(x), x)``.

        ``x``: what attention or the MLP gave: ``[num_tokens, size]``, or the partial sums of it that a layer of
        ``prepare_residual_linear`` may give, or the residual itself, to which it has been added. With a residual it is
        summed over the ranks of the tensor group as well; without one it is the embedding, which is whole. If the sum
        has been made, and this norm begun with it, there is nothing to do here.
        """
        if isinstance(x, PendingNorm):
            return x, x.total
        if residual is None or x is residual:
            return self._rms_norm(x, self.weight, self.eps), x
        return self._add_rms_norm(x, residual, self.weight, self.eps)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot(f"{prefix}weight", tuple(self.weight.shape), lambda: self.weight, init="ones")


@dataclass(frozen=True, slots=True)
class NormedLinear:
    """A norm, and the linear layer that alone reads what it gives: whoever runs before may begin with the norm."""

    norm: RMSNorm
    linear: Linear
