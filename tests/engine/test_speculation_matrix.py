"""{n-grams, draft model, EAGLE} x {no connector, files, offloading} x {V1, V2} x {lockstep, overlapped}, with few
blocks and small steps: whatever its parameters, a request gets what it gets alone and without drafts."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.engines import make_engine
from tests.helpers.prefill_decode import settle
from tests.helpers.runner_lives import MAX_MODEL_LEN, METHODS, NUM_DRAFTS, STORY
from tests.helpers.schedules import Life, assert_lives_agree, live_alone

from fleetfoot.config.speculative import MAX_SPECULATIVE_TOKENS
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.scheduler.stats import DraftStats
from fleetfoot.speculative import controller
from fleetfoot.speculative.controller import MEASURING, NUM_SAMPLES
from fleetfoot.tokenizer.tokenizer import Tokenizer

TIGHT = {"max_num_seqs": 6, "max_num_batched_tokens": 40, "num_gpu_blocks_override": 26}
CONNECTORS: dict[str, tuple[str, dict[str, Any]] | None] = {
    "none": None,
    "files": ("SharedStorageConnector", {"shared_storage_path": ""}),  # the folder of a test
    "offload": ("OffloadingConnector", {"num_cpu_blocks": 60}),
}
OPENINGS = (
    "Once there was a fox named",
    "One morning, the little bear went to the river. One morning, the little bear",
    "Pip the mouse, Pip the mouse, Pip",
    "Once there was a fox named Mo who had a red kite. The kite was",
)


Cases = dict[str, Life]
Outputs = dict[str, RequestOutput]


def make_cases(stop_inside: str) -> Cases:
    """``stop_inside``: a string that the greedy continuation of the first opening comes to, not at a token's edge."""
    tokenizer = Tokenizer.from_path(STORY)
    openings = [tokenizer.encode(opening) for opening in OPENINGS]
    long = (openings[1] * 8)[:MAX_MODEL_LEN]
    common = tokenizer.encode(" the and was a to", add_special_tokens=False)
    some_words = sorted({*range(260, 700), *common})

    def case(opening: int, abort_at: int | None = None, **features: Any) -> tuple[Any, ...]:
        params = SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **features})
        return openings[opening], params, 0, abort_at

    def near_the_end(length: int, **features: Any) -> tuple[Any, ...]:
        return long[:length], SamplingParams(**{"max_tokens": None, "ignore_eos": True, **features})

    greedy, random = {"temperature": 0.0}, {"temperature": 1.0, "seed": 5}
    everything: dict[str, Any] = {"temperature": 0.7, "seed": 9, "top_k": 50, "repetition_penalty": 1.2}
    everything |= {"stop": ["zz", " and"], "bad_words": ["Pip"], "logit_bias": {common[1]: 2.0}}
    everything |= {"min_tokens": 6, "logprobs": 2, "prompt_logprobs": 1}
    made = {
        "greedy": case(0, **greedy, max_tokens=40),
        "greedy-delta": case(1, **greedy, output_kind=RequestOutputKind.DELTA),
        "random": case(0, **random, max_tokens=40),
        "own-seed": case(1, temperature=0.9),
        "filters": case(3, temperature=0.8, seed=1, top_p=0.9, top_k=20, min_p=0.01),
        "penalties": case(1, **greedy, repetition_penalty=1.3, presence_penalty=0.5, logprobs=1),
        "frequency": case(2, **random, frequency_penalty=0.7, logprobs=2),
        "bad-words": case(1, **greedy, bad_words=["the", "was a", "river"], logprobs=0),
        "bias": case(0, **random, logit_bias={token: 9.0 for token in common}),
        "allowed": case(0, **greedy, allowed_token_ids=some_words, logprobs=3),
        "min-tokens": case(3, **greedy, min_tokens=11, stop_token_ids=some_words, ignore_eos=False),
        "stop-token": case(1, **random, stop_token_ids=some_words[::8], ignore_eos=False),
        "stop-string": case(0, **greedy, stop=[stop_inside], max_tokens=40, logprobs=1),
        "stop-included": case(0, **greedy, stop=[stop_inside], include_stop_str_in_output=True, max_tokens=40),
        "stop-late": case(2, **random, stop=[" ", "."], min_tokens=9),
        "copies": case(1, **random, n=3, logprobs=1, max_tokens=13),
        "one": case(0, **greedy, max_tokens=1, logprobs=1),
        "two": case(1, **random, max_tokens=2),
        "three": case(2, **greedy, max_tokens=3),
        "prompt-logprobs": case(3, **greedy, prompt_logprobs=2, logprobs=2),
        "last": near_the_end(MAX_MODEL_LEN - 1, **greedy),
        "last-two": near_the_end(MAX_MODEL_LEN - 2, **random),
        "last-few": near_the_end(MAX_MODEL_LEN - 7, **greedy, logprobs=1),
        "to-the-end": near_the_end(40, **random),
        "one-token": near_the_end(20, **random, logit_bias={common[0]: 100.0}),
        "aborted": case(3, abort_at=7, **greedy, output_kind=RequestOutputKind.CUMULATIVE),
        "aborted-at-once": case(0, abort_at=0, **greedy),
        "everything": case(2, **everything),
    }
    return {name: Life(name, *fields) for name, fields in made.items()}


