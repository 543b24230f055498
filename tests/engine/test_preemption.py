"""Requests that lose their KV blocks half-way: they come back and nobody can tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.checkpoints import reference_logits
from tests.helpers.engines import TEXT_MODEL, drain, make_engine, prompt_of, run_requests

from fleetfoot import RequestOutput, RequestOutputKind, SamplingParams

VOCAB = TEXT_MODEL["vocab_size"]
TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 20, "block_size": 4, "max_num_seqs": 4}


def seeded(number: int, **params: Any) -> SamplingParams:
    return SamplingParams(**{"seed": number, "max_tokens": 40, "ignore_eos": True, **params})


def outputs_of(output: RequestOutput) -> list[tuple[list[int], str]]:
    return [(completion.token_ids, completion.text) for completion in output.outputs]


@pytest.mark.parametrize("keywords", [{}, {"max_num_batched_tokens": 7}, {"enable_prefix_caching": False}], ids=str)
def test_tokens_and_text_are_those_of_a_request_that_was_never_preempted(
    keywords: dict[str, Any], text_model: Path
) -> None:
    roomy, tight = make_engine(text_model), make_engine(text_model, **TIGHT, **keywords)
    requests = {
        "random": (prompt_of(9, VOCAB, 1), seeded(1, logprobs=2)),
        "penalties": (prompt_of(14, VOCAB, 2), seeded(2, repetition_penalty=1.4, frequency_penalty=0.5)),
        "minimum": (prompt_of(3, VOCAB, 3), seeded(3, ignore_eos=False, min_tokens=35, logit_bias={1: 20.0})),
        "greedy": (prompt_of(30, VOCAB, 4), seeded(4, temperature=0, bad_words=[" the", " fox"])),
        "copies": (prompt_of(5, VOCAB, 5), seeded(5, n=3, max_tokens=20)),
    }
    expected = run_requests(roomy, requests)
    found = run_requests(tight, requests)
    for name in requests:
        assert outputs_of(found[name]) == outputs_of(expected[name]), name
    assert len(found["minimum"].outputs[0].token_ids) == 36
    logprobs = [
        [entry[token].logprob for token, entry in zip(c.token_ids, c.logprobs or [], strict=True)]
        for c in (found["random"].outputs[0], expected["random"].outputs[0])
    ]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    assert tight.stats().scheduler.num_preemptions > 0
    assert roomy.stats().scheduler.num_preemptions == 0
    for engine in (roomy, tight):
        engine.shutdown()


def test_deltas_neither_repeat_nor_skip(text_model: Path) -> None:
    engine = make_engine(text_model, **TIGHT)
    requests = {
        str(number): (prompt_of(10, VOCAB, number), seeded(number, output_kind=RequestOutputKind.DELTA))
        for number in range(4)
    }
    alone = {}
    for name, (prompt, params) in requests.items():
        alone[name] = drain_tokens(engine, {name: (prompt, params)})[name]
    assert engine.stats().scheduler.num_preemptions == 0
    assert drain_tokens(engine, requests) == alone
    assert engine.stats().scheduler.num_preemptions > 0
    engine.shutdown()


def drain_tokens(engine: Any, requests: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, list[int]]:
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    for output in drain(engine):
        tokens[output.request_id] += output.outputs[0].token_ids
    return tokens


def test_prompt_logprobs_of_a_prompt_that_was_preempted_half_way(
    text_checkpoint: tuple[Path, Any],
) -> None:
    """Its first chunks are computed twice; each position must be reported once."""
    folder, reference = text_checkpoint
    engine = make_engine(folder, num_gpu_blocks_override=18, block_size=4, max_num_seqs=3, max_num_batched_tokens=6)
    prompt = prompt_of(44, VOCAB, 9)
    for number in range(2):  # they grow, and take the blocks that the long prompt was admitted with
        engine.add_request(str(number), prompt_of(4, VOCAB, number), seeded(number, max_tokens=30))
    for _ in range(3):
        engine.step()
    engine.add_request("long", prompt, SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1))
    outputs = drain(engine)
    assert engine.stats().scheduler.num_preemptions > 0
    (long,) = [output for output in outputs if output.request_id == "long" and output.finished]
    assert long.prompt_logprobs is not None and len(long.prompt_logprobs) == len(prompt)
    logprobs = reference_logits(reference, prompt).log_softmax(-1)
    expected = [logprobs[i - 1, prompt[i]].item() for i in range(1, len(prompt))]
    found = [entry.get(prompt[i]) for i, entry in enumerate(long.prompt_logprobs) if entry is not None]
    assert [entry.logprob if entry else None for entry in found] == pytest.approx(expected, abs=1e-4)
    engine.shutdown()


def test_priorities_decide_who_goes(text_model: Path) -> None:
    """The important ones come last, finish first, and are never the ones to be preempted."""
    engine = make_engine(text_model, **TIGHT, scheduling_policy="priority")
    for number in range(3):
        engine.add_request(f"low{number}", prompt_of(10, VOCAB, number), seeded(number), priority=5)
    for _ in range(5):
        engine.step()
    for number in range(2):
        engine.add_request(f"high{number}", prompt_of(10, VOCAB, number), seeded(number), priority=-1)
    finished = [output for output in drain(engine) if output.finished]
    assert {output.request_id for output in finished[:2]} == {"high0", "high1"}
    assert engine.stats().scheduler.num_preemptions > 0
    tokens = {output.request_id: output.outputs[0].token_ids for output in finished}
    assert tokens["high0"] == tokens["low0"] and tokens["high1"] == tokens["low1"]
    engine.shutdown()


def test_a_preempted_request_is_aborted(text_model: Path) -> None:
    engine = make_engine(text_model, **TIGHT)
    for number in range(4):
        engine.add_request(str(number), prompt_of(10, VOCAB, number), seeded(number))
    while not engine.stats().scheduler.num_preemptions:
        engine.step()
    assert engine.stats().scheduler.num_waiting
    engine.abort_request("3")  # the last one to come is the first one to go
    outputs = drain(engine)
    finished = {output.request_id: output.outputs[0] for output in outputs if output.finished}
    assert {name: completion.finish_reason for name, completion in finished.items()} == {
        "0": "length",
        "1": "length",
        "2": "length",
        "3": "abort",
    }
    assert 0 < len(finished["3"].token_ids) < 40
    engine.core.scheduler.check_idle()
    engine.shutdown()


def test_one_request_fills_the_whole_cache(text_model: Path) -> None:
    """80 tokens of KV hold 40 of prompt and 40 of output."""
    engine = make_engine(text_model, **TIGHT)
    output = run_requests(engine, {"r": (prompt_of(40, VOCAB), SamplingParams(temperature=0, max_tokens=None))})["r"]
    other = run_requests(engine, {"r": (prompt_of(40, VOCAB), seeded(0, max_tokens=40))})["r"]
    assert len(other.outputs[0].token_ids) == 40
    assert output.outputs[0].finish_reason in ("length", "stop")
    assert engine.input_processor.max_model_len == 80
    engine.shutdown()
