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
    """The kind of each decoder layer of a model. ``runner``: ``v1`` or ``v2``."""
    if runner != "v2":
        return (LayerFusion(False, "Model Runner V1 runs plain layers"),) * config.num_layers
    fused = LayerFusion(True, "branches with norms and residual sums")
    return tuple(LayerFusion(False, layer.unfusible) if layer.unfusible else fused for layer in config.layers)
