"""Requests of every kind for engines with drafts, and what must be equal of their outputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from fleetfoot.assets import embedded_model_path
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.tokenizer.tokenizer import Tokenizer
from tests.helpers.engines import make_engine
from tests.helpers.runner_lives import DRAFT

STORY = embedded_model_path()
NUM_DRAFTS = 3
MAX_MODEL_LEN = 96
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_max": 3},
    "draft_model": {"model": str(DRAFT), "num_speculative_tokens": NUM_DRAFTS},
    "eagle": {"method": "eagle", "num_speculative_tokens": NUM_DRAFTS},
}
OPENINGS = (
    "Once there was a fox named",
    "One morning, the little bear went to the river. One morning, the little bear",
    "Pip the mouse, Pip the mouse, Pip",
    "Once there was a fox named Mo who had a red kite. The kite was",
)


class Case(NamedTuple):
    """A request; it is aborted once it has ``abort_at`` output tokens."""

    prompt: list[int]
    params: SamplingParams
    abort_at: int | None = None


def make_cases(stop_inside: str) -> dict[str, Case]:
    """By name.

    Args:
        stop_inside: a string that the greedy continuation of the first opening comes to, not at a token's edge.
    """
    tokenizer = Tokenizer.from_path(STORY)
    openings = [tokenizer.encode(opening) for opening in OPENINGS]
    long = (openings[1] * 8)[:MAX_MODEL_LEN]
    common = tokenizer.encode(" the and was a to", add_special_tokens=False)
    some_words = sorted({*range(260, 700), *common})

    def case(opening: int, abort_at: int | None = None, **features: Any) -> Case:
        return Case(openings[opening], SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **features}), abort_at)

    def near_the_end(length: int, **features: Any) -> Case:
        return Case(long[:length], SamplingParams(**{"max_tokens": None, "ignore_eos": True, **features}))

    greedy, random = {"temperature": 0.0}, {"temperature": 1.0, "seed": 5}
    everything: dict[str, Any] = {
        "temperature": 0.7,
        "seed": 9,
        "top_k": 50,
        "repetition_penalty": 1.2,
        "min_tokens": 6,
    }
    everything |= {"stop": ["zz", " and"], "bad_words": ["Pip"], "logit_bias": {common[1]: 2.0}}
    everything |= {"logprobs": 2, "prompt_logprobs": 1}
    return {
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


def story_engine(**settings: Any) -> LLMEngine:
    """On the embedded model in float32, which is exact enough for tokens to be the same in any company."""
    return make_engine(STORY, **{"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "block_size": 8, **settings})


@dataclass
class Outcome:
    """What a user of a request has seen; lists hold an entry for each of its sequences."""

    token_ids: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    last: RequestOutput | None = None

    def take(self, output: RequestOutput, kind: RequestOutputKind) -> None:
        token_ids = [list(completion.token_ids) for completion in output.outputs]
        texts = [completion.text for completion in output.outputs]
        if kind is RequestOutputKind.DELTA and self.last is not None:
            token_ids = list(map(list.__add__, self.token_ids, token_ids))
            texts = list(map(str.__add__, self.texts, texts))
        self.token_ids, self.texts, self.last = token_ids, texts, output


def run_cases(engine: LLMEngine, cases: dict[str, Case], *, together: bool = True) -> dict[str, Outcome]:
    """Run them, all at once or one after the other. The books are checked after each step."""
    outcomes = {name: Outcome() for name in cases}
    for group in [list(cases)] if together else [[name] for name in cases]:
        for name in group:
            engine.add_request(name, cases[name].prompt, cases[name].params)
            if cases[name].abort_at == 0:
                engine.abort_request(name)
        while engine.has_unfinished_requests():
            for output in engine.step():
                name = output.request_id
                outcomes[name].take(output, cases[name].params.output_kind)
                abort_at = cases[name].abort_at
                if not output.finished and abort_at is not None and len(outcomes[name].token_ids[0]) >= abort_at:
                    engine.abort_request(name)
            engine.check_integrity()
    return outcomes


def outcomes_alone(cases: dict[str, Case]) -> dict[str, Outcome]:
    """Of V1, one request at a time, nothing cached and no drafts."""
    engine = story_engine(runner="v1", enable_prefix_caching=False)
    outcomes = run_cases(engine, cases, together=False)
    engine.shutdown()
    return outcomes


def assert_same_outcomes(got: dict[str, Outcome], expected: dict[str, Outcome]) -> None:
    for name, outcome in expected.items():
        _assert_same(name, got[name], outcome)


def _assert_same(name: str, got: Outcome, expected: Outcome) -> None:
    assert got.last is not None and expected.last is not None, name
    assert got.last.finished and expected.last.finished, name
    if got.last.outputs[0].finish_reason == "abort":  # when it ends depends on the number of tokens of a step
        assert expected.last.outputs[0].finish_reason == "abort", name
        length = min(len(got.token_ids[0]), len(expected.token_ids[0]))
        assert got.token_ids[0][:length] == expected.token_ids[0][:length], name
        return
    assert (name, got.token_ids, got.texts) == (name, expected.token_ids, expected.texts)
    for here, there in zip(got.last.outputs, expected.last.outputs, strict=True):
        assert (name, here.finish_reason, here.stop_reason) == (name, there.finish_reason, there.stop_reason)
        _assert_logprobs(here.logprobs, there.logprobs)
        if there.cumulative_logprob is not None:
            assert here.cumulative_logprob == pytest.approx(there.cumulative_logprob, abs=1e-3)
    _assert_logprobs(got.last.prompt_logprobs, expected.last.prompt_logprobs)


def _assert_logprobs(got: Any, expected: Any) -> None:
    """For each token an entry of token id to logprob, or None."""
    assert (got is None) == (expected is None)
    for here, there in zip(got or (), expected or (), strict=True):
        assert (here is None) == (there is None)
        values = [{token: entry.logprob for token, entry in (row or {}).items()} for row in (here, there)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)
