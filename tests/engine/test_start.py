"""Engines that cannot start say why: settings, missing or broken files, unknown models."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.engines import TEXT_MODEL

from fleetfoot import LLM, AsyncLLM, SamplingParams
from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.env import USE_NATIVE_KERNELS
from fleetfoot.executor.build import start_executor
from fleetfoot.executor.protocol import PlanMismatchError, check_parts, planned_parts
from fleetfoot.kernels.interface import KernelPlan
from fleetfoot.kernels.registry import DeviceFacts, KernelUnavailableError, load_kernels, plan_kernels
from fleetfoot.kv_transfer.base.registry import find_connector
from fleetfoot.native import loading
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.plan.resolve import resolve_plan
from fleetfoot.speculative.drafter import NO_DRAFTING

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
    ({"runner": "v3"}, ValueError, "runner is 'v3'; it can be auto, v1, v2"),
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
    "tokenizer not JSON": ("tokenizer.json", b"{", "tokenizer.json is not a file"),
}


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


def odd_kernels(plan: KernelPlan) -> Any:
    return dataclasses.replace(load_kernels(plan), plan=KernelPlan((("rms_norm", "odd"),)))


def odd_connector(config: Any) -> type:
    return type("Odd", (find_connector(config),), {})


NGRAM: dict[str, Any] = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}
DIFFERENCES: dict[str, tuple[str, Any, str, str]] = {
    "runner": ("runner.v2.runner.ModelRunnerV2.name", "v9", "'v9'", "'v2'"),
    "kernels": ("executor.worker.load_kernels", odd_kernels, "'odd: rms_norm'", "'torch: rms_norm"),
    "attention": ("kernels.attention.sdpa_backend.SDPABackend.name", "odd", "'odd'", "'sdpa'"),
    "kv_layout": ("records.kv_layout.KVLayout.name", "odd", "'odd'", "'block-contiguous-hnd'"),
    "connector": ("plan.connector.find_connector", odd_connector, r"'[\w.]*Odd'", r"'[\w.]*OffloadingConnector'"),
    "drafter": ("executor.worker.build_speculation", lambda *_, **__: NO_DRAFTING, "'none'", "'ngram'"),
    "fused_layers": ("runner.v2.runner.fuse", lambda *_: None, r"\(\)", r"\(0, 1"),
    "num_ranks": ("distributed.groups.TensorGroup.size", 2, "2", "1"),
}
SETTINGS = {"connector": {"kv_offloading_size": 0.01}, "drafter": NGRAM, "num_ranks": {"load_format": "dummy"}}


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
    builds[1] = {**builds[1], "attention": "odd", "num_ranks": 3}
    with pytest.raises(PlanMismatchError) as caught:
        check_parts(plan, 1, builds[1])
    assert str(caught.value).count("\n  - worker 1: ") == 2


def test_a_worker_process_compares_what_it_built(text_model: Path) -> None:
    plan = plan_of(text_model, distributed_executor_backend="mp")
    plan = dataclasses.replace(plan, kv_layout="odd")
    with pytest.raises(PlanMismatchError, match=r"worker 0: kv_layout is 'block-contiguous-hnd', .*names 'odd'"):
        start_executor(plan)
