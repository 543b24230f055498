"""Qwen2 and Qwen2.5 (Yang et al. 2024), dense: Llama's decoder with biases on q, k and v."""

from __future__ import annotations

from fleetfoot.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """`ModelConfig.qkv_bias` is always set; some layers may have a window, in `ModelConfig.layer_windows`."""
