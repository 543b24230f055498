"""Engines that cannot start say why: settings, files, models, drafters; `force_runner` wins, and is restored."""

import asyncio
import dataclasses
import json
import logging
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tests.helpers.commands import CommandRunner
from tests.helpers.engines import TEXT_MODEL, drain
from tests.helpers.faulty_connector import OFFLOADING, Faults, faulty
from tests.helpers.runner_lives import DRAFT

from fleetfoot import LLM, AsyncLLM, SamplingParams
from fleetfoot.assets import embedded_eagle_path, embedded_model_path
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.env import USE_NATIVE_KERNELS, USE_V2_MODEL_RUNNER
from fleetfoot.engine import engine as engine_module
from fleetfoot.engine.child_process import EngineProcess
from fleetfoot.engine.client import EngineClient
from fleetfoot.engine.engine import build_engine
from fleetfoot.engine.metrics import Histogram
from fleetfoot.executor import worker_loop
from fleetfoot.executor.build import start_executor
from fleetfoot.executor.protocol import PlanMismatchError, check_parts, planned_parts
from fleetfoot.kernels.interface import KernelPlan
from fleetfoot.kernels.registry import DeviceFacts, KernelUnavailableError, load_kernels, plan_kernels
from fleetfoot.kv_transfer.base.registry import find_connector
from fleetfoot.models.interface import CausalLM
from fleetfoot.native import loading
from fleetfoot.plan.forced_runner import forced_runners
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.plan.resolve import resolve_plan
from fleetfoot.records.forward_context import ForwardContext
from fleetfoot.records.kv_layout import TOKEN_MAJOR_NHD, KVLayout
from fleetfoot.records.step import SchedulerOutput, WarmUpOutput
from fleetfoot.records.weights import WeightError
from fleetfoot.runner.base import ModelRunner
from fleetfoot.runner.v1.compiled import warm_up_layers
from fleetfoot.runner.v2.warm_up import NAME
from fleetfoot.speculative.drafter import NO_DRAFTING
from fleetfoot.testing import force_runner, force_v1_runner

Patch = pytest.MonkeyPatch
MAX_LEN = TEXT_MODEL["max_position_embeddings"]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
CHUNKED = {"enable_chunked_prefill": False, "max_num_batched_tokens": 20}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_model_length": 7}, TypeError, r"unknown keyword 'max_model_length'; did you mean 'max_model_len'\?"),
    ({"xyz": 1}, TypeError, "unknown keyword 'xyz'; it takes model, tokenizer"),
    ({"model": "/no/such/model"}, FileNotFoundError, "'/no/such/model': no such folder"),
    ({"model": Path(__file__)}, FileNotFoundError, "is a file; give the folder"),
    ({"model": 5}, TypeError, "model is 5, a int; it must be str"),
    ({"dtype": "float8"}, ValueError, r"dtype is 'float8'; it can be auto, bfloat16, float16, float32"),
    ({"device": "tpu"}, ValueError, "device is 'tpu'; it can be auto, cpu, cuda"),
    ({"model_runner": "v3"}, ValueError, "model_runner is 'v3'; it can be auto, v1, v2"),
    ({"max_restarts": 3}, ValueError, "max_restarts is 3, but on_error is 'raise'; set it to 'restart'"),
    ({"max_num_seqs": 0}, ValueError, "max_num_seqs is 0; it must be at least 1"),
    ({"max_num_seqs": True}, TypeError, "max_num_seqs is True, a bool"),
    ({"max_num_seqs": "8"}, TypeError, "max_num_seqs is '8', a str; it must be int"),
    ({"block_size": -16}, ValueError, "block_size is -16"),
    ({"gpu_memory_utilization": 1.5}, ValueError, "gpu_memory_utilization is 1.5"),
    ({"gpu_memory_utilization": float("nan")}, TypeError, "gpu_memory_utilization is nan"),
    ({"seed": 2**64}, ValueError, "seed is 18446744073709551616; it must fit in 64 bits"),
    ({"max_num_batched_tokens": 3}, ValueError, r"max_num_batched_tokens is 3.*set max_num_seqs=3"),
    ({"max_model_len": MAX_LEN + 1}, ValueError, rf"max_model_len is {MAX_LEN + 1}.*at most {MAX_LEN}"),
    ({"tensor_parallel_size": 3}, ValueError, "tensor_parallel_size is 3"),
    ({"num_gpu_blocks_override": 0}, ValueError, "num_gpu_blocks_override is 0"),
    ({"num_gpu_blocks_override": 10**13}, ValueError, r"10,000,000,000,000 blocks.*num_gpu_blocks_override"),
    ({"kv_cache_memory_bytes": 100}, ValueError, r"one takes 8,192 bytes and 100 are left"),
    (CHUNKED, ValueError, r"max_num_batched_tokens is 20.*enable_chunked_prefill=True"),
    ({"skip_tokenizer_init": True, "tokenizer": "x"}, ValueError, "skip_tokenizer_init"),
    ({"tokenizer": "/no/such/folder"}, FileNotFoundError, "/no/such/folder"),
]


