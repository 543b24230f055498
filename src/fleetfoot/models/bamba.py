"""Bamba (IBM 2024) and Granite-4.0-H (IBM 2025): Mamba-2, and attention in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import nn

from fleetfoot.config.model import ModelConfig
from fleetfoot.config.sharding import even_span
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.decoder import DecoderLayer
from fleetfoot.layers.linear import ColumnParallelLinear, RowParallelLinear
from fleetfoot.layers.recurrent import HybridLayer, Mamba2, StateMixer
from fleetfoot.models.granite import GraniteForCausalLM
from fleetfoot.models.llama import LlamaForCausalLM
from fleetfoot.records.forward_context import ForwardContext


class BambaLayer(HybridLayer):
    """Mamba-2 or attention, and an MLP."""

    recurrent: ClassVar[tuple[str, type[StateMixer]]] = ("mamba", Mamba2)


class BambaForCausalLM(LlamaForCausalLM):
    """The model of the Bamba checkpoints."""

    layer_class: ClassVar[type[DecoderLayer]] = BambaLayer
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "model.norm.": "model.final_layernorm.",
        ".post_attention_layernorm.": ".pre_ff_layernorm.",
        ".mlp.": ".feed_forward.",
    }


class SharedMLP(nn.Module):
    """SwiGLU with gate and up in one tensor of the checkpoint."""

    def __init__(self, config: ModelConfig, context: ModelContext, layer: int) -> None:
        super().__init__()
        size, group = config.layers[layer].mlp.intermediate_size, context.groups.tensor
        part, parts = even_span(size, group.rank, group.size), (("gate", size), ("up", size))
        self.input_linear = ColumnParallelLinear(
            context, config.hidden_size, parts, rows=(part, part), merged="input_linear"
        )
        self.output_linear = RowParallelLinear(context, "output_linear", size, config.hidden_size, False, part)
        self._activate = context.ops.silu_and_mul

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape."""
        return self.output_linear(self._activate(self.input_linear(x)))


class GraniteHybridLayer(BambaLayer):
    """Mamba-2 or attention, and an MLP, each times a factor."""

    mlp_class: ClassVar[type[nn.Module]] = SharedMLP


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    """The models without experts."""

    layer_class: ClassVar[type[DecoderLayer]] = GraniteHybridLayer
    checkpoint_names: ClassVar[Mapping[str, str]] = {".mlp.": ".shared_mlp."}
