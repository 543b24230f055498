"""Keywords that scripts bring along from vLLM: each is refused with what to do instead."""

import dataclasses
import re
from typing import Any

import pytest
import torch

from fleetfoot.compat import names as vllm_names
from fleetfoot.config.engine import CompilationConfig, EngineConfig
from fleetfoot.config.speculative import SpeculativeConfig
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.utils.validation import FieldError

SETTINGS = {field.name for field in dataclasses.fields(EngineConfig)}


def call(self: object, prompts: object, lora_request: None = None, *, use_tqdm: bool = True, **unknown: Any) -> None:
    """Stands for one of the calls of `LLM`."""


@pytest.mark.parametrize("owner", ["LLM", "AsyncLLM"])
@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("swap_space", 8, "leave it out: a preempted request is computed again; kv_offloading_size"),
        ("cpu_offload_gb", 1, "tensor_parallel_size"),
        ("tokenizer_mode", "slow", "leave it out"),
        ("disable_log_stats", 5, r"stats\(\) has the numbers"),
        ("max_seq_len_to_capture", 4096, "enforce_eager=True"),
        ("calculate_kv_scales", True, "scales of KV in FP8 are the checkpoint's, or 1"),
        ("rope_theta", 1e6, "set hf_overrides={...}: fields in place of those of config.json"),
        ("limit_mm_per_prompt", {"image": 1}, "text alone"),
        ("data_parallel_backend", "ray", "processes of one machine"),
        ("speculative_model", "x/y", "speculative_config="),
        ("max_lora_rank", 8, "merge the adapter"),
        ("guided_decoding_backend", "xgrammar", "compiled by llguidance"),
        ("structured_outputs_config", {"backend": "xgrammar"}, "compiled by llguidance"),
    ],
)
def test_a_setting_that_only_vllm_has(name: str, value: Any, advice: str, owner: str) -> None:
    with pytest.raises(TypeError, match=rf"^{owner} does not support {name}={re.escape(repr(value))}; .*{advice}"):
        EngineConfig.from_keywords({"model": "x", name: value}, owner=owner)


def test_values_that_change_nothing_are_taken() -> None:
    neutral = {name: values[0] for name, (values, _) in vllm_names.ENGINE_KEYWORDS.items() if values}
    for given in (
        neutral,
        dict.fromkeys(vllm_names.ENGINE_KEYWORDS),
        dict.fromkeys(SETTINGS),
        {"mm_processor_kwargs": {}, "convert": ""},
    ):
        assert EngineConfig.from_keywords(given, owner="LLM") == EngineConfig()
    for name, value in (("task", "embed"), ("convert", "classify")):
        assert EngineConfig.from_keywords({name: value}, owner="LLM").runner == "pooling"
        with pytest.raises(FieldError, match="and runner is 'generate'") as refused:
            EngineConfig.from_keywords({name: value, "runner": "generate"}, owner="LLM")
        assert refused.value.field == name
    assert EngineConfig(task="generate").runner == "generate"
    named = {"dtype": "half", "task": "auto", "runner": "auto", "disable_log_stats": False, "swap_space": 4.0}
    named["compilation_config"] = 0
    config = EngineConfig.from_keywords(named, owner="LLM")
    assert config == EngineConfig(dtype="float16", compilation_config=CompilationConfig())
    assert [EngineConfig(dtype=name).dtype for name in ("float", torch.half)] == ["float32", "float16"]  # type: ignore[arg-type]
    for name, value in (("data_parallel_backend", True), ("enable_dbo", 0), ("tokenizer_mode", object())):
        with pytest.raises(TypeError, match=f"LLM does not support {name}="):
            EngineConfig.from_keywords({name: value}, owner="LLM")


EVENTS = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557"}


def test_a_process_serves_its_share_of_the_replicas_of_several() -> None:
    """By the flags of vLLM's manifests: a process for each replica, or for those of a machine."""
    share = {"data_parallel_address": "10.0.0.1", "data_parallel_rpc_port": 5555, "kv_events_config": EVENTS}
    for given, count, port in (
        ({"data_parallel_rank": 2, "data_parallel_external_lb": True}, 1, 5559),
        ({"data_parallel_hybrid_lb": True, "data_parallel_size_local": 2, "data_parallel_start_rank": 2}, 2, 5559),
        ({"data_parallel_size_local": 4}, 4, 5557),
    ):
        config = EngineConfig.from_keywords({"data_parallel_size": 4, **share, **given}, owner="LLM")
        assert config.data_parallel_size == count
        assert config.kv_events_config is not None and config.kv_events_config.endpoint == f"tcp://*:{port}"
    for given, field in (
        ({"data_parallel_rank": 4}, "data_parallel_rank"),
        ({"data_parallel_rank": True}, "data_parallel_rank"),
        ({"data_parallel_size_local": 2}, "data_parallel_size_local"),
        ({"data_parallel_hybrid_lb": True, "data_parallel_start_rank": 1}, "data_parallel_start_rank"),
    ):
        with pytest.raises(FieldError) as error:
            EngineConfig.from_keywords({"data_parallel_size": 4, **given}, owner="LLM")
        assert error.value.field == field
    with pytest.raises(TypeError, match="data_parallel_address='x'; replicas that share experts"):
        EngineConfig.from_keywords({"enable_expert_parallel": True, "data_parallel_address": "x"}, owner="LLM")


