"""Drafting that turns itself off and on in a real engine, and the limits that it keeps to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.helpers.draft_matrix import (
    METHODS,
    NUM_DRAFTS,
    OPENINGS,
    STORY,
    Outcome,
    assert_same_outcomes,
    make_cases,
    run_cases,
    story_engine,
)

from fleetfoot.config.speculative import MAX_SPECULATIVE_TOKENS
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.executor.protocol import Executor
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import PendingOutput, SchedulerOutput
from fleetfoot.speculative.controller import FIRST_PATIENCE, MEASURING, NUM_SAMPLES
from fleetfoot.tokenizer.tokenizer import Tokenizer

WAYS = pytest.mark.parametrize(
    ("runner", "async_scheduling"), [("v1", False), ("v2", False), ("v2", True)], ids=["v1", "v2", "v2-overlapped"]
)


class TimedExecutor:
    """The engine's executor, on a clock that nothing but steps moves.

    Attributes:
        draft_cost: seconds that drafts add to the one second of a step, by the number of steps before it.
        reasons: for each step, why it proposed nothing.
    """

    def __init__(self, engine: LLMEngine, draft_cost: Callable[[int], float]) -> None:
        self.now = 100.0
        self.draft_cost = draft_cost
        self.steps: list[SchedulerOutput] = []
        self.reasons: list[str] = []
        self._engine = engine
        self._executor: Executor = engine.core.executor
        self.runner_name = self._executor.runner_name
        engine.core.executor = self
        engine.core.clock = lambda: self.now

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.now += 1.0 + (self.draft_cost(len(self.steps)) if scheduler_output.num_drafts else 0.0)
        self.steps.append(scheduler_output)
        self.reasons.append(self._engine.stats().drafts.off_reason)
        self._executor.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: object | None) -> PendingOutput:
        return self._executor.sample_tokens(grammar_output)

    def shutdown(self) -> None:
        self._executor.shutdown()


def run(engine: LLMEngine, lengths: list[int]) -> dict[str, list[int]]:
    """A request of each output length; their tokens."""
    tokenizer = Tokenizer.from_path(STORY)
    for number, length in enumerate(lengths):
        params = SamplingParams(temperature=0.8, seed=number, max_tokens=length, ignore_eos=True, detokenize=False)
        engine.add_request(str(number), tokenizer.encode(OPENINGS[number % 4]), params)
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = output.outputs[0].token_ids
        engine.check_integrity()
    return tokens


def long_engine(**settings: Any) -> LLMEngine:
    return story_engine(max_model_len=700, num_gpu_blocks_override=400, **settings)


LENGTHS = [30, 420, 420]
"""Two of three requests go on for long enough to be tried twice."""
DOES_NOT_PAY = "it does not pay at 2 to 3 requests"


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    engine = long_engine(runner="v1")
    tokens = run(engine, LENGTHS)
    engine.shutdown()
    return tokens


@WAYS
def test_drafting_that_does_not_pay_ends_and_says_so(
    runner: str, async_scheduling: bool, expected: dict[str, list[int]]
) -> None:
    engine = long_engine(runner=runner, async_scheduling=async_scheduling, speculative_config=METHODS["ngram"])
    timed = TimedExecutor(engine, lambda step: 2.0)  # few n-grams come again in these stories
    assert run(engine, LENGTHS) == expected
    drafts = engine.stats().drafts
    assert drafts.off[MEASURING] >= NUM_SAMPLES
    assert drafts.off[DOES_NOT_PAY] > FIRST_PATIENCE
    of_two = [number for number, step in enumerate(timed.steps) if step.num_decodes >= 2]
    assert timed.reasons[of_two[-1]] == DOES_NOT_PAY
    with_drafts = [number for number in of_two if timed.steps[number].num_drafts]
    first_try = [number for number in with_drafts if number < 3 * NUM_SAMPLES]
    second_try = [number for number in with_drafts if number > FIRST_PATIENCE]
    assert NUM_SAMPLES <= len(first_try) <= NUM_SAMPLES + 4
    assert NUM_SAMPLES <= len(second_try) <= NUM_SAMPLES + 4
    assert len(first_try) + len(second_try) == len(with_drafts)
    engine.shutdown()


@WAYS
def test_drafting_begins_again_where_it_comes_to_pay(
    runner: str, async_scheduling: bool, expected: dict[str, list[int]]
) -> None:
    engine = long_engine(runner=runner, async_scheduling=async_scheduling, speculative_config=METHODS["eagle"])
    timed = TimedExecutor(engine, lambda step: 9.0 if step < 60 else 0.1)
    assert run(engine, LENGTHS) == expected
    drafts = engine.stats().drafts
    assert drafts.off[DOES_NOT_PAY] == pytest.approx(FIRST_PATIENCE, abs=16)
    assert drafts.off_reason == ""
    assert [step.num_drafts for step in timed.steps[-10:]] == [NUM_DRAFTS] * 10
    assert drafts.mean_acceptance_length > 2
    engine.shutdown()


@WAYS
def test_large_batches_go_without(runner: str, async_scheduling: bool) -> None:
    lengths = [10, 20, 50, 60]
    config = {**METHODS["eagle"], "disable_by_batch_size": 2, "adaptive": False}
    plain = long_engine(runner="v1")
    engine = long_engine(runner=runner, async_scheduling=async_scheduling, speculative_config=config)
    timed = TimedExecutor(engine, lambda step: 0.0)
    assert run(engine, lengths) == run(plain, lengths)
    assert all(step.num_decodes <= 2 for step in timed.steps if step.num_to_propose)
    assert not any(step.num_drafts for step in timed.steps if step.num_decodes > 2)
    drafts = engine.stats().drafts
    assert list(drafts.off) == ["more than 2 requests"]
    assert drafts.num_accepted > 20
    assert drafts.off_reason == ""
    plain.shutdown()
    engine.shutdown()


# --- limits ---------------------------------------------------------------------------------------------------------

NAMES = ("greedy", "random", "stop-string", "copies", "one", "two", "last", "last-two", "one-token", "everything")
CASES = {name: case for name, case in make_cases(" the").items() if name in NAMES}


@pytest.fixture(scope="module")
def plain_outcomes() -> dict[str, Outcome]:
    engine = story_engine(runner="v1", enable_prefix_caching=False)
    outcomes = run_cases(engine, CASES, together=False)
    engine.shutdown()
    return outcomes


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_drafts", [1, MAX_SPECULATIVE_TOKENS])
def test_as_few_and_as_many_drafts_as_can_be(
    num_drafts: int, method: str, runner: str, plain_outcomes: dict[str, Outcome]
) -> None:
    """Up to 64 of them, also behind prompts that leave room for one token."""
    config = {**METHODS[method], "num_speculative_tokens": num_drafts, "adaptive": False}
    engine = story_engine(runner=runner, speculative_config=config, max_num_batched_tokens=600)
    assert_same_outcomes(run_cases(engine, CASES), plain_outcomes)
    drafts = engine.stats().drafts
    assert len(drafts.accepted_at) == num_drafts
    assert drafts.num_accepted > 20
    assert method != "ngram" or drafts.accepted_at[-1] > 0  # of a token that comes again and again
    engine.shutdown()
