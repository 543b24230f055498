"""The oracle: the order in which it decides, what it says, and what it makes of settings and environment."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetfoot.config import env
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.base.registry import V2_LAYOUT, connector_layouts
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.oracle import (
    DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES,
    Decision,
    ModelFeatures,
    UnsupportedFeatureError,
    decide,
    required_features,
    unsupported_features,
)
from fleetfoot.plan.resolve import resolve_plan
from fleetfoot.runner.capabilities import CAPABILITIES, Feature, Support

GIB = 1 << 30
CPU = Machine(16 * GIB)
GPU = Machine(16 * GIB, "some GPU", 80 * GIB, has_triton=True)
NO_TRITON = dataclasses.replace(GPU, has_triton=False)
LLAMA = ModelFeatures("LlamaForCausalLM")
QWEN2 = ModelFeatures("Qwen2ForCausalLM")
VARIABLE = env.USE_V2_MODEL_RUNNER


class DeclaresLayout:
    """A connector of somebody else's."""

    accepted_kv_layouts: ClassVar = (V2_LAYOUT, "another")


class DeclaresOther:
    accepted_kv_layouts: ClassVar = ("another",)


class DeclaresNothing: ...


def connector(name: str, path: str | None = __name__, role: str | None = "kv_both") -> dict[str, Any]:
    settings = {"kv_connector": name, "kv_role": role, "kv_connector_module_path": path}
    return {"kv_transfer_config": {key: value for key, value in settings.items() if value is not None}}


def ask(
    model: ModelFeatures = LLAMA, machine: Machine = GPU, environ: dict[str, str] | None = None, **settings: Any
) -> Decision:
    return decide(EngineConfig(**settings), model, machine, environ or {})


# --- what was said explicitly ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "meaning"), [(None, None), ("0", False), ("1", True)])
def test_the_environment_has_three_states(value: str | None, meaning: bool | None) -> None:
    environ = {} if value is None else {VARIABLE: value}
    assert env.use_v2_model_runner(environ) is meaning


@pytest.mark.parametrize("value", ["", "true", "True", "2", "v2", " 1", "01", "no"])
@pytest.mark.parametrize("settings", [{}, {"runner": "v1"}])
def test_anything_else_is_an_error_that_says_so(value: str, settings: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=rf"{VARIABLE} is '{value}'; it can be 0 .*, 1 .* or unset"):
        ask(environ={VARIABLE: value}, **settings)


@pytest.mark.parametrize("value", [None, "0", "1"])
@pytest.mark.parametrize("settings", [{"runner": "v1"}, {"runner": "v2"}, {"use_v2_model_runner": True},
                                      {"use_v2_model_runner": False}])  # fmt: skip
def test_a_setting_beats_the_environment(value: str | None, settings: dict[str, Any]) -> None:
    decision = ask(environ={} if value is None else {VARIABLE: value}, **settings)
    wanted = settings.get("runner") or ("v2" if settings["use_v2_model_runner"] else "v1")
    assert (decision.runner, decision.explicit) == (wanted, True)
    assert next(iter(settings)) in decision.reasons[0]


@pytest.mark.parametrize("value", ["0", "1"])
@pytest.mark.parametrize("model", [LLAMA, QWEN2])
@pytest.mark.parametrize("machine", [CPU, GPU])
def test_the_environment_beats_the_oracle(value: str, model: ModelFeatures, machine: Machine) -> None:
    decision = ask(model, machine, {VARIABLE: value})
    assert (decision.runner, decision.explicit) == (f"v{int(value) + 1}", True)
    assert decision.reasons[0].endswith(f"{VARIABLE} is {value}.")
    assert not decision.missing


@pytest.mark.parametrize(("runner", "use_v2"), [("v1", True), ("v2", False)])
def test_settings_that_contradict_each_other(runner: Any, use_v2: bool) -> None:
    with pytest.raises(ValueError, match=f"runner is '{runner}' and use_v2_model_runner is {use_v2}: they contradict"):
        EngineConfig(runner=runner, use_v2_model_runner=use_v2)
    EngineConfig(runner=runner, use_v2_model_runner=not use_v2)


