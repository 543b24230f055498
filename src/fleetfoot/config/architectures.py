"""The registry of architectures: how each one reads ``config.json``, and which class runs it. No torch.

An architecture is one entry of ARCHITECTURES. No other module names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fleetfoot.config.experts import (
    ROUTER_DEFAULTS,
    glm4_moe_layers,
    gpt_oss_layers,
    granite_moe_layers,
    mixtral_layers,
    olmoe_layers,
    qwen2_moe_layers,
    qwen3_moe_layers,
)
from fleetfoot.config.hybrid import (
    BAMBA_DEFAULTS,
    LFM2_DEFAULTS,
    MAMBA_DEFAULTS,
    MOE_DEFAULTS,
    QWEN3_5_DEFAULTS,
    QWEN3_5_MOE_DEFAULTS,
    QWEN3_NEXT_DEFAULTS,
    bamba_layers,
    granite_hybrid_layers,
    lfm2_layers,
    qwen3_5_layers,
    qwen3_5_moe_layers,
    qwen3_next_moe_layers,
    qwen3_next_traits,
    text_ropes,
)
from fleetfoot.config.json_fields import Fields
from fleetfoot.config.model import BranchNorms, LayerRopes, LayerSpec, RopeConfig
from fleetfoot.config.rope import parse_rope, partial_ropes, uniform_ropes

logger = logging.getLogger(__name__)

LayerWindows = tuple[int | None, ...]

_FULL, _SLIDING = "full_attention", "sliding_attention"
_SANDWICH, _AFTER = BranchNorms(before=True, after=True), BranchNorms(before=False, after=True)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture."""

    model_type: str
    """``model_type`` in ``config.json``."""
    base_model: str
    """The class name of the model without its logits head, which some checkpoints have in ``architectures``."""
    model: str
    """``module:class`` of the `CausalLM`, imported when a model is built."""
    defaults: Mapping[str, Any]
    """Values of absent fields, where they differ from those common to all: the defaults of ``transformers``."""
    traits: Callable[[Fields], dict[str, Any]]
    """Further fields of `ModelConfig`, and as ``attention``, ``mlp`` and ``layer`` those of the specs of all layers.
    Raises ConfigError for a field of ``config.json`` that is not supported."""
    windows: Callable[[Fields, int], LayerWindows]
    """``(fields, num_layers)`` -> the sliding window of each layer."""
    ropes: Callable[[Fields, int], LayerRopes] = uniform_ropes
    """``(fields, num_layers)`` -> the rotation of each layer."""
    layers: Callable[[Fields, tuple[LayerSpec, ...]], tuple[LayerSpec, ...]] = lambda fields, layers: layers
    """``(fields, layers)`` -> the layers of a model in which they differ; those that it takes have equal sizes."""
    activation_field: str = "hidden_act"
    activations: tuple[str, ...] = ("silu", "swish")
    """Values of ``activation_field`` that the model computes."""
    attribute_map: Mapping[str, str] = field(default_factory=dict)
    """Name of a field here -> its name in ``config.json``, where that differs: ``{"hidden_size": "n_embd"}``."""
    decoder_field: str = ""
    """The object in ``config.json`` with the fields of the decoder, where the model has other parts besides."""
    has_mtp: bool = False
    """Whether its checkpoints have a layer that predicts the token after the next, ``mtp.``."""
    default_on_v2: bool = False
    """Whether Model Runner V2 is the default: the model passes V2's equivalence suite."""
    model_class: type[Any] | None = None
    """The class itself, where this process has it already."""


def llama_traits(fields: Fields) -> dict[str, Any]:
    """``attention_bias`` and ``mlp_bias``."""
    return {"attention": _attention_biases(fields), "mlp": {"has_bias": fields.boolean("mlp_bias")}}


def _attention_biases(fields: Fields) -> dict[str, Any]:
    return dict.fromkeys(("qkv_bias", "o_bias"), fields.boolean("attention_bias"))


