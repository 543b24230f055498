"""Drafts on a GPU: the tokens of the CPU without any, from captured steps that verify, draft and fill caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.gpu.test_engine_gpu import ASSETS, MODELS, VOCAB, engine
from tests.helpers.schedules import assert_agree, live, live_alone, random_lives

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DRAFTS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3},
    "draft": {"method": "draft_model", "model": str(ASSETS / "story-draft"), "num_speculative_tokens": 3},
    "eagle": {"method": "eagle", "num_speculative_tokens": 2},
}
TELL = [0, 587, 349, 286, 264, 1008]  # to the embedded model: Once there was a fox


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = tf32


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("method", DRAFTS)
@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_tokens_equal_the_cpus_without_drafts(runner: str, method: str, adaptive: bool) -> None:
    reference = engine(MODELS["llama"], "cpu", runner="v1", enable_prefix_caching=False)
    drafts = {**DRAFTS[method], "adaptive": adaptive}
    tried = engine(MODELS["llama"], "cuda", runner=runner, speculative_config=drafts)
    for seed in range(3):
        lives = random_lives(seed, VOCAB)
        expected = live_alone(reference, lives)
        got = live(tried, lives)
        for life in lives:
            try:
                assert_agree(got[life.request_id], expected[life.request_id], tolerance=1e-3)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {life}: {error}") from error
    stats = tried.stats().scheduler.drafts
    assert stats.num_drafted > 0
    if runner == "v2":
        graphs = tried.core.executor._worker.runner.graphs  # type: ignore[attr-defined]
        assert graphs.num_steps["uniform"] > 0
        assert any(key.kind == "uniform" and key.drafting for key in graphs.captured)
    tried.shutdown()
    reference.shutdown()


@pytest.mark.parametrize("method", ["draft", "eagle"])
def test_most_drafts_are_accepted(method: str) -> None:
    from tests.helpers.engines import run_requests

    from fleetfoot import SamplingParams

    tried = engine(MODELS["llama"], "cuda", runner="v2", speculative_config={**DRAFTS[method], "adaptive": False})
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    run_requests(tried, {str(number): ([*TELL, number], params) for number in range(4, 12)})
    stats = tried.stats().scheduler.drafts
    assert stats.acceptance_rate > 0.5
    tried.shutdown()
