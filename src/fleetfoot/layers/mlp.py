"""The feed-forward part of a decoder layer."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from fleetfoot.config.model import ModelConfig
from fleetfoot.config.sharding import even_span
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.linear import ColumnParallelLinear, RowParallelLinear


class MLP(Protocol):
    """What a decoder layer needs of its feed-forward part; dense is one, experts are another."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape."""
        ...


class GatedMLP(nn.Module):
    """SwiGLU (Shazeer 2020): ``down(silu(gate(x)) * up(x))``, gate and up in one product."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        size, group = config.intermediate_size, context.tensor_group
        part = even_span(size, group.rank, group.size)
        parts = (("gate_proj", size), ("up_proj", size))
        self.gate_up_proj = ColumnParallelLinear(context, config.hidden_size, parts, config.mlp_bias, rows=(part, part))
        self.down_proj = RowParallelLinear(context, "down_proj", size, config.hidden_size, config.mlp_bias, part)
        self._silu_and_mul = context.ops.silu_and_mul

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape."""
        gate_up = self.gate_up_proj(x)  # [num_tokens, 2 * intermediate size of this rank]
        return self.down_proj(self._silu_and_mul(gate_up))
