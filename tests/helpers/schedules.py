"""Requests with arrivals and aborts, also random ones from a seed; in every schedule each gets what it gets alone."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fleetfoot.engine.engine import LLMEngine
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from fleetfoot.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Life:
    """A request, the step before which it arrives, and the output length at which it is aborted, if it is."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    arrival: int = 0
    abort_at: int | None = None
    priority: int = 0


def random_params(rng: random.Random, vocab_size: int) -> SamplingParams:
    """Any mix of parameters; about half of the requests are plain."""
    max_tokens = rng.randint(1, 24)
    params: dict[str, Any] = {
        "max_tokens": max_tokens,
        "detokenize": False,
        "temperature": rng.choice([0.0, 0.0, 0.7, 1.0, 1.5]),
        "seed": rng.randrange(2**63),
    }
    if rng.random() < 0.5:
        return SamplingParams(**params)

    def some(probability: float, **values: Any) -> None:
        if rng.random() < probability:
            params.update(values)

    def tokens(most: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(rng.randint(1, most))]

    some(0.3, top_k=rng.randint(1, 50))
    some(0.3, top_p=rng.uniform(0.1, 1.0))
    some(0.3, min_p=rng.uniform(0.0, 0.3))
    some(0.3, repetition_penalty=rng.uniform(0.5, 2.0))
    some(0.3, frequency_penalty=rng.uniform(-2, 2))
    some(0.3, presence_penalty=rng.uniform(-2, 2))
    some(0.3, logit_bias={token: rng.uniform(-5, 5) for token in tokens(5)})
    some(0.2, allowed_token_ids=sorted(set(tokens(200))))
    some(0.3, stop_token_ids=tokens(60), min_tokens=rng.randint(0, max_tokens))
    some(0.3, ignore_eos=True)
    some(0.4, logprobs=rng.randint(0, 5))
    some(0.2, prompt_logprobs=rng.randint(0, 3))
    return SamplingParams(**params)


def random_lives(seed: int, vocab_size: int, *, most: int = 10, longest: int = 40) -> list[Life]:
    """Requests that share beginnings, arrive over some steps, and are aborted now and then, also at their last step."""
    rng = random.Random(seed)
    base = [rng.randrange(6, vocab_size) for _ in range(longest)]
    lives = []
    for number in range(rng.randint(1, most)):
        size = rng.randint(1, longest)
        shared = rng.randint(0, size)
        prompt = base[:shared] + [rng.randrange(6, vocab_size) for _ in range(size - shared)]
        params = random_params(rng, vocab_size)
        assert params.max_tokens is not None
        abort_at = rng.choice([None, None, None, rng.randint(0, params.max_tokens)])
        lives.append(Life(f"r{number}", prompt, params, rng.randint(0, 12), abort_at))
    return lives


def live(
    engine: LLMEngine, lives: Sequence[Life], before_step: Callable[[], object] = lambda: None
) -> dict[str, RequestOutput]:
    """Run them, checking integrity after each step; the last output of each, aborted ones too, with all its deltas."""
    arriving = sorted(lives, key=lambda life: life.arrival)
    by_id = {life.request_id: life for life in lives}
    last: dict[str, RequestOutput] = {}
    step = 0
    while arriving or engine.has_unfinished_requests():
        while arriving and arriving[0].arrival <= step:
            life = arriving.pop(0)
            engine.add_request(life.request_id, life.prompt, life.params, priority=life.priority)
            if life.abort_at == 0:
                engine.abort_request(life.request_id)
        before_step()
        for output in engine.step():
            life, abort_at = by_id[output.request_id], by_id[output.request_id].abort_at
            if life.params.output_kind is RequestOutputKind.DELTA and output.request_id in last:
                for new, before in zip(output.outputs, last[output.request_id].outputs, strict=True):
                    new.token_ids, new.text = before.token_ids + new.token_ids, before.text + new.text
                    new.logprobs = None if new.logprobs is None else (before.logprobs or []) + new.logprobs
            last[output.request_id] = output
            if not output.finished and abort_at is not None and len(output.outputs[0].token_ids) >= abort_at:
                engine.abort_request(output.request_id)
        engine.check_integrity()
        step += 1
    return last


