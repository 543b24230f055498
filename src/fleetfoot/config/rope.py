"""The rotary embedding's part of ``config.json``, in today's and in yesterday's spelling."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from fleetfoot.config.fields import Fields
from fleetfoot.config.model import RopeConfig

logger = logging.getLogger(__name__)

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")

_YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
_PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", *_YARN_OPTIONS),
}
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def parse_rope(config: Fields, source: str) -> RopeConfig:
    """Read ``rope_parameters`` (today), or ``rope_theta`` and ``rope_scaling`` (yesterday).

    Where both stand side by side ``rope_scaling`` wins, and a theta inside the object wins over one beside it.

    Raises:
        ConfigError: an unknown type, a missing or impossible parameter, or a rotation of only a part of the head.
    """
    name = "rope_scaling" if config.mapping("rope_scaling") else "rope_parameters"
    content = config.mapping(name)
    if any(isinstance(value, dict) for value in content.values()):
        raise config.error(name, "one set of parameters for all layers is supported, not one per layer type")
    rope = Fields(content, {"rope_type": content.get("type") or "default"}, source, prefix=f"{name}.")

    rope_type = rope.raw("rope_type")
    if rope_type not in ROPE_TYPES:
        raise rope.error("rope_type", f"supported: {', '.join(ROPE_TYPES)}")
    rotated = _holder("partial_rotary_factor", rope, config)
    if rotated.number("partial_rotary_factor") != 1.0:
        raise rotated.error("partial_rotary_factor", "only 1.0, the rotation of the whole head, is supported")
    unused = [key for key, value in content.items() if value is not None and key not in _known(rope_type)]
    if unused:
        logger.warning("%s: %s of rope type %r: no such parameter, it has no effect", source, unused, rope_type)
    return RopeConfig(
        theta=_holder("rope_theta", rope, config).number("rope_theta"),
        rope_type=rope_type,
        parameters=_parameters(rope_type, rope, config),
    )


def _holder(name: str, rope: Fields, config: Fields) -> Fields:
    """The rope object where it holds the field, else the object around it, which has the default."""
    return config if rope.raw(name) is None else rope


def _known(rope_type: str) -> tuple[str, ...]:
    return (*_COMMON, *_PARAMETERS[rope_type])


def _parameters(rope_type: str, rope: Fields, config: Fields) -> Mapping[str, Any]:
    if rope_type == "llama3":
        return _llama3(rope, config)
    if rope_type == "yarn":
        return _yarn(rope, config)
    return {key: rope.number(key) for key in _PARAMETERS[rope_type]}


def _original_max_positions(rope: Fields, config: Fields) -> int:
    """The context length that the model was first trained for."""
    name = "original_max_position_embeddings"
    if config.raw(name) is not None:  # some checkpoints keep it beside the rope parameters; there it takes precedence
        return config.integer(name)
    if rope.raw(name) is not None:
        return rope.integer(name)
    return config.integer("max_position_embeddings")


def _llama3(rope: Fields, config: Fields) -> Mapping[str, Any]:
    parameters = {key: rope.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    if parameters["high_freq_factor"] <= parameters["low_freq_factor"]:
        raise rope.error("high_freq_factor", f"expected more than low_freq_factor, {parameters['low_freq_factor']:g}")
    return {**parameters, "original_max_position_embeddings": _original_max_positions(rope, config)}


def _yarn(rope: Fields, config: Fields) -> Mapping[str, Any]:
    """YaRN (Peng et al. 2023, "YaRN: Efficient Context Window Extension of Large Language Models")."""
    original = _original_max_positions(rope, config)
    if rope.raw("factor") is None and original != config.integer("max_position_embeddings"):
        factor = config.integer("max_position_embeddings") / original
    else:
        factor = rope.number("factor")
    if rope.raw("attention_factor") is not None:
        attention_factor = rope.number("attention_factor")
    elif rope.raw("mscale") and rope.raw("mscale_all_dim"):
        attention_factor = _mscale(factor, rope.number("mscale")) / _mscale(factor, rope.number("mscale_all_dim"))
    else:
        attention_factor = _mscale(factor, 1.0)
    base = _holder("rope_theta", rope, config)
    if base.number("rope_theta") <= 1.0:
        raise base.error("rope_theta", "yarn takes its logarithm and needs more than 1")
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
