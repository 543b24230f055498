"""What ``quantization_config`` says about each layer, and what is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetfoot.config.json_fields import ConfigError
from fleetfoot.config.quantization import QUANTIZED_WHILE_LOADING, choose_quantization, read_quantization
from fleetfoot.quantization.base import LinearMethods
from fleetfoot.quantization.methods import linear_methods

Q, DOWN, HEAD = "model.layers.1.self_attn.q_proj", "model.layers.10.mlp.down_proj", "lm_head"
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "observer": None}


def compressed(weights: dict[str, Any] | None = None, inputs: Any = TOKEN, **changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": WEIGHTS if weights is None else weights, "input_activations": inputs}
    content = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    return content | {"ignore": ["lm_head"], "version": "0.9"} | changes


def fp8(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]} | changes


MODELOPT = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["*layers.1.*"]}}
GPTQ = {
    **dict.fromkeys(("method", "quant_method", "format", "checkpoint_format"), "gptq"),
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "lm_head": True,
    "pack_dtype": "int32",
    "meta": {"act_group_aware": True},
    "dynamic": {"-:.*q_proj": {}, "+:.*down_proj": {"group_size": 64}, "lm_head": {"bits": 8}},
}  # as GPTQModel 7.7 writes it
AUTOROUND = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 32,
    "sym": False,
    "version": "gemm",
    "zero_point": True,
    "autoround_version": "0.16.1",
    "data_type": "int",
    "provider": "auto-round",
    "to_quant_block_names": "model.layers",
    "modules_to_not_convert": ["lm_head"],
}
BYTES = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False}
PLAIN, TOKENS = "unquantized", "fp8 by output, inputs quantized by token"
TENSORS, STATIC = "fp8 by tensor, inputs quantized by token", "fp8 by tensor, inputs quantized by static"
BLOCKS = "fp8 in blocks of 128 x 128, inputs quantized by group"
CASES: list[tuple[dict[str, Any], tuple[str, str, str]]] = [
    (compressed(), (TOKENS, TOKENS, PLAIN)),
    (compressed(ignore=["re:.*layers\\.1\\..*"]), (PLAIN, TOKENS, TOKENS)),
    (compressed(ignore=[DOWN, "lm_head"]), (TOKENS, PLAIN, PLAIN)),
    (compressed(WEIGHTS | {"strategy": "tensor"}, None), ("fp8 by tensor", "fp8 by tensor", PLAIN)),
    (fp8(), (BLOCKS, BLOCKS, PLAIN)),
    (fp8(modules_to_not_convert=["layers.1.self_attn"], weight_block_size=None), (PLAIN, TENSORS, PLAIN)),
    (fp8(activation_scheme="static", weight_block_size=None, ignored_layers=["down_proj"]), (STATIC, PLAIN, PLAIN)),
    (MODELOPT, (PLAIN, STATIC, PLAIN)),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, (STATIC, STATIC, PLAIN)),
    (GPTQ, (PLAIN, "int4 in groups of 64, with zero points", "int8 in groups of 32")),
    (AUTOROUND, ("int4 in groups of 32, with zero points",) * 2 + (PLAIN,)),
    (compressed(BYTES, None, format="pack-quantized"), ("int8 in groups of 128", "int8 in groups of 128", PLAIN)),
]


def methods(content: dict[str, Any]) -> LinearMethods:
    return linear_methods(read_quantization({"quantization_config": content}, "config.json"))


@pytest.mark.parametrize(("content", "names"), CASES)
def test_each_layer_has_its_format(content: dict[str, Any], names: tuple[str, str, str]) -> None:
    found = methods(content)
    assert tuple(found.of([name]).name for name in (Q, DOWN, HEAD)) == names


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "bitsandbytes"}, "quant_method"),
    (fp8(fmt="e5m2"), "fmt"),
    (fp8(scale_fmt="ue8m0"), "scale_fmt"),
    (fp8(weight_block_size=[128]), "weight_block_size"),
    (fp8(weight_block_size=[128, 24]), "weight_block_size"),
    (fp8(activation_scheme="static"), "activation_scheme"),
    (fp8(rotation="hadamard"), "rotation"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version"),
    ({"quant_method": "awq", "bits": 3, "group_size": 128}, "bits"),
    ({"quant_method": "gptq", "bits": 2, "group_size": 128}, "bits"),
    ({"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": False}, "sym"),
    ({"quant_method": "gptq", "bits": 8, "group_size": 128, "desc_act": True}, "desc_act"),
    ({"quant_method": "gptq", "method": "qqq", "bits": 4, "group_size": 128}, "method"),
    ({"method": "gptq", "bits": 4, "group_size": 128, "format": "gptq_p"}, "format"),
    ({"method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "gptq", "format": "gptq_v2"}, "format"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "format": "gemv_fast"}, "format"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"}, "checkpoint_format"),
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:(": {}}}, "dynamic.-:("),
    (compressed(WEIGHTS | {"strategy": "attn_head"}), "config_groups.group_0.weights.strategy"),
    (compressed(WEIGHTS | {"actorder": "group"}), "config_groups.group_0.weights.actorder"),
    (compressed(WEIGHTS, TOKEN | {"symmetric": False}), "config_groups.group_0.input_activations.symmetric"),
    (compressed(BYTES | {"num_bits": 4}, format="pack-quantized"), "config_groups.group_0.input_activations"),
    (compressed(kv_cache_scheme={"num_bits": 8, "type": "int"}), "kv_cache_scheme.type"),
    (compressed(kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": True}), "kv_cache_scheme.dynamic"),
    (compressed(ignore="lm_head"), "ignore"),
    (compressed(transform_config={"config_groups": {"v": {}}, "format": "hadamard"}), "transform_config"),
    (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    (compressed(format="nvfp4-pack-quantized"), "format"),
]


@pytest.mark.parametrize(("content", "field"), REFUSED, ids=[field for _, field in REFUSED])
def test_what_is_unknown_is_refused_by_name(content: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        methods(content)
    assert str(caught.value).startswith(f"config.json: quantization_config.{field} is ")


@pytest.mark.parametrize("value", [[], 0, False, "", ["fp8"]])
def test_a_quantization_config_is_a_mapping(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        read_quantization({"quantization_config": value}, "config.json")
    assert str(caught.value).startswith("config.json: quantization_config is ")


SCALARS = st.none() | st.booleans() | st.integers(-3, 600) | st.sampled_from(["re:(", "*", "int", "group"])
JSON = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.sampled_from(["weights", "targets", "a"]), SCALARS)
CONTENTS = [content for content, _ in CASES] + [content for content, _ in REFUSED]
NAMES = sorted({name for content in CONTENTS for name in content} | {"desc_act", "sym", "zero_point", "lm_head"})


@given(st.sampled_from(CONTENTS), st.dictionaries(st.sampled_from(NAMES), JSON))
def test_any_json_is_read_or_refused(content: dict[str, Any], changes: dict[str, Any]) -> None:
    try:
        read_quantization({"quantization_config": content | changes}, "config.json")
    except ConfigError:
        return


def test_the_setting_goes_with_the_checkpoint() -> None:
    stored, plain = (read_quantization(content, "config.json") for content in ({"quantization_config": fp8()}, {}))
    assert choose_quantization("fp8", stored) is choose_quantization(None, stored) is stored
    assert choose_quantization("fp8", plain).formats == (QUANTIZED_WHILE_LOADING["fp8"],)
    for setting, weights in (("int4", stored), ("awq", plain)):
        with pytest.raises(ValueError, match=f"quantization is '{setting}'"):
            choose_quantization(setting, weights)
