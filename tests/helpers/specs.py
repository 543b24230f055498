"""Model configs whose layers are equal but for windows and rotations, by flat fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from fleetfoot.config.model import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, RopeConfig

_RENAMED = {
    "mlp_bias": "has_bias",
    "attention_scale": "scale",
    "attention_soft_cap": "soft_cap",
}
"""Fields of specs that need their owner in a flat list."""
_ATTENTION = {field.name for field in fields(AttentionSpec)}
_MLP = {field.name for field in fields(MLPSpec)}
_LAYER = {field.name for field in fields(LayerSpec)}


def model_config(
    architecture: str,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_position_embeddings: int,
    **more: Any,
) -> ModelConfig:
    """A model of equal layers; ``more``: see `changed`."""
    layer = LayerSpec(AttentionSpec(num_heads, num_kv_heads, head_dim), MLPSpec(intermediate_size))
    config = ModelConfig(architecture, vocab_size, hidden_size, (layer,) * num_layers, max_position_embeddings)
    return changed(config, **more)


def changed(
    config: ModelConfig,
    *,
    num_layers: int | None = None,
    layer_windows: Sequence[int | None] = (),
    layer_ropes: Sequence[RopeConfig | None] = (),
    **more: Any,
) -> ModelConfig:
    """``config`` with other fields of itself or of the specs of all layers. A model with another number of layers
    repeats its layers."""
    layers = list(config.layers)
    if num_layers is not None:
        layers = [layers[index % len(layers)] for index in range(num_layers)]
    attention, mlp, layer, model = _by_owner(more)
    layers = [
        replace(each, mixer=replace(each.mixer, **attention), mlp=replace(each.mlp, **mlp), **layer) for each in layers
    ]
    for name, values in (("window", layer_windows), ("rope", layer_ropes)):
        if values:
            layers = [
                replace(each, mixer=replace(each.mixer, **{name: value}))
                for each, value in zip(layers, values, strict=True)
            ]
    return replace(config, layers=tuple(layers), **model)


def _by_owner(given: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    attention: dict[str, Any] = {}
    mlp: dict[str, Any] = {}
    layer: dict[str, Any] = {}
    model: dict[str, Any] = {}
    for name, value in given.items():
        field = _RENAMED.get(name, name)
        owner = attention if field in _ATTENTION else mlp if field in _MLP else layer if field in _LAYER else model
        owner[field] = value
    return attention, mlp, layer, model


class flat:  # noqa: N801
    """The fields of a model and of its first layer; ``layer_windows`` and ``layer_ropes`` of all layers."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        first, field = self._config.layers[0], _RENAMED.get(name, name)
        by_layer = {"layer_windows": "window", "layer_ropes": "rope"}
        if name in by_layer:
            return tuple(getattr(layer.mixer, by_layer[name]) for layer in self._config.layers)
        owner = first.mixer if field in _ATTENTION else first.mlp if field in _MLP else first
        return getattr(owner if field in _ATTENTION | _MLP | _LAYER else self._config, field)


def ropes_of(config: ModelConfig) -> tuple[RopeConfig | None, ...]:
    """The rotation of each layer."""
    return tuple(layer.mixer.rope for layer in config.layers)