@pytest.mark.parametrize("owner", [LLM, AsyncLLM])
@pytest.mark.parametrize(("keywords", "error", "message"), REFUSED, ids=[str(keywords) for keywords, *_ in REFUSED])
def test_settings_that_cannot_work(owner: Any, keywords: Any, error: Any, message: str, text_model: Path) -> None:
    with pytest.raises(error, match=message) as caught:
        owner(**{"model": str(text_model), "device": "cpu", "max_num_seqs": 4, **keywords})
    assert "unknown keyword" not in message or owner.__name__ in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu(text_model: Path) -> None:
    with pytest.raises(ValueError, match="device is 'cuda', but torch finds no GPU here"):
        LLM(str(text_model), device="cuda")


CONFIG, WEIGHTS = "config.json", "model.safetensors"
GPT2 = {"architectures": ["GPT2LMHeadModel"]}
BROKEN: dict[str, tuple[str, bytes | dict[str, Any] | None, str]] = {
    "no config": (CONFIG, None, "no config.json in"),
    "config not JSON": (CONFIG, b"{", "config.json cannot be read as JSON"),
    "architecture": (CONFIG, GPT2, r"architectures is \['GPT2LMHeadModel'\]; supported architectures: Llama"),
    "no weights": (WEIGHTS, None, r"no \*.safetensors in"),
    "no safetensors": (WEIGHTS, b"PK\x03\x04", "not a whole safetensors file"),
    "misshapen": (CONFIG, {"vocab_size": 100}, r"2 misshapen\n.*found \[2048, 64\], expected \[100, 64\]"),
    "no tokenizer": ("tokenizer.json", None, r"no tokenizer.json.*skip_tokenizer_init=True"),
    "tokenizer not JSON": ("tokenizer.json", b"{", "tokenizer.json cannot be read as JSON"),
}


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/model"}')
    with pytest.raises(ValueError, match=r"an adapter alone \(adapter_config.json, of the model 'some/model'\).*merge"):
        LLM(tmp_path, device="cpu")


