"""Gemma 2 (Gemma Team 2024): norms before and behind attention and MLP, soft caps of scores and logits, and windows."""

from __future__ import annotations

from typing import ClassVar

import torch

from fleetfoot.config.model import ModelConfig
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.decoder import DecoderLayer
from fleetfoot.layers.norm import RMSNorm
from fleetfoot.models.llama import LlamaForCausalLM
from fleetfoot.records.forward_context import ForwardContext


class GemmaDecoderLayer(DecoderLayer):
    """Attention and MLP between two norms each."""

    def __init__(
        self, config: ModelConfig, context: ModelContext, cos_sin: torch.Tensor, layer: int, kv_index: int
    ) -> None:
        super().__init__(config, context, cos_sin, layer, kv_index)
        norm = config.hidden_size, config.rms_norm_eps, config.norm_offset
        self.pre_feedforward_layernorm = RMSNorm(context, *norm)
        self.post_feedforward_layernorm = RMSNorm(context, *norm)

    def forward(self, x: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """``x [num_tokens, hidden_size]`` -> the same shape."""
        attended = self.self_attn(self.input_layernorm(x), ctx)
        hidden, x = self.post_attention_layernorm.and_add(attended, x, self.pre_feedforward_layernorm)
        return self.post_feedforward_layernorm.and_add(self.mlp(hidden, ctx), x)[1]


class Gemma2ForCausalLM(LlamaForCausalLM):
    """Embeddings are scaled by the square root of their size. The soft cap of scores, windows, GELU and the offset of
    norms follow the config."""

    layer_class: ClassVar[type[DecoderLayer]] = GemmaDecoderLayer

    def __init__(self, config: ModelConfig, context: ModelContext, layers: range | None = None) -> None:
        super().__init__(config, context, layers)
        # rounded to the dtype of the weights, as in training: in bfloat16, 55.5 instead of the square root of 3072
        self._embedding_scale = torch.tensor(config.hidden_size**0.5).to(context.dtype).item()
        self._soft_cap: float | None = config.extras["final_logit_softcapping"]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().embed(input_ids) * self._embedding_scale

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden)
        return logits if self._soft_cap is None else logits.div_(self._soft_cap).tanh_().mul_(self._soft_cap)
