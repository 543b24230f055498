"""Ids of users and ids that the engine makes for a request's copies: none can be taken for another."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.engines import ScriptedExecutor, drain, scripted_engine
from tests.helpers.streams import async_test, gated, submit

from fleetfoot import RequestOutputKind, SamplingParams
from fleetfoot.engine.input_processor import COPY_MARK

PROMPT = [5, 6]
TOKENS = [10, 11, 12]
LOOKALIKES = ["r", "0_r", "1_r", "r_0", "r0", "r#1"]
"""One of them has copies in a test; the others are what ids of copies might look like."""


def params(copies: int, max_tokens: int = 3) -> SamplingParams:
    return SamplingParams(n=copies, max_tokens=max_tokens, output_kind=RequestOutputKind.FINAL_ONLY)


@pytest.mark.parametrize("copies_first", [True, False])
def test_a_request_and_another_ones_copies(copies_first: bool) -> None:
    engine = scripted_engine(ScriptedExecutor())
    for request_id in LOOKALIKES if copies_first else LOOKALIKES[::-1]:
        engine.add_request(request_id, PROMPT, params(2 if request_id == "r" else 1))
    finished = {output.request_id: output for output in drain(engine) if output.finished}
    assert finished.keys() == set(LOOKALIKES)
    for request_id, output in finished.items():
        assert [completion.token_ids for completion in output.outputs] == [TOKENS] * (1 + (request_id == "r"))
    assert {output.outputs[0].finish_reason for output in finished.values()} == {"length"}


@pytest.mark.parametrize("aborted", ["r", "0_r"])
def test_an_abort_ends_one_and_not_the_other(aborted: str) -> None:
    engine = scripted_engine(ScriptedExecutor())
    engine.add_request("r", PROMPT, params(2))
    engine.add_request("0_r", PROMPT, params(1))
    engine.step()
    engine.abort_request(aborted)
    reasons = {output.request_id: [c.finish_reason for c in output.outputs] for output in drain(engine)}
    expected = {"r": ["length"] * 2, "0_r": ["length"]}
    assert reasons == {**expected, aborted: ["abort"] * len(expected[aborted])}
    engine.core.scheduler.check_idle()


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("request_id", [f"r{COPY_MARK}0", COPY_MARK, f"{COPY_MARK}r"])
def test_the_mark_of_copies_is_the_engines_own(request_id: str, copies: int) -> None:
    engine = scripted_engine(ScriptedExecutor())
    engine.add_request("r", PROMPT, params(2))
    with pytest.raises(ValueError, match=r"it must not hold the character '\\x1f'"):
        engine.add_request(request_id, PROMPT, params(copies))
    assert [output.request_id for output in drain(engine)] == ["r"]
    engine.abort_request(f"r{COPY_MARK}0")  # no id of a user's: ends nothing, and is no error


@given(st.dictionaries(st.text("r_01#\x1e", min_size=1, max_size=4), st.integers(1, 3), min_size=1, max_size=6))
def test_no_two_sequences_have_one_id(requests: dict[str, int]) -> None:
    engine = scripted_engine(ScriptedExecutor(), max_num_seqs=18)
    for request_id, copies in requests.items():
        engine.add_request(request_id, PROMPT, params(copies, max_tokens=1))
    assert len(engine.core.scheduler.requests) == sum(requests.values())
    outputs = drain(engine)
    assert {output.request_id: len(output.outputs) for output in outputs} == requests


@async_test
async def test_streams_with_such_ids_get_what_is_theirs() -> None:
    with gated() as (llm, gate):
        gate.open()
        tasks = [submit(llm, PROMPT, params(2 if name == "r" else 1), name) for name in LOOKALIKES]
        outputs = [outputs[-1] for outputs in await asyncio.gather(*tasks)]
        with pytest.raises(ValueError, match="must not hold the character"):
            await submit(llm, PROMPT, params(1), f"r{COPY_MARK}0")
    assert [output.request_id for output in outputs] == LOOKALIKES
    assert [len(output.outputs) for output in outputs] == [2, 1, 1, 1, 1, 1]
    assert all(completion.token_ids == TOKENS for output in outputs for completion in output.outputs)


@pytest.mark.parametrize("aborted", ["r", "0_r"])
@async_test
async def test_an_abort_of_a_stream_ends_one_and_not_the_other(aborted: str) -> None:
    with gated() as (llm, gate):
        tasks = [submit(llm, PROMPT, params(n), name) for name, n in (("r", 2), ("0_r", 1))]
        await gate.arrival()  # the first step has begun
        await llm.abort(aborted)
        gate.open()
        outputs = [outputs[-1] for outputs in await asyncio.gather(*tasks)]
    reasons = {output.request_id: [completion.finish_reason for completion in output.outputs] for output in outputs}
    expected = {"r": ["length"] * 2, "0_r": ["length"]}
    assert reasons == {**expected, aborted: ["abort"] * len(expected[aborted])}
    llm._engine.core.scheduler.check_idle()
