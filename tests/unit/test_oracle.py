"""The oracle: the order of its decisions, its reasons, and what follows from settings and the environment."""

import dataclasses
from collections.abc import Iterable
from functools import reduce
from itertools import product
from operator import or_
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetfoot.config import env
from fleetfoot.config.engine import CompilationMode, EngineConfig
from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.config.quantization import WeightFormat
from fleetfoot.kv_transfer.base.registry import CONNECTORS, connector_layouts
from fleetfoot.kv_transfer.vllm.base import KVConnectorBase_V1
from fleetfoot.plan import oracle
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.oracle import Decision, ModelFeatures
from fleetfoot.plan.output_settings import output_settings
from fleetfoot.plan.resolve import resolve_plan
from fleetfoot.records.kv_layout import ARENA, BLOCK_CONTIGUOUS_HND, TOKEN_MAJOR_NHD
from fleetfoot.runner.capabilities import CAPABILITIES, Feature

GIB = 1 << 30
CPU = Machine(16 * GIB)
GPU = Machine(16 * GIB, "some GPU", 80 * GIB, has_triton=True)
NO_TRITON = dataclasses.replace(GPU, has_triton=False)
LLAMA = ModelFeatures("LlamaForCausalLM")
QWEN2 = ModelFeatures("Qwen2ForCausalLM")
VARIABLE = env.USE_V2_MODEL_RUNNER
Env = dict[str, str]


class DeclaresLayout:
    accepted_kv_layouts: ClassVar = (BLOCK_CONTIGUOUS_HND, "another")


class DeclaresTokenMajor:
    accepted_kv_layouts: ClassVar = (TOKEN_MAJOR_NHD,)


class DeclaresOther:
    accepted_kv_layouts: ClassVar = ("another",)


class DeclaresNothing: ...


class Theirs(KVConnectorBase_V1):
    """Written for vLLM."""

    required: ClassVar[Any] = None

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> Any:
        assert vllm_config.kv_transfer_config.kv_role == "kv_both" and vllm_config.cache_config.block_size == 16
        return cls.required(vllm_config) if callable(cls.required) else cls.required


def connector(name: str, path: str | None = __name__) -> dict[str, Any]:
    module = {} if path is None else {"kv_connector_module_path": path}
    return {"kv_transfer_config": {"kv_connector": name, "kv_role": "kv_both", **module}}


def ask(model: ModelFeatures = LLAMA, machine: Machine = GPU, environ: Env | None = None, **settings: Any) -> Decision:
    return oracle.decide(EngineConfig(**settings), model, machine, environ or {})


def declare(monkeypatch: pytest.MonkeyPatch, why_not: str, runners: Iterable[str], *features: Feature) -> None:
    for runner, feature in product(runners, features):
        monkeypatch.setitem(CAPABILITIES[runner], feature, why_not)


@pytest.mark.parametrize("environ", [{}, {VARIABLE: "0"}, {VARIABLE: "1"}], ids=str)
@pytest.mark.parametrize("settings", [{}, {"model_runner": "v1"}, {"model_runner": "v2"}, {"use_v2_model_runner": True},
                                      {"use_v2_model_runner": False}], ids=str)  # fmt: skip
def test_a_setting_beats_the_environment_and_both_the_oracle(environ: dict[str, str], settings: dict[str, Any]) -> None:
    runners = {"v1": "v1", "v2": "v2", "0": "v1", "1": "v2", False: "v1", True: "v2"}
    for model, machine in product((LLAMA, QWEN2), (CPU, GPU)):
        decision = ask(model, machine, environ, **settings)
        explicit = settings or environ
        assert decision.explicit == bool(explicit)
        for name, value in explicit.items():
            assert decision.runner == runners[value]
            assert f"{name} is {value!r}." in decision.reasons[0] or f"{name} is {value}." in decision.reasons[0]
            assert not decision.missing


