"""The whole engine on a GPU: captured steps against eager ones, and against the CPU's float32 tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.helpers.engines import make_engine
from tests.helpers.schedules import assert_agree, live, live_alone, random_lives

from fleetfoot.assets import embedded_model_path
from fleetfoot.engine.engine import LLMEngine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ASSETS = Path(__file__).parent.parent / "assets"
MODELS = {
    "llama": embedded_model_path(),
    "qwen3": ASSETS / "story-qwen3",
    "mistral": ASSETS / "story-mistral",
}
VOCAB = 2048


def engine(model: Path, device: str, **wishes: object) -> LLMEngine:
    limits = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 256, "block_size": 16}
    return make_engine(
        model, device=device, dtype="float32", max_model_len=80, skip_tokenizer_init=True, **{**limits, **wishes}
    )


@pytest.fixture(scope="module", params=MODELS, ids=str)
def model(request: pytest.FixtureRequest) -> Iterator[Path]:
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield MODELS[request.param]
    torch.backends.cuda.matmul.allow_tf32 = tf32


@pytest.mark.parametrize("way", ["graphs", "eager", "v1", "tight"])
def test_tokens_equal_the_cpus(model: Path, way: str) -> None:
    wishes: dict[str, dict[str, object]] = {
        "graphs": {"runner": "v2"},
        "eager": {"runner": "v2", "enforce_eager": True},
        "v1": {"runner": "v1"},
        "tight": {"runner": "v2", "num_gpu_blocks_override": 12, "max_num_batched_tokens": 24},
    }
    reference = engine(model, "cpu", runner="v1", enable_prefix_caching=False)
    tried = engine(model, "cuda", **wishes[way])
    assert tried.runner_name == wishes[way]["runner"]
    for seed in range(3):
        lives = random_lives(seed, VOCAB)
        expected = live_alone(reference, lives)
        got = live(tried, lives)
        for life in lives:
            try:
                assert_agree(got[life.request_id], expected[life.request_id], tolerance=1e-3)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {life}: {error}") from error
    if way == "graphs":
        graphs = tried.core.executor._worker.runner.graphs  # type: ignore[attr-defined]
        assert graphs.num_steps["decode"] > 0
        assert graphs.captured
    tried.shutdown()
    reference.shutdown()
