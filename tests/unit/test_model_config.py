"""`config.json` to ModelConfig, in every family and spelling; how a model is cut over ranks: every part is on one."""

import dataclasses
import logging
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.specs import flat, model_config

from fleetfoot.config import sharding
from fleetfoot.config.architectures import ARCHITECTURES
from fleetfoot.config.model import ConfigError, ModelConfig, RopeConfig
from fleetfoot.config.parsing import parse_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA3_SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_SCALING["original_max_position_embeddings"] = 128
LLAMA3 = {"rope_type": "llama3", **LLAMA3_SCALING}
SLIDING, FULL, WINDOW = "sliding_attention", "full_attention", {"use_sliding_window": True}


def parse(config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    return parse_model_config(config, generation or {}, source="somewhere/config.json")


def llama(**fields: Any) -> dict[str, Any]:
    return {**LLAMA, **fields}


def family(name: str, **fields: Any) -> dict[str, Any]:
    return {**LLAMA, "architectures": [f"{name}ForCausalLM"], "model_type": name.lower(), **fields}


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
SAME = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings", "rms_norm_eps")
RENAMED = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}
RENAMED |= {name: name for name in (*SAME, "tie_word_embeddings", "bos_token_id")}


NOT_EVEN = {"Glm4MoeForCausalLM": {"head_dim": 128}}
"""Fields of defaults that do not make a model: GLM-4.5 has 96 heads, which do not divide its hidden size."""
NOT_EVEN["GraniteMoeHybridForCausalLM"] = NO_EXPERTS = {"num_local_experts": 0}
HYBRIDS = {"Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Lfm2ForCausalLM", "BambaForCausalLM"}
HYBRIDS |= {"GraniteMoeHybridForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM"}
HYBRIDS |= {"Qwen3_5MoeForConditionalGeneration"}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_default_config_of_transformers_is_refused(architecture: str) -> None:
    from transformers import CONFIG_MAPPING

    content = CONFIG_MAPPING[ARCHITECTURES[architecture].model_type]().to_dict()
    parse({**content, **NOT_EVEN.get(architecture, {}), "architectures": [architecture]})


FOREIGN = {
    "experts": (
        {"moe_num_experts": 8}, {"num_moe_experts": 8}, {"num_experts_per_layer": [8, 8]}, {"num_experts": "8"},
        {"num_experts_per_tok": 2, "moe_intermediate_size": 64}, {"numExperts": 4}, {"nExpertsPerTok": 2},
        {"ffn_config": {"moe_num_experts": 16}}, {"ffn": {"experts": {"count": 8}}}, {"is_moe": True}, {"MoE": True},
        {"moe": {"top_k": 2}}, {"layers": [{"mlp": "dense"}, {"mlp": "x", "n_experts": 4}]}, {"moe_layers": [1]},
        {"mlp_types": ["dense", "sparse_moe"]}, {"router_aux_loss_coef": 0.001}, {"expert_num": 8.0},
        {"model_type": "qwen2_moe"}, {"decoder": {"sparse": {"routed_scaling_factor": 2.5}}},
    ),
    "recurrent": (
        {"mamba_d_state": 16}, {"ssm_cfg": {"layer": "Mamba2"}}, {"state_size": 128}, {"conv_kernel": 4},
        {"layers_block_type": ["mamba", "attention"]}, {"hybrid_override_pattern": "M-M*"}, {"attn_type_list": [0, 1]},
        {"linear_attn_config": {"full_attn_layers": [4]}}, {"linear_num_key_heads": 16}, {"lru_width": 64},
        {"time_mix": {"recurrent": True}}, {"blocks": {"d_state": 64}}, {"conv_L_cache": 3},
    ),
    "quantized": (
        {"quantization": {"bits": 4}}, {"bits": 4, "group_size": 128}, {"w_bit": 4}, {"quant_method": "awq"},
        {"gguf": {"type": "q4_0"}}, {"load_in_8bit": True}, {"weights": {"wbits": 4}}, {"gptq_order": [1, 0]},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}}, {"compression": {"ratio": 2}},
        {"compute_type": "fp8"},
    ),
}  # fmt: skip
"""Fields in spellings of all families, and none of them."""


