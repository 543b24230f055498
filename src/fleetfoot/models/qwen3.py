"""Qwen3 (Yang et al. 2025), dense: Llama's decoder with an RMSNorm on each head of q and k before the rotation."""

from __future__ import annotations

from fleetfoot.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """`ModelConfig.qk_norm` is always set; some layers may have a window, in `ModelConfig.layer_windows`."""
