"""One truth: whatever the runner, the overlap, the cache and the company, a request gets the tokens it gets alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers.engines import make_engine
from tests.helpers.schedules import assert_agree, live, live_alone, random_lives

from fleetfoot.assets import embedded_model_path
from fleetfoot.engine.engine import LLMEngine

ASSETS = Path(__file__).parent.parent / "assets"
MODELS = {
    "llama": embedded_model_path(),
    "qwen3": ASSETS / "story-qwen3",
    "mistral": ASSETS / "story-mistral",
    "draft": ASSETS / "story-draft",
}
VOCAB = 2048


@dataclass(frozen=True)
class Way:
    """One way to run."""

    runner: str
    async_scheduling: bool
    roomy: bool
    chunked: bool = True

    def __str__(self) -> str:
        overlap = "overlapped" if self.async_scheduling else "lockstep"
        return f"{self.runner}-{overlap}-{'roomy' if self.roomy else 'tight'}{'' if self.chunked else '-whole'}"

    def engine(self, model: Path) -> LLMEngine:
        """Roomy: no preemption, whole prompts. Tight: few blocks, few rows, small chunks, so everything happens."""
        limits = (
            {"max_num_seqs": 16, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 256, "block_size": 8}
            if self.roomy
            else {"max_num_seqs": 4, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 22, "block_size": 4}
        )
        if not self.chunked:
            limits["max_num_batched_tokens"] = 128
        return make_engine(
            model,
            dtype="float32",
            max_model_len=80,
            skip_tokenizer_init=True,
            runner=self.runner,
            async_scheduling=self.async_scheduling,
            enable_chunked_prefill=self.chunked,
            **limits,
        )


WAYS = [
    *(Way(runner, overlap, roomy) for runner in ("v1", "v2") for overlap in (False, True) for roomy in (True, False)),
    Way("v1", False, False, chunked=False),
    Way("v2", True, False, chunked=False),
]


@pytest.fixture(scope="module", params=MODELS, ids=str)
def engines(request: pytest.FixtureRequest) -> Iterator[dict[Way | None, LLMEngine]]:
    """An engine for each way, and under None the reference: V1, no prefix cache, one request at a time."""
    model = MODELS[request.param]
    made: dict[Way | None, LLMEngine] = {way: way.engine(model) for way in WAYS}
    made[None] = make_engine(
        model,
        dtype="float32",
        max_model_len=80,
        skip_tokenizer_init=True,
        runner="v1",
        enable_prefix_caching=False,
        max_num_seqs=1,
    )
    yield made
    for engine in made.values():
        engine.shutdown()


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_every_way_gives_the_same_tokens(engines: dict[Way | None, LLMEngine], seed: int) -> None:
    lives = random_lives(seed, VOCAB)
    expected = live_alone(engines[None], lives)
    for way in WAYS:
        engine = engines[way]
        assert engine.runner_name == way.runner
        got = live(engine, lives)
        for life in lives:
            try:
                assert_agree(got[life.request_id], expected[life.request_id])
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {way}, {life}: {error}") from error
        engine.core.scheduler.check_idle()


@pytest.mark.parametrize("seed", [6, 19])
def test_the_tight_ways_really_preempt(engines: dict[Way | None, LLMEngine], seed: int) -> None:
    """With seeds of which that is known, whatever other tests have run on these engines."""
    lives = random_lives(seed, VOCAB)
    for way in WAYS:
        if not way.roomy:
            before = engines[way].stats().scheduler
            live(engines[way], lives)
            after = engines[way].stats().scheduler
            assert after.num_preemptions > before.num_preemptions
            assert after.prefix_cache_hits > before.prefix_cache_hits
