"""Qwen3-Next (Qwen Team 2025) and Qwen3.5 (Qwen Team 2026): three gated delta nets for one layer of gated attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, cast

import torch
from torch import nn

from fleetfoot.config.model import ModelConfig
from fleetfoot.layers.attention import Attention
from fleetfoot.layers.context import ModelContext, WeightTree
from fleetfoot.layers.decoder import DecoderStack
from fleetfoot.layers.linear import ColumnParallelLinear
from fleetfoot.layers.norm import RMSNorm
from fleetfoot.layers.recurrent import GatedDeltaNet, HybridLayer, StateMixer
from fleetfoot.models.llama import LlamaForCausalLM
from fleetfoot.records.forward_context import ForwardContext
from fleetfoot.records.weights import WeightSpec


class GatedAttention(Attention):
    """Attention with a sigmoid gate on each head's output."""

    def __init__(self, config: ModelConfig, context: ModelContext, cos_sin: torch.Tensor, layer: int, kv_index: int):
        super().__init__(config, context, cos_sin, layer, kv_index)
        self._mul_sigmoid = context.ops.mul_sigmoid

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape. Writes the tokens' K and V to the layer's KV cache."""
        gate_and_qkv = self.project(x)
        size = self.paged.num_heads * self.paged.rotary.cos_sin.shape[1]
        gate, qkv = gate_and_qkv[:, :size], gate_and_qkv[:, size:]
        query = self.paged.rotate_and_cache(qkv, ctx)  # [num_tokens, num_heads, head_dim]
        attended = self.paged.attend(query, ctx, ctx.attention_of(self.paged.kv_index)).flatten(1)
        return self.o_proj(self._mul_sigmoid(attended, gate))


class Qwen3NextLayer(HybridLayer):
    """A gated delta net or gated attention, and an MLP."""

    attention_class: ClassVar[type[Attention]] = GatedAttention
    recurrent: ClassVar[tuple[str, type[StateMixer]]] = ("linear_attn", GatedDeltaNet)


class Qwen3NextForCausalLM(LlamaForCausalLM):
    """The text models. `MultiTokenPredictor` has what ``mtp.`` begins with."""

    layer_class = Qwen3NextLayer
    other_weights: tuple[str, ...] = ("mtp.",)


class MultiTokenPredictor(WeightTree):
    """The layer of a checkpoint that predicts the token after the next (DeepSeek-AI 2024), on one rank. It reads the
    target's hidden state after the final norm and the embedding of the next token. ``config``: of its decoder layer."""

    def __init__(self, config: ModelConfig, context: ModelContext) -> None:
        super().__init__()
        context, size = context.within("mtp"), config.hidden_size
        norm = context, size, config.rms_norm_eps, config.norm_offset
        self.mtp = nn.ModuleDict(
            {
                "pre_fc_norm_embedding": RMSNorm(*norm),
                "pre_fc_norm_hidden": RMSNorm(*norm),
                "fc": ColumnParallelLinear(context, 2 * size, (("fc", size),)),
                "layers": DecoderStack(config, context, range(config.num_layers), Qwen3NextLayer),
                "norm": RMSNorm(*norm),
            }
        )

    @property
    def layers(self) -> DecoderStack:
        """Its decoder layer."""
        return cast("DecoderStack", self.mtp["layers"])

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """As `fleetfoot.models.eagle.EagleHead.forward`."""
        both = self.mtp["pre_fc_norm_embedding"](embeddings), self.mtp["pre_fc_norm_hidden"](hidden)
        return cast("torch.Tensor", self.mtp["norm"](self.layers(self.mtp["fc"](torch.cat(both, dim=-1)), ctx)))


class Qwen35ForConditionalGeneration(Qwen3NextForCausalLM):
    """The decoder of the models that read images too; the vision tower is not loaded, and prompts are text."""

    other_weights: tuple[str, ...] = ("mtp.", "visual.", "model.visual.")

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Every tensor of the checkpoint that it holds, also by the names of a text model."""
        for spec in super().weight_specs():
            names = (spec.name, *spec.aliases)
            newer = (name.replace("model.", "model.language_model.", 1) for name in names)
            yield replace(spec, aliases=tuple(dict.fromkeys((*spec.aliases, *newer))))
