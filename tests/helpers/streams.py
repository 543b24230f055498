"""Helpers for tests of `AsyncLLM`: async tests, streams of outputs, an engine with steps that wait at a gate."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

from fleetfoot import AsyncLLM, RequestOutput, SamplingParams
from tests.helpers.engines import ScriptedExecutor, scripted_engine
from tests.helpers.processes import HANG, Gate

T = TypeVar("T")


def run(coroutine: Awaitable[T], timeout: float = HANG) -> T:
    """Run a coroutine in an event loop of its own."""
    return asyncio.run(asyncio.wait_for(coroutine, timeout))


def async_test(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Decorator: runs a coroutine function as a test."""

    @functools.wraps(test)
    def run_test(*arguments: Any, **fixtures: Any) -> None:
        run(test(*arguments, **fixtures), timeout=5 * HANG)

    return run_test


@contextlib.contextmanager
def gated(script: dict[str, list[int]] | None = None, **limits: Any) -> Iterator[tuple[AsyncLLM, Gate]]:
    """An engine that plays a script, and the gate that holds its steps."""
    gate = Gate()
    llm = AsyncLLM.from_engine(scripted_engine(ScriptedExecutor(script, before_step=gate), **limits))
    try:
        yield llm, gate
    finally:
        gate.open()
        llm.shutdown()


def submit(llm: AsyncLLM, prompt: Any, params: SamplingParams, request_id: Any) -> asyncio.Task[list[RequestOutput]]:
    """A task that collects all outputs of a request."""
    return asyncio.ensure_future(collect(llm.generate(prompt, params, request_id)))


async def collect(stream: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in stream]


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    """Tokens of a stream of deltas."""
    return [token for output in outputs for token in output.outputs[0].token_ids]


def assert_idle(llm: AsyncLLM) -> None:
    """End the engine's thread; then no block, row or request must be left."""
    llm.shutdown()
    assert llm._result_queues == {}
    assert not llm._engine.has_unfinished_requests()
    llm._engine.core.scheduler.check_idle()
    llm._engine.check_integrity()
