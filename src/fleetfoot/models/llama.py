"""Llama (Touvron et al. 2023): the decoder that the other architectures here are variants of."""

from __future__ import annotations

from typing import ClassVar

from fleetfoot.config.model import ModelConfig
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.decoder import DecoderLayer, DecoderStack
from fleetfoot.layers.linear import VocabParallelEmbedding
from fleetfoot.layers.norm import RMSNorm
from fleetfoot.models.interface import CausalLM, Decoder


class LlamaModel(Decoder):
    """The embedding, layers and final norm, as far as this rank of a pipeline holds them."""

    def __init__(self, causal_lm: LlamaForCausalLM, context: ModelContext) -> None:
        super().__init__()
        config, has_embedding = causal_lm.config, causal_lm.is_first or causal_lm.has_tied_head
        self.embed_tokens = VocabParallelEmbedding(config, context) if has_embedding else None
        self.layers = DecoderStack(config, context, causal_lm.layers, causal_lm.layer_class)
        norm = config.hidden_size, config.rms_norm_eps, config.norm_offset
        self.norm = RMSNorm(context, *norm) if causal_lm.is_last else None


class LlamaForCausalLM(CausalLM):
    """Biases, head norms, windows and tying follow the config: Llama, Mistral (sliding windows, Jiang et al.
    2023), Qwen2 (biases on q, k and v, Yang et al. 2024) and Qwen3 (head norms, Yang et al. 2025)."""

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    """A subclass with another `forward` makes another architecture."""

    def __init__(self, config: ModelConfig, context: ModelContext, layers: range | None = None) -> None:
        super().__init__(config, context, layers)
        self.model = LlamaModel(self, context.within("model"))
        self.lm_head = self.make_lm_head(context)
