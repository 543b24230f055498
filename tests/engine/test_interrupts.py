"""Ctrl-C during `LLM.generate`: it waits for the end of the step, ends that call alone, and is never lost."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.engines import TEXT_MODEL, prompt_of

from fleetfoot import LLM, EngineDeadError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [prompt_of(length, TEXT_MODEL["vocab_size"], seed=length) for length in (3, 9, 5)]
PLACES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "forward": lambda engine: (engine.core.executor, "execute_model"),
    "sample": lambda engine: (engine.core.executor, "sample_tokens"),
    "schedule": lambda engine: (engine.core.scheduler, "schedule"),
    "update": lambda engine: (engine.core.scheduler, "update"),
    "add": lambda engine: (engine.core.scheduler, "add_request"),
    "output": lambda engine: (engine.output_processor, "_request_output"),
}


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def at_call(
    patch: pytest.MonkeyPatch, llm: LLM, place: str, number: int, then: Callable[[], object] = press_ctrl_c
) -> None:
    """Press Ctrl-C when a method is called for the nth time; the handler runs on the spot."""
    owner, name = PLACES[place](llm.llm_engine)
    method, calls = getattr(owner, name), iter(range(1, 1_000_000))

    def called(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == number:
            then()
        return method(*arguments, **keywords)

    patch.setattr(owner, name, called)


@pytest.fixture(scope="module", params=[False, True], ids=["lockstep", "overlapped"])
def start(request: pytest.FixtureRequest, text_model: Path) -> Callable[[], LLM]:
    """Starts an engine."""
    return lambda: LLM(text_model, device="cpu", max_num_seqs=2, block_size=4, async_scheduling=request.param)


@pytest.fixture(scope="module")
def llm(start: Callable[[], LLM]) -> Iterator[LLM]:
    """One for all tests that leave it as it was."""
    with start() as llm:
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


STEPS = [(place, call) for place in ("forward", "sample", "schedule", "update") for call in (1, 2, 5, 9)]


@pytest.mark.parametrize(("place", "call"), [*STEPS, ("add", 2), ("output", 3)])  # 3: in the last step
def test_an_interrupt_ends_the_call_alone(place: str, call: int, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(llm)
    before = llm.stats()
    with monkeypatch.context() as patch:
        at_call(patch, llm, place, call)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert place == "output" or llm.stats().num_finished.get("abort", 0) > before.num_finished.get("abort", 0)
    assert place != "add" or llm.stats().num_steps == before.num_steps
    assert_as_before(llm, expected)


def test_an_interrupt_between_steps(llm: LLM) -> None:
    class Bar:
        def update(self, count: int) -> None:
            press_ctrl_c()

        def close(self) -> None:
            pass

    expected = tokens(llm)
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (2, 50)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[5, 6], [7, 8]], params, use_tqdm=lambda **_: Bar())
    assert_as_before(llm, expected)


def test_a_second_interrupt_does_not_wait(start: Callable[[], LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    with start() as llm:
        at_call(monkeypatch, llm, "forward", 2, lambda: (press_ctrl_c(), press_ctrl_c()))
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def test_a_handler_of_the_users_own_is_left_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens(llm)
    received: list[int] = []
    at_call(monkeypatch, llm, "forward", 2)
    former = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    mine = signal.getsignal(signal.SIGINT)
    try:
        assert tokens(llm) == expected
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, former)
    assert received == [signal.SIGINT]
