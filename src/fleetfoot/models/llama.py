"""Llama (Touvron et al. 2023): the decoder that the other architectures here are variants of."""

from __future__ import annotations

from typing import ClassVar

from fleetfoot.config.model import ModelConfig
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.decoder import DecoderLayer, DecoderStack
from fleetfoot.layers.linear import VocabParallelEmbedding
from fleetfoot.layers.norm import RMSNorm
from fleetfoot.layers.rotary import rotary_table
from fleetfoot.models.interface import CausalLM, Decoder


class LlamaModel(Decoder):
    """Embedding, layers and final norm: those of them that this rank holds."""

    def __init__(
        self,
        config: ModelConfig,
        context: ModelContext,
        layers: range,
        layer_class: type[DecoderLayer] = DecoderLayer,
        *,
        has_embedding: bool,
        has_norm: bool,
    ) -> None:
        super().__init__()
        max_positions = context.max_positions or config.max_position_embeddings
        cos_sin = rotary_table(config.rope, config.head_dim, max_positions, context.device)

        def make_layer(layer: int, kv_index: int) -> DecoderLayer:
            return layer_class(config, context, cos_sin, layer, kv_index)

        self.embed_tokens = VocabParallelEmbedding(config, context) if has_embedding else None
        self.layers = DecoderStack(make_layer, layers)
        self.norm = RMSNorm(context, config.hidden_size, config.rms_norm_eps) if has_norm else None


class LlamaForCausalLM(CausalLM):
    """Biases, head norms, windows and tying are as the config says: Llama, Mistral (sliding windows, Jiang et al.
    2023), Qwen2 (biases on q, k and v, Yang et al. 2024) and Qwen3 (head norms, Yang et al. 2025)."""

    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    """A subclass with another `forward` makes another architecture."""

    def __init__(self, config: ModelConfig, context: ModelContext, layers: range | None = None) -> None:
        super().__init__(config, context, layers)
        has_embedding = self.is_first or self.has_tied_head
        self.model = LlamaModel(
            config, context, self.layers, self.layer_class, has_embedding=has_embedding, has_norm=self.is_last
        )
        self.lm_head = self.make_lm_head(context)