@pytest.mark.parametrize(("kind", "fields"), [(kind, each) for kind, cases in FOREIGN.items() for each in cases])
@pytest.mark.parametrize("architecture", ["Llama", "Qwen3", "Gemma2"])
def test_fields_of_other_kinds_of_models_are_refused_by_name(
    architecture: str, kind: str, fields: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=f"it is of a model with {kind}") as caught:
        parse(family(architecture) | fields)
    name = str(caught.value).split()[1]
    value: Any = fields
    for part in name.split("."):  # of a list, the object in it that has the field
        value = next(each for each in value if part in each)[part] if isinstance(value, list) else value[part]
    assert f"{name} is {value!r}; " in str(caught.value)


def test_labels_and_names_say_nothing_about_layers() -> None:
    parse(llama(label2id={"MoE": 2, "expert": 3}, _name_or_path="me/hybrid-moe-8bit", auto_map={"AutoMoE": "moe.A"}))
    plain = {"residual_in_fp32": True, "output_hidden_states": True, "initializer_range": 0.02, "state_dict_path": ""}
    parse(llama(**plain, use_bias=True, converted_from="x", num_key_value_groups=4, torch_dtype="bfloat16"))


@pytest.mark.parametrize("architecture", sorted(HYBRIDS))
def test_absent_fields_of_hybrid_models(architecture: str) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(ARCHITECTURES[architecture].model_type).get_text_config()
    ours = parse({"architectures": [architecture], **NOT_EVEN.get(architecture, {})})
    has_attention = [kind == FULL for kind in theirs.layer_types]
    assert [layer.attention is not None for layer in ours.layers] == has_attention
    for name in ("vocab_size", "hidden_size", "max_position_embeddings", "tie_word_embeddings", "bos_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rms_norm_eps == (getattr(theirs, "rms_norm_eps", None) or theirs.norm_eps)
    for mixer in ours.attentions:
        rope, head_dim = theirs.rope_parameters, getattr(theirs, "head_dim", None)
        assert mixer.head_dim == (head_dim or theirs.hidden_size // theirs.num_attention_heads)
        assert mixer.rope is not None and mixer.rope.theta == rope["rope_theta"]
        assert mixer.rope.rotary_dim in (None, int(mixer.head_dim * rope.get("partial_rotary_factor", 1.0)))


@pytest.mark.parametrize(
    ("architecture", "fields", "name"),
    [
        ("Qwen3_5", {"layer_types": ["full_attention", "mamba", "full_attention", "full_attention"]}, "layer_types"),
        ("Qwen3_5", {"linear_num_value_heads": 24}, "linear_num_value_heads"),
        ("Lfm2", {"conv_dim": 7}, "conv_dim"),
        ("Lfm2", {"full_attn_idxs": 3}, "full_attn_idxs"),
        ("Lfm2", {"conv_L_cache": 9}, "conv_L_cache"),
        ("Bamba", {"mamba_n_heads": 7}, "mamba_n_heads"),
        ("Bamba", {"mamba_n_groups": 3}, "mamba_n_groups"),
        ("Bamba", {"time_step_limit": [0.0, 1.0]}, "time_step_limit"),
        ("GraniteMoeHybrid", {"num_local_experts": 4}, "num_local_experts"),
    ],
)
def test_fields_of_hybrid_models_that_are_refused(architecture: str, fields: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f" {name} is"):
        parse({**LLAMA, "architectures": [f"{architecture}ForCausalLM"], **NO_EXPERTS, **fields})


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - HYBRIDS))
def test_absent_fields_take_the_defaults_of_transformers(architecture: str) -> None:
    from transformers import AutoConfig

    model_type = ARCHITECTURES[architecture].model_type
    theirs = AutoConfig.for_model(model_type).get_text_config()
    for name, value in NOT_EVEN.get(architecture, {}).items():
        setattr(theirs, name, value)
    ours = flat(parse({"architectures": [architecture], **NOT_EVEN.get(architecture, {})}))
    for name, other in RENAMED.items():
        if name == "intermediate_size" and hasattr(theirs, "moe_intermediate_size"):
            other = "intermediate_size" if model_type == "glm4_moe" else "moe_intermediate_size"
        assert getattr(ours, name) == getattr(theirs, other), name
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    layer_types = getattr(theirs, "layer_types", [FULL] * ours.num_layers)
    has_rope = getattr(theirs, "no_rope_layers", [1] * ours.num_layers)
    for layer, layer_type in enumerate(layer_types):
        rope = theirs.rope_parameters.get(layer_type, theirs.rope_parameters)
        expected = RopeConfig(rope["rope_theta"], rope["rope_type"]) if has_rope[layer] else None
        ours_rope = ours.layer_ropes[layer]
        if model_type in ("gpt_oss", "glm4_moe"):
            ours_rope = dataclasses.replace(ours_rope, parameters={}, rotary_dim=None)
        assert ours_rope == expected
        has_window = model_type == "mistral" or layer_type == SLIDING
        assert ours.layer_windows[layer] == (theirs.sliding_window if has_window else None)
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))
    has_bias, has_norm = ("qwen2", "qwen2_moe", "gpt_oss"), ("qwen3", "qwen3_moe", "gemma3", "gemma3_text")
    assert (ours.qkv_bias, ours.qk_norm) == (model_type in has_bias, model_type in has_norm)
    assert (ours.o_bias, ours.mlp_bias) == (model_type == "gpt_oss",) * 2


