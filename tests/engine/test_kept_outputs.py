"""Outputs do not change after they were returned."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.engines import TEXT_MODEL, make_engine, prompt_of
from tests.helpers.streams import async_test, gated

from fleetfoot import LLMEngine, RequestOutput, RequestOutputKind, SamplingParams


@pytest.fixture(scope="module")
def engine(text_model: Path) -> Iterator[LLMEngine]:
    """An engine in which prompts take several steps."""
    engine = make_engine(text_model, max_num_batched_tokens=8, max_num_seqs=4, block_size=4)
    yield engine
    engine.shutdown()


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_later_steps_change_no_earlier_output(kind: RequestOutputKind, engine: LLMEngine) -> None:
    params = SamplingParams(n=2, seed=3, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1, output_kind=kind)
    engine.add_request("r", prompt_of(30, TEXT_MODEL["vocab_size"]), params)
    engine.add_request("s", prompt_of(5, TEXT_MODEL["vocab_size"]), SamplingParams(max_tokens=3, output_kind=kind))
    kept: list[RequestOutput] = []
    as_they_came: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            kept.append(output)
            as_they_came.append(copy.deepcopy(output))
    assert kept == as_they_came
    metrics = [output.metrics for output in kept if output.request_id == "r"]
    assert len({id(one) for one in metrics}) == len(metrics) > 6
    counts = [one.num_generation_tokens for one in metrics]
    assert counts == sorted(counts) and counts[0] < counts[-1] == 12
    assert metrics[0].last_token_ts < metrics[-1].last_token_ts
    lengths = [len(output.prompt_logprobs or []) for output in kept if output.request_id == "r"]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1] == 30


def test_what_a_user_does_to_an_output_changes_no_later_one(engine: LLMEngine) -> None:
    engine.add_request("r", prompt_of(5, TEXT_MODEL["vocab_size"]), SamplingParams(max_tokens=6, ignore_eos=True))
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs.append(copy.deepcopy(output))
            output.metrics.first_token_ts = output.metrics.queued_ts = -1.0
            output.outputs[0].token_ids.clear()
    last = outputs[-1]
    assert len(last.outputs[0].token_ids) == last.metrics.num_generation_tokens == 6
    assert 0 < last.metrics.queued_ts <= last.metrics.first_token_ts < last.metrics.last_token_ts


@async_test
async def test_streams_too() -> None:
    params = SamplingParams(max_tokens=50, output_kind=RequestOutputKind.CUMULATIVE)
    kept: list[RequestOutput] = []
    as_they_came: list[RequestOutput] = []
    with gated() as (llm, gate):
        gate.open()
        async for output in llm.generate([5, 6], params, "r"):
            kept.append(output)
            as_they_came.append(copy.deepcopy(output))
    assert kept == as_they_came
    assert all(output.metrics.num_generation_tokens == len(output.outputs[0].token_ids) for output in kept)
