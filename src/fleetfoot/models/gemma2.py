"""Gemma 2 (Gemma Team 2024): norms before and after attention and MLP, soft caps of scores and logits, and windows."""

from __future__ import annotations

import torch

from fleetfoot.config.model import ModelConfig
from fleetfoot.layers.context import ModelContext
from fleetfoot.models.llama import LlamaForCausalLM


class Gemma2ForCausalLM(LlamaForCausalLM):
    """Embeddings are scaled by the square root of their size. The soft cap of scores, windows, GELU, and the norms and
    their offset follow the config."""

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