GEMMA = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "bos_token_id": 2, "query_pre_attn_scalar": 256}
PUBLISHED: dict[str, tuple[dict[str, Any], int, dict[str, Any]]] = {
    "gemma-2-2b": (
        {
            "architectures": ["Gemma2ForCausalLM"],
            "model_type": "gemma2",
            **GEMMA,
            "torch_dtype": "float32",
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "cache_implementation": "hybrid",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "vocab_size": 256000,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_hidden_layers": 26,
            "rope_theta": 10000.0,
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
            "eos_token_id": 1,
            "rms_norm_eps": 1e-06,
        },
        2_614_341_888,
        {"layer_windows": (4096, None) * 13, "attention_soft_cap": 50.0, "attention_scale": 0.0625},
    ),
    "gemma-3-1b-it": (
        {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            **GEMMA,
            "torch_dtype": "bfloat16",
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "rope_local_base_freq": 10000,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "vocab_size": 262144,
            "sliding_window_pattern": 6,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "num_hidden_layers": 26,
            "rope_theta": 1000000,
            "max_position_embeddings": 32768,
            "sliding_window": 512,
            "eos_token_id": [1, 106],
            "rope_scaling": None,
        },
        999_885_952,
        {"layer_windows": ((512,) * 5 + (None,)) * 4 + (512, 512), "eos_token_ids": (1, 106), "dtype": "bfloat16"},
    ),
    "gemma-3-4b-it": (
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "torch_dtype": "bfloat16",
            "vision_config": {"hidden_size": 1152},
            "image_token_index": 262144,
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
                "model_type": "gemma3_text",
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
        },
        3_880_263_168,
        {
            "layer_windows": ((1024,) * 5 + (None,)) * 5 + (1024,) * 4,
            "layer_ropes": ((RopeConfig(),) * 5 + (RopeConfig(1e6, "linear", {"factor": 8.0}),)) * 5
            + (RopeConfig(),) * 4,
            "dtype": "bfloat16",
            "eos_token_ids": (1, 106),
            "tie_word_embeddings": True,
        },
    ),
    "OLMo-2-1124-7B": (
        {
            "architectures": ["Olmo2ForCausalLM"],
            "model_type": "olmo2",
            "attention_bias": False,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "vocab_size": 100352,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "num_hidden_layers": 32,
            "rope_theta": 500000,
            "max_position_embeddings": 4096,
            "eos_token_id": 100257,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
        },
        7_298_617_344,
        {"layer_windows": (None,) * 32, "qk_norm_over_heads": True, "eos_token_ids": (100257,), "bos_token_id": None},
    ),
    "Phi-3-mini-4k-instruct": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "attention_bias": False,
            "num_key_value_heads": 32,
            "original_max_position_embeddings": 4096,
            "resid_pdrop": 0.0,
            "rope_scaling": None,
            "sliding_window": 2047,
        },
        3_821_079_552,
        {"layer_windows": (2047,) * 32, "has_merged_projections": True, "rms_norm_eps": 1e-5},
    ),
    "granite-3.1-2b-instruct": (
        {
            "architectures": ["GraniteForCausalLM"],
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "logits_scaling": 8.0,
            "max_position_embeddings": 131072,
            "num_hidden_layers": 40,
            "num_key_value_heads": 8,
            "residual_multiplier": 0.22,
            "tie_word_embeddings": True,
            "vocab_size": 49155,
        },
        2_533_531_648,
        {
            "attention_scale": 0.015625,
            "residual_multiplier": 0.22,
            "extras": {"embedding_multiplier": 12.0, "logits_scaling": 8.0},
        },
    ),
    "SmolLM3-3B": (
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "eos_token_id": 128012,
            "layer_types": [FULL] * 36,
            "max_position_embeddings": 65536,
            "max_window_layers": 28,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "pretraining_tp": 2,
            "rope_theta": 5000000.0,
            "sliding_window": None,
            "use_sliding_window": False,
        },
        3_075_098_624,
        {"layer_ropes": (*(RopeConfig(5e6),) * 3, None) * 9, "layer_windows": (None,) * 36, "eos_token_ids": (128012,)},
    ),
}


