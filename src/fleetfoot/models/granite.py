"""Granite (IBM 2024): Llama with factors on embeddings, residual branches, attention scores and logits."""

from __future__ import annotations

import torch

from fleetfoot.models.llama import LlamaForCausalLM


class GraniteForCausalLM(LlamaForCausalLM):
    """The factors on residual branches and attention scores are fields of the layers' specs."""

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """See `CausalLM.embed`."""
        return super().embed(input_ids) * self.config.extras["embedding_multiplier"]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `CausalLM.compute_logits`."""
        return super().compute_logits(hidden) / self.config.extras["logits_scaling"]