def test_dynamic_rope_scaling_ends_with_the_positions(text_model: Path, tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(ValueError, match=rf"max_model_len is {MAX_LEN + 1}; rope scaling of the type 'dynamic'"):
        LLM(text_model, device="cpu", max_model_len=MAX_LEN + 1, hf_overrides={"rope_scaling": scaling})


@pytest.mark.parametrize("name", BROKEN)
def test_broken_checkpoints(name: str, text_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(text_model, folder)
    file, content, message = BROKEN[name]
    if isinstance(content, dict):
        content = json.dumps(json.loads((folder / file).read_text()) | content).encode()
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        LLM(folder, device="cpu", max_num_seqs=4)


def test_token_ids_need_no_tokenizer_and_dummy_weights_no_files(text_model: Path, tmp_path: Path) -> None:
    shutil.copy(text_model / "config.json", tmp_path)
    with LLM(tmp_path, device="cpu", load_format="dummy", skip_tokenizer_init=True, max_num_seqs=4) as llm:
        (output,) = llm.generate({"prompt_token_ids": [5, 6]}, GREEDY, use_tqdm=False)
        assert (len(output.outputs[0].token_ids), output.outputs[0].text, output.prompt) == (4, "", None)
        for params in ({"stop": ["a"]}, {"bad_words": ["a"]}):
            with pytest.raises(ValueError, match="needs a tokenizer"):
                llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(**params), use_tqdm=False)
        with pytest.raises(ValueError, match=r"no tokenizer.*prompt_token_ids"):
            llm.generate("text", GREEDY, use_tqdm=False)
        with pytest.raises(ValueError, match="no tokenizer"):
            llm.chat([{"role": "user", "content": "hi"}], GREEDY, use_tqdm=False)


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: Patch) -> Iterator[None]:
    """A C library that exists and does not load."""
    (tmp_path / "libfleetfoot.so").write_bytes(b"not a library")
    monkeypatch.setattr(loading, "PATH", tmp_path / "libfleetfoot.so")
    monkeypatch.setenv(USE_NATIVE_KERNELS, "1")
    caches = (loading.open_library, loading.load_library)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_without_the_c_library_the_plan_names_what_runs(text_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(str(text_model), device="cpu", max_num_seqs=2) as llm:
        plan = llm.llm_engine.plan
        assert plan.kernels == plan_kernels(DeviceFacts("cpu"))
        llm.generate({"prompt_token_ids": [5, 6]}, GREEDY, use_tqdm=False)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len([text for text in warnings if "several times as long" in text and "does not load" in text]) == 1
    assert "\n" not in warnings[0]


def test_a_plan_that_names_the_c_library_does_not_start_without_it(no_library: None, text_model: Path) -> None:
    with pytest.raises(KernelUnavailableError, match=r"the plan names 'native' for attention, .*does not load"):
        start_executor(plan_of(text_model, Machine(16 << 30, has_native=True)))


def plan_of(text_model: Path, machine: Machine | None = None, **settings: Any) -> EnginePlan:
    config = EngineConfig(model=str(text_model), device="cpu", max_num_seqs=2, skip_tokenizer_init=True, **settings)
    return resolve_plan(config, machine or Machine(16 << 30), environ={})


def odd_kernels(plan: KernelPlan, **options: Any) -> Any:
    return dataclasses.replace(load_kernels(plan, **options), plan=KernelPlan((("rms_norm", "odd"),)))


def odd_connector(config: Any) -> type:
    return type("Odd", (find_connector(config),), {})


def odd_layout(*sizes: Any, **more: Any) -> KVLayout:
    return dataclasses.replace(LAYOUT_OF(*sizes, **more), name=TOKEN_MAJOR_NHD)


LAYOUT_OF = KVLayout.of
NGRAM: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
DIFFERENCES: dict[str, tuple[str, Any, str, str]] = {
    "runner": ("runner.v2.runner.ModelRunnerV2.name", "v9", "'v9'", "'v2'"),
    "kernels": ("executor.worker.load_kernels", odd_kernels, "'odd: rms_norm'", "'torch: rms_norm"),
    "attention": ("kernels.attention.sdpa_backend.SDPABackend.name", "odd", "'odd'", "'sdpa'"),
    "kv_layout": ("records.kv_layout.KVLayout.of", odd_layout, "'token-major-nhd'", "'arena'"),
    "connector": ("plan.connector.find_connector", odd_connector, r"'[\w.]*Odd'", r"'[\w.]*OffloadingConnector'"),
    "drafter": ("executor.worker.build_speculation", lambda *_, **__: NO_DRAFTING, "'none'", "'ngram'"),
    "fused_layers": ("runner.v2.runner.fuse", lambda *_: None, r"\(\)", r"\(0, 1"),
    "ranks": ("distributed.groups.TensorGroup.size", 2, "{'tensor': 2.*}", "{'tensor': 1.*}"),
}
SETTINGS = {"connector": {"kv_offloading_size": 0.01}, "drafter": NGRAM, "ranks": {"load_format": "dummy"}}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_difference_from_the_plan_ends_the_start(what: str, text_model: Path, monkeypatch: Patch) -> None:
    target, value, built, planned = DIFFERENCES[what]
    plan = plan_of(text_model, **SETTINGS.get(what, {}))
    monkeypatch.setattr(f"fleetfoot.{target}", value)
    message = f"not built as planned:\n  - worker 0: {what} is {built}, and the plan names {planned}"
    with pytest.raises(PlanMismatchError, match=message):
        start_executor(plan)


def test_each_rank_is_compared_with_its_own_part(text_model: Path) -> None:
    """Only the last pipeline stage has the drafter."""
    plan = plan_of(text_model, pipeline_parallel_size=2, **NGRAM)
    builds = {rank: planned_parts(plan, rank) for rank in range(2)}
    assert [builds[rank]["drafter"] for rank in range(2)] == ["none", "ngram"]
    for rank, build in builds.items():
        check_parts(plan, rank, build)
    builds[1] = {**builds[1], "attention": "odd", "ranks": {"tensor": 3}}
    with pytest.raises(PlanMismatchError) as caught:
        check_parts(plan, 1, builds[1])
    assert str(caught.value).count("\n  - worker 1: ") == 2


def test_a_rank_opens_its_compiler_before_it_meets_the_others(text_model: Path, monkeypatch: Patch) -> None:
    """Connecting takes seconds on GPUs, in which the processes that compile import the compiler."""
    events: list[Any] = []

    def meet(*_: object, **__: object) -> None:
        events.append("groups")
        raise ConnectionError("a rank is missing")

    monkeypatch.setattr(worker_loop, "open_compiler", lambda *arguments: events.append(arguments[:2]))
    monkeypatch.setattr(worker_loop.dist, "init_process_group", meet)
    for runner, opened in (("v2", [(2, torch.device("cpu"))]), ("v1", [])):
        events.clear()
        plan = plan_of(text_model, tensor_parallel_size=2, model_runner=runner)
        with pytest.raises(ConnectionError):
            worker_loop._start(plan, 1, str(text_model / "store"), mock.Mock())
        assert events == [*opened, "groups"]


def start(model: str | Path | None = None, method: str = "", target: str = "story-llama", **settings: Any) -> None:
    speculative = {"method": method, "num_speculative_tokens": 2} | ({} if model is None else {"model": str(model)})
    LLM(model=target, device="cpu", num_gpu_blocks_override=64, speculative_config=speculative, **settings).shutdown()


def copy_of(source: Path, folder: Path, **fields: Any) -> Path:
    """A checkpoint with other fields in its config.json."""
    made = folder / "drafter"
    shutil.copytree(source, made)
    content = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**content, **fields}))
    return made


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_no_such_model(method: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"^speculative_config: model '/no/such/folder': no such folder"):
        start("/no/such/folder", method)


