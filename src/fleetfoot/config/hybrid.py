"""How ``config.json`` describes layers with recurrent states. No torch.

Each function returns the layers of a model, given those with attention that the other fields make.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fleetfoot.config.experts import ROUTER_DEFAULTS, qwen2_moe_layers
from fleetfoot.config.json_fields import Fields
from fleetfoot.config.model import GatedDeltaNetSpec, LayerRopes, LayerSpec, Mamba2Spec, MLPSpec, ShortConvSpec
from fleetfoot.config.rope import parse_rope

Layers = tuple[LayerSpec, ...]

_ATTENTION = ("full_attention", "attention")
"""Names of layers with attention, in current and in older files."""
_MOST_TAPS = 4
_LARGEST_FACTOR = 1000
QWEN3_NEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
QWEN3_5_DEFAULTS: dict[str, Any] = {
    **QWEN3_NEXT_DEFAULTS,
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
MOE_DEFAULTS: dict[str, Any] = {
    **ROUTER_DEFAULTS,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
"""Defaults of Qwen3-Next."""
QWEN3_5_MOE_DEFAULTS: dict[str, Any] = {
    **QWEN3_5_DEFAULTS,
    **MOE_DEFAULTS,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}
LFM2_DEFAULTS: dict[str, Any] = {
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "conv_L_cache": 3,
    "conv_bias": False,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
}
MAMBA_DEFAULTS: dict[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
BAMBA_DEFAULTS: dict[str, Any] = {
    **MAMBA_DEFAULTS,
    "vocab_size": 128000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def qwen3_next_traits(fields: Fields) -> dict[str, Any]:
    """Head norms, gates on the outputs of attention, and norm weights around 1."""
    fields.refuse("mlp_bias", because="Qwen3-Next has no biases in its MLP; expected false")
    for name in ("attn_output_gate", "output_gate_type", "mamba_ssm_dtype"):
        fields.raw(name)  # the models have one value
    biases = dict.fromkeys(("qkv_bias", "o_bias"), fields.boolean("attention_bias"))
    return {"attention": {**biases, "qk_norm": True, "has_output_gate": True}, "norm_offset": 1.0}


def text_ropes(fields: Fields, num_layers: int) -> LayerRopes:
    """The rotation of a part of each head. The three positions of a multimodal model are the same in a text."""
    name = "rope_scaling" if fields.mapping("rope_scaling") else "rope_parameters"
    of_images = ("mrope_section", "mrope_interleaved")
    rope = {key: value for key, value in fields.mapping(name).items() if key not in of_images}
    return (parse_rope(replace(fields, content={**fields.content, name: rope}), may_be_partial=True),) * num_layers


def qwen3_next_layers(fields: Fields, layers: Layers, *, is_grouped: bool = True) -> Layers:
    """Qwen3-Next (Qwen Team 2025): gated delta nets in all layers but each ``full_attention_interval``-th."""
    mixer = GatedDeltaNetSpec(
        num_k_heads=fields.integer("linear_num_key_heads"),
        num_v_heads=fields.integer("linear_num_value_heads"),
        head_k_dim=fields.integer("linear_key_head_dim"),
        head_v_dim=fields.integer("linear_value_head_dim"),
        num_taps=fields.integer("linear_conv_kernel_dim", minimum=2, maximum=_MOST_TAPS),
        is_grouped=is_grouped,
    )
    if mixer.num_v_heads % mixer.num_k_heads:
        raise fields.error("linear_num_value_heads", f"expected a multiple of {mixer.num_k_heads} key heads")
    interval = fields.integer("full_attention_interval")
    default = ["linear_attention" if (layer + 1) % interval else _ATTENTION[0] for layer in range(len(layers))]
    return _mixed(fields, layers, "layer_types", default, {"linear_attention": mixer})


def qwen3_5_layers(fields: Fields, layers: Layers) -> Layers:
    """Qwen3.5 (Qwen Team 2026): the same with separate projections."""
    return qwen3_next_layers(fields, layers, is_grouped=False)


def qwen3_next_moe_layers(fields: Fields, layers: Layers) -> Layers:
    """Qwen3-Next: experts as in Qwen2-MoE."""
    return qwen3_next_layers(fields, qwen2_moe_layers(fields, layers))


def qwen3_5_moe_layers(fields: Fields, layers: Layers) -> Layers:
    """Qwen3.5 with experts."""
    return qwen3_5_layers(fields, qwen2_moe_layers(fields, layers))


def lfm2_layers(fields: Fields, layers: Layers) -> Layers:
    """LFM2 (Liquid AI 2025): short convolutions, and attention in the layers of ``full_attn_idxs``."""
    channels = fields.integer("hidden_size")
    for name in ("conv_dim", "conv_dim_out"):
        if fields.raw(name) not in (None, channels):
            raise fields.error(name, f"expected hidden_size, {channels}")
    fields.raw("conv_use_xavier_init")  # of training
    taps = fields.integer("conv_L_cache", minimum=2, maximum=_MOST_TAPS)
    conv = ShortConvSpec(taps, channels, fields.boolean("conv_bias"))
    default = _by_index(fields, "full_attn_idxs", "conv", len(layers), all_without=True)
    mlp = MLPSpec(_lfm2_size(fields))
    return tuple(replace(each, mlp=mlp) for each in _mixed(fields, layers, "layer_types", default, {"conv": conv}))


def _lfm2_size(fields: Fields) -> int:
    """The width of the MLP."""
    size = fields.integer("intermediate_size")
    if fields.boolean("block_auto_adjust_ff_dim"):
        multiple, factor = fields.integer("block_multiple_of"), fields.number("block_ffn_dim_multiplier")
        if factor > _LARGEST_FACTOR:
            raise fields.error("block_ffn_dim_multiplier", f"expected at most {_LARGEST_FACTOR}")
        size = max(1, int(factor * int(2 * size / 3)))
        size = -(-size // multiple) * multiple
    return size


def bamba_layers(fields: Fields, layers: Layers) -> Layers:
    """Bamba (IBM 2024): Mamba-2, and attention in the layers of ``attn_layer_indices``."""
    default = _by_index(fields, "attn_layer_indices", "mamba", len(layers), all_without=False)
    return _mixed(fields, layers, "layers_block_type", default, _mamba(fields))


def granite_hybrid_layers(fields: Fields, layers: Layers) -> Layers:
    """Granite-4.0-H (IBM 2025): Mamba-2, and attention in the layers of ``layer_types``."""
    name = "layers_block_type" if fields.raw("layer_types") is None else "layer_types"
    return _mixed(fields, layers, name, ["mamba"] * len(layers), _mamba(fields))


def _mamba(fields: Fields) -> Mapping[str, Mamba2Spec]:
    num_heads, size = fields.integer("mamba_n_heads"), fields.integer("mamba_expand") * fields.integer("hidden_size")
    head_dim = size // num_heads if fields.raw("mamba_d_head") == "auto" else fields.integer("mamba_d_head")
    if num_heads * head_dim != size:
        raise fields.error("mamba_n_heads", f"expected a divisor of mamba_expand * hidden_size, {size}")
    num_groups = fields.integer("mamba_n_groups")
    if num_heads % num_groups:
        raise fields.error("mamba_n_groups", f"expected a divisor of {num_heads} heads")
    if fields.raw("time_step_limit") not in (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        raise fields.error("time_step_limit", "limits are not supported; expected 0 and infinity")
    fields.raw("mamba_chunk_size")  # without effect
    mixer = Mamba2Spec(
        num_heads,
        head_dim,
        num_groups,
        fields.integer("mamba_d_state"),
        fields.integer("mamba_d_conv", minimum=2, maximum=_MOST_TAPS),
        has_conv_bias=fields.boolean("mamba_conv_bias"),
        has_bias=fields.boolean("mamba_proj_bias"),
    )
    return dict.fromkeys(("mamba", "linear_attention"), mixer)


def _by_index(fields: Fields, name: str, other: str, num_layers: int, *, all_without: bool) -> list[str]:
    """The kinds of layers where the list ``name`` has the numbers of those with attention. ``all_without``: whether
    all layers have it without the list."""
    given = fields.raw(name)
    if given is None:
        return [_ATTENTION[0] if all_without else other] * num_layers
    if not isinstance(given, list) or not all(type(layer) is int for layer in given):
        raise fields.error(name, "expected a list of numbers of layers")
    return [_ATTENTION[0] if layer in given else other for layer in range(num_layers)]


def _mixed(fields: Fields, layers: Layers, name: str, default: list[str], mixers: Mapping[str, Any]) -> Layers:
    """``layers`` with these mixers where the list ``name`` names them, and with attention elsewhere."""
    given = default if fields.raw(name) is None else fields.raw(name)
    known = (*_ATTENTION, *mixers)
    if not isinstance(given, list) or len(given) != len(layers) or any(kind not in known for kind in given):
        raise fields.error(name, f"expected {len(layers)} entries out of: {', '.join(known)}")
    return tuple(
        layer if kind in _ATTENTION else replace(layer, mixer=mixers[kind])
        for layer, kind in zip(layers, given, strict=True)
    )
