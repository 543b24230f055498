"""Mistral (Jiang et al. 2023): Llama's decoder whose layers may see a sliding window of positions only."""

from __future__ import annotations

from fleetfoot.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """The window of each layer is in `ModelConfig.layer_windows`."""
