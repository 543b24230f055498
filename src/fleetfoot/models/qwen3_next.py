"""Qwen3-Next (Qwen Team 2025) and Qwen3.5 (Qwen Team 2026): three gated delta nets for one layer of gated attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch

from fleetfoot.layers.attention import Attention
from fleetfoot.layers.recurrent import GatedDeltaNet, HybridLayer, StateMixer
from fleetfoot.models.llama import LlamaForCausalLM
from fleetfoot.records.forward_context import ForwardContext
from fleetfoot.records.weights import WeightSpec


class GatedAttention(Attention):
    """Attention with a sigmoid gate on each head's output."""

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape. Writes the tokens' K and V to the layer's KV cache."""
        gate_and_qkv = self.project(x)
        size = self.paged.num_heads * self.paged.rotary.cos_sin.shape[1]
        gate, qkv = gate_and_qkv[:, :size], gate_and_qkv[:, size:]
        query = self.paged.rotate_and_cache(qkv, ctx)  # [num_tokens, num_heads, head_dim]
        attended = self.paged.attend(query, ctx, ctx.attention_of(self.paged.kv_index)).flatten(1)
        return self.o_proj(attended * gate.sigmoid())


class Qwen3NextLayer(HybridLayer):
    """A gated delta net or gated attention, and an MLP."""

    attention_class: ClassVar[type[Attention]] = GatedAttention
    recurrent: ClassVar[tuple[str, type[StateMixer]]] = ("linear_attn", GatedDeltaNet)


class Qwen3NextForCausalLM(LlamaForCausalLM):
    """The text models. Heads for the prediction of several tokens are not loaded."""

    layer_class = Qwen3NextLayer
    other_weights: tuple[str, ...] = ("mtp.",)


class Qwen35ForConditionalGeneration(Qwen3NextForCausalLM):
    """The decoder of the models that read images too; the vision tower is not loaded, and prompts are text."""

    other_weights: tuple[str, ...] = ("mtp.", "visual.", "model.visual.")

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Every tensor of the checkpoint that it holds, also by the names of a text model."""
        for spec in super().weight_specs():
            names = (spec.name, *spec.aliases)
            newer = (name.replace("model.", "model.language_model.", 1) for name in names)
            yield replace(spec, aliases=tuple(dict.fromkeys((*spec.aliases, *newer))))