def test_a_whole_model_is_no_head() -> None:
    with pytest.raises(WeightError, match=r"'story-llama' .* has no tensor fc.weight, .* method 'draft_model'"):
        start("story-llama", "eagle")


HEAD = embedded_eagle_path()


@pytest.mark.parametrize(
    ("source", "fields", "message"),
    [
        (HEAD, {"vocab_size": 100}, "a vocabulary of 100 tokens and the model one of 2,048"),
        (DRAFT, {"architectures": ["GPT2LMHeadModel"]}, r"architectures is \['GPT2LMHeadModel'\]"),
        (DRAFT, {"quantization_config": {"quant_method": "fp8"}}, "tensors in .* do not fit its config.json"),
        (DRAFT, {"intermediate_size": 64}, "do not fit its config.json"),
        (HEAD, {"intermediate_size": 64}, "do not fit its config.json"),
    ],
)
def test_a_drafter_that_does_not_fit(source: Path, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        start(copy_of(source, tmp_path, **fields), "eagle" if source == HEAD else "draft_model")


def test_a_drafter_with_few_positions(tmp_path: Path, run: CommandRunner) -> None:
    """Also without ``max_model_len``, which is then the model's."""
    folder = copy_of(DRAFT, tmp_path, max_position_embeddings=512)
    message = r"has 512 positions \(max_position_embeddings\), fewer than the max_model_len 1,024; set max_model_len to"
    with pytest.raises(ValueError, match=message):
        start(folder)
    config = json.dumps({"model": str(folder), "num_speculative_tokens": 2})
    error = run.refused("plan", "--device", "cpu", "--speculative-config", config)
    assert "fewer than the max_model_len 2,048" in error
    start(folder, max_model_len=512)


def plan(run: CommandRunner, speculative: dict[str, Any] | None, *flags: str) -> tuple[dict[str, Any], str]:
    """The report, and the text with every run of blanks as one."""
    given = [] if speculative is None else ["--speculative-config", json.dumps(speculative)]
    words = ("plan", "--device", "cpu", "--cpu-memory", "64GiB", *given, *flags)
    return run.json(*words, "--json"), " ".join(run(*words).split())


PLANS: dict[str, tuple[dict[str, Any], tuple[str | None, int], str]] = {
    "eagle": (
        {"method": "eagle", "num_speculative_tokens": 3},
        ("story-llama-eagle", 1),
        "drafter EAGLE head story-llama-eagle: 3 drafts for each decode, where it is seen to pay 1 layer: ",
    ),
    "draft_model": (
        {"model": str(DRAFT), "num_speculative_tokens": 1, "adaptive": False, "disable_by_batch_size": 8},
        (str(DRAFT), 2),
        f"drafter draft model {DRAFT}: 1 draft for each decode, up to 8 requests at a time 2 layers: ",
    ),
    "ngram": (
        {"num_speculative_tokens": 4, "prompt_lookup_max": 3},
        (None, 0),
        "drafter n-grams of 1 to 3 tokens: 4 drafts for each decode, where it is seen to pay KV layout",
    ),
}
"""The speculative config, the name of the model and its number of layers, and a line of the text."""


@pytest.mark.parametrize("method", PLANS)
def test_the_plan_of_a_drafter(method: str, run: CommandRunner) -> None:
    speculative, model, line = PLANS[method]
    plain, plain_text = plan(run, None)
    report, text = plan(run, speculative)
    drafter, memory = report["drafter"], report["memory"]
    assert plain["drafter"] is None and "drafter" not in plain_text
    assert line in text
    assert (drafter["method"], drafter["model"], drafter["num_layers"]) == (method, *model)
    assert {"adaptive": True, **speculative}.items() <= {**drafter, "disable_by_batch_size": 8}.items()
    assert method != "ngram" or (drafter["prompt_lookup_max"], drafter["prompt_lookup_min"]) == (3, 1)
    assert drafter["weights"] == memory["weights"] - plain["memory"]["weights"]
    assert report["kv_layout"]["bytes_per_block"] == plain["kv_layout"]["bytes_per_block"] + drafter["bytes_per_block"]
    assert drafter["kv_cache"] == memory["num_blocks"] * drafter["bytes_per_block"]
    assert method != "eagle" or drafter["bytes_per_block"] == 2 * 2 * 32 * 16 * 2  # K and V, heads, size, tokens, bf16
    assert (drafter["weights"] > 0) == (drafter["kv_cache"] > 0) == (method != "ngram")


def test_the_drafter_is_on_the_last_rank(run: CommandRunner) -> None:
    report, _ = plan(run, {"model": str(DRAFT), "num_speculative_tokens": 1}, "--pipeline-parallel-size", "2")
    first, last = report["parallel"]["stages"]
    assert last["kv_cache"] - first["kv_cache"] == report["drafter"]["kv_cache"] > 0


@pytest.mark.parametrize("target", ["story-llama", embedded_model_path()], ids=["name", "path"])
@pytest.mark.parametrize("model", [None, "story-llama-eagle"])
def test_the_embedded_head_is_found(target: str | Path, model: str | None) -> None:
    start(model, "eagle", target=str(target), max_model_len=64)


RUNNERS = ("v1", "v2")


@pytest.fixture(params=[None, "0", "1", "nonsense"], ids=lambda value: f"holds-{value}")
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What the environment holds around the test."""
    if request.param is None:
        monkeypatch.delenv(USE_V2_MODEL_RUNNER, raising=False)
    else:
        monkeypatch.setenv(USE_V2_MODEL_RUNNER, request.param)
    return request.param


PUT_BACK = pytest.mark.parametrize("held", [None, "nonsense"], ids=lambda value: f"holds-{value}", indirect=True)
"""For tests of what the environment holds afterwards, whatever that does to a runner."""


def start_engine(**settings: object) -> LLM:
    return LLM(device="cpu", skip_tokenizer_init=True, max_num_seqs=2, num_gpu_blocks_override=16, **settings)


def runs() -> str:
    """Start an engine, run a request, and read which runner it was."""
    with start_engine() as llm:
        (output,) = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
        assert len(output.outputs[0].token_ids) >= 1
        assert llm.llm_engine.plan.explicit
        assert llm.llm_engine.plan.use_v2_model_runner == (llm.llm_engine.runner_name == "v2")
        return llm.llm_engine.runner_name


def is_as_before(held: str | None) -> bool:
    return os.environ.get(USE_V2_MODEL_RUNNER) == held and next(forced_runners(), None) is None


@pytest.mark.parametrize("runner", RUNNERS)
def test_it_wins_and_leaves_the_environment(runner: str, held: str | None) -> None:
    with force_runner(runner) as forced:
        assert runs() == runner
        assert os.environ.get(USE_V2_MODEL_RUNNER) == held
        assert engine_module.resolve_plan is resolve_plan and engine_module.build_engine is build_engine
        assert runs() == runner
    assert [plan.runner for plan in forced.plans] == [runner, runner]
    assert is_as_before(held)


@PUT_BACK
def test_as_a_decorator(held: str | None) -> None:
    @force_runner("v1")
    def first(suffix: str, *, times: int) -> str:
        """Its own."""
        return runs() + suffix * times

    @force_runner("v2")
    async def second() -> str:
        await asyncio.sleep(0)
        return runs()

    assert first("!", times=2) == "v1!!"
    assert first("", times=0) == "v1"  # again
    assert asyncio.run(second()) == "v2"
    assert first.__doc__ == "Its own."
    assert is_as_before(held)


def plan_only() -> None:
    engine_module.resolve_plan(EngineConfig(device="cpu"), Machine.detect())


def nested() -> None:
    """An engine counts for the innermost block alone."""
    with force_runner("v2"):
        runs()


@PUT_BACK
@pytest.mark.parametrize("work", [plan_only, nested])
def test_without_an_engine_it_is_an_error(work: Callable[[], None], held: str | None) -> None:
    message = r"force_runner\('v1'\) had no effect: no engine has started in its block"
    with pytest.raises(AssertionError, match=message), force_runner("v1"):
        work()
    assert is_as_before(held)


def test_force_v1_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USE_V2_MODEL_RUNNER, "1")
    for block in (force_v1_runner, force_v1_runner()):
        with block:
            assert runs() == "v1"
    assert force_v1_runner(runs)() == "v1"
    assert force_v1_runner()(runs)() == "v1"


def test_the_engine_of_a_process_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process reads another value from its environment. Signals are for its parent."""
    monkeypatch.setenv(USE_V2_MODEL_RUNNER, "1")

    async def runner_of(process: EngineProcess) -> str:
        client = EngineClient(process.address)
        await client.start()
        client.close()
        return client.runner_name

    config = EngineConfig(device="cpu", skip_tokenizer_init=True, num_gpu_blocks_override=16)
    with pytest.raises(AssertionError, match="no engine has started"), force_v1_runner:
        process = EngineProcess(config, logging.WARNING)
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them while it imports
        os.kill(process.pid, number)
    try:
        assert asyncio.run(runner_of(process)) == "v1"
    finally:
        assert process.stop() == 0


@PUT_BACK
@pytest.mark.parametrize("settings", [{"model_runner": "v2"}, {"use_v2_model_runner": True}])
def test_a_setting_that_contradicts_it_is_an_error(settings: dict[str, object], held: str | None) -> None:
    (name,) = settings
    message = rf"force_runner\('v1'\) is in effect, and the engine would run on 'v2': .*{name} is .*Leave that"
    with pytest.raises(ValueError, match=message), force_runner("v1"):
        start_engine(**settings)
    with force_runner("v2"), start_engine(**settings) as llm:  # the same runner
        assert llm.llm_engine.runner_name == "v2"
    assert is_as_before(held)


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="runner is 'v3'; it can be 'v1' or 'v2'"):
        force_runner("v3")
    forced = force_runner("v1")
    with forced:
        with pytest.raises(RuntimeError, match="in use already"), forced:
            pass
        assert runs() == "v1"
    with forced:  # one after the other is fine
        assert runs() == "v1"


