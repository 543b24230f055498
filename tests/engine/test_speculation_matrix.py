"""{n-grams, draft model, EAGLE} x {no connector, files, offloading} x {V1, V2} x {lockstep, overlapped}, with few
blocks and small steps: whatever a request asks for, it gets what it gets alone and without drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.helpers.draft_matrix import (
    METHODS,
    Case,
    Outcome,
    assert_same_outcomes,
    make_cases,
    run_cases,
    story_engine,
)
from tests.helpers.schedules import assert_agree, live, live_alone, random_lives

from fleetfoot.engine.engine import LLMEngine

TIGHT = {"max_num_seqs": 6, "max_num_batched_tokens": 40, "num_gpu_blocks_override": 26}
CONNECTORS: dict[str, Callable[[Path], dict[str, Any] | None]] = {
    "none": lambda folder: None,
    "files": lambda folder: {
        "kv_connector": "SharedStorageConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    },
    "offload": lambda folder: {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"num_cpu_blocks": 60},
    },
}


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return make_cases(greedy_text()[61:67])


def greedy_text() -> str:
    engine = story_engine(runner="v1")
    (outcome,) = run_cases(engine, {"greedy": make_cases("none")["greedy"]}).values()
    engine.shutdown()
    return outcome.texts[0]


@pytest.fixture(scope="module")
def expected(cases: dict[str, Case]) -> dict[str, Outcome]:
    """Of V1, one request at a time, nothing cached."""
    engine = story_engine(runner="v1", enable_prefix_caching=False)
    outcomes = run_cases(engine, cases, together=False)
    engine.shutdown()
    return outcomes


def close(engine: LLMEngine) -> None:
    """End an engine when its last transfer has ended, with every block back."""
    while engine.has_transfers():
        engine.step()
        engine.check_integrity()
    pool = engine.core.scheduler.pool
    assert pool.num_free == pool.num_blocks
    engine.core.scheduler.check_idle()
    engine.shutdown()


def test_the_cases_mean_something(expected: dict[str, Outcome]) -> None:
    def last(name: str) -> Any:
        output = expected[name].last
        assert output is not None
        return output.outputs[0]

    greedy = expected["greedy"]
    for name in ("stop-string", "stop-included"):
        assert last(name).finish_reason == "stop"
        assert 8 < len(last(name).token_ids) < len(greedy.token_ids[0])
    assert (last("stop-token").finish_reason, last("min-tokens").finish_reason) == ("stop", "stop")
    assert len(last("min-tokens").token_ids) > 10
    assert 1 < len(last("stop-token").token_ids) < 24
    assert len(last("stop-late").token_ids) > 9 and last("stop-late").finish_reason == "stop"
    assert [len(expected[name].token_ids[0]) for name in ("last", "last-two", "last-few")] == [1, 2, 7]
    assert len(expected["to-the-end"].token_ids[0]) == 56
    assert len({tuple(tokens) for tokens in expected["copies"].token_ids}) == 3
    assert last("bias").token_ids != expected["random"].token_ids[0][:24]
    assert last("allowed").token_ids != greedy.token_ids[0][:24]
    assert last("penalties").token_ids != expected["greedy-delta"].token_ids[0]
    assert last("bad-words").token_ids != expected["greedy-delta"].token_ids[0]


HALF = [
    (method, connector, runner, (i + j + k) % 2 == 1)
    for i, method in enumerate(METHODS)
    for j, connector in enumerate(CONNECTORS)
    for k, runner in enumerate(("v1", "v2"))
]
"""Of the 36 combinations; any three of the four settings meet in all of theirs."""


@pytest.mark.parametrize(("method", "connector", "runner", "async_scheduling"), HALF)
def test_outputs_are_those_without(
    method: str,
    connector: str,
    runner: str,
    async_scheduling: bool,
    tmp_path: Path,
    cases: dict[str, Case],
    expected: dict[str, Outcome],
) -> None:
    transfers = CONNECTORS[connector](tmp_path)
    engine = story_engine(
        runner=runner,
        async_scheduling=async_scheduling,
        speculative_config={**METHODS[method], "adaptive": False},
        kv_transfer_config=transfers,
        **TIGHT,
    )
    assert engine.runner_name == runner
    outcomes = run_cases(engine, cases)
    assert_same_outcomes(outcomes, expected)
    first = engine.stats().drafts
    metrics = [outcome.last.metrics for outcome in outcomes.values() if outcome.last is not None]
    assert sum(request.num_drafted_tokens for request in metrics) == first.num_drafted
    assert sum(request.num_accepted_tokens for request in metrics) == first.num_accepted
    if transfers is not None:  # once more, with much of the KV loaded, a drafter's too; an engine's own seeds go on
        again = {name: case for name, case in cases.items() if name != "own-seed"}
        assert_same_outcomes(run_cases(engine, again), {name: expected[name] for name in again})
        assert engine.stats().transfers.loads_done > 0
        second = engine.stats().drafts.since(first)
        assert method == "ngram" or second.acceptance_rate > 0.8 * first.acceptance_rate
    stats = engine.stats()
    assert stats.scheduler.num_preemptions > 0
    assert stats.drafts.num_drafted > 50
    assert stats.drafts.num_accepted > (10 if method == "ngram" else 100)
    close(engine)


# --- random lives ---------------------------------------------------------------------------------------------------

WAYS = [
    ("ngram", "v1", True),
    ("ngram", "v2", True),
    ("draft_model", "v1", False),
    ("draft_model", "v2", True),
    ("eagle", "v1", True),
    ("eagle", "v2", False),
    ("eagle", "v2", True),
]


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[tuple[str, str, bool] | None, LLMEngine]]:
    """One for each way; under None the reference."""
    both: dict[str, Any] = {"max_model_len": 80, "skip_tokenizer_init": True}
    tight = {"max_num_seqs": 4, "max_num_batched_tokens": 28, "num_gpu_blocks_override": 22, "block_size": 4}
    made: dict[tuple[str, str, bool] | None, LLMEngine] = {
        way: story_engine(
            runner=way[1],
            async_scheduling=way[2],
            speculative_config={**METHODS[way[0]], "adaptive": False},
            **tight,
            **both,
        )
        for way in WAYS
    }
    made[None] = story_engine(
        runner="v1", enable_prefix_caching=False, max_num_seqs=1, max_model_len=80, skip_tokenizer_init=True
    )
    yield made
    for engine in made.values():
        engine.shutdown()


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_random_requests(engines: dict[tuple[str, str, bool] | None, LLMEngine], seed: int) -> None:
    lives = random_lives(seed, 2048, most=8)
    wanted = live_alone(engines[None], lives)
    for way in WAYS:
        got = live(engines[way], lives)
        for life in lives:
            try:
                assert_agree(got[life.request_id], wanted[life.request_id], tolerance=1e-4)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}, {way}, {life}: {error}") from error
        engines[way].core.scheduler.check_idle()


def test_random_requests_have_drafts_and_are_preempted(
    engines: dict[tuple[str, str, bool] | None, LLMEngine],
) -> None:
    """With seeds of which that is known, whatever other tests have run on these engines."""
    for way in WAYS:
        before = engines[way].stats()
        for seed in (6, 9, 14):
            live(engines[way], random_lives(seed, 2048))
        stats = engines[way].stats()
        assert stats.drafts.num_accepted > before.drafts.num_accepted
        assert stats.scheduler.num_preemptions > before.scheduler.num_preemptions