def live_alone(engine: LLMEngine, lives: Sequence[Life]) -> dict[str, RequestOutput]:
    """Run each alone to its end: the reference of every schedule."""
    return {life.request_id: live(engine, [replace(life, arrival=0, abort_at=None)])[life.request_id] for life in lives}


def assert_lives_agree(
    engine: LLMEngine, lives: Sequence[Life], expected: dict[str, RequestOutput], label: str = "",
    before_step: Callable[[], object] = lambda: None, **how: Any,
) -> dict[str, RequestOutput]:  # fmt: skip
    """Run the requests together: each agrees with its output of `live_alone`. ``how``: see `assert_agree`."""
    got = live(engine, lives, before_step)
    for life in lives:
        try:
            assert_agree(got[life.request_id], expected[life.request_id], **how)
        except AssertionError as error:
            raise AssertionError(f"{label}, {life}: {error}") from error
    engine.core.scheduler.check_idle()
    return got


def assert_agree(got: RequestOutput, expected: RequestOutput, *, tolerance: float = 1e-5, ties: bool = True) -> None:
    """The same tokens, texts, reasons and logprobs of all sequences; an aborted request has a beginning of the tokens.

    Args:
        ties: whether tokens that tie within the tolerance may be in either list of the most probable ones.
    """
    assert got.finished
    for mine, other in zip(got.outputs, expected.outputs, strict=True):
        if mine.finish_reason == "abort":
            assert mine.token_ids == other.token_ids[: len(mine.token_ids)]
        else:
            assert (mine.token_ids, mine.text) == (other.token_ids, other.text)
            assert (mine.finish_reason, mine.stop_reason) == (other.finish_reason, other.stop_reason)
            total = pytest.approx(other.cumulative_logprob, abs=tolerance * len(mine.token_ids))
            assert mine.cumulative_logprob == total
        assert (mine.logprobs is None) == (other.logprobs is None)
        for here, there in zip(mine.logprobs or [], other.logprobs or [], strict=False):
            _assert_close(here, there, tolerance, ties)
    if got.outputs[0].token_ids:
        assert (got.prompt_logprobs is None) == (expected.prompt_logprobs is None)
        for here, there in zip(got.prompt_logprobs or [], expected.prompt_logprobs or [], strict=True):
            assert (here is None) == (there is None)
            _assert_close(here or {}, there or {}, tolerance, ties)


def _assert_close(here: dict[int, Any], there: dict[int, Any], tolerance: float, ties: bool) -> None:
    """Two entries of logprobs."""
    assert ties or here.keys() == there.keys()
    for token in here.keys() & there.keys():
        assert abs(here[token].logprob - there[token].logprob) <= tolerance
    values = (sorted(entry.logprob for entry in entries.values()) for entries in (here, there))
    assert all(abs(one - other) <= tolerance for one, other in zip(*values, strict=True))


OPENINGS = (
    "Once there was a fox named",
    "One morning, the little bear went to the river. One morning, the little bear",
    "Pip the mouse, Pip the mouse, Pip",
    "Once there was a fox named Mo who had a red kite. The kite was",
)