@pytest.mark.parametrize("drafts", [False, True])
def test_a_warm_up_is_of_no_request(drafts: bool, runner: str, monkeypatch: Patch) -> None:
    """Its passes are marked for hooks of modules; calls, connectors, counters and aborts have requests alone."""
    passes: list[tuple[type, bool]] = []
    steps: list[SchedulerOutput] = []
    forward, execute_model = CausalLM.forward, ModelRunner.execute_model

    def recorded(self: CausalLM, input_ids: Any, ctx: ForwardContext, *rest: Any) -> Any:
        passes.append((type(self), ctx.is_warm_up))
        return forward(self, input_ids, ctx, *rest)

    monkeypatch.setattr(CausalLM, "forward", recorded)
    monkeypatch.setattr(
        ModelRunner, "execute_model", lambda self, step: steps.append(step) or execute_model(self, step)
    )
    faults = Faults()
    config = {"model": str(DRAFT), "num_speculative_tokens": 2} if drafts else None
    with force_runner(runner) as forced:
        llm = LLM(device="cpu", speculative_config=config, kv_transfer_config=faulty(OFFLOADING, faults))
    assert len(forced.plans) == 1
    assert all(is_warm_up for _, is_warm_up in passes) and bool(passes) == (runner == "v2")
    assert (steps, faults.calls) == ([], ["register_kv_caches"])
    stats = llm.stats()
    assert (stats.num_steps, stats.num_prompt_tokens, stats.num_generation_tokens, stats.num_finished) == (0, 0, 0, {})
    assert stats.scheduler.prefix_cache_queries == stats.drafts.num_steps == 0
    assert {metric.count for metric in llm.get_metrics() if isinstance(metric, Histogram)} == {0}
    llm.llm_engine.abort_request(NAME)
    assert llm.llm_engine.step() == []
    passes.clear()
    llm.llm_engine.add_request(NAME, [5, 6], GREEDY)
    assert [output.request_id for output in drain(llm.llm_engine) if output.finished] == [NAME]
    assert passes and not any(is_warm_up for _, is_warm_up in passes)
    assert steps and not any(isinstance(step, WarmUpOutput) for step in steps)
    llm.shutdown()


def test_a_compilation_is_a_warm_up() -> None:
    contexts: list[ForwardContext] = []

    class Model:
        is_first, config = True, SimpleNamespace(hidden_size=4)

        def __call__(self, input_ids: Any, ctx: ForwardContext, received: None) -> None:
            contexts.append(ctx)

    warm_up_layers(Model(), [torch.zeros(1)])  # type: ignore[arg-type]
    assert len(contexts) == 3 and all(ctx.is_warm_up for ctx in contexts)
