"""Parses the ``config.json`` of the supported architectures into a `ModelConfig`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetfoot.config.architectures import ARCHITECTURES, Architecture
from fleetfoot.config.json_fields import ConfigError, Fields
from fleetfoot.config.model import DTYPES, ModelConfig, RopeConfig, read_config_json, read_generation_json
from fleetfoot.config.pooling import HEAD

logger = logging.getLogger(__name__)

_NULLABLE = ("num_key_value_heads", "head_dim", "sliding_window", "bos_token_id", "eos_token_id")
# defaults of `transformers` 5 for absent fields
_COMMON_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "attention_bias": False,
    "mlp_bias": False,
}


def load_model_config(folder: str | Path, hf_overrides: Any = None) -> ModelConfig:
    """Read ``config.json`` (and ``generation_config.json``) of a local checkpoint folder. Raises ConfigError: the file
    is missing or is not JSON, or a field is missing or not supported; the message names the file, the field, the value
    found and what would work."""
    path = Path(folder)
    content = read_config_json(path, hf_overrides)
    return parse_model_config(content, read_generation_json(path), source=str(path / "config.json"))


def parse_model_config(config: Mapping[str, Any], generation: Mapping[str, Any], source: str) -> ModelConfig:
    """Build the ModelConfig of a checkpoint.

    A field that is absent or null takes the default that ``transformers`` has for the model type, except that null
    derives ``head_dim`` and ``num_key_value_heads`` from the other sizes, and means none for ``sliding_window`` and the
    token ids.

    Args:
        config: the content of ``config.json``, with current names (``rope_parameters``, ``dtype``, ``layer_types``) or
            older ones (``rope_theta``, ``rope_scaling``, ``torch_dtype``).
        generation: the content of ``generation_config.json``; empty if there is none. Its token ids take precedence.
        source: the path of ``config.json``, for messages.

    Raises:
        ConfigError: a field is invalid or not supported; names the field, the value and what would work.
    """
    name, architecture = _find_architecture(config, source)
    fields = Fields(config, {**_COMMON_DEFAULTS, **architecture.defaults}, source, nullable=_NULLABLE)
    advice = "quantized checkpoints are not supported; use one in bfloat16, float16 or float32"
    fields.refuse("quantization_config", "compression_config", because=advice)
    fields.refuse("per_layer_config", because="all layers must have the same shape")
    fields.refuse("rope_interleaved", because="only the rotation of the two halves of a head is supported")
    if fields.raw("hidden_act") not in architecture.activations:
        raise fields.error("hidden_act", f"supported: {', '.join(architecture.activations)}")
    vocab_size = fields.integer("vocab_size")
    num_layers = fields.integer("num_hidden_layers", maximum=10_000)
    num_heads, num_kv_heads, head_dim = _heads(fields)
    rope = parse_rope(fields, source)
    num_positions = fields.integer("max_position_embeddings", minimum=2)
    if rope.rope_type == "yarn":  # many files have the length before it was extended
        num_positions = max(
            num_positions, int(rope.parameters["original_max_position_embeddings"] * rope.parameters["factor"])
        )
    generation_fields = Fields(generation, {}, source.replace("config.json", "generation_config.json"))
    return ModelConfig(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=num_positions,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=rope,
        layer_windows=architecture.windows(fields, num_layers),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        dtype=_dtype(fields),
        bos_token_id=fields.optional_integer("bos_token_id", minimum=0),
        eos_token_ids=_eos_token_ids(generation_fields, fields, vocab_size),
        **architecture.traits(fields),
    )


def _find_architecture(config: Mapping[str, Any], source: str) -> tuple[str, Architecture]:
    """The entry of ARCHITECTURES that ``architectures`` names, else the one of ``model_type``."""
    supported = f"supported architectures: {', '.join(ARCHITECTURES)}"
    names = config.get("architectures")
    if not names:  # some exports have the model type only
        model_type = config.get("model_type")
        names = [name for name, entry in ARCHITECTURES.items() if entry.model_type == model_type]
        if not names:
            raise ConfigError(f"{source}: architectures is missing and model_type is {model_type!r}; {supported}")
    names = [str(name).replace(HEAD, "ForCausalLM") for name in names] if isinstance(names, list) else ()
    for name, entry in ARCHITECTURES.items():
        if name in names or entry.base_model in names:
            return name, entry
    raise ConfigError(f"{source}: architectures is {config.get('architectures')!r}; {supported}")


def _heads(fields: Fields) -> tuple[int, int, int]:
    """``(num_heads, num_kv_heads, head_dim)``."""
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.optional_integer("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"expected a divisor of num_attention_heads, {num_heads}")
    head_dim = fields.optional_integer("head_dim")
    if head_dim is None and hidden_size % num_heads:
        raise fields.error("hidden_size", f"without head_dim, expected a multiple of num_attention_heads, {num_heads}")
    head_dim = head_dim or hidden_size // num_heads
    if head_dim % 2:
        raise ConfigError(
            f"{fields.source}: head_dim is {head_dim} (hidden_size {hidden_size}, {num_heads} heads); "
            "expected an even number, because the rotary embedding rotates pairs of elements"
        )
    return num_heads, num_kv_heads, head_dim


def _dtype(fields: Fields) -> str:
    name = "torch_dtype" if fields.raw("dtype") is None else "dtype"
    value = fields.raw(name)
    if value is None:
        return "float32"
    dtype = value.removeprefix("torch.") if isinstance(value, str) else value
    if dtype not in DTYPES:
        raise fields.error(name, f"supported: {', '.join(DTYPES)}")
    return dtype


def _eos_token_ids(generation: Fields, config: Fields, vocab_size: int) -> tuple[int, ...]:
    fields = config if generation.raw("eos_token_id") is None else generation
    value = fields.raw("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
        raise fields.error("eos_token_id", "expected a token id or a list of token ids, integers of at least 0")
    # a reduced vocabulary often keeps the ids of the full one; ids outside it can never be sampled
    return tuple(dict.fromkeys(token for token in ids if token < vocab_size))


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


def parse_rope(config: Fields, source: str) -> RopeConfig:
    """Read ``rope_parameters`` (current), or ``rope_theta`` and ``rope_scaling`` (older).

    ``rope_scaling`` takes precedence over ``rope_parameters``, and a theta inside the object over one beside it. Raises
    ConfigError for an unknown type, a missing or invalid parameter, or a partial rotation.
    """
    name = "rope_scaling" if config.mapping("rope_scaling") else "rope_parameters"
    content = config.mapping(name)
    if any(isinstance(value, dict) for value in content.values()):
        raise config.error(name, "one set of parameters for all layers is supported, not one per layer type")
    rope = Fields(content, {"rope_type": content.get("type") or "default"}, source, prefix=f"{name}.")

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
        logger.warning("%s: %s of rope type %r: no such parameter, it has no effect", source, unused, rope_type)
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