def story_lives(tokenizer: Tokenizer, max_model_len: int, stop_inside: str) -> list[Life]:
    """Requests that use every parameter, end at every limit, and are aborted.

    Args:
        tokenizer: the embedded model's.
        stop_inside: a string that the greedy continuation of the first opening comes to, not at a token's edge.
    """
    openings = [tokenizer.encode(opening) for opening in OPENINGS]
    long = (openings[1] * 8)[:max_model_len]
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
        "stop-token": case(1, **random, stop_token_ids=some_words[::4], ignore_eos=False),
        "stop-string": case(0, **greedy, stop=[stop_inside], max_tokens=40, logprobs=1),
        "stop-included": case(0, **greedy, stop=[stop_inside], include_stop_str_in_output=True, max_tokens=40),
        "stop-late": case(2, **random, stop=[" ", "."], min_tokens=9),
        "copies": case(1, **random, n=3, logprobs=1, max_tokens=13),
        "one": case(0, **greedy, max_tokens=1, logprobs=1),
        "two": case(1, **random, max_tokens=2),
        "three": case(2, **greedy, max_tokens=3),
        "prompt-logprobs": case(3, **greedy, prompt_logprobs=2, logprobs=2),
        "last": near_the_end(max_model_len - 1, **greedy),
        "last-two": near_the_end(max_model_len - 2, **random),
        "last-few": near_the_end(max_model_len - 7, **greedy, logprobs=1),
        "to-the-end": near_the_end(40, **random),
        "one-token": near_the_end(20, **random, logit_bias={common[0]: 100.0}),
        "aborted": case(3, abort_at=7, **greedy, output_kind=RequestOutputKind.CUMULATIVE),
        "aborted-at-once": case(0, abort_at=0, **greedy),
        "everything": case(2, **everything),
    }
    return [Life(name, *fields) for name, fields in made.items()]


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["age"],
    "additionalProperties": False,
}
CONSTRAINTS: list[dict[str, Any]] = [
    {"json": PERSON, "disable_any_whitespace": True},
    {"json": PERSON, "whitespace_pattern": "[ \n]{0,2}"},
    {"json": {"properties": {"a": {"type": "boolean"}}, "required": ["a"], "type": "object"}},
    {"json": {"type": "array", "items": {"type": "string"}, "uniqueItems": False}},
    {"json_object": True},
    {"regex": r"[a-c]{2,9}-\d{3}"},
    {"regex": "(the |fox |and )*"},
    {"choice": ["positive", "negative", "no opinion"]},
    {"grammar": 'start: "(" WORD ("," WORD)~2 ")"\nWORD: /[a-z]{1,4}/'},
    {"grammar": 'root ::= "<" [0-9]+ ">" | "once upon a time"'},
    {"structural_tag": {"structures": [{"begin": "<f>", "schema": PERSON, "end": "</f>"}], "triggers": ["<f"]}},
    {"choice": ["left", "right"], "reasoning_end": "e"},
    {"json": PERSON, "reasoning_end": "</t>", "max_reasoning_tokens": 5, "reasoning_begin": "<t>"},
]


def grammar_lives(seed: int, vocab_size: int) -> list[Life]:
    """Requests of which most have a grammar; they share beginnings, arrive over some steps, and some are aborted."""
    rng = random.Random(seed)
    base = [rng.randrange(6, vocab_size) for _ in range(30)]
    lives = []
    for number in range(rng.randint(2, 9)):
        shared, size = rng.randint(0, 20), rng.randint(1, 20)
        prompt = base[:shared] + [rng.randrange(6, vocab_size) for _ in range(size)]
        params, max_tokens = random_params(rng, vocab_size), rng.randint(1, 40)
        min_tokens = min(params.min_tokens, max_tokens)
        params = replace(params, detokenize=True, max_tokens=max_tokens, min_tokens=min_tokens, prompt_logprobs=None)
        if rng.random() < 0.2:
            params = replace(params, stop=["a", '",'], include_stop_str_in_output=rng.random() < 0.5)
        if params.temperature and rng.random() < 0.3:
            params = replace(params, n=2)
        if rng.random() < 0.85:
            allowed = params.allowed_token_ids
            constraint = StructuredOutputsParams(**rng.choice(CONSTRAINTS))
            params = replace(
                params,
                structured_outputs=constraint,
                allowed_token_ids=None if allowed is None else [1, *range(6, vocab_size, 2)],
            )
        abort_at = rng.choice([None, None, None, rng.randint(0, params.max_tokens or 0)])
        lives.append(Life(f"r{number}", prompt, params, rng.randint(0, 12), abort_at))
    return lives
