"""The MLP of a decoder layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fleetfoot.config.model import MLPSpec, ModelConfig
from fleetfoot.config.sharding import even_span
from fleetfoot.layers.branch import Offering
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.linear import ColumnParallelLinear, RowParallelLinear
from fleetfoot.records.forward_context import ForwardContext


class GatedParts(NamedTuple):
    """A gated MLP as fusion computes it."""

    gate_up_proj: ColumnParallelLinear
    activation: str
    """`MLPSpec.activation`."""
    activate: Callable[[torch.Tensor], torch.Tensor]
    """``[n, 2 * size]`` (gate, up) -> ``[n, size]``."""
    down_proj: RowParallelLinear


class GatedMLP(Offering):
    """SwiGLU (Shazeer 2020): ``down(silu(gate(x)) * up(x))``, gate and up in one product; GeGLU with GELU."""

    def __init__(self, config: ModelConfig, context: ModelContext, layer: int) -> None:
        super().__init__()
        spec, group = config.layers[layer].mlp, context.groups.tensor
        assert isinstance(spec, MLPSpec)
        size = spec.intermediate_size
        part = even_span(size, group.rank, group.size)
        parts = (("gate_proj", size), ("up_proj", size))
        merged = "gate_up_proj" if config.has_merged_projections else None
        self.gate_up_proj = ColumnParallelLinear(
            context, config.hidden_size, parts, spec.has_bias, rows=(part, part), merged=merged
        )
        self.down_proj = RowParallelLinear(context, "down_proj", size, config.hidden_size, spec.has_bias, part)
        ops = context.ops
        self._activation = spec.activation
        self._activate = {"silu": ops.silu_and_mul, "gelu_tanh": ops.gelu_and_mul}[spec.activation]

    def offer(self) -> GatedParts | None:
        return GatedParts(self.gate_up_proj, self._activation, self._activate, self.down_proj)

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape."""
        gate_up = self.gate_up_proj(x)  # [num_tokens, 2 * intermediate size of this rank]
        return self.down_proj(self._activate(gate_up))
