"""Parses the ``config.json`` of the supported architectures into a `ModelConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleetfoot.config.architectures import ARCHITECTURES, Architecture
from fleetfoot.config.foreign_fields import foreign_fields
from fleetfoot.config.json_fields import ConfigError, Fields
from fleetfoot.config.model import (
    DTYPES,
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelConfig,
    read_config_json,
    read_generation_json,
)
from fleetfoot.config.pooling import check_is_decoder, decoder_name
from fleetfoot.config.quantization import read_quantization
from fleetfoot.config.rope import read_head_dim

_NULLABLE = (
    *("num_key_value_heads", "head_dim", "sliding_window", "bos_token_id", "eos_token_id"),
    *("attn_logit_softcapping", "final_logit_softcapping"),
)
_OUTER_FIELDS = ("bos_token_id", "eos_token_id", "dtype", "torch_dtype", "quantization_config", "compression_config")
"""Beside the decoder's object they take precedence."""
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
        generation: the content of ``generation_config.json``; empty if there is none. End tokens are those of both.
        source: the path of ``config.json``, for messages.

    Raises:
        ConfigError: a field is invalid or not supported, or was not read and is of models with experts, recurrent
            states or quantized weights; names the field, the value and what would work.
    """
    name, architecture = _find_architecture(config, source)
    whole = config
    if architecture.decoder_field:
        config = _decoder_content(config, architecture.decoder_field, source)
    renamed = architecture.attribute_map.items()
    config = {**config, **{name: config[other] for name, other in renamed if other in config}}
    fields = Fields(config, {**_COMMON_DEFAULTS, **architecture.defaults}, source, nullable=_NULLABLE)
    quantization = read_quantization(config, source)
    fields.read.update(("quantization_config", "compression_config"))
    fields.refuse("per_layer_config", because="all layers must have the same shape")
    fields.refuse("rope_interleaved", because="only the rotation of the two halves of a head is supported")
    if fields.raw(architecture.activation_field) not in architecture.activations:
        raise fields.error(architecture.activation_field, f"supported: {', '.join(architecture.activations)}")
    vocab_size = fields.integer("vocab_size")
    num_layers = fields.integer("num_hidden_layers", maximum=10_000)
    traits = architecture.traits(fields)
    layers = architecture.layers(fields, _layers(architecture, fields, num_layers, traits))
    num_positions = fields.integer("max_position_embeddings", minimum=2)
    for rope in (layer.attention.rope for layer in layers if layer.attention is not None):
        if rope is not None and rope.rope_type == "yarn":  # many files have the length before it was extended
            extended = rope.parameters["original_max_position_embeddings"] * rope.parameters["factor"]
            num_positions = max(num_positions, int(extended))
    generation_fields = Fields(generation, {}, source.replace("config.json", "generation_config.json"))
    model = ModelConfig(
        architecture=name,
        class_path=architecture.model,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        layers=layers,
        max_position_embeddings=num_positions,
        rms_norm_eps=fields.number("rms_norm_eps"),
        tie_word_embeddings=fields.boolean("tie_word_embeddings"),
        dtype=_dtype(fields),
        quantization=quantization,
        bos_token_id=fields.optional_integer("bos_token_id", minimum=0),
        eos_token_ids=_eos_token_ids(generation_fields, fields, vocab_size, is_named="eos_token_id" in config),
        **{name: value for name, value in traits.items() if name not in _OF_LAYERS},
    )
    outside = {name: value for name, value in whole.items() if name not in config}
    known = {*fields.read, *architecture.attribute_map.values(), architecture.decoder_field}
    if config.get("model_type") in (architecture.model_type, f"{architecture.model_type}_text"):
        known.add("model_type")
    for found in foreign_fields({**config, **outside}, known):
        raise ConfigError(
            f"{source}: {found.name} is {found.value!r:.200}; it is of a model with {found.kind}, which "
            f"{name} is not here. If it has no effect, leave it out, or set it to null with hf_overrides"
        )
    return model


_OF_LAYERS = ("attention", "mlp", "layer")
"""Traits with fields of `AttentionSpec`, `MLPSpec` and `LayerSpec`."""


def _layers(
    architecture: Architecture, fields: Fields, num_layers: int, traits: Mapping[str, Any]
) -> tuple[LayerSpec, ...]:
    """Layers that differ in their windows and rotations alone."""
    attention, mlp, layer = (traits.get(name, {}) for name in _OF_LAYERS)
    heads, mlp = _heads(fields), MLPSpec(fields.integer("intermediate_size"), **mlp)
    windows, ropes = architecture.windows(fields, num_layers), architecture.ropes(fields, num_layers)
    return tuple(
        LayerSpec(AttentionSpec(*heads, rope, window, **attention), mlp, **layer)
        for rope, window in zip(ropes, windows, strict=True)
    )


def _find_architecture(config: Mapping[str, Any], source: str) -> tuple[str, Architecture]:
    """The entry of ARCHITECTURES that ``architectures`` names, else the one of ``model_type``."""
    supported = f"supported architectures: {', '.join(ARCHITECTURES)}"
    names = config.get("architectures")
    if not names:  # some exports have the model type only
        model_type = config.get("model_type")
        names = [name for name, entry in ARCHITECTURES.items() if entry.model_type == model_type]
        if not names:
            check_is_decoder(config, source)
            raise ConfigError(f"{source}: architectures is missing and model_type is {model_type!r}; {supported}")
    names = [decoder_name(str(name)) for name in names] if isinstance(names, list) else []
    names += [name.replace("ForCausalLM", "Model") for name in names if name not in ARCHITECTURES]
    names = [name.casefold() for name in names]  # old files have LLaMAForCausalLM
    for name, entry in ARCHITECTURES.items():
        if name.casefold() in names or entry.base_model.casefold() in names:
            return name, entry
    check_is_decoder(config, source)
    raise ConfigError(f"{source}: architectures is {config.get('architectures')!r}; {supported}")


def _decoder_content(config: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    """The fields of a multimodal model's decoder. Whether embeddings are tied is a field of the whole model."""
    decoder = Fields(config, {}, source).mapping(name)
    outer = {field: config[field] for field in _OUTER_FIELDS if config.get(field) is not None}
    return {**decoder, **outer, "tie_word_embeddings": config.get("tie_word_embeddings")}


def _heads(fields: Fields) -> tuple[int, int, int]:
    """``(num_heads, num_kv_heads, head_dim)``."""
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.optional_integer("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"expected a divisor of num_attention_heads, {num_heads}")
    return num_heads, num_kv_heads, read_head_dim(fields)


def _dtype(fields: Fields) -> str:
    name = "torch_dtype" if fields.raw("dtype") is None else "dtype"
    value = fields.raw(name)
    if value is None:
        return "float32"
    dtype = value.removeprefix("torch.") if isinstance(value, str) else value
    if dtype not in DTYPES:
        raise fields.error(name, f"supported: {', '.join(DTYPES)}")
    return dtype


def _eos_token_ids(generation: Fields, config: Fields, vocab_size: int, *, is_named: bool) -> tuple[int, ...]:
    """Those of both files. ``is_named``: whether ``config`` has them; transformers' default is for models without."""
    found: dict[int, None] = {}
    has_own = generation.raw("eos_token_id") is not None
    for fields in (*[generation] * has_own, *[config] * (is_named or not has_own)):
        value = fields.raw("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
            raise fields.error("eos_token_id", "expected a token id or a list of token ids, integers of at least 0")
        found.update(dict.fromkeys(ids))
    # a reduced vocabulary often keeps the ids of the full one; ids outside it can never be sampled
    return tuple(token for token in found if token < vocab_size)