def _mistral_traits(fields: Fields) -> dict[str, Any]:
    fields.refuse("attention_bias", "mlp_bias", because="Mistral has no biases; expected false")
    return {}


def _qwen2_traits(fields: Fields) -> dict[str, Any]:
    fields.refuse("mlp_bias", because="Qwen2 has biases on q, k and v alone; expected false")
    return {"attention": {"qkv_bias": True}}


def _qwen3_traits(fields: Fields) -> dict[str, Any]:
    fields.refuse("mlp_bias", because="Qwen3 has no biases in its MLP; expected false")
    return {"attention": {**_attention_biases(fields), "qk_norm": True}}


def _granite_traits(fields: Fields) -> dict[str, Any]:
    """The factors on attention scores and residual branches of every layer, and the two of the model's ends."""
    return {
        "attention": {**_attention_biases(fields), "scale": fields.number("attention_multiplier")},
        "mlp": {"has_bias": fields.boolean("mlp_bias")},
        "layer": {"residual_multiplier": fields.number("residual_multiplier")},
        "extras": {name: fields.number(name) for name in ("embedding_multiplier", "logits_scaling")},
    }


def _phi3_traits(fields: Fields) -> dict[str, Any]:
    fields.refuse("attention_bias", "mlp_bias", "lm_head_bias", because="Phi-3 has no biases; expected false")
    return {"has_merged_projections": True}


def _phi3_ropes(fields: Fields, num_layers: int) -> LayerRopes:
    """A part of each head (Phi-4-mini), with factors for longer contexts, which older files name otherwise."""
    old_names = {"su": "longrope", "yarn": "longrope"}
    return (parse_rope(fields, may_be_partial=True, old_names=old_names),) * num_layers


def _smollm3_ropes(fields: Fields, num_layers: int) -> LayerRopes:
    """``no_rope_layers`` has a 0 for each layer without positions; without it, each
    ``no_rope_layer_interval``-th layer is one."""
    has_rope = _layers_with_rope(fields, num_layers)
    rope = parse_rope(fields)
    return tuple(rope if each else None for each in has_rope)


