"""The feed-forward part of a decoder layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fleetfoot.config.model import ModelConfig
from fleetfoot.config.sharding import even_span
from fleetfoot.kernels.norm.pending_norm import PendingNorm
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.linear import Linear
from fleetfoot.layers.norm import NormedLinear
from fleetfoot.layers.residual_linear import ResidualLinear
from fleetfoot.layers.slots import WeightSlot


class MLP:
    """SwiGLU (Shazeer 2020): ``down(silu(gate(x)) * up(x))``, gate and up in one product."""

    __slots__ = ("down", "gate_up")

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        hidden_size, size = config.hidden_size, config.intermediate_size
        group, ops = context.tensor_group, context.ops
        part = even_span(size, group.rank, group.size)
        gate_up = (("gate_proj", size), ("up_proj", size))
        self.gate_up = Linear(context, hidden_size, gate_up, config.mlp_bias, ops.prepare_gate_up, rows=(part, part))
        self.down = ResidualLinear(context, "down_proj", size, hidden_size, config.mlp_bias, part)

    def __call__(
        self, x: torch.Tensor | PendingNorm, residual: torch.Tensor | None = None, then: NormedLinear | None = None
    ) -> torch.Tensor | PendingNorm:
        """``x [num_tokens, hidden_size]`` -> the same shape, or what else `ResidualLinear` gives, for the norm that
        follows, which also adds up what the ranks of a tensor group have."""
        return self.down(self.gate_up(x), residual, then)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.gate_up.weight_slots(prefix)
        yield from self.down.weight_slots(prefix)

    def finish_loading(self) -> None:
        self.gate_up.finish_loading()
        self.down.finish_loading()
