"""Ctrl-C during `LLM.generate`: it waits for the end of the step, ends that call alone, and is never lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.engines import TEXT_MODEL, prompt_of

from fleetfoot import LLM, EngineDeadError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [prompt_of(length, TEXT_MODEL["vocab_size"], seed=length) for length in (3, 9, 5)]


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def at_call(number: int, function: Callable[..., Any], then: Callable[[], None] = press_ctrl_c) -> Callable[..., Any]:
    """The function, which presses Ctrl-C when it is called for the nth time; the handler runs on the spot."""
    calls = 0

    def called(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            then()
        return function(*arguments, **keywords)

    return called


@pytest.fixture(params=[False, True], ids=["lockstep", "overlapped"])
def llm(request: pytest.FixtureRequest, text_model: Path) -> Iterator[LLM]:
    with LLM(text_model, device="cpu", max_num_seqs=2, block_size=4, async_scheduling=request.param) as llm:
        yield llm


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def assert_as_before(llm: LLM, expected: list[list[int]]) -> None:
    engine = llm.llm_engine
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not engine.has_unfinished_requests()
    engine.core.scheduler.check_idle()
    engine.check_integrity()
    assert tokens(llm) == expected


@pytest.mark.parametrize("call", [1, 2, 5, 9])
@pytest.mark.parametrize("place", ["execute_model", "sample_tokens", "schedule", "update"])
def test_an_interrupt_inside_a_step_ends_the_call_and_not_the_engine(
    place: str, call: int, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens(llm)
    core = llm.llm_engine.core
    owner: Any = core.executor if hasattr(core.executor, place) else core.scheduler
    with monkeypatch.context() as patch:
        patch.setattr(owner, place, at_call(call, getattr(owner, place)))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert llm.stats().num_finished.get("abort", 0) > 0
    assert_as_before(llm, expected)


def test_an_interrupt_while_requests_are_queued(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(llm)
    before = llm.stats().num_steps
    scheduler = llm.llm_engine.core.scheduler
    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "add_request", at_call(2, scheduler.add_request))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert llm.stats().num_steps == before
    assert_as_before(llm, expected)


def test_an_interrupt_in_the_last_step_is_not_lost(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(llm)
    processor = llm.llm_engine._output_processor
    with monkeypatch.context() as patch:
        patch.setattr(processor, "_request_output", at_call(3, processor._request_output))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_as_before(llm, expected)


def test_requests_of_others_go_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(llm)
    engine = llm.llm_engine
    engine.add_request("stranger", PROMPTS[1], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(engine.core.executor, "execute_model", at_call(2, engine.core.executor.execute_model))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        engine.check_integrity()
    assert [output.request_id for output in outputs if output.finished] == ["stranger"]
    assert outputs[-1].outputs[0].token_ids == expected[1]
    assert_as_before(llm, expected)


def test_a_second_interrupt_does_not_wait(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> None:
        press_ctrl_c()
        press_ctrl_c()

    with LLM(text_model, device="cpu", max_num_seqs=2) as llm:
        executor = llm.llm_engine.core.executor
        monkeypatch.setattr(executor, "execute_model", at_call(2, executor.execute_model, twice))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def test_a_handler_of_the_users_own_is_left_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(llm)
    heard: list[int] = []
    executor = llm.llm_engine.core.executor
    monkeypatch.setattr(executor, "execute_model", at_call(2, executor.execute_model))
    former = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    mine = signal.getsignal(signal.SIGINT)
    try:
        assert tokens(llm) == expected
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, former)
    assert heard == [signal.SIGINT]


def test_another_thread_leaves_signals_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(llm)
    handlers, found = [], []
    executor = llm.llm_engine.core.executor

    def note() -> None:
        handlers.append(signal.getsignal(signal.SIGINT))

    monkeypatch.setattr(executor, "execute_model", at_call(2, executor.execute_model, note))
    thread = threading.Thread(target=lambda: found.extend(tokens(llm)))
    thread.start()
    thread.join()
    assert found == expected
    assert handlers == [signal.default_int_handler]