def _layers_with_rope(fields: Fields, num_layers: int) -> list[bool]:
    given = fields.raw("no_rope_layers")
    if given is None:
        interval = fields.integer("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) < num_layers or any(value not in (0, 1) for value in given):
        raise fields.error("no_rope_layers", f"expected 0 (no positions) or 1 for each of {num_layers} layers")
    return [bool(value) for value in given[:num_layers]]


def _gemma2_traits(fields: Fields) -> dict[str, Any]:
    fields.refuse("mlp_bias", because="Gemma has no biases in its MLP; expected false")
    if fields.raw("is_causal") is False:
        raise fields.error("is_causal", "tokens attend to earlier ones only; expected true")
    return {
        "attention": {
            **_attention_biases(fields),
            "scale": fields.number("query_pre_attn_scalar") ** -0.5,
            "soft_cap": _soft_cap(fields, "attn_logit_softcapping"),
        },
        "mlp": {"activation": "gelu_tanh"},
        "layer": {"mixer_norms": _SANDWICH, "mlp_norms": _SANDWICH},
        "norm_offset": 1.0,
        "extras": {"final_logit_softcapping": _soft_cap(fields, "final_logit_softcapping")},
    }


def _gemma3_traits(fields: Fields) -> dict[str, Any]:
    _warn_of_no_effect(fields, "attn_logit_softcapping")
    traits = _gemma2_traits(fields)
    return {**traits, "attention": {**traits["attention"], "soft_cap": None, "qk_norm": True}}


def _gemma3_multimodal_traits(fields: Fields) -> dict[str, Any]:
    _warn_of_no_effect(fields, "final_logit_softcapping")
    return {**_gemma3_traits(fields), "extras": {"final_logit_softcapping": None}}


def _soft_cap(fields: Fields, name: str) -> float | None:
    return None if fields.raw(name) is None else fields.number(name)


def _warn_of_no_effect(fields: Fields, name: str) -> None:
    if fields.raw(name) is not None:
        logger.warning("%s: %s is %r; it has no effect on this architecture", fields.source, name, fields.raw(name))


def _olmo2_traits(fields: Fields) -> dict[str, Any]:
    fields.refuse("mlp_bias", "clip_qkv", because="OLMo-2 has neither biases in its MLP nor clipping; expected null")
    return {
        "attention": {**_attention_biases(fields), "qk_norm_over_heads": True},
        "layer": {"mixer_norms": _AFTER, "mlp_norms": _AFTER},
    }


def _olmoe_traits(fields: Fields) -> dict[str, Any]:
    fields.refuse("clip_qkv", because="clipping of q, k and v is not supported; expected null")
    return {"attention": {**_attention_biases(fields), "qk_norm_over_heads": True}}


def _qwen2_moe_traits(fields: Fields) -> dict[str, Any]:
    return {"attention": {"qkv_bias": fields.boolean("qkv_bias")}}


def _gpt_oss_traits(fields: Fields) -> dict[str, Any]:
    return {"attention": {**_attention_biases(fields), "has_sinks": True}}


def _glm4_moe_traits(fields: Fields) -> dict[str, Any]:
    return {"attention": {"qkv_bias": fields.boolean("attention_bias"), "qk_norm": fields.boolean("use_qk_norm")}}


def _lfm2_traits(fields: Fields) -> dict[str, Any]:
    return {"attention": {"qk_norm": True}}


def _granite_hybrid_traits(fields: Fields) -> dict[str, Any]:
    if fields.integer("num_local_experts", minimum=0):
        raise fields.error("num_local_experts", "those with experts are not supported; expected 0")
    for name in ("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"):
        fields.raw(name)  # without effect
    return _granite_traits(fields)


def no_windows(fields: Fields, num_layers: int) -> LayerWindows:
    """Full attention in every layer."""
    fields.refuse("sliding_window", because="this architecture attends to every position; expected null")
    return _uniform_windows(fields, num_layers, None)


def _phi3_windows(fields: Fields, num_layers: int) -> LayerWindows:
    """One window for all layers. That of the models for long contexts is longer than these, and so is none."""
    window = fields.optional_integer("sliding_window")
    is_limit = window is not None and window < fields.integer("max_position_embeddings")
    return _uniform_windows(fields, num_layers, window if is_limit else None)


def _every_position(fields: Fields, num_layers: int) -> LayerWindows:
    """Full attention in every layer that has attention; ``layer_types`` says which."""
    fields.refuse("sliding_window", because="this architecture attends to every position; expected null")
    return (None,) * num_layers


def _granite_hybrid_ropes(fields: Fields, num_layers: int) -> LayerRopes:
    """None, unless ``position_embedding_type`` is ``rope``."""
    return (
        uniform_ropes(fields, num_layers) if fields.raw("position_embedding_type") == "rope" else (None,) * num_layers
    )


def _mistral_windows(fields: Fields, num_layers: int) -> LayerWindows:
    """One window for all layers. Null means none; absent means 4096, as in the first Mistral."""
    return _uniform_windows(fields, num_layers, fields.optional_integer("sliding_window"))


def _qwen_windows(fields: Fields, num_layers: int) -> LayerWindows:
    """Windows with ``use_sliding_window``: the layers in ``layer_types``, else those from ``max_window_layers`` on."""
    window = fields.optional_integer("sliding_window") if fields.boolean("use_sliding_window") else None
    if window is None:
        return _uniform_windows(fields, num_layers, None)
    first = fields.integer("max_window_layers", minimum=0)
    default = [_SLIDING if layer >= first else _FULL for layer in range(num_layers)]
    return _windows_by_layer(fields, default, {_FULL: None, _SLIDING: window})


def _qwen2_moe_windows(fields: Fields, num_layers: int) -> LayerWindows:
    """Windows with ``use_sliding_window``: the layers in ``layer_types``, else every second one of the first
    ``max_window_layers``."""
    window = fields.optional_integer("sliding_window") if fields.boolean("use_sliding_window") else None
    if window is None:
        return _uniform_windows(fields, num_layers, None)
    last = fields.integer("max_window_layers", minimum=0)
    default = [_SLIDING if (layer + 1) % 2 and layer < last else _FULL for layer in range(num_layers)]
    return _windows_by_layer(fields, default, {_FULL: None, _SLIDING: window})


def _qwen3_moe_windows(fields: Fields, num_layers: int) -> LayerWindows:
    """One window for all layers with ``use_sliding_window``."""
    window = fields.optional_integer("sliding_window") if fields.boolean("use_sliding_window") else None
    fields.raw("max_window_layers")  # in the files, and without effect
    return _uniform_windows(fields, num_layers, window)


def _smollm3_windows(fields: Fields, num_layers: int) -> LayerWindows:
    """Windows with ``use_sliding_window``: the layers in ``layer_types``, else those without positions."""
    window = fields.optional_integer("sliding_window") if fields.boolean("use_sliding_window") else None
    if window is None:
        return _uniform_windows(fields, num_layers, None)
    default = [_FULL if has_rope else _SLIDING for has_rope in _layers_with_rope(fields, num_layers)]
    return _windows_by_layer(fields, default, {_FULL: None, _SLIDING: window})


def _gemma2_windows(fields: Fields, num_layers: int) -> LayerWindows:
    """Without ``layer_types``, every second layer has none."""
    fields.refuse("use_bidirectional_attention", because="tokens attend to earlier ones only; expected false")
    return _alternating_windows(fields, num_layers, 2)


def _gemma3_windows(fields: Fields, num_layers: int) -> LayerWindows:
    """Without ``layer_types``, every ``sliding_window_pattern``-th layer has none. Of an embedding model, half of the
    window is on either side."""
    windows = _alternating_windows(fields, num_layers, fields.integer("sliding_window_pattern"))
    if not fields.boolean("use_bidirectional_attention"):
        return windows
    return tuple(None if window is None else window // 2 for window in windows)


def _alternating_windows(fields: Fields, num_layers: int, period: int) -> LayerWindows:
    default = [_SLIDING if (layer + 1) % period else _FULL for layer in range(num_layers)]
    return _windows_by_layer(fields, default, {_FULL: None, _SLIDING: fields.integer("sliding_window")})


def _uniform_windows(fields: Fields, num_layers: int, window: int | None) -> LayerWindows:
    layer_type = _FULL if window is None else _SLIDING
    return _windows_by_layer(fields, [layer_type] * num_layers, {layer_type: window})


def _windows_by_layer(fields: Fields, default: list[str], windows: Mapping[str, int | None]) -> LayerWindows:
    """The window of each layer. ``windows`` maps the layer types that the other fields allow to their windows."""
    layer_types = default if fields.raw("layer_types") is None else fields.raw("layer_types")
    fits = isinstance(layer_types, list) and len(layer_types) == len(default)
    if not fits or any(layer_type not in list(windows) for layer_type in layer_types):
        expected = f"with these window fields, expected {len(default)} entries out of: {', '.join(windows)}"
        raise fields.error("layer_types", expected)
    return tuple(windows[layer_type] for layer_type in layer_types)


def _gemma3_ropes(fields: Fields, num_layers: int) -> LayerRopes:
    """One for the layers with a window and one for the others, which alone are scaled. Current configs have an object
    for each in ``rope_parameters``; beside both of them, tools leave the thetas that they were made of."""
    given = dict(fields.mapping("rope_parameters"))
    if given.get(_FULL) and given.get(_SLIDING) and given.get("rope_type") == "default":
        given = {name: value for name, value in given.items() if name not in ("rope_type", "rope_theta")}
    if not all(name in (_FULL, _SLIDING) and isinstance(value, dict | None) for name, value in given.items()):
        raise fields.error("rope_parameters", f"expected two objects, {_FULL} and {_SLIDING}")

    def parsed(layer_type: str, theta: str, scaling: Mapping[str, Any]) -> RopeConfig:
        rope = {"rope_theta": fields.raw(theta), **(given.get(layer_type) or {}), **scaling}
        return parse_rope(replace(fields, content={**fields.content, "rope_scaling": None, "rope_parameters": rope}))

    local = parsed(_SLIDING, "rope_local_base_freq", {})
    whole = parsed(_FULL, "rope_theta", fields.mapping("rope_scaling"))
    return tuple(whole if window is None else local for window in _gemma3_windows(fields, num_layers))


_TOKENS: dict[str, Any] = {"vocab_size": 32000, "bos_token_id": 1, "eos_token_id": 2}
LLAMA_DEFAULTS = {**_TOKENS, "intermediate_size": 11008, "max_position_embeddings": 2048}
_MISTRAL_DEFAULTS = {
    **_TOKENS,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
_GRANITE_DEFAULTS: dict[str, Any] = {**LLAMA_DEFAULTS, **dict.fromkeys(_MULTIPLIERS, 1.0)}
_PHI3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 32000,
}
_SMOLLM3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2000000.0,
    "use_sliding_window": False,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_GEMMA2_DEFAULTS: dict[str, Any] = {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_GEMMA3_DEFAULTS: dict[str, Any] = {
    **_GEMMA2_DEFAULTS,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
    "use_bidirectional_attention": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}
_GEMMA: dict[str, Any] = {"activation_field": "hidden_activation", "activations": ("gelu_pytorch_tanh",)}
_OLMO2_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50304,
    "intermediate_size": 11008,
    "max_position_embeddings": 2048,
    "eos_token_id": 50279,
    "rms_norm_eps": 1e-5,
}
_MIXTRAL_DEFAULTS = {
    **_MISTRAL_DEFAULTS,
    **ROUTER_DEFAULTS,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_OLMOE_DEFAULTS: dict[str, Any] = {
    **ROUTER_DEFAULTS,
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
    "num_experts": 64,
    "num_experts_per_tok": 8,
}
_QWEN3_MOE_DEFAULTS: dict[str, Any] = {
    **ROUTER_DEFAULTS,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_QWEN2_MOE_DEFAULTS: dict[str, Any] = {
    **_QWEN3_MOE_DEFAULTS,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_window_layers": 28,
    "qkv_bias": True,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
_GPT_OSS_DEFAULTS: dict[str, Any] = {
    **ROUTER_DEFAULTS,
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "attention_bias": True,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_GRANITE_MOE_DEFAULTS: dict[str, Any] = {
    **_GRANITE_DEFAULTS,
    **ROUTER_DEFAULTS,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_GLM4_MOE_DEFAULTS: dict[str, Any] = {
    **ROUTER_DEFAULTS,
    "vocab_size": 151552,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": False,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
}
_LLAMA = "fleetfoot.models.llama:LlamaForCausalLM"

ARCHITECTURES: dict[str, Architecture] = {
    "LlamaForCausalLM": Architecture(
        "llama", "LlamaModel", _LLAMA, LLAMA_DEFAULTS, llama_traits, no_windows, default_on_v2=True
    ),
    "MistralForCausalLM": Architecture(
        "mistral", "MistralModel", _LLAMA, _MISTRAL_DEFAULTS, _mistral_traits, _mistral_windows, default_on_v2=True
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2", "Qwen2Model", _LLAMA, _QWEN_DEFAULTS, _qwen2_traits, _qwen_windows, default_on_v2=True
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3", "Qwen3Model", _LLAMA, {**_QWEN_DEFAULTS, "head_dim": 128}, _qwen3_traits, _qwen_windows,
        default_on_v2=True,
    ),
    "GraniteForCausalLM": Architecture(
        "granite", "GraniteModel", "fleetfoot.models.granite:GraniteForCausalLM", _GRANITE_DEFAULTS, _granite_traits,
        no_windows, default_on_v2=True,
    ),
    "Phi3ForCausalLM": Architecture(
        "phi3", "Phi3Model", _LLAMA, _PHI3_DEFAULTS, _phi3_traits, _phi3_windows, _phi3_ropes, default_on_v2=True
    ),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3", "SmolLM3Model", _LLAMA, _SMOLLM3_DEFAULTS, llama_traits, _smollm3_windows, _smollm3_ropes,
        default_on_v2=True,
    ),
    "Gemma2ForCausalLM": Architecture(
        "gemma2", "Gemma2Model", "fleetfoot.models.gemma2:Gemma2ForCausalLM", _GEMMA2_DEFAULTS, _gemma2_traits,
        _gemma2_windows, **_GEMMA, default_on_v2=True,
    ),
    "Gemma3ForCausalLM": Architecture(
        "gemma3_text", "Gemma3TextModel", "fleetfoot.models.gemma3:Gemma3ForCausalLM", _GEMMA3_DEFAULTS, _gemma3_traits,
        _gemma3_windows, _gemma3_ropes, **_GEMMA, default_on_v2=True,
    ),
    "Gemma3ForConditionalGeneration": Architecture(
        "gemma3", "Gemma3Model", "fleetfoot.models.gemma3:Gemma3ForConditionalGeneration", _GEMMA3_DEFAULTS,
        _gemma3_multimodal_traits, _gemma3_windows, _gemma3_ropes, decoder_field="text_config", **_GEMMA,
        default_on_v2=True,
    ),
    "Qwen3_5ForCausalLM": Architecture(
        "qwen3_5_text", "Qwen3_5TextModel", "fleetfoot.models.qwen3_next:Qwen3NextForCausalLM", QWEN3_5_DEFAULTS,
        qwen3_next_traits, _every_position, text_ropes, layers=qwen3_5_layers, default_on_v2=True, has_mtp=True,
    ),
    "Qwen3_5ForConditionalGeneration": Architecture(
        "qwen3_5", "Qwen3_5Model", "fleetfoot.models.qwen3_next:Qwen35ForConditionalGeneration", QWEN3_5_DEFAULTS,
        qwen3_next_traits, _every_position, text_ropes, layers=qwen3_5_layers, decoder_field="text_config",
        default_on_v2=True, has_mtp=True,
    ),
    "Qwen3NextForCausalLM": Architecture(
        "qwen3_next", "Qwen3NextModel", "fleetfoot.models.qwen3_next:Qwen3NextForCausalLM",
        {**QWEN3_NEXT_DEFAULTS, **MOE_DEFAULTS}, qwen3_next_traits, _every_position, text_ropes,
        layers=qwen3_next_moe_layers, default_on_v2=True, has_mtp=True,
    ),
    "Qwen3_5MoeForCausalLM": Architecture(
        "qwen3_5_moe_text", "Qwen3_5MoeTextModel", "fleetfoot.models.qwen3_next:Qwen3NextForCausalLM",
        QWEN3_5_MOE_DEFAULTS, qwen3_next_traits, _every_position, text_ropes, layers=qwen3_5_moe_layers,
        default_on_v2=True, has_mtp=True,
    ),
    "Qwen3_5MoeForConditionalGeneration": Architecture(
        "qwen3_5_moe", "Qwen3_5MoeModel", "fleetfoot.models.qwen3_next:Qwen35ForConditionalGeneration",
        QWEN3_5_MOE_DEFAULTS, qwen3_next_traits, _every_position, text_ropes, layers=qwen3_5_moe_layers,
        decoder_field="text_config", default_on_v2=True, has_mtp=True,
    ),
    "Lfm2ForCausalLM": Architecture(
        "lfm2", "Lfm2Model", "fleetfoot.models.lfm2:Lfm2ForCausalLM", LFM2_DEFAULTS, _lfm2_traits, _every_position,
        layers=lfm2_layers, default_on_v2=True, attribute_map={
            "rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embedding", "intermediate_size": "block_ff_dim",
        },
    ),
    "BambaForCausalLM": Architecture(
        "bamba", "BambaModel", "fleetfoot.models.bamba:BambaForCausalLM", BAMBA_DEFAULTS, llama_traits,
        _every_position, partial_ropes, layers=bamba_layers, default_on_v2=True,
    ),
    "GraniteMoeHybridForCausalLM": Architecture(
        "granitemoehybrid", "GraniteMoeHybridModel", "fleetfoot.models.bamba:GraniteMoeHybridForCausalLM",
        {**_GRANITE_DEFAULTS, **MAMBA_DEFAULTS, "num_local_experts": 8}, _granite_hybrid_traits, _every_position,
        _granite_hybrid_ropes, layers=granite_hybrid_layers,
        attribute_map={"intermediate_size": "shared_intermediate_size"}, default_on_v2=True,
    ),
    "Olmo2ForCausalLM": Architecture(
        "olmo2", "Olmo2Model", "fleetfoot.models.olmo2:Olmo2ForCausalLM", _OLMO2_DEFAULTS, _olmo2_traits, no_windows,
        default_on_v2=True,
    ),
    "MixtralForCausalLM": Architecture(
        "mixtral", "MixtralModel", "fleetfoot.models.mixtral:MixtralForCausalLM", _MIXTRAL_DEFAULTS, _mistral_traits,
        _mistral_windows, layers=mixtral_layers, default_on_v2=True,
    ),
    "OlmoeForCausalLM": Architecture(
        "olmoe", "OlmoeModel", "fleetfoot.models.olmoe:OlmoeForCausalLM", _OLMOE_DEFAULTS, _olmoe_traits, no_windows,
        layers=olmoe_layers, default_on_v2=True,
    ),
    "Qwen2MoeForCausalLM": Architecture(
        "qwen2_moe", "Qwen2MoeModel", "fleetfoot.models.qwen_moe:Qwen2MoeForCausalLM", _QWEN2_MOE_DEFAULTS,
        _qwen2_moe_traits, _qwen2_moe_windows, layers=qwen2_moe_layers, default_on_v2=True,
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe", "Qwen3MoeModel", "fleetfoot.models.qwen_moe:Qwen3MoeForCausalLM", _QWEN3_MOE_DEFAULTS,
        _qwen3_traits, _qwen3_moe_windows, layers=qwen3_moe_layers, default_on_v2=True,
    ),
    "GptOssForCausalLM": Architecture(
        "gpt_oss", "GptOssModel", "fleetfoot.models.gpt_oss:GptOssForCausalLM", _GPT_OSS_DEFAULTS, _gpt_oss_traits,
        lambda fields, num_layers: _alternating_windows(fields, num_layers, 2), layers=gpt_oss_layers,
        default_on_v2=True,
    ),
    "GraniteMoeForCausalLM": Architecture(
        "granitemoe", "GraniteMoeModel", "fleetfoot.models.granite_moe:GraniteMoeForCausalLM", _GRANITE_MOE_DEFAULTS,
        _granite_traits, no_windows, layers=granite_moe_layers, default_on_v2=True,
    ),
    "Glm4MoeForCausalLM": Architecture(
        "glm4_moe", "Glm4MoeModel", "fleetfoot.models.glm4_moe:Glm4MoeForCausalLM", _GLM4_MOE_DEFAULTS,
        _glm4_moe_traits, no_windows, partial_ropes, layers=glm4_moe_layers, default_on_v2=True,
    ),
}  # fmt: skip
"""By the names in ``architectures`` of ``config.json``."""
