"""The gate and up projections of a SwiGLU MLP as one layer, of an implementation's plain operations."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fleetfoot.kernels.linear.linear import PreparedLinear, prepare_linear_torch
from fleetfoot.kernels.linear.silu_and_mul import silu_and_mul_torch


class GatedLinear:
    """``x [n, in]`` -> ``silu(x @ gate.T) * (x @ up.T) [n, out / 2]``, of a weight that is gate above up."""

    __slots__ = ("_linear", "_silu_and_mul")

    def __init__(self, linear: PreparedLinear, silu_and_mul: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._linear = linear
        self._silu_and_mul = silu_and_mul

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._silu_and_mul(self._linear(x))

    def weight(self) -> torch.Tensor:
        return self._linear.weight()

    def replace(self, weight: torch.Tensor) -> None:
        self._linear.replace(weight)


def prepare_gate_up_torch(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PreparedLinear:
    """See `Kernels.prepare_gate_up`."""
    return GatedLinear(prepare_linear_torch(weight, bias), silu_and_mul_torch)