def test_what_was_asked_for_is_never_overridden() -> None:
    decision = ask(runner="v2", enable_lora=True, prefill_context_parallel_size=4)
    assert (decision.runner, decision.explicit) == ("v2", True)
    assert [feature.name for feature in decision.missing] == ["prefill context parallelism", "LoRA adapters"]
    with pytest.raises(UnsupportedFeatureError) as caught:
        decision.check()
    message = str(caught.value)
    assert "Model Runner V2 is to run (runner is 'v2')" in message
    assert "prefill context parallelism (prefill_context_parallel_size is 4): " in message
    assert "LoRA adapters (enable_lora is on): " in message
    assert "No model runner supports all of it" in message


def test_v1_is_named_where_it_would_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CAPABILITIES["v2"], Feature.PREFIX_CACHING, Support("Not in this test."))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedFeatureError, match=r"Not in this test\.\nModel Runner V1 supports all of it"):
        ask(environ={VARIABLE: "1"}).check()
    ask(environ={VARIABLE: "0"}).check()


def test_v2_on_a_gpu_needs_triton() -> None:
    decision = ask(machine=NO_TRITON, runner="v2")
    assert (decision.runner, decision.unsupported) == ("v2", ())
    with pytest.raises(UnsupportedFeatureError, match="written in Triton"):
        decision.check()
    ask(machine=NO_TRITON, runner="v2", device="cpu").check()
    ask(machine=NO_TRITON, runner="v1").check()


# --- in which order -------------------------------------------------------------------------------------------------

LORA: dict[str, Any] = {"enable_lora": True}
STRANGER = connector("DeclaresNothing")
ORDER: dict[str, tuple[dict[str, Any], str, str]] = {
    "v2": ({}, "v2", "default of LlamaForCausalLM, and nothing is on"),
    "cpu": ({"machine": CPU}, "v2", "default of LlamaForCausalLM, and nothing is on"),
    "cpu-asked-for": ({"machine": NO_TRITON, "device": "cpu"}, "v2", "nothing is on"),
    "connector": (STRANGER, "v1", "the KV connector DeclaresNothing does not say which KV layouts it accepts"),
    "connector-first": (
        {**STRANGER, **LORA, "model": QWEN2, "machine": NO_TRITON, "task": "embed"},
        "v1",
        "KV connector DeclaresNothing",
    ),
    "architecture": ({"model": QWEN2}, "v1", "Qwen2ForCausalLM is not one of the architectures"),
    "architecture-second": (
        {**LORA, "model": QWEN2, "machine": NO_TRITON, "task": "embed"},
        "v1",
        "Qwen2ForCausalLM is not one of",
    ),
    "task": ({"task": "embed"}, "v1", "the task is embed"),
    "task-before-triton": ({**LORA, "machine": NO_TRITON, "task": "score"}, "v1", "the task is score"),
    "triton": ({"machine": NO_TRITON}, "v1", "written in Triton"),
    "triton-before-features": ({**LORA, "machine": NO_TRITON}, "v1", "written in Triton"),
    "features": ({**LORA}, "v1", "Model Runner V2 does not support LoRA adapters (enable_lora is on)"),
    "offloading": ({"kv_offloading_size": 2}, "v2", "nothing is on that it does not support"),
    "offloading-beside-a-connector": ({"kv_offloading_size": 2, **STRANGER}, "v1", "KV connector DeclaresNothing"),
}