def story_engine(**settings: Any) -> LLMEngine:
    """On the embedded model in float32, which is exact enough for tokens to be the same in any company."""
    return make_engine(STORY, **{"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "block_size": 8, **settings})


def outputs_alone(cases: Cases) -> Outputs:
    """Of V1, one request at a time, nothing cached and no drafts."""
    engine = story_engine(model_runner="v1", enable_prefix_caching=False)
    outputs = live_alone(engine, list(cases.values()))
    engine.shutdown()
    return outputs


def check_cases(engine: LLMEngine, cases: Cases, expected: Outputs) -> Outputs:
    return assert_lives_agree(engine, list(cases.values()), expected, "a case", tolerance=1e-4, ties=False)


@pytest.fixture(scope="module")
def cases() -> Cases:
    greedy = outputs_alone({"greedy": make_cases("none")["greedy"]})["greedy"]
    return make_cases(greedy.outputs[0].text[61:67])


@pytest.fixture(scope="module")
def expected(cases: Cases) -> Outputs:
    return outputs_alone(cases)


def test_the_cases_mean_something(expected: Outputs) -> None:
    last = {name: output.outputs[0] for name, output in expected.items()}
    greedy, tokens = last["greedy"].token_ids, {name: completion.token_ids for name, completion in last.items()}
    for name in ("stop-string", "stop-included"):
        assert last[name].finish_reason == "stop"
        assert 8 < len(tokens[name]) < len(greedy)
    assert [last[name].finish_reason for name in ("stop-token", "min-tokens", "stop-late")] == ["stop"] * 3
    assert len(tokens["min-tokens"]) > 10 and len(tokens["stop-late"]) > 9
    assert 1 < len(tokens["stop-token"]) < 24
    assert [len(tokens[name]) for name in ("last", "last-two", "last-few")] == [1, 2, 7]
    assert len(tokens["to-the-end"]) == 56
    assert len({tuple(copy.token_ids) for copy in expected["copies"].outputs}) == 3
    assert tokens["bias"] != tokens["random"][:24]
    assert tokens["allowed"] != greedy[:24]
    assert tokens["penalties"] != tokens["greedy-delta"] != tokens["bad-words"]


COMBINATIONS = [
    ("ngram", "none", "v1", False),
    ("ngram", "files", "v2", False),
    ("ngram", "offload", "v1", True),
    ("draft_model", "none", "v2", True),
    ("draft_model", "files", "v1", True),
    ("draft_model", "offload", "v2", False),
    ("eagle", "none", "v1", False),
    ("eagle", "files", "v2", True),
    ("eagle", "offload", "v2", True),
]
"""Of the 36; any two of the settings meet in all of theirs."""


@pytest.mark.parametrize(("method", "connector", "runner", "async_scheduling"), COMBINATIONS)
def test_outputs_are_those_without(
    method: str, connector: str, runner: str, async_scheduling: bool, tmp_path: Path, cases: Cases, expected: Outputs
) -> None:
    transfers: dict[str, Any] | None = None
    if (named := CONNECTORS[connector]) is not None:
        extra = {name: value or str(tmp_path) for name, value in named[1].items()}
        transfers = {"kv_connector": named[0], "kv_role": "kv_both", "kv_connector_extra_config": extra}
    engine = story_engine(
        model_runner=runner,
        async_scheduling=async_scheduling,
        speculative_config={**METHODS[method], "adaptive": False},
        kv_transfer_config=transfers,
        **TIGHT,
    )
    assert engine.runner_name == runner
    outputs = check_cases(engine, cases, expected)
    first = engine.stats().drafts
    metrics = [output.metrics for output in outputs.values()]
    assert sum(request.num_drafted_tokens for request in metrics) == first.num_drafted
    assert sum(request.num_accepted_tokens for request in metrics) == first.num_accepted
    if transfers is not None:  # once more, with much of the KV loaded, a drafter's too; an engine's own seeds go on
        again = {name: case for name, case in cases.items() if name != "own-seed"}
        check_cases(engine, again, expected)
        assert engine.stats().transfers.loads_done > 0
        second = engine.stats().drafts.since(first)
        assert method == "ngram" or second.acceptance_rate > 0.8 * first.acceptance_rate
    stats = engine.stats()
    assert stats.scheduler.num_preemptions > 0
    assert stats.drafts.num_drafted > 50
    assert stats.drafts.num_accepted > (10 if method == "ngram" else 100)
    settle(engine)
    engine.shutdown()


FEW = ("greedy", "random", "stop-string", "copies", "one", "two", "last", "last-two", "last-few", "everything")


EXTREMES = [
    (MAX_SPECULATIVE_TOKENS if (i + j) % 2 else 1, method, runner)
    for i, method in enumerate(METHODS)
    for j, runner in enumerate(("v1", "v2"))
]
"""Any two of the settings meet in all of theirs."""


@pytest.mark.parametrize(("num_drafts", "method", "runner"), EXTREMES)
def test_fewest_and_most_drafts(num_drafts: int, method: str, runner: str, cases: Cases, expected: Outputs) -> None:
    """Up to 64 of them, also behind prompts that leave room for one token."""
    config = {**METHODS[method], "num_speculative_tokens": num_drafts, "adaptive": False}
    engine = story_engine(model_runner=runner, speculative_config=config, max_num_batched_tokens=600)
    # the drafts of a model for the one token are wrong, which takes many steps
    names = (*FEW, "one-token") if method == "ngram" else FEW
    check_cases(engine, {name: cases[name] for name in names}, expected)
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


@pytest.mark.usefixtures("patience")
@WAY
def test_drafting_begins_again_where_it_comes_to_pay(way: dict[str, Any]) -> None:
    config = METHODS["eagle"]
    tokens, timed, drafts = run(LENGTHS, lambda step: 9.0 if step < 60 else 0.1, speculative_config=config, **way)
    assert tokens == tokens_without(LENGTHS)
    assert drafts.off[DOES_NOT_PAY] == pytest.approx(PATIENCE, abs=16)
    assert drafts.off_reason == ""
    assert [step.num_drafts for step in timed.steps[-10:]] == [NUM_DRAFTS] * 10
    assert drafts.mean_acceptance_length > 2


@WAY
def test_large_batches_have_no_drafts(way: dict[str, Any]) -> None:
    lengths = (10, 20, 50, 60)
    config = {**METHODS["eagle"], "disable_by_batch_size": 2, "adaptive": False}
    tokens, timed, drafts = run(lengths, speculative_config=config, **way)
    assert tokens == tokens_without(lengths)
    assert all(step.num_decodes <= 2 for step in timed.steps if step.num_to_propose)
    assert not any(step.num_drafts for step in timed.steps if step.num_decodes > 2)
    assert list(drafts.off) == ["more than 2 requests"]
    assert drafts.num_accepted > 20
    assert drafts.off_reason == ""