def test_fields_of_gemma_3_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    config = {**PUBLISHED["gemma-3-1b-it"][0], "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    parsed = parse(config)
    assert (flat(parsed).attention_soft_cap, parsed.extras) == (None, {"final_logit_softcapping": 30.0})
    parsed = parse({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config})
    assert (flat(parsed).attention_soft_cap, parsed.extras) == (None, {"final_logit_softcapping": None})
    assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == [
        "attn_logit_softcapping", "final_logit_softcapping", "attn_logit_softcapping",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("today", "yesterday"),
    [
        ({"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}),
        ({"dtype": "float16"}, {"torch_dtype": "torch.float16"}),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"rope_theta": 500000}),
        ({"rope_parameters": {"rope_theta": 5e5}}, {"rope_theta": 500000, "rope_scaling": None}),
        ({"rope_parameters": None}, {}),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}},
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}},
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}},
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3_SCALING}},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}},
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
            {"rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 128},
        ),
        ({"rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 1.0}}, {"rope_theta": 7.0}),
        ({"rope_parameters": LONGROPE}, {"rope_scaling": {"type": "longrope", **LONGROPE}}),
    ],
)
def test_both_spellings_mean_the_same(today: dict[str, Any], yesterday: dict[str, Any]) -> None:
    assert parse(llama(**today)) == parse(llama(**yesterday))


def test_longrope_is_completed_and_resolved() -> None:
    """Older files name it otherwise; ``original_max_position_embeddings`` beside it takes precedence."""
    given = {**LONGROPE, "rope_type": "su", "original_max_position_embeddings": 7}
    config = parse(family("Phi3", rope_scaling=given, original_max_position_embeddings=128, partial_rotary_factor=0.95))
    (rope, *others) = flat(config).layer_ropes
    assert rope is not None and rope.rotary_dim == 7 and others == [rope] * 3
    assert rope.parameters["attention_factor"] == pytest.approx(1.1338934)  # (1 + ln 4 / ln 128) ** 0.5
    for length, is_long in ((128, False), (129, True)):
        (resolved, *_) = flat(config.for_context(length)).layer_ropes
        assert resolved is not None and resolved.parameters == {**rope.parameters, "is_long": is_long}
        assert resolved.for_context(10**6) is resolved
    for other, factor in ({"factor": 0.5}, 1.0), ({"factor": 128.0}, 2**0.5), ({"attention_factor": 1.5}, 1.5):
        parsed = parse(family("Phi3", original_max_position_embeddings=128, rope_scaling={**LONGROPE, **other}))
        (rope, *_) = flat(parsed).layer_ropes
        assert rope is not None and rope.parameters["attention_factor"] == pytest.approx(factor)


