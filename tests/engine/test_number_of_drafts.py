"""How many drafts there are: the fewest and the most, and drafting that is turned off where it does not pay."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from tests.helpers.engines import make_engine
from tests.helpers.runner_lives import MAX_MODEL_LEN, METHODS, STORY
from tests.helpers.schedules import OPENINGS, assert_lives_agree, live_alone, story_lives

from fleetfoot import RequestOutput
from fleetfoot.config.speculative import MAX_SPECULATIVE_TOKENS
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.scheduler.stats import DraftStats
from fleetfoot.speculative import controller
from fleetfoot.speculative.controller import MEASURING, NUM_SAMPLES
from fleetfoot.tokenizer.tokenizer import Tokenizer


def story_engine(**settings: Any) -> LLMEngine:
    """On the embedded model in float32, which is exact enough for tokens to be the same in any company."""
    return make_engine(STORY, **{"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "block_size": 8, **settings})


FEW = ("greedy", "random", "copies", "one", "two", "last", "last-two", "last-few", "everything")
EXTREMES = [
    (MAX_SPECULATIVE_TOKENS if (i + j) % 2 else 1, method, runner)
    for i, method in enumerate(METHODS)
    for j, runner in enumerate(("v1", "v2"))
]
"""Any two of the settings meet in all of theirs."""


LIVES = [
    life
    for life in story_lives(Tokenizer.from_path(STORY), MAX_MODEL_LEN, "?")
    if life.request_id in (*FEW, "one-token")
]


@functools.cache
def alone() -> dict[str, RequestOutput]:
    engine = story_engine(model_runner="v1", enable_prefix_caching=False)
    outputs = live_alone(engine, LIVES)
    engine.shutdown()
    return outputs


@pytest.mark.parametrize(("num_drafts", "method", "runner"), EXTREMES)
def test_fewest_and_most_drafts(num_drafts: int, method: str, runner: str) -> None:
    """Up to 64 of them, also after prompts that leave room for one token."""
    config = {**METHODS[method], "num_speculative_tokens": num_drafts, "adaptive": False}
    # the drafts of a model for the one token are wrong, which takes many steps
    names = (*FEW, "one-token") if method == "ngram" else FEW
    lives = [life for life in LIVES if life.request_id in names]
    engine = story_engine(model_runner=runner, speculative_config=config, max_num_batched_tokens=600)
    assert_lives_agree(engine, lives, alone(), tolerance=1e-4, ties=False)
    drafts = engine.stats().drafts
    assert len(drafts.accepted_at) == num_drafts
    assert drafts.num_accepted > 20
    assert method != "ngram" or drafts.accepted_at[-1] > 0  # of a token that comes again and again
    engine.shutdown()


WAYS = {
    "v1": {"model_runner": "v1"},
    "v2-overlapped": {"model_runner": "v2", "async_scheduling": True},
}
WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
PATIENCE = 96
"""Steps until drafting is tested again; an engine waits longer."""
LENGTHS = (30, 210, 210)
"""Two of three requests are long enough for two tests of drafting."""


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "FIRST_PATIENCE", PATIENCE)


DOES_NOT_PAY = "it does not pay at 2 to 3 requests"


class TimedExecutor:
    """The engine's executor, on a clock that only steps move: one second each, and for drafts ``draft_cost``, by the
    number of steps before it. ``reasons``: for each step, why it proposed nothing."""

    def __init__(self, engine: LLMEngine, draft_cost: Callable[[int], float]) -> None:
        self.now = 100.0
        self.draft_cost = draft_cost
        self.steps: list[SchedulerOutput] = []
        self.reasons: list[str] = []
        self._engine = engine
        self._executor = executor = engine.core.executor
        self.runner_name, self.sample_tokens = executor.runner_name, executor.sample_tokens
        self.shutdown = executor.shutdown
        engine.core.executor = self
        engine.core.clock = lambda: self.now

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.now += 1.0 + (self.draft_cost(len(self.steps)) if scheduler_output.num_drafts else 0.0)
        self.steps.append(scheduler_output)
        self.reasons.append(self._engine.stats().drafts.off_reason)
        self._executor.execute_model(scheduler_output)


def run(
    lengths: tuple[int, ...], draft_cost: Callable[[int], float] = lambda step: 0.0, **settings: Any
) -> tuple[dict[str, list[int]], TimedExecutor, DraftStats]:
    """A request of each output length: their tokens, the steps, and what is counted of drafts."""
    settings = {"async_scheduling": False, "max_model_len": 700, "num_gpu_blocks_override": 400, **settings}
    engine, tokenizer = story_engine(**settings), Tokenizer.from_path(STORY)
    timed = TimedExecutor(engine, draft_cost)
    for number, length in enumerate(lengths):
        params = SamplingParams(temperature=0.8, seed=number, max_tokens=length, ignore_eos=True, detokenize=False)
        engine.add_request(str(number), tokenizer.encode(OPENINGS[number % 4]), params)
    tokens = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[output.request_id] = output.outputs[0].token_ids
        engine.check_integrity()
    drafts = engine.stats().drafts
    engine.shutdown()
    return tokens, timed, drafts


@functools.cache
def tokens_without(lengths: tuple[int, ...]) -> dict[str, list[int]]:
    return run(lengths, model_runner="v1")[0]


@pytest.mark.usefixtures("patience")
@WAY
def test_drafting_that_does_not_pay_is_turned_off(way: dict[str, Any]) -> None:
    # few n-grams are repeated in these stories
    tokens, timed, drafts = run(LENGTHS, lambda step: 2.0, speculative_config=METHODS["ngram"], **way)
    assert tokens == tokens_without(LENGTHS)
    assert drafts.off[MEASURING] >= NUM_SAMPLES
    assert drafts.off[DOES_NOT_PAY] > PATIENCE
    of_two = [number for number, step in enumerate(timed.steps) if step.num_decodes >= 2]
    assert timed.reasons[of_two[-1]] == DOES_NOT_PAY
    with_drafts = [number for number in of_two if timed.steps[number].num_drafts]
    first_test = sum(number < 3 * NUM_SAMPLES for number in with_drafts)
    second_test = sum(number > PATIENCE for number in with_drafts)
    assert all(NUM_SAMPLES <= count <= NUM_SAMPLES + 4 for count in (first_test, second_test))
    assert first_test + second_test == len(with_drafts)
