"""Qwen2-MoE (Yang et al. 2024) and Qwen3-MoE (Yang et al. 2025): experts in some layers, or in all."""

from __future__ import annotations

from fleetfoot.models.llama import LlamaForCausalLM


class Qwen2MoeForCausalLM(LlamaForCausalLM):
    """Qwen2 with experts, and beside them an MLP for every token, with a gate."""


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Qwen3 with experts."""
