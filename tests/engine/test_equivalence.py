"""Whatever the runner, overlap, cache, batch and drafts, a request gets the tokens that it gets alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers.engines import make_engine
from tests.helpers.runner_lives import DRAFT, METHODS, STORY
from tests.helpers.schedules import assert_lives_agree, live, live_alone, random_lives

from fleetfoot.engine.engine import LLMEngine

MODELS = {"llama": STORY} | {name: DRAFT.parent / f"story-{name}" for name in ("qwen3", "mistral", "draft")}
VOCAB = 2048
LIMITS: dict[str, dict[str, int]] = {
    "roomy": {"max_num_seqs": 16, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 256, "block_size": 8},
    # few blocks, few rows, small chunks: everything happens
    "tight": {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 22, "block_size": 4},
}


class Way(NamedTuple):
    """One way to run."""

    runner: str
    async_scheduling: bool
    limits: str
    enable_chunked_prefill: bool = True
    method: str | None = None


def engine_of(model: Path, **options: Any) -> LLMEngine:
    return make_engine(model, dtype="float32", max_model_len=80, skip_tokenizer_init=True, **options)


def engine_in(way: Way, model: Path) -> LLMEngine:
    options: dict[str, Any] = {"runner": way.runner, "async_scheduling": way.async_scheduling, **LIMITS[way.limits]}
    if way.method is not None:
        options["speculative_config"] = {**METHODS[way.method], "adaptive": False}
    if not way.enable_chunked_prefill:
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": 128}
    return engine_of(model, **options)


WAYS = [
    *(Way(runner, overlap, limits) for runner in ("v1", "v2") for overlap in (False, True) for limits in LIMITS),
    Way("v1", False, "tight", enable_chunked_prefill=False),
    Way("v2", True, "tight", enable_chunked_prefill=False),
]
PAIRS = [WAYS[index] for index in (0, 3, 5, 6, 8, 9)]
"""Any two of the settings meet in all of theirs."""
DRAFTING = [
    *(Way(runner, True, "tight", method=method) for runner in ("v1", "v2") for method in ("ngram", "eagle")),
    Way("v1", False, "tight", method="draft_model"),
    Way("v2", True, "tight", method="draft_model"),
    Way("v2", False, "tight", method="eagle"),
]
"""For the llama, for which there are drafters."""


@pytest.fixture(scope="module", params=MODELS, ids=str)
def engines(request: pytest.FixtureRequest) -> Iterator[dict[Way | None, LLMEngine]]:
    """An engine for each way, and under None the reference: V1, no prefix cache, one request at a time."""
    model = MODELS[request.param]
    ways = WAYS + DRAFTING if request.param == "llama" else PAIRS
    made: dict[Way | None, LLMEngine] = {way: engine_in(way, model) for way in ways}
    made[None] = engine_of(model, runner="v1", enable_prefix_caching=False, max_num_seqs=1)
    yield made
    for engine in made.values():
        engine.shutdown()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_every_way_gives_the_same_tokens(engines: dict[Way | None, LLMEngine], seed: int) -> None:
    lives = random_lives(seed, VOCAB)
    expected = live_alone(engines[None], lives)
    for way, engine in engines.items():
        if way is not None:
            assert engine.runner_name == way.runner
            tolerance = 1e-5 if way.method is None else 1e-4
            assert_lives_agree(engine, lives, expected, f"seed {seed}, {way}", tolerance=tolerance)


@pytest.mark.parametrize("seed", [6, 19])
def test_the_tight_ways_really_preempt(engines: dict[Way | None, LLMEngine], seed: int) -> None:
    """With seeds for which that is known, whatever other tests have run on these engines."""
    lives = random_lives(seed, VOCAB)
    for way in (way for way in engines if way is not None and way.limits == "tight"):
        before = engines[way].stats()
        live(engines[way], lives)
        after = engines[way].stats()
        assert after.scheduler.num_preemptions > before.scheduler.num_preemptions
        assert after.scheduler.prefix_cache_hits > before.scheduler.prefix_cache_hits
        assert way.method is None or after.drafts.num_drafted > before.drafts.num_drafted
        assert way.method in (None, "ngram") or after.drafts.num_accepted > before.drafts.num_accepted
