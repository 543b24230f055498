"""The feed-forward part of a decoder layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fleetfoot.config.model import ModelConfig
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.linear import Linear
from fleetfoot.weights.slots import WeightSlot


class MLP:
    """SwiGLU (Shazeer 2020): ``down(silu(gate(x)) * up(x))``, gate and up in one product."""

    __slots__ = ("_silu_and_mul", "down", "gate_up")

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        size = config.intermediate_size
        self.gate_up = Linear(context, config.hidden_size, (("gate_proj", size), ("up_proj", size)), config.mlp_bias)
        self.down = Linear(context, size, (("down_proj", config.hidden_size),), config.mlp_bias)
        self._silu_and_mul = context.ops.silu_and_mul

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape."""
        return self.down(self._silu_and_mul(self.gate_up(x)))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.gate_up.weight_slots(prefix)
        yield from self.down.weight_slots(prefix)

    def finish_loading(self) -> None:
        self.gate_up.finish_loading()
        self.down.finish_loading()
