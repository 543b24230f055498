"""Fusion: a pass over a loaded model that replaces runs of plain decoder layers by fused ones.

Here is which layers can be fused, from a model's config alone. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetfoot.config.model import LayerSpec, ModelConfig


@dataclass(frozen=True, slots=True)
class LayerFusion:
    """The decision about one decoder layer."""

    is_fused: bool
    reason: str


def plan_fusion(config: ModelConfig, runner: str) -> tuple[LayerFusion, ...]:
    """For each decoder layer of a model. ``runner``: ``v1`` or ``v2``."""
    if runner != "v2":
        return (LayerFusion(False, "Model Runner V1 runs plain layers"),) * config.num_layers
    fused = LayerFusion(True, "RMSNorm before attention and MLP, SwiGLU, unquantized weights")
    reasons = (_unfusible(layer, config.norm_offset) for layer in config.layers)
    return tuple(LayerFusion(False, reason) if reason else fused for reason in reasons)


def _unfusible(layer: LayerSpec, norm_offset: float) -> str:
    """All that a fused layer does not compute; empty: nothing."""
    reasons = {
        layer.unfusible: bool(layer.unfusible),
        "GELU": layer.mlp.activation != "silu",
        "an MLP without a gate": not layer.mlp.has_gate,
        "a soft cap of attention scores": layer.mixer.soft_cap is not None,
        "norm weights around 1": norm_offset != 0,
    }
    return ", ".join(dict.fromkeys(reason for reason, applies in reasons.items() if applies))
