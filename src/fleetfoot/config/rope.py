"""How ``config.json`` describes rotary position embeddings. No torch."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from fleetfoot.config.json_fields import Fields
from fleetfoot.config.model import LayerRopes, RopeConfig

logger = logging.getLogger(__name__)

_ROPE_PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
        *("mscale", "mscale_all_dim", "truncate"),
    ),
}
"""By types."""
_COMMON_ROPE_PARAMETERS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def uniform_ropes(fields: Fields, num_layers: int) -> LayerRopes:
    """The same rotation in every layer."""
    return (parse_rope(fields),) * num_layers


def parse_rope(config: Fields) -> RopeConfig:
    """Read ``rope_parameters`` (current), or ``rope_theta`` and ``rope_scaling`` (older).

    ``rope_scaling`` takes precedence over ``rope_parameters``, and a theta inside the object over one beside it. Raises
    ConfigError for an unknown type, a missing or invalid parameter, or a partial rotation.
    """
    name = "rope_scaling" if config.mapping("rope_scaling") else "rope_parameters"
    content = config.mapping(name)
    if any(isinstance(value, dict) for value in content.values()):
        raise config.error(name, "one set of parameters for all layers is supported, not one per layer type")
    rope = Fields(content, {"rope_type": content.get("type") or "default"}, config.source, prefix=f"{name}.")

    rope_type = rope.raw("rope_type")
    if rope_type not in _ROPE_PARAMETERS:
        raise rope.error("rope_type", f"supported: {', '.join(_ROPE_PARAMETERS)}")
    names = _ROPE_PARAMETERS[rope_type]
    rotated, base = _holder("partial_rotary_factor", rope, config), _holder("rope_theta", rope, config)
    if rotated.number("partial_rotary_factor") != 1.0:
        raise rotated.error("partial_rotary_factor", "only 1.0, the rotation of the whole head, is supported")
    known = {*names, *_COMMON_ROPE_PARAMETERS}
    unused = [key for key, value in content.items() if value is not None and key not in known]
    if unused:
        logger.warning("%s: %s of rope type %r: no such parameter, it has no effect", config.source, unused, rope_type)
    theta = base.number("rope_theta")
    if rope_type == "llama3":
        return RopeConfig(theta, rope_type, _llama3(rope, config))
    if rope_type == "yarn":
        if theta <= 1.0:
            raise base.error("rope_theta", "yarn takes its logarithm and needs more than 1")
        return RopeConfig(theta, rope_type, _yarn(rope, config))
    return RopeConfig(theta, rope_type, {key: rope.number(key) for key in names})


def _holder(name: str, rope: Fields, config: Fields) -> Fields:
    """The rope object if it has the field, else the outer object, which has the default."""
    return config if rope.raw(name) is None else rope


def _original_max_positions(rope: Fields, config: Fields) -> int:
    """The context length before it was extended. Beside the rope parameters it takes precedence."""
    name = "original_max_position_embeddings"
    for fields in (config, rope):
        if fields.raw(name) is not None:
            return fields.integer(name)
    return config.integer("max_position_embeddings")


def _llama3(rope: Fields, config: Fields) -> Mapping[str, Any]:
    parameters = {key: rope.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    if parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        raise rope.error("high_freq_factor", f"expected more than low_freq_factor, {parameters['low_freq_factor']:g}")
    return {**parameters, "original_max_position_embeddings": _original_max_positions(rope, config)}


def _yarn(rope: Fields, config: Fields) -> Mapping[str, Any]:
    """YaRN (Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models")."""
    original, longest = _original_max_positions(rope, config), config.integer("max_position_embeddings")
    factor = longest / original if rope.raw("factor") is None and original != longest else rope.number("factor")
    if rope.raw("attention_factor") is not None:
        attention_factor = rope.number("attention_factor")
    elif rope.raw("mscale") and rope.raw("mscale_all_dim"):
        attention_factor = _mscale(factor, rope.number("mscale")) / _mscale(factor, rope.number("mscale_all_dim"))
    else:
        attention_factor = _mscale(factor, 1.0)
    return {
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": attention_factor,
        "beta_fast": rope.number("beta_fast") if rope.raw("beta_fast") else 32.0,
        "beta_slow": rope.number("beta_slow") if rope.raw("beta_slow") else 1.0,
        "truncate": True if rope.raw("truncate") is None else rope.boolean("truncate"),
    }


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
