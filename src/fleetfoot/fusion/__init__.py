"""Fusion: a pass over a loaded model that replaces runs of plain decoder layers by fused ones.

Here is which layers can be fused, from a model's config alone. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetfoot.config.model import ModelConfig


@dataclass(frozen=True, slots=True)
class LayerFusion:
    """The decision about one decoder layer."""

    is_fused: bool
    reason: str


def plan_fusion(config: ModelConfig, runner: str) -> tuple[LayerFusion, ...]:
    """For each decoder layer of a model. ``runner``: ``v1`` or ``v2``."""
    if runner != "v2":
        return (LayerFusion(False, "Model Runner V1 runs plain layers"),) * config.num_layers
    if reason := _unfusible(config):
        return (LayerFusion(False, reason),) * config.num_layers
    reason = "RMSNorm before attention and MLP, SwiGLU, unquantized weights"
    return (LayerFusion(True, reason),) * config.num_layers


def _unfusible(config: ModelConfig) -> str:
    """All that fused layers do not compute; empty: nothing."""
    reasons = {
        config.unfusible: bool(config.unfusible),
        "GELU": config.activation != "silu",
        "a soft cap of attention scores": config.attention_soft_cap is not None,
        "norm weights around 1": config.norm_offset != 0,
    }
    return ", ".join(reason for reason, applies in reasons.items() if applies)
