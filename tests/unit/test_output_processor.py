"""The short way of outputs without logprobs and stop strings against the general one."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fleetfoot.assets import embedded_model_path
from fleetfoot.engine.input_processor import EngineRequest
from fleetfoot.engine.output_processor import OutputProcessor
from fleetfoot.engine.stats import StatsCollector
from fleetfoot.records.request import FINISH_REASONS, RequestStatus
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.records.step import EngineOutput
from fleetfoot.tokenizer.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_path(embedded_model_path())
TOKENS = st.lists(st.integers(6, 260), min_size=1, max_size=3)  # bytes and parts of characters
CALLS = st.lists(st.lists(TOKENS, min_size=1, max_size=3), min_size=1, max_size=6)
"""For each call of `process`, the tokens of its steps."""


def run(
    kind: RequestOutputKind, calls: list[list[list[int]]], *, detokenize: bool, is_general: bool, change: int
) -> Any:
    """The outputs, and what the statistics count. ``change``: the call before which the weights change."""
    stats = StatsCollector()
    processor = OutputProcessor(TOKENIZER, lambda *_: None, stats)
    params = SamplingParams(output_kind=kind, detokenize=detokenize, max_tokens=100)
    request = EngineRequest("r", None, array("i", [5, 200]), params, [], None, 100, 0, None, 0.0)
    sequence: Any = SimpleNamespace(
        request_id="r", status=RequestStatus.RUNNING, is_finished=False, finish_reason=None, stop_reason=None,
        num_cached_tokens=1, num_drafted=0, num_accepted=0, scheduled_ts=0.5, kv_transfer_output=None,
    )  # fmt: skip
    processor.add(request, [sequence], 1.0)
    if is_general:
        state = processor._requests["r"]
        state.is_single_delta = state.sequences[0].is_fast = False
    outputs: list[Any] = []
    for place, steps in enumerate(calls):
        if place == change:
            processor.change_weights(1)
        outputs += processor.process([EngineOutput(sequence, list(tokens), 0) for tokens in steps], 2.0 + place)
    sequence.status, sequence.is_finished = RequestStatus.FINISHED_LENGTH, True
    sequence.finish_reason = FINISH_REASONS[sequence.status]
    outputs += processor.process([EngineOutput(sequence, [7], 0)], 99.0)
    return outputs, list(stats.itl), stats.num_generation_tokens


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@settings(max_examples=25, deadline=None)
@given(calls=CALLS, detokenize=st.booleans(), change=st.integers(0, 6))
def test_both_ways_have_the_same_outputs(
    kind: RequestOutputKind, calls: list[list[list[int]]], detokenize: bool, change: int
) -> None:
    short = run(kind, calls, detokenize=detokenize, is_general=False, change=change)
    assert short == run(kind, calls, detokenize=detokenize, is_general=True, change=change)
    texts = [output.outputs[0].text for output in short[0]]
    tokens = [token for steps in calls for step in steps for token in step] + [7]
    if detokenize and kind is RequestOutputKind.DELTA:
        prompt = TOKENIZER.decode([5, 200])
        assert "".join(texts) == TOKENIZER.decode([5, 200, *tokens]).removeprefix(prompt.rstrip("\ufffd"))
