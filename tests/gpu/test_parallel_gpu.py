"""Engines on two GPUs: the tokens of the CPU, from tensor ranks and from a pipeline, with drafts and transfers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.test_engine_gpu import MODELS, VOCAB, engine
from tests.gpu.test_structured_gpu import tokens
from tests.helpers.engines import make_engine
from tests.helpers.schedules import assert_agree, live, live_alone, random_lives

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


@pytest.mark.parametrize("way", WAYS)
def test_tokens_equal_the_cpus(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")  # read by the workers' processes
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    reference = engine(MODELS["llama"], "cpu", model_runner="v1", enable_prefix_caching=False)
    tried = engine(MODELS["llama"], "cuda", **{"model_runner": "v2", **WAYS[way]})
    try:
        for seed in range(3):
            lives = random_lives(seed, VOCAB)
            expected = live_alone(reference, lives)
            got = live(tried, lives)
            for life in lives:
                try:
                    assert_agree(got[life.request_id], expected[life.request_id], tolerance=1e-3)
                except AssertionError as error:
                    raise AssertionError(f"{way}, seed {seed}, {life}: {error}") from error
    finally:
        tried.shutdown()
        reference.shutdown()


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
