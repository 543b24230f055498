"""Layers that are alike in the KV cache. No torch: memory is planned where there is none."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose KV has the same shape: those of the model, or of a drafter beside it."""

    num_layers: int
    num_kv_heads: int
    """On this rank."""
    head_dim: int
