"""Engines on two GPUs: the tokens of the CPU, from tensor ranks and from a pipeline, with drafts and transfers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.test_engine_gpu import MODELS, VOCAB, engine
from tests.gpu.test_structured_gpu import tokens
from tests.helpers.checkpoints import UNTRAINED, make_checkpoint
from tests.helpers.engines import make_engine
from tests.helpers.schedules import assert_agree, live, live_alone, random_lives

from fleetfoot.engine.engine import LLMEngine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]

WAYS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2},
    "tensor, v1": {"tensor_parallel_size": 2, "model_runner": "v1"},
    "pipeline": {"pipeline_parallel_size": 2},
    "pipeline, tight": {"pipeline_parallel_size": 2, "num_gpu_blocks_override": 12, "max_num_batched_tokens": 24},
    "pipeline, drafts": {
        "pipeline_parallel_size": 2,
        "speculative_config": {"method": "eagle", "num_speculative_tokens": 2, "adaptive": False},
    },
    "tensor, offloading": {"tensor_parallel_size": 2, "kv_offloading_size": 0.1, "enable_prefix_caching": False},
}


EXPERTS: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
DATA: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
EPLB = {"step_interval": 8, "num_redundant_experts": 3}
EXPERT_WAYS: dict[str, dict[str, Any]] = {
    "experts": EXPERTS,
    "experts, v1": {**EXPERTS, "model_runner": "v1"},
    "balanced": {**EXPERTS, "enable_eplb": True, "eplb_config": EPLB},
    "data ranks": DATA,
    "data ranks, v1": {**DATA, "model_runner": "v1"},
    "data ranks, balanced": {**DATA, "enable_eplb": True, "eplb_config": EPLB},
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_equal_the_cpus(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = check_tokens(MODELS["llama"], way, WAYS[way], monkeypatch)
    tried.shutdown()


@pytest.mark.parametrize("way", EXPERT_WAYS)
def test_tokens_of_experts_equal_the_cpus(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_type, fields = UNTRAINED["qwen3-moe"]
    make_checkpoint(tmp_path, model_type, vocab_size=VOCAB, **fields)
    tried = check_tokens(tmp_path, way, EXPERT_WAYS[way], monkeypatch)
    reports = [report and {**report, "seconds": 0} for report in tried.collective_rpc("balance_report")]
    tried.shutdown()
    assert reports[0] == reports[1]
    assert reports[0] is None or (reports[0]["num_rounds"] > 1 and reports[0]["num_moved"] > 0)


def check_tokens(model: Path, way: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> LLMEngine:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # read by the workers' processes
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    reference = engine(model, "cpu", model_runner="v1", enable_prefix_caching=False)
    tried = engine(model, "cuda", **{"model_runner": "v2", **settings})
    try:
        for seed in range(3):
            lives = random_lives(seed, VOCAB)
            expected = live_alone(reference, lives)
            got = live(tried, lives)
            for life in lives:
                try:
                    assert_agree(got[life.request_id], expected[life.request_id], tolerance=1e-3)
                except AssertionError as error:
                    tried.shutdown()
                    raise AssertionError(f"{way}, seed {seed}, {life}: {error}") from error
    finally:
        reference.shutdown()
    return tried


def test_structured_tokens_equal_the_cpus(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are in memory that the engine and both ranks map, and that each rank page-locks."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    reference = make_engine(text_model, device="cpu", dtype="float32", model_runner="v1")
    tried = make_engine(text_model, device="cuda", dtype="float32", max_model_len=128, tensor_parallel_size=2)
    try:
        assert tokens(tried) == tokens(reference)
    finally:
        tried.shutdown()
        reference.shutdown()
