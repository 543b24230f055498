"""The short way of outputs without stop strings against the general one."""

from __future__ import annotations

import copy
import pickle
from array import array
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fleetfoot.assets import embedded_model_path
from fleetfoot.engine.input_processor import EngineRequest
from fleetfoot.engine.output_processor import OutputProcessor
from fleetfoot.engine.stats import StatsCollector
from fleetfoot.outputs import Logprob
from fleetfoot.records.request import RequestStatus
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.records.step import EngineOutput, RowLogprobs, SequenceEnd
from fleetfoot.tokenizer.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_path(embedded_model_path())
TOKENS = st.lists(st.integers(6, 260), min_size=1, max_size=3)  # bytes and parts of characters
CALLS = st.lists(st.lists(TOKENS, min_size=1, max_size=3), min_size=1, max_size=6)
"""For each call of `process`, the tokens of its steps."""


def packed_logprobs(tokens: list[int], num_top: int | None) -> list[bytes] | None:
    """Of each token, and of the tokens behind it as the most probable ones."""
    if num_top is None:
        return None
    places = range(1, 1 + num_top)
    rows = [([t, *[t + i for i in places]], [-0.5 - t, *[-0.25 * i for i in places]], 9) for t in tokens]
    return [RowLogprobs(*row).pack() for row in rows]


def run(
    kind: RequestOutputKind,
    calls: list[list[list[int]]],
    *,
    detokenize: bool,
    is_general: bool,
    change: int,
    num_top: int | None,
) -> Any:
    """The outputs, and what the statistics count. ``change``: the call before which the weights change."""
    stats = StatsCollector()
    processor = OutputProcessor(TOKENIZER, lambda *_: None, stats)
    params = SamplingParams(output_kind=kind, detokenize=detokenize, max_tokens=100, logprobs=num_top)
    request = EngineRequest("r", None, array("i", [5, 200]), params, [], None, 100, 0, None, 0.0)
    processor.add(request, {5: None}, 1.0)
    if is_general:
        state = processor._requests["r"]
        state.is_single_delta = state.sequences[0].is_fast = False
    outputs: list[Any] = []
    for place, steps in enumerate(calls):
        if place == change:
            processor.change_weights(1)
        made = [EngineOutput(5, list(tokens), packed_logprobs(tokens, num_top)) for tokens in steps]
        if not place:
            made[0].num_cached_tokens, made[0].scheduled_ts = 1, 0.5
        outputs += processor.process(made, 2.0 + place)
    end = SequenceEnd(int(RequestStatus.FINISHED_LENGTH), None, 1, 0, 0, 0.5, None, None)
    outputs += processor.process([EngineOutput(5, [7], packed_logprobs([7], num_top), end=end)], 99.0)
    assert all((output.num_cached_tokens, output.metrics.scheduled_ts) == (1, 0.5) for output in outputs)
    return outputs, list(stats.itl), stats.num_generation_tokens


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@settings(max_examples=25, deadline=None)
@given(calls=CALLS, detokenize=st.booleans(), change=st.integers(0, 6), num_top=st.sampled_from([None, 0, 2]))
def test_both_ways_have_the_same_outputs(
    kind: RequestOutputKind,
    calls: list[list[list[int]]],
    detokenize: bool,
    change: int,
    num_top: int | None,
) -> None:
    options: dict[str, Any] = {"detokenize": detokenize, "change": change, "num_top": num_top}
    short = run(kind, calls, is_general=False, **options)
    copies = [pickle.loads(pickle.dumps(output)) for output in short[0]]
    assert short == run(kind, calls, is_general=True, **options)
    assert copies == copy.deepcopy(short[0]) == short[0]
    texts = [output.outputs[0].text for output in short[0]]
    tokens = [token for steps in calls for step in steps for token in step] + [7]
    if detokenize and kind is RequestOutputKind.DELTA:
        prompt = TOKENIZER.decode([5, 200])
        assert "".join(texts) == TOKENIZER.decode([5, 200, *tokens]).removeprefix(prompt.rstrip("\ufffd"))
    completions = [output.outputs[0] for output in short[0]]
    last = completions[-1]
    if num_top is None:
        assert all(each.logprobs is each.cumulative_logprob is None for each in completions)
        return
    entries = [entry for each in completions for entry in each.logprobs]
    if kind is RequestOutputKind.CUMULATIVE:
        entries = last.logprobs
        assert all(mine is last.logprobs[i] for each in completions for i, mine in enumerate(each.logprobs))
    assert [list(entry) for entry in entries] == [[token + i for i in range(1 + num_top)] for token in tokens]
    assert entries[0][tokens[0]] == Logprob(-0.5 - tokens[0], 9, TOKENIZER.decode_token(tokens[0]))
    assert last.cumulative_logprob == -sum(tokens) - 0.5 * len(tokens)
    assert replace(last, logprobs=None).logprobs is None