def test_a_rope_parameter_without_effect_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        parse(llama(rope_scaling={"type": "linear", "factor": 2.0, "finetuned": True}))
    assert "['finetuned'] of rope type 'linear'" in caplog.text


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (family("Mistral"), (4096,) * 4),
        (family("Mistral", sliding_window=None), (None,) * 4),
        (family("Mistral", sliding_window=9), (9,) * 4),
        (family("Mistral", sliding_window=9, layer_types=[SLIDING] * 4), (9,) * 4),
        (family("Qwen2", sliding_window=9, max_window_layers=1), (None,) * 4),
        (family("Qwen2", **WINDOW, sliding_window=9, max_window_layers=1), (None, 9, 9, 9)),
        (family("Qwen2", **WINDOW, sliding_window=9), (None,) * 4),
        (family("Qwen2", **WINDOW, sliding_window=None), (None,) * 4),
        (family("Qwen3", **WINDOW, sliding_window=9, max_window_layers=0), (9,) * 4),
        (family("Qwen3", **WINDOW, sliding_window=9, layer_types=[FULL, SLIDING] * 2), (None, 9, None, 9)),
        (llama(layer_types=[FULL] * 4), (None,) * 4),
    ],
)
def test_windows(config: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert flat(parse(config)).layer_windows == windows


def gemma3(**fields: Any) -> dict[str, Any]:
    return {"architectures": ["Gemma3ForCausalLM"], **fields}


def test_thetas_that_tools_leave_beside_the_ropes_of_layers() -> None:
    """As transformers 5 writes the config again that another of its versions has read."""
    ropes = {name: {"rope_theta": theta, "rope_type": "default"} for name, theta in ((FULL, 1e6), (SLIDING, 1e4))}
    left = {"rope_theta": {"global": 5.0, "local": 5.0}, "rope_type": "default"}
    assert parse(gemma3(rope_parameters={**ropes, **left})) == parse(gemma3(rope_parameters=ropes))


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True},
        "use_bidirectional_attention is True; tokens attend to earlier ones",
    ),
    (gemma3(is_causal=False), "is_causal is False; tokens attend to earlier ones"),
    (gemma3(hidden_activation="gelu"), "hidden_activation is 'gelu'; supported: gelu_pytorch_tanh"),
    (gemma3(sliding_window=None), "sliding_window is missing; expected an integer"),
    (gemma3(rope_parameters={"rope_type": "default"}), "rope_parameters is .*; expected two objects, full_attention"),
    (gemma3(rope_scaling={"rope_type": "linear", "factor": 0}), "factor is 0; expected a finite number above 0"),
    (gemma3(final_logit_softcapping=0.0), "final_logit_softcapping is 0.0; expected a finite number above 0"),
    (gemma3(mlp_bias=True), "mlp_bias is True; Gemma has no biases in its MLP"),
    ({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": 3}, "text_config is 3; expected an object"),
    ({"architectures": ["Olmo2ForCausalLM"], "clip_qkv": 8.0}, "clip_qkv is 8.0; OLMo-2 has neither"),
    (llama(architectures=["GPT2LMHeadModel"]), r"architectures is \['GPT2LMHeadModel'\]; supported.*Qw"),
    (llama(architectures=None, model_type="gpt2"), r"model_type is 'gpt2'; supported.*Llama"),
    (llama(architectures=3), "architectures is 3; supported"),
    (llama(quantization_config={"bits": 4}), r"quantization_config.quant_method is missing; supported: c"),
    (llama(hidden_act="gelu"), "hidden_act is 'gelu'; supported: silu, swish"),
    (llama(partial_rotary_factor=0.5), r"config.json: partial_rotary_factor is 0.5; only 1.0"),
    (llama(rope_scaling={"partial_rotary_factor": 0.5}), r"rope_scaling.partial_rotary_factor is 0.5"),
    (llama(rope_interleaved=True), "rope_interleaved is True"),
    (llama(rope_scaling={"type": "longrope"}), "rope_scaling.short_factor is missing; expected a list of 4 numbers"),
    (llama(rope_scaling={"type": "ntk"}), "rope_scaling.rope_type is 'ntk'; supported: default"),
    (llama(rope_parameters={"rope_type": "su"}), "rope_parameters.rope_type is 'su'; supported"),
    (llama(rope_parameters={"full_attention": {"rope_theta": 1.0}}), "one set of parameters for all"),
    (llama(rope_scaling=3), "rope_scaling is 3; expected an object"),
    (llama(rope_scaling={"type": "linear"}), "rope_scaling.factor is missing; expected a finite number"),
    (llama(rope_scaling={"type": "linear", "factor": 0}), "rope_scaling.factor is 0; expected"),
    (llama(rope_theta=float("inf")), "rope_theta is inf; expected a finite number above 0"),
    (
        llama(rope_scaling={**LLAMA3, "high_freq_factor": 1.0}),
        "high_freq_factor is 1.0; expected more than low_freq_factor, 1",
    ),
    (llama(rope_scaling={"type": "yarn"}), "rope_scaling.factor is missing"),
    (llama(rope_theta=1, rope_scaling={"type": "yarn", "factor": 2.0}), "rope_theta is 1; yarn"),
    (llama(num_key_value_heads=3), "num_key_value_heads is 3; expected a divisor of num_attention_heads, 8"),
    (llama(head_dim=7), "head_dim is 7 .*expected an even number"),
    (llama(hidden_size=40), "head_dim is 5 .*expected an even number"),
    (llama(hidden_size=68), "hidden_size is 68; without head_dim, expected a multiple of num_attention"),
    (llama(vocab_size=0), "vocab_size is 0; expected an integer of at least 1"),
    (llama(num_hidden_layers=-2), "num_hidden_layers is -2; expected an integer"),
    (llama(num_hidden_layers=10**25), "expected an integer of at least 1, at most 10000"),
    (llama(hidden_size=64.5), "hidden_size is 64.5; expected an integer"),
    (llama(intermediate_size="128"), "intermediate_size is '128'; expected an integer"),
    (llama(num_attention_heads=True), "num_attention_heads is True; expected an integer"),
    (llama(tie_word_embeddings="yes"), "tie_word_embeddings is 'yes'; expected true or false"),
    (llama(rms_norm_eps=-1e-6), "rms_norm_eps is -1e-06; expected a finite number above 0"),
    (llama(torch_dtype="float64"), "torch_dtype is 'float64'; supported: bfloat16, float16, float32"),
    (llama(eos_token_id=-1), "config.json: eos_token_id is -1; expected a token id or a list"),
    (llama(eos_token_id=[1, "2"]), r"eos_token_id is \[1, '2'\]"),
    (llama(sliding_window=16), "sliding_window is 16; this architecture attends to every position"),
    (llama(layer_types=[SLIDING] * 4), "layer_types is .*4 entries out of: full_att"),
    (family("Mistral", layer_types=[SLIDING, FULL] * 2), "layer_types is .*expected 4 entries out of: sliding_att"),
    (family("Mistral", sliding_window=0), "sliding_window is 0; expected an integer of at least 1"),
    (family("Mistral", attention_bias=True), "attention_bias is True; Mistral has no biases"),
    (family("Qwen3", layer_types=[FULL] * 3), "expected 4 entries"),
    (family("Qwen3", **WINDOW, layer_types=["linear_attention"] * 4), f"entries out of: {FULL}, {SLIDING}"),
    (family("Qwen3", layer_types=[SLIDING] * 4), "with these window fields"),
    (family("Phi3", attention_bias=True), "attention_bias is True; Phi-3 has no biases"),
    (family("Phi3", lm_head_bias=True), "lm_head_bias is True; Phi-3 has no biases"),
    (family("Phi3", partial_rotary_factor=1.5), "partial_rotary_factor is 1.5; expected at most 1, and at least one"),
    (family("Phi3", partial_rotary_factor=0.1), "expected at most 1, and at least one rotated element of 8"),
    (family("Phi3", rope_scaling={"type": "su", "short_factor": [1.0]}), r"short_factor is \[1.0\]; .* list of 4 num"),
    (family("Phi3", rope_scaling={**LONGROPE, "long_factor": [1.0] * 3 + [0]}), "long_factor is 0; expected a finite"),
    (
        family("SmolLM3", no_rope_layers=[1, 2, 1, 0]),
        r"no_rope_layers is .* expected 0 \(no positions\) or 1 for each of 4",
    ),
    (family("SmolLM3", no_rope_layers=[1, 0]), "expected 0 .* for each of 4 layers"),
    (family("SmolLM3", no_rope_layer_interval=0), "no_rope_layer_interval is 0; expected an integer of at least 1"),
    (family("SmolLM3", layer_types=[SLIDING] * 4), "with these window fields"),
    (family("Granite", residual_multiplier=0), "residual_multiplier is 0; expected a finite number above 0"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=range(len(REFUSED)))
def test_unsupported_fields_are_named_with_their_value(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(config)
    assert str(caught.value).startswith("somewhere/config.json: ")


FIELD_NAMES = sorted(
    {*LLAMA, "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "dtype", "torch_dtype", "hidden_act"}
    | {"sliding_window", "layer_types", "use_sliding_window", "max_window_layers", "eos_token_id", "bos_token_id"}
    | {"attention_bias", "mlp_bias", "tie_word_embeddings", "quantization_config", "original_max_position_embeddings"}
    | {"partial_rotary_factor", "no_rope_layers", "no_rope_layer_interval", "residual_multiplier", "logits_scaling"}
    | {"full_attn_idxs", "block_ffn_dim_multiplier", "attn_layer_indices", "mamba_d_head", "linear_num_key_heads"}
)
SCALARS = st.none() | st.booleans() | st.integers(-3, 600) | st.floats() | st.text(max_size=5)
ROPE = st.dictionaries(
    st.sampled_from(["rope_type", "type", "factor", "rope_theta", *LLAMA3_SCALING, "beta_fast", "mscale", "truncate"])
    | st.sampled_from(["short_factor", "long_factor", "attention_factor", "partial_rotary_factor"]),
    st.sampled_from(["linear", "llama3", "yarn", "longrope", "default", [1.0] * 4, [2.0] * 2]) | SCALARS,
)
JSON = SCALARS | st.lists(SCALARS | st.sampled_from([FULL, SLIDING, "conv"]), max_size=4) | ROPE


@given(st.sampled_from(sorted(ARCHITECTURES)), st.dictionaries(st.sampled_from(FIELD_NAMES), JSON, max_size=4))
def test_any_json_is_parsed_or_refused_and_never_crashes(architecture: str, changes: dict[str, Any]) -> None:
    try:
        config = parse({**LLAMA, "architectures": [architecture], **changes})
    except ConfigError:
        return
    for mixer in config.attentions:
        assert mixer.num_heads % mixer.num_kv_heads == 0
        assert mixer.head_dim % 2 == 0


def test_the_record_survives_pickling_and_replacing() -> None:
    config = parse(llama(rope_parameters={"rope_type": "yarn", "factor": 4.0}))
    assert pickle.loads(pickle.dumps(config)) == config
    assert config.distinct_layers == config.layers[:1]  # equal ones have equal hashes
    shorter = dataclasses.replace(config, layers=config.layers[:2])
    assert (shorter.num_layers, shorter.layer_parameters()) == (2, config.layer_parameters() // 2)
    with pytest.raises(ValueError, match="layers is empty"):
        dataclasses.replace(config, layers=())


def shape(heads: int, kv_heads: int, intermediate: int = 96, layers: int = 4, vocab: int = 64) -> ModelConfig:
    return model_config("LlamaForCausalLM", vocab, 32, intermediate, layers, heads, kv_heads, 8, 64)


NEITHER = "4 KV heads can neither be shared evenly nor be copied to equally many ranks each; .*: 1, 2, 4"


@pytest.mark.parametrize(
    ("what", "config", "size", "message"),
    [
        ("tensor", shape(6, 2), 4, "_size is 4, but 6 attention heads cannot be shared evenly; .*: 1, 2, 6$"),
        ("tensor", shape(12, 4), 6, NEITHER),
        ("tensor", shape(8, 8, intermediate=100), 8, "an intermediate_size of 100 cannot be shared evenly.*: 1, 2, 4$"),
        ("pipeline", shape(2, 2), 5, "_size is 5, but .* has 4 layers to spread; .* at most 4"),
    ],
)
def test_ranks_that_cannot_share_a_model_are_refused(what: str, config: ModelConfig, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"{what}_parallel.*{message}"):
        getattr(sharding, f"check_{what}_parallel_size")(config, size)
