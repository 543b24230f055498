"""The gate and up projections of a SwiGLU MLP as one layer, of an implementation's plain operations."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fleetfoot.kernels.linear.linear import PreparedLinear


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


def gated(
    prepare_linear: Callable[[torch.Tensor, torch.Tensor | None], PreparedLinear],
    silu_and_mul: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[..., PreparedLinear]:
    """`OpSet.prepare_gate_up` out of two other operations."""

    def prepare_gate_up(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PreparedLinear:
        return GatedLinear(prepare_linear(weight, bias), silu_and_mul)

    return prepare_gate_up