@pytest.mark.parametrize(("runner", "use_v2"), [("v1", True), ("v2", False)])
def test_settings_that_contradict_each_other(runner: Any, use_v2: bool) -> None:
    with pytest.raises(ValueError, match=f"runner is '{runner}' and use_v2_model_runner is {use_v2}: they contradict"):
        EngineConfig(model_runner=runner, use_v2_model_runner=use_v2)
    EngineConfig(model_runner=runner, use_v2_model_runner=not use_v2)


STRANGER = connector("DeclaresNothing")
TOKEN_MAJOR = connector("DeclaresTokenMajor")


POOLING = dataclasses.replace(LLAMA, task="pooling")
OTHER = ModelFeatures("OtherForCausalLM", task="pooling")


@pytest.fixture
def runners_that_call_connectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests do not depend on what the runners support."""
    declare(monkeypatch, "", ("v1", "v2"), Feature.KV_CONNECTOR, Feature.KV_OFFLOADING)
    declare(monkeypatch, "", ("v1",), Feature.LORA, Feature.POOLING)
    entry = dataclasses.replace(oracle.ARCHITECTURES["LlamaForCausalLM"], default_on_v2=False)
    monkeypatch.setitem(oracle.ARCHITECTURES, OTHER.architecture, entry)


@pytest.mark.usefixtures("runners_that_call_connectors")
@pytest.mark.parametrize(
    ("name", "path", "layout"),
    [
        *((name, None, ARENA) for name in CONNECTORS if name not in ("ExampleConnector", "MultiConnector")),
        ("ExampleConnector", None, TOKEN_MAJOR_NHD),
        ("DeclaresLayout", __name__, BLOCK_CONTIGUOUS_HND),
        ("DeclaresTokenMajor", __name__, TOKEN_MAJOR_NHD),
        *((name, __name__, None) for name in ("DeclaresOther", "DeclaresNothing", "NoSuchClass")),
        ("DeclaresLayout", "no.such.module", None),
        ("SomebodysConnector", None, None),
    ],
)
def test_connectors_declare_the_layouts_that_they_accept(name: str, path: str | None, layout: str | None) -> None:
    settings = connector(name, path)
    layouts = connector_layouts(KVTransferConfig.parse(settings["kv_transfer_config"]), EngineConfig())
    assert (BLOCK_CONTIGUOUS_HND in layouts.accepted) == (layout in (ARENA, BLOCK_CONTIGUOUS_HND))
    decision = ask(**settings)
    assert decision.runner == ("v2" if layout in (ARENA, BLOCK_CONTIGUOUS_HND) else "v1")
    names = {
        ARENA: [],
        BLOCK_CONTIGUOUS_HND: [],
        TOKEN_MAJOR_NHD: ["this KV connector's layout"],
        None: ["this KV connector"],
    }
    assert [feature.name for feature in decision.unsupported] == names[layout]
    assert bool(decision.missing) == (layout is None)
    assert layout is None or decision.kv_layout == layout
    hybrid = ask(ModelFeatures("Lfm2ForCausalLM", is_hybrid=True, has_states=True), **settings)
    assert bool(hybrid.missing) == (layout != ARENA)
    reason = f"No model runner supports this KV connector (kv_transfer_config has {name} as kv_both)."
    assert layout is not None or decision.reasons == (reason,)
    kept = "alone; KV caches are kept as arena, block-contiguous-hnd, token-major-nhd."
    assert name != "DeclaresOther" or decision.missing[0].why_not.endswith(f"accepts another {kept}")


@pytest.mark.parametrize(
    ("required", "message"),
    [
        (
            "NWHD",
            "of the KV connector Theirs returns 'NWHD'; it can return NHD, HND, token-major-nhd, block-contiguous-hnd",
        ),
        (["NHD"], r"returns \['NHD'\]; it can return"),
        (
            lambda config: config.model_config.get_head_size(),
            "has raised ValueError: the model's shape is not known yet",
        ),
        (lambda config: config.nothing, "has raised AttributeError: VllmConfig has no 'nothing' here; it has"),
    ],
)
def test_layouts_that_do_not_exist(monkeypatch: pytest.MonkeyPatch, required: Any, message: str) -> None:
    monkeypatch.setattr(Theirs, "required", staticmethod(required) if callable(required) else required)
    with pytest.raises(ValueError, match=f"get_required_kvcache_layout.*{message}"):
        ask(**connector("Theirs"))


@pytest.mark.usefixtures("runners_that_call_connectors")
def test_of_several_connectors_one_that_refuses_decides() -> None:
    ours, theirs, other = (
        {"kv_connector": "OffloadingConnector"},
        *(settings["kv_transfer_config"] for settings in (STRANGER, TOKEN_MAJOR)),
    )
    settings = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    expected: list[tuple[list[Any], str, str]] = [
        ([ours, ours], "v2", ""),
        ([other, other], "v1", ""),
        ([ours, theirs], "v1", "the KV connector DeclaresNothing does not say"),
        ([theirs, other], "v1", "the KV connector DeclaresNothing does not say"),
        (
            [ours, other],
            "v1",
            "connectors without a common KV layout (OffloadingConnector accepts arena, block-contiguous-hnd;",
        ),
    ]
    for parts, runner, refusal in expected:
        extra = {"kv_connector_extra_config": {"connectors": parts}}
        decision = ask(kv_transfer_config={**settings, **extra})
        assert decision.runner == runner
        assert [refusal in feature.why_not for feature in decision.missing] == [True] * bool(refusal)
    with pytest.raises(ValueError, match="MultiConnector needs kv_connector_extra_config"):
        ask(kv_transfer_config=settings)


DRAFT = {"num_speculative_tokens": 3, "model": "a/draft"}
ODD_BLOCKS = ModelFeatures(
    "LlamaForCausalLM", quantization="fp8", formats=(WeightFormat("fp8", "scale_inv", (128, 48), "group"),)
)
REQUIRING: dict[Feature, dict[str, Any]] = {
    Feature.QUANTIZED_WEIGHTS: {"quantization": "fp8"},
    Feature.WEIGHTS_WITHOUT_KERNELS: {"model": ODD_BLOCKS},
    Feature.MIXTURE_OF_EXPERTS: {"model": ModelFeatures("MixtralForCausalLM", has_experts=True)},
    Feature.HYBRID_LAYERS: {"model": ModelFeatures("Lfm2ForCausalLM", is_hybrid=True, has_states=True)},
    Feature.OTHER_LAYERS: {"model": ModelFeatures("JambaForCausalLM", is_hybrid=True)},
    Feature.SLIDING_WINDOW: {"model": ModelFeatures("MistralForCausalLM", has_windows=True)},
    Feature.POOLING: {"model": POOLING},
    Feature.TORCH_COMPILE: {"compilation_config": {"mode": CompilationMode.STOCK_TORCH_COMPILE, "backend": "inductor"}},
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
    Feature.LOGITS_PROCESSORS: {"logits_processors": ["module:Class"]},
}


SETTINGS = [{}, *({**settings} for settings in REQUIRING.values() if "model" not in settings), STRANGER]


@given(
    chosen=st.lists(st.sampled_from(SETTINGS), max_size=4),
    model=st.sampled_from([LLAMA, QWEN2, ModelFeatures("MixtralForCausalLM", has_experts=True)]),
    machine=st.sampled_from([CPU, GPU, NO_TRITON]),
    environ=st.sampled_from([{}, {VARIABLE: "0"}, {VARIABLE: "1"}]),
    runner=st.sampled_from(["auto", "v1", "v2"]),
)
def test_any_combination(chosen: list[Any], model: ModelFeatures, machine: Machine, environ: Env, runner: str) -> None:
    settings: dict[str, Any] = reduce(or_, chosen, {"model_runner": runner})
    decision = ask(model, machine, environ, **settings)
    assert decision.explicit == (runner != "auto" or bool(environ))
    if runner == "auto" and not environ:  # the oracle itself never chooses a V2 that could not run
        assert decision.runner == "v1" or not decision.missing
        assert decision.runner == "v2" or decision.unsupported or machine is NO_TRITON or decision.impossible
    else:
        assert decision.runner == (f"v{int(environ[VARIABLE]) + 1}" if runner == "auto" else runner)
    lacking = oracle.unsupported_features(decision.runner, oracle.required_features(EngineConfig(**settings), model))
    assert set(lacking) <= set(decision.missing)
    assert len(decision.warnings) <= 1
    assert bool(decision.advice) == bool(decision.missing)


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


KV = "kv_transfer_config"
INVALID: list[tuple[str, Any, type[Exception], str]] = [
    (KV, "{", ValueError, "kv_transfer_config is not JSON"),
    (KV, "[1]", TypeError, r"kv_transfer_config is \[1\]; it must be a JSON object"),
    (KV, 5, TypeError, "kv_transfer_config is 5"),
    (KV, {"kv_rol": "x"}, TypeError, "unknown keyword 'kv_rol'; did you mean 'kv_role'"),
    (KV, {"kv_role": "both"}, ValueError, "kv_role is 'both'; it can be kv_producer"),
    (KV, {"kv_connector": ""}, TypeError, "kv_connector is ''"),
    (KV, {"kv_port": -1}, ValueError, "kv_port is -1"),
    (KV, {"kv_connector_extra_config": 1}, TypeError, "must be an object"),
    (KV, '{"kv_role": "a", "kv_role": "b"}', ValueError, "has the key 'kv_role' twice"),
    (KV, '{"kv_connector_extra_config": {"a": 1, "a": 2}}', ValueError, f"{KV} has the key 'a' twice; leave one out"),
    (KV, {5: 6}, TypeError, "kv_transfer_config has the key 5, a int; keys must be strings"),
    (KV, {"kv_connector_module_path": "..x"}, ValueError, "it must be the whole name of a module"),
    (KV, {"kv_connector_module_path": "a/b.py"}, ValueError, "such as 'my_package.connector'"),
    ("override_generation_config", {5: 6}, TypeError, "override_generation_config has the key 5"),
    ("kv_offloading_size", 0, ValueError, "kv_offloading_size is 0; it must be above 0, in GiB"),
    ("kv_offloading_size", 1e300, ValueError, r"kv_offloading_size is 1e\+300; .* \(less than 8,589,934,592\)"),
    ("kv_offloading_size", float("inf"), TypeError, "kv_offloading_size is inf; it must be a finite number"),
    ("master_addr", "10.0.0.1:29500", ValueError, "IPv4 address of node 0 and nothing else"),
    ("speculative_config", {**DRAFT, "model": ""}, TypeError, "model is ''"),
    ("compilation_config", {"mode": 3}, ValueError, "mode is 3; it can be 0 or NONE, 1 or STOCK_TORCH_COMPILE"),
    ("compilation_config", {"mode": True}, ValueError, "mode is True"),
    ("compilation_config", {"level": 1}, TypeError, "unknown keyword 'level'; it is mode"),
    (
        "compilation_config",
        {"mode": 1, "backend": "eager"},
        TypeError,
        "'backend'; leave it out: the backend is induct",
    ),
    ("tensor_parallel_size", 0, ValueError, "tensor_parallel_size is 0"),
    ("runner", "translate", ValueError, "runner is 'translate'; it can be auto, generate, pooling"),
    ("runner", "v1", ValueError, "runner is 'v1'; it can be auto, generate, pooling; the model runner is model_runner"),
    ("quantization", "", ValueError, "quantization is an empty string"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), INVALID, ids=str)
def test_invalid_settings(name: str, value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EngineConfig(**{name: value})


def test_settings_that_change_outputs_are_what_engines_of_a_group_compare() -> None:
    plan = resolve_plan(EngineConfig(), GPU, environ={}, config_only=True)
    changes: dict[str, Any] = {"kv_cache_dtype": "fp8", "seed": 1, "enforce_eager": True}
    for name, value in changes.items():
        other = resolve_plan(EngineConfig(**{name: value}), GPU, environ={}, config_only=True)
        differ = output_settings(plan).items() ^ output_settings(other).items()
        assert {setting for setting, _ in differ} == {name} - {"enforce_eager"}
