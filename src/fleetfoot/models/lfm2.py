"""LFM2 (Liquid AI 2025): short convolutions, and attention in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fleetfoot.layers.decoder import DecoderLayer
from fleetfoot.layers.recurrent import HybridLayer, ShortConv, StateMixer
from fleetfoot.models.llama import LlamaForCausalLM


class Lfm2Layer(HybridLayer):
    """A short convolution or attention, and an MLP."""

    recurrent: ClassVar[tuple[str, type[StateMixer]]] = ("conv", ShortConv)


class Lfm2ForCausalLM(LlamaForCausalLM):
    """The text models."""

    layer_class: ClassVar[type[DecoderLayer]] = Lfm2Layer
    checkpoint_names: ClassVar[Mapping[str, str]] = {
        "model.norm.": "model.embedding_norm.",
        ".input_layernorm.": ".operator_norm.",
        ".post_attention_layernorm.": ".ffn_norm.",
        ".self_attn.o_proj.": ".self_attn.out_proj.",
        ".self_attn.q_norm.": ".self_attn.q_layernorm.",
        ".self_attn.k_norm.": ".self_attn.k_layernorm.",
        ".mlp.gate_proj.": ".feed_forward.w1.",
        ".mlp.up_proj.": ".feed_forward.w3.",
        ".mlp.down_proj.": ".feed_forward.w2.",
    }