@pytest.fixture
def runners_that_call_connectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the runners can do: these tests are about what the oracle makes of it."""
    for runner in ("v1", "v2"):
        for feature in (Feature.KV_CONNECTOR, Feature.KV_OFFLOADING):
            monkeypatch.setitem(CAPABILITIES[runner], feature, Support())  # type: ignore[arg-type]


@pytest.mark.usefixtures("runners_that_call_connectors")
@pytest.mark.parametrize("case", ORDER)
def test_the_order_of_decisions(case: str) -> None:
    settings, runner, reason = ORDER[case]
    decision = ask(**settings)
    assert (decision.runner, decision.explicit) == (runner, False)
    assert decision.reasons[0].startswith(f"Model Runner {runner.upper()} runs: ")
    assert reason in decision.reasons[0]
    assert all(sentence.endswith(".") and sentence[0].isupper() for sentence in decision.reasons)


def test_the_architectures_that_run_on_v2_unasked() -> None:
    assert DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES == ("LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM")
    for architecture in DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES:
        assert ask(ModelFeatures(architecture)).runner == "v2"
    assert ask(QWEN2, runner="v2").runner == "v2"


def test_a_cpu_is_told_how_v2_runs_there() -> None:
    assert "torch twins" in ask(machine=CPU).reasons[1]
    assert len(ask(machine=GPU).reasons) == len(ask(machine=CPU, runner="v1").reasons) == 1


def test_one_warning_names_every_feature_that_v2_lacks() -> None:
    decision = ask(machine=CPU, enable_lora=True, quantization="fp8", enable_prompt_embeds=True)
    assert decision.warnings == decision.reasons
    (warning,) = decision.warnings
    for name in ("quantized weights", "LoRA adapters", "prompt embeddings"):
        assert name in warning
    assert ask(machine=NO_TRITON).warnings == ask(machine=NO_TRITON).reasons
    for quiet in (ask(), ask(QWEN2), ask(**STRANGER), ask(runner="v2", enable_lora=True)):
        assert quiet.warnings == ()


# --- KV connectors --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("runners_that_call_connectors")
@pytest.mark.parametrize(
    ("name", "path", "accepts"),
    [
        ("NixlConnector", None, True),
        ("OffloadingConnector", None, True),
        ("SharedStorageConnector", None, True),
        ("FilesystemConnector", None, True),
        ("DeclaresLayout", __name__, True),
        ("DeclaresOther", __name__, False),
        ("DeclaresNothing", __name__, False),
        ("NoSuchClass", __name__, False),
        ("DeclaresLayout", "no.such.module", False),
        ("SomebodysConnector", None, False),
    ],
)
def test_connectors_declare_the_layouts_that_they_accept(name: str, path: str | None, accepts: bool) -> None:
    settings = connector(name, path)
    layouts = connector_layouts(KVTransferConfig.parse(settings["kv_transfer_config"]))
    assert (V2_LAYOUT in layouts.accepted) == accepts
    decision = ask(**settings)
    assert decision.runner == ("v2" if accepts else "v1")
    assert (f"in the layout {V2_LAYOUT}, and the KV connector {name} " in decision.reasons[0]) != accepts
    exists = name in ("DeclaresOther", "DeclaresNothing")
    lacking = "Model Runner V2's KV layout" if exists else "this KV connector"
    assert [feature.name for feature in decision.unsupported] == [lacking] * (not accepts)
    assert bool(decision.missing) == (not accepts and not exists)  # what nobody can import, V1 cannot run either


def test_a_runner_that_calls_no_connectors_does_not_start_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for runner in ("v1", "v2"):
        monkeypatch.setitem(CAPABILITIES[runner], Feature.KV_CONNECTOR, Support("Not in this test."))  # type: ignore[arg-type]
    decision = ask(**connector("SharedStorageConnector", None))
    assert decision.runner == "v1" and "Model Runner V2 does not support KV connectors" in decision.reasons[0]
    assert [feature.name for feature in decision.missing] == ["KV connectors"]


@pytest.mark.usefixtures("runners_that_call_connectors")
def test_of_several_connectors_one_that_refuses_decides() -> None:
    ours, theirs = {"kv_connector": "OffloadingConnector"}, STRANGER["kv_transfer_config"]
    settings = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    for parts, runner in (([ours, ours], "v2"), ([ours, theirs], "v1"), ([theirs], "v1")):
        extra = {"kv_connector_extra_config": {"connectors": parts}}
        decision = ask(kv_transfer_config={**settings, **extra})
        assert decision.runner == runner
        assert ("the KV connector DeclaresNothing does not say" in decision.reasons[0]) == (runner == "v1")
    with pytest.raises(ValueError, match="MultiConnector needs kv_connector_extra_config"):
        ask(kv_transfer_config=settings)


ROLES = "kv_producer, kv_consumer, kv_both"
KNOWN = "OffloadingConnector, NixlConnector, SharedStorageConnector, FilesystemConnector, MultiConnector"


@pytest.mark.parametrize(
    ("settings", "remark"),
    [
        ({}, None),
        ({"kv_load_failure_policy": "recompute"}, None),  # which says nothing new
        (
            {"kv_connector_extra_config": {"a": 1}, "kv_port": 5},
            "it has no kv_connector and no kv_role: nothing comes of kv_connector_extra_config {'a': 1}, kv_port 5. "
            f"Set kv_connector ({KNOWN}) and kv_role ({ROLES}), or leave kv_transfer_config out.",
        ),
        (
            {"kv_connector": "DeclaresNothing", "kv_connector_module_path": __name__},
            f"it has no kv_role: nothing comes of kv_connector 'DeclaresNothing', kv_connector_module_path "
            f"{__name__!r}. Set kv_role ({ROLES}), or leave kv_transfer_config out.",
        ),
        (
            {"kv_role": "kv_producer"},
            f"it has no kv_connector: nothing comes of kv_role 'kv_producer'. Set kv_connector ({KNOWN}), or leave",
        ),
    ],
)
def test_a_connector_without_name_or_role_is_not_active(settings: dict[str, Any], remark: str | None) -> None:
    decision = ask(kv_transfer_config=settings)
    assert (decision.runner, decision.unsupported) == ("v2", ())
    assert len(decision.warnings) == (remark is not None)
    assert remark is None or remark in decision.warnings[0]


def test_what_v2_lacks_is_listed_when_it_was_asked_for() -> None:
    decision = ask(runner="v2", **STRANGER)
    assert decision.runner == "v2"
    with pytest.raises(UnsupportedFeatureError, match="does not say which KV layouts it accepts"):
        decision.check()


# --- features -------------------------------------------------------------------------------------------------------

DRAFT = {"num_speculative_tokens": 3, "model": "a/draft"}
WANTED: dict[Feature, dict[str, Any]] = {
    Feature.QUANTIZED_WEIGHTS: {"quantization": "fp8"},
    Feature.MIXTURE_OF_EXPERTS: {"model": ModelFeatures("MixtralForCausalLM", has_experts=True)},
    Feature.HYBRID_LAYERS: {"model": ModelFeatures("JambaForCausalLM", is_hybrid=True)},
    Feature.SLIDING_WINDOW: {"model": ModelFeatures("MistralForCausalLM", has_windows=True)},
    Feature.POOLING: {"task": "embed"},
    Feature.TORCH_COMPILE: {"compilation_config": {"mode": "STOCK_TORCH_COMPILE"}},
    Feature.ASYNC_SCHEDULING: {"async_scheduling": True},
    Feature.TENSOR_PARALLELISM: {"tensor_parallel_size": 2},
    Feature.PIPELINE_PARALLELISM: {"pipeline_parallel_size": 2},
    Feature.PREFILL_CONTEXT_PARALLELISM: {"prefill_context_parallel_size": 2},
    Feature.SPECULATIVE_NGRAM: {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    Feature.SPECULATIVE_DRAFT_MODEL: {"speculative_config": DRAFT},
    Feature.SPECULATIVE_EAGLE: {"speculative_config": {"method": "eagle", **DRAFT}},
    Feature.SLEEP: {"enable_sleep_mode": True},
    Feature.CHUNKED_PREFILL: {"enable_chunked_prefill": True},
    Feature.PREFIX_CACHING: {"enable_prefix_caching": True},
    Feature.PREEMPTION: {},
    Feature.PRIORITY_SCHEDULING: {"scheduling_policy": "priority"},
    Feature.KV_CONNECTOR: connector("NixlConnector", None),
    Feature.KV_OFFLOADING: {"kv_offloading_size": 4.0},
    Feature.PROMPT_EMBEDDINGS: {"enable_prompt_embeds": True},
    Feature.LORA: {"enable_lora": True},
}
PLAIN: dict[str, Any] = {"enable_chunked_prefill": False, "enable_prefix_caching": False}


@pytest.mark.parametrize("feature", WANTED, ids=lambda feature: feature.name)
def test_what_a_configuration_wants(feature: Feature) -> None:
    settings = {**PLAIN, **WANTED[feature]}
    model = settings.pop("model", LLAMA)
    wanted = required_features(EngineConfig(**settings), model)
    assert set(wanted) == {feature, Feature.PREEMPTION}
    assert wanted[feature]
    for runner in ("v1", "v2"):
        lacking = unsupported_features(runner, wanted)
        support = CAPABILITIES[runner][feature]
        assert [entry.name for entry in lacking] == ([] if support.is_supported else [feature.value])
        assert [entry.why_not for entry in lacking] == ([] if support.is_supported else [support.why_not])


def test_a_quantized_checkpoint_is_told_by_itself() -> None:
    wanted = required_features(EngineConfig(), ModelFeatures("LlamaForCausalLM", quantization="awq"))
    assert wanted[Feature.QUANTIZED_WEIGHTS] == "the checkpoint's weights are quantized, awq"


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_every_feature_is_declared_in_sentences(runner: str) -> None:
    declared = CAPABILITIES[runner]
    assert set(declared) == set(Feature)
    for feature, support in declared.items():
        assert support.is_supported or (support.why_not[0].isupper() and support.why_not.endswith(".")), feature


SETTINGS = [{}, *({**settings} for settings in WANTED.values() if "model" not in settings), STRANGER]


@given(
    chosen=st.lists(st.sampled_from(SETTINGS), max_size=4),
    model=st.sampled_from([LLAMA, QWEN2, ModelFeatures("MixtralForCausalLM", has_experts=True)]),
    machine=st.sampled_from([CPU, GPU, NO_TRITON]),
    value=st.sampled_from([None, "0", "1"]),
    runner=st.sampled_from(["auto", "v1", "v2"]),
)
def test_whatever_is_asked(
    chosen: list[dict[str, Any]], model: ModelFeatures, machine: Machine, value: str | None, runner: str
) -> None:
    settings: dict[str, Any] = {"runner": runner}
    for part in chosen:
        settings |= part
    decision = ask(model, machine, {} if value is None else {VARIABLE: value}, **settings)
    assert decision.explicit == (runner != "auto" or value is not None)
    if runner != "auto":
        assert decision.runner == runner
    elif value is not None:
        assert decision.runner == f"v{int(value) + 1}"
    else:  # the oracle itself never chooses a V2 that could not run
        assert decision.runner == "v1" or not decision.missing
        assert decision.runner == "v2" or decision.unsupported or machine is NO_TRITON or model is not LLAMA
    lacking = unsupported_features(decision.runner, required_features(EngineConfig(**settings), model))
    assert set(lacking) <= set(decision.missing)
    assert len(decision.warnings) <= 1
    assert bool(decision.advice) == bool(decision.missing)


# --- the plan -------------------------------------------------------------------------------------------------------


def test_the_plan_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    plan = resolve_plan(EngineConfig(device="cpu"), CPU)
    monkeypatch.setenv(VARIABLE, "1")
    assert not plan.use_v2_model_runner
    assert (plan.runner, plan.explicit, plan.unsupported) == ("v1", True, ())
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.decision = None  # type: ignore[misc, assignment]
    assert resolve_plan(EngineConfig(device="cpu"), CPU).use_v2_model_runner
    monkeypatch.delenv(VARIABLE)
    assert resolve_plan(EngineConfig(device="cpu"), CPU).explicit is False


def test_what_depends_on_the_runner_follows_the_plan() -> None:
    v1, v2 = (resolve_plan(EngineConfig(runner=runner), GPU, environ={}) for runner in ("v1", "v2"))
    assert (v1.async_scheduling, v2.async_scheduling) == (False, True)
    assert v1.capture_table.keys == () and v2.capture_table.keys
    assert v1.memory.state_bytes_per_block == 0 < v2.memory.state_bytes_per_block
    assert not resolve_plan(EngineConfig(enforce_eager=True), GPU, environ={}).capture_table.keys


# --- settings that are objects --------------------------------------------------------------------------------------


def test_settings_may_be_json_or_a_dictionary() -> None:
    settings = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"a": [1]}}
    text = '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"a": [1]}}'
    made = [EngineConfig(kv_transfer_config=value) for value in (settings, text, KVTransferConfig(**settings))]  # type: ignore[arg-type]
    assert made[0] == made[1] == made[2]
    assert made[0].kv_transfer_config is not None and made[0].kv_transfer_config.is_active
    assert dataclasses.replace(made[0], seed=1).kv_transfer_config == made[0].kv_transfer_config
    hash(made[0])


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"kv_transfer_config": "{"}, ValueError, "kv_transfer_config is not JSON"),
        ({"kv_transfer_config": "[1]"}, TypeError, r"kv_transfer_config is \[1\]; it must be a JSON object"),
        ({"kv_transfer_config": 5}, TypeError, "kv_transfer_config is 5"),
        ({"kv_transfer_config": {"kv_rol": "x"}}, TypeError, "unknown keyword 'kv_rol'; did you mean 'kv_role'"),
        ({"kv_transfer_config": {"kv_role": "both"}}, ValueError, "kv_role is 'both'; it can be kv_producer"),
        ({"kv_transfer_config": {"kv_connector": ""}}, TypeError, "kv_connector is ''"),
        ({"kv_transfer_config": {"kv_port": -1}}, ValueError, "kv_port is -1"),
        ({"kv_transfer_config": {"kv_connector_extra_config": 1}}, TypeError, "must be an object"),
        ({"kv_transfer_config": '{"kv_role": "a", "kv_role": "b"}'}, ValueError, "has the key 'kv_role' twice"),
        (
            {"kv_transfer_config": '{"kv_connector_extra_config": {"a": 1, "a": 2}}'},
            ValueError,
            "kv_transfer_config has the key 'a' twice; leave one out",
        ),
        ({"kv_transfer_config": {5: 6}}, TypeError, "kv_transfer_config has the key 5, a int; keys must be strings"),
        (
            {"kv_transfer_config": {"kv_connector_module_path": "..x"}},
            ValueError,
            "it must be the whole name of a module",
        ),
        ({"kv_transfer_config": {"kv_connector_module_path": "a/b.py"}}, ValueError, "such as 'my_package.connector'"),
        ({"override_generation_config": {5: 6}}, TypeError, "override_generation_config has the key 5"),
        ({"kv_offloading_size": 0}, ValueError, "kv_offloading_size is 0; it must be above 0, in GiB"),
        ({"kv_offloading_size": 1e300}, ValueError, r"kv_offloading_size is 1e\+300; .* \(less than 8,589,934,592\)"),
        ({"kv_offloading_size": float("inf")}, TypeError, "kv_offloading_size is inf; it must be a finite number"),
        ({"master_addr": "10.0.0.1:29500"}, ValueError, "IPv4 address of node 0 and nothing else"),
        ({"speculative_config": {**DRAFT, "model": ""}}, TypeError, "model is ''"),
        ({"compilation_config": {"mode": 3}}, ValueError, "mode is 3; it can be 0 or NONE, 1 or STOCK_TORCH_COMPILE"),
        ({"compilation_config": {"mode": True}}, ValueError, "mode is True"),
        ({"tensor_parallel_size": 0}, ValueError, "tensor_parallel_size is 0"),
        ({"task": "translate"}, ValueError, "task is 'translate'; it can be generate, embed"),
        ({"quantization": ""}, ValueError, "quantization is an empty string"),
    ],
    ids=str,
)
def test_settings_that_mean_nothing(settings: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EngineConfig(**settings)
