"""Threads that share an `LLM`: their calls run as one batch, and what ends one call ends no other."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from tests.helpers.engines import prompt_of
from tests.helpers.processes import HANG

from fleetfoot import LLM, EngineDeadError, SamplingParams
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.utils.validation import FieldError

CALLS = [
    (
        [prompt_of(3 + 2 * index, 2048, seed=number) for index in range(number % 3 + 1)],
        SamplingParams(temperature=number % 2, seed=number, max_tokens=5 + number, ignore_eos=True),
    )
    for number in range(7)
]


def run_beside(
    llm: LLM, *functions: Callable[[], object], then: Callable[[], object] = lambda: None
) -> tuple[list[Future[Any]], list[int]]:
    """Run functions in threads beside the next call. They start in its second step, and ``then`` is called in that step
    when all of them wait for their turn. Returns their futures and the numbers of requests in each step, so far."""
    futures: list[Future[Any]] = []
    num_requests: list[int] = []
    waiting: SimpleQueue[int] = SimpleQueue()
    turns, executor = llm._turns._changed, llm.llm_engine.core.executor
    wait, execute = turns.wait, executor.execute_model

    def noted_wait(timeout: float) -> bool:
        waiting.put(threading.get_ident())
        return wait(timeout)

    def execute_model(step: SchedulerOutput) -> None:
        num_requests.append(len(step.rows))
        if len(num_requests) == 2:
            futures.extend(map(ThreadPoolExecutor(16).submit, functions))
            threads: set[int] = set()
            while len(threads) < len(futures):
                threads.add(waiting.get(timeout=HANG))
            then()
        execute(step)

    turns.wait, executor.execute_model = noted_wait, execute_model
    return futures, num_requests


def results(futures: list[Future[Any]]) -> list[Any]:
    """What the functions have returned or raised."""
    return [future.exception(HANG) or future.result() for future in futures]


@pytest.fixture
def llm(text_model: Path) -> Iterator[LLM]:
    with LLM(text_model, device="cpu", max_num_seqs=32, block_size=4) as llm:
        yield llm


def tokens(llm: LLM, prompts: Any, params: Any, use_tqdm: Any = False) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=use_tqdm)]


@pytest.fixture
def expected(llm: LLM) -> Iterator[list[list[list[int]]]]:
    """The tokens of CALLS, which are the same after the test."""
    expected = [tokens(llm, *call) for call in CALLS]
    yield expected
    assert not llm.llm_engine.has_unfinished_requests() and not llm._calls
    llm.llm_engine.check_integrity()
    assert [tokens(llm, *call) for call in CALLS] == expected


def test_calls_of_threads_run_as_one_batch(llm: LLM, expected: Any) -> None:
    futures, num_requests = run_beside(llm, *(partial(tokens, llm, *call) for call in CALLS[1:]))
    assert [tokens(llm, *CALLS[0]), *results(futures)] == expected
    assert num_requests[2] == sum(len(prompts) for prompts, _ in CALLS)


def test_what_ends_a_call_ends_no_other(llm: LLM, expected: Any) -> None:
    """A bad prompt, bad parameters, a progress bar that raises, Ctrl-C."""
    bad = [([[5], []], None), ("text", SamplingParams(stop_token_ids=[9**9])), (*CALLS[1], lambda **_: None)]
    calls = [partial(tokens, llm, *call) for call in (*CALLS[1:], *bad)]
    futures, _ = run_beside(llm, *calls, then=lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        tokens(llm, *CALLS[0])
    *others, prompt, params, bar = results(futures)
    assert others == expected[1:]
    assert [type(error) for error in (prompt, params, bar)] == [FieldError, FieldError, AttributeError]


def test_a_shutdown_ends_all_calls_after_the_step(llm: LLM) -> None:
    futures, _ = run_beside(llm, llm.shutdown, *(partial(tokens, llm, *call) for call in CALLS[1:]))
    with pytest.raises(EngineDeadError, match="was shut down"):
        tokens(llm, *CALLS[0])
    assert [type(result) for result in results(futures)] == [type(None), *[EngineDeadError] * 6]


def test_calls_in_the_middle_of_a_step_are_refused(llm: LLM, expected: Any) -> None:
    """They come from a signal handler or `__del__`; those of the engine itself also from another thread."""

    def interrupt() -> None:
        for refused in (partial(tokens, llm, *CALLS[1]), llm.reset_prefix_cache, llm.llm_engine.step):
            with pytest.raises(RuntimeError, match="during a step"):
                refused()

    _, num_requests = run_beside(llm, then=interrupt)
    assert tokens(llm, *CALLS[0]) == expected[0]
    assert len(num_requests) == 5


@pytest.mark.parametrize("limit", [True, 1e-9])
def test_a_shutdown_drains_calls_of_other_threads(limit: bool | float, text_model: Path) -> None:
    """Until the limit, which is over at once here: then requests end as aborted."""
    llm = LLM(text_model, device="cpu", max_num_seqs=4)
    prompts, params = CALLS[2]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
    futures, _ = run_beside(llm, partial(llm.shutdown, limit))
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    assert results(futures) == [None]
    for output, tokens in zip(outputs, expected, strict=True):
        assert output.finish_reason == ("length" if limit is True else "abort")
        assert output.token_ids == tokens[: len(output.token_ids)]
    with pytest.raises(EngineDeadError, match="was shut down"):
        llm.generate(prompts, params, use_tqdm=False)
    with pytest.raises(ValueError, match="drain is -1; it must be True, False or a number of seconds"):
        llm.shutdown(drain=-1)