def test_misspelt_settings_and_what_vllm_calls_runner() -> None:
    with pytest.raises(TypeError, match="'gpu_memory_utilisation'; did you mean 'gpu_memory_utilization'"):
        EngineConfig.from_keywords({"gpu_memory_utilisation": 0.5}, owner="LLM")


def test_advice_is_about_settings_that_there_are() -> None:
    assert not vllm_names.ENGINE_KEYWORDS.keys() & SETTINGS
    speculative = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    assert not vllm_names.SPECULATIVE_KEYS.keys() & speculative
    assert set(vllm_names.ENGINE_FLAGS.values()) <= SETTINGS | vllm_names.ENGINE_KEYWORDS.keys()
    known = SETTINGS | speculative
    known |= {field.name for field in dataclasses.fields(SamplingParams)}
    known |= {"chat_template", "collective_rpc", "prompt_token_ids"}
    of_calls = [advice for _, advice in (*vllm_names.ENGINE_KEYWORDS.values(), *vllm_names.CALL_KEYWORDS.values())]
    for advice in [*vllm_names.SPECULATIVE_KEYS.values(), *of_calls]:
        assert advice and set(re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", advice)) <= known, advice


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("best_of", 3, "set n, and keep the outputs with the highest cumulative_logprob"),
        ("use_beam_search", True, "LLM.beam_search"),
        ("guided_regex", "a+", r"set structured_outputs=StructuredOutputsParams\(regex=...\)"),
        ("guided_json", {"type": "object"}, r"set structured_outputs=StructuredOutputsParams\(json=...\)"),
        ("guided_json", {}, r"set structured_outputs=StructuredOutputsParams\(json=...\)"),
        ("guided_json", {"const": None}, r"set structured_outputs=StructuredOutputsParams\(json=...\)"),
        ("guided_json", "", r"set structured_outputs=StructuredOutputsParams\(json=...\)"),
        ("guided_choice", [], r"set structured_outputs=StructuredOutputsParams\(choice=...\)"),
        ("guided_structural_tag", {}, r"set structured_outputs=StructuredOutputsParams\(structural_tag=...\)"),
        ("guided_decoding_backend", "outlines", "llguidance"),
        ("thinking_token_budget", 5, "a server's chats take it"),
        ("best_off", 1, "it takes allowed_token_ids"),
    ],
)
def test_sampling_parameters_of_vllm(name: str, value: Any, advice: str) -> None:
    neutral = {name: neutral for name, (neutral, _) in vllm_names.SAMPLING_KEYWORDS.items()}
    assert SamplingParams(**neutral, n=2) == SamplingParams(n=2)
    with pytest.raises(TypeError, match=f"SamplingParams got an unknown keyword '{name}'; .*{advice}"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lora_request": "adapter"}, "'lora_request'; LoRA adapters are not served"),
        ({"guided_options_request": {"guided_json": {}}}, "'guided_options_request'; give it to SamplingParams"),
        ({"guided_options_request": {"guided_json": {"const": None}}}, "'guided_options_request'; give it to"),
        ({"tokenization_kwargs": {"a": 1}}, r"'tokenization_kwargs'; SamplingParams\(truncate_prompt_tokens"),
        ({"chat_template_content_format": "openai"}, "'chat_template_content_format'; leave it out"),
        ({"prompt_token_ids": [[5]]}, r"'prompt_token_ids'; give \{'prompt_token_ids': \[...\]\} as a prompt"),
        ({"use_tqmd": False}, r"'use_tqmd'; did you mean 'use_tqdm'\?"),
        ({"use_tqmd": None}, "'use_tqmd'; did you mean"),
        ({"xyz": 1}, "'xyz'; it takes prompts, use_tqdm$"),
    ],
    ids=str,
)
def test_others_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=f"^LLM.generate got an unknown keyword {message}"):
        vllm_names.check_call_keywords("LLM.generate", call, given)
