"""Random requests, with arrivals and aborts; all from one seed, so that a failure can be repeated."""

import random
from dataclasses import dataclass, replace
from typing import Any

from fleetfoot.engine.engine import LLMEngine
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Life:
    """A request, the step before which it arrives, and the output length at which it is aborted, if it is."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    arrival: int
    abort_at: int | None


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


def live(engine: LLMEngine, lives: list[Life]) -> dict[str, RequestOutput]:
    """Run them, checking integrity after each step; the last output of each, aborted ones too."""
    arriving = sorted(lives, key=lambda life: life.arrival)
    by_id = {life.request_id: life for life in lives}
    last: dict[str, RequestOutput] = {}
    step = 0
    while arriving or engine.has_unfinished_requests():
        while arriving and arriving[0].arrival <= step:
            life = arriving.pop(0)
            engine.add_request(life.request_id, life.prompt, life.params)
            if life.abort_at == 0:
                engine.abort_request(life.request_id)
        for output in engine.step():
            last[output.request_id] = output
            abort_at = by_id[output.request_id].abort_at
            if not output.finished and abort_at is not None and len(output.outputs[0].token_ids) >= abort_at:
                engine.abort_request(output.request_id)
        engine.check_integrity()
        step += 1
    return last


def live_alone(engine: LLMEngine, lives: list[Life]) -> dict[str, RequestOutput]:
    """Run each alone to its end: the reference of every schedule."""
    return {life.request_id: live(engine, [replace(life, arrival=0, abort_at=None)])[life.request_id] for life in lives}


def assert_lives_agree(
    engine: LLMEngine, lives: list[Life], expected: dict[str, RequestOutput], label: str, *, tolerance: float = 1e-5
) -> None:
    """Run the requests together: each agrees with its output of `live_alone`."""
    got = live(engine, lives)
    for life in lives:
        try:
            assert_agree(got[life.request_id], expected[life.request_id], tolerance=tolerance)
        except AssertionError as error:
            raise AssertionError(f"{label}, {life}: {error}") from error
    engine.core.scheduler.check_idle()


def assert_agree(got: RequestOutput, expected: RequestOutput, *, tolerance: float = 1e-5) -> None:
    """The same tokens, reasons and logprobs; an aborted request has a beginning of them."""
    mine, other = got.outputs[0], expected.outputs[0]
    if mine.finish_reason == "abort":
        assert mine.token_ids == other.token_ids[: len(mine.token_ids)]
    else:
        assert mine.token_ids == other.token_ids
        assert (mine.finish_reason, mine.stop_reason) == (other.finish_reason, other.stop_reason)
    assert (mine.logprobs is None) == (other.logprobs is None)
    for here, there in zip(mine.logprobs or [], other.logprobs or [], strict=False):
        _assert_close(here, there, tolerance)
    if mine.token_ids and expected.prompt_logprobs is not None:
        assert got.prompt_logprobs is not None
        for here, there in zip(got.prompt_logprobs, expected.prompt_logprobs, strict=True):
            assert (here is None) == (there is None)
            _assert_close(here or {}, there or {}, tolerance)


def _assert_close(here: dict[int, Any], there: dict[int, Any], tolerance: float) -> None:
    """Two entries of logprobs. Tokens that tie within the tolerance may be in either's list."""
    for token in here.keys() & there.keys():
        assert abs(here[token].logprob - there[token].logprob) <= tolerance
    values = (sorted(entry.logprob for entry in entries.values()) for entries in (here, there))
    assert all(abs(one - other) <= tolerance for one, other in zip(*values, strict=True))
