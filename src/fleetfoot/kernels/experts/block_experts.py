"""Experts with matrices in the blocks of GGUF files, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fleetfoot.kernels.experts.experts import ExpertSizes, TorchExperts
from fleetfoot.kernels.quantized.blocks import BlockLinear, BlockRows


class BlockStack(TorchExperts):
    """Each product reads the blocks of one of the chosen experts."""

    def __init__(self, sizes: ExpertSizes, dtype: torch.dtype, make: Callable[..., BlockLinear]) -> None:
        self._make = make
        self._linears: dict[str, list[BlockLinear]] = {}
        super().__init__(sizes, dtype, torch.device("cpu"))

    def _allocate(self) -> None:
        self.matrices = {}

    def forget(self) -> None:
        """The blocks of a matrix are others now; `fill` follows."""
        self._linears = {}

    def fill(self, gates: Sequence[BlockRows], ups: Sequence[BlockRows], downs: Sequence[BlockRows]) -> None:
        """The matrices of all experts."""
        if self._linears:
            return
        parts: dict[str, list[tuple[BlockRows, ...]]] = {
            "gate_up": [*zip(gates, ups, strict=True)],
            "down": [(down,) for down in downs],
        }
        for name, experts in parts.items():
            biases = self.biases[name]
            self._linears[name] = [
                self._make(each, self.shapes[name][1], self.dtype, None if biases is None else biases[expert])
                for expert, each in enumerate(experts)
            ]

    def _linear(self, x: torch.Tensor, matrix: str, expert: Any) -> torch.Tensor:
        linear = self._linears[matrix][expert]
        return linear.unrounded(x) if matrix == "down" else linear(x)
