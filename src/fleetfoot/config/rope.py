"""How ``config.json`` describes rotary position embeddings. No torch."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from fleetfoot.config.json_fields import ConfigError, Fields
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
    "longrope": ("short_factor", "long_factor", "factor", "original_max_position_embeddings", "attention_factor"),
}
"""By types."""
_COMMON_ROPE_PARAMETERS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def uniform_ropes(fields: Fields, num_layers: int) -> LayerRopes:
    """The same rotation in every layer."""
    return (parse_rope(fields),) * num_layers


def partial_ropes(fields: Fields, num_layers: int) -> LayerRopes:
    """The same rotation in every layer, of a part of each head."""
    return (parse_rope(fields, may_be_partial=True),) * num_layers


def read_head_dim(fields: Fields) -> int:
    """``head_dim``, or the even share of ``hidden_size``."""
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None and hidden_size % num_heads:
        raise fields.error("hidden_size", f"without head_dim, expected a multiple of num_attention_heads, {num_heads}")
    head_dim = head_dim or hidden_size // num_heads
    if head_dim % 2:
        raise ConfigError(
            f"{fields.source}: head_dim is {head_dim} (hidden_size {hidden_size}, {num_heads} heads); "
            "expected an even number, because the rotary embedding rotates pairs of elements"
        )
    return head_dim


def parse_rope(config: Fields, *, may_be_partial: bool = False, old_names: Mapping[str, str] = {}) -> RopeConfig:
    """Read ``rope_parameters`` (current), or ``rope_theta`` and ``rope_scaling`` (older).

    ``rope_scaling`` takes precedence over ``rope_parameters``, and a theta inside the object over one beside it. Raises
    ConfigError for an unknown type, or a missing or invalid parameter.

    Args:
        may_be_partial: whether the model reads ``partial_rotary_factor``; if not, it must be 1.
        old_names: types in older files -> their names here.
    """
    name = "rope_scaling" if config.mapping("rope_scaling") else "rope_parameters"
    content = config.mapping(name)
    if any(isinstance(value, dict) for value in content.values()):
        raise config.error(name, "one set of parameters for all layers is supported, not one per layer type")
    rope = Fields(content, {"rope_type": content.get("type") or "default"}, config.source, prefix=f"{name}.")

    rope_type = rope.raw("rope_type")
    rope_type = old_names.get(rope_type, rope_type) if isinstance(rope_type, str) else rope_type
    if not isinstance(rope_type, str) or rope_type not in _ROPE_PARAMETERS:
        raise rope.error("rope_type", f"supported: {', '.join(_ROPE_PARAMETERS)}")
    names = _ROPE_PARAMETERS[rope_type]
    rotary_dim, base = _rotary_dim(rope, config, may_be_partial=may_be_partial), _holder("rope_theta", rope, config)
    known = {*names, *_COMMON_ROPE_PARAMETERS}
    unused = [key for key, value in content.items() if value is not None and key not in known]
    if unused:
        logger.warning("%s: %s of rope type %r: no such parameter, it has no effect", config.source, unused, rope_type)
    theta = base.number("rope_theta")
    if rope_type == "llama3":
        return RopeConfig(theta, rope_type, _llama3(rope, config), rotary_dim)
    if rope_type == "yarn":
        if theta <= 1.0:
            raise base.error("rope_theta", "yarn takes its logarithm and needs more than 1")
        return RopeConfig(theta, rope_type, _yarn(rope, config), rotary_dim)
    if rope_type == "longrope":
        return RopeConfig(theta, rope_type, _longrope(rope, config, rotary_dim), rotary_dim)
    return RopeConfig(theta, rope_type, {key: rope.number(key) for key in names}, rotary_dim)


def _rotary_dim(rope: Fields, config: Fields, *, may_be_partial: bool) -> int | None:
    """Rotated elements of each head; None: all."""
    name, head_dim = "partial_rotary_factor", read_head_dim(config)
    holder = _holder(name, rope, config)
    factor = holder.number(name)
    if factor == 1.0:
        return None
    if not may_be_partial:
        raise holder.error(name, "only 1.0, the rotation of the whole head, is supported")
    if factor > 1.0 or int(head_dim * factor) < 1:
        raise holder.error(name, f"expected at most 1, and at least one rotated element of {head_dim}")
    return int(head_dim * factor)


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


def _longrope(rope: Fields, config: Fields, rotary_dim: int | None) -> Mapping[str, Any]:
    """LongRoPE (Ding et al. 2024, "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens")."""
    original, longest = _original_max_positions(rope, config), config.integer("max_position_embeddings")
    factor = longest / original if rope.raw("factor") is None else rope.number("factor")
    if original < 2:
        raise config.error("original_max_position_embeddings", "longrope takes its logarithm and needs at least 2")
    if rope.raw("attention_factor") is not None:
        attention_factor = rope.number("attention_factor")
    else:
        attention_factor = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    num_angles = -(-(rotary_dim or read_head_dim(config)) // 2)
    return {
        "short_factor": rope.numbers("short_factor", num_angles),
        "long_factor": rope.numbers("long_factor", num_angles),
        "original_max_position_embeddings": original,
        "attention_factor": attention_factor,
    }


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
