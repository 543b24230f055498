"""Work of a client's size runs in threads that clients share fairly."""

import asyncio
import contextlib
import gc
import os
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import ContextVar
from typing import Any

import pytest

from fleetfoot.server.http import ApiError
from fleetfoot.utils.work_pool import LARGE, TRIM_COST, PoolFullError, WorkPool


class HeldExecutor(Executor):
    """Runs a function when it is told to."""

    def __init__(self) -> None:
        self.held: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, function: Any, /, *arguments: Any, **keywords: Any) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        self.held.append((future, lambda: function(*arguments, **keywords)))
        return future

    def run_one(self) -> None:
        future, function = self.held.pop(0)
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def order_of(jobs: list[tuple[str, int, str]], num_threads: int = 1) -> list[str]:
    """The names of jobs ``(client, cost, name)`` in the order in which they run."""
    executor, order = HeldExecutor(), []
    pool = WorkPool(num_threads, 100, executor=executor, trim=lambda: None)
    tasks = [asyncio.ensure_future(pool.run(client, cost, order.append, name)) for client, cost, name in jobs]
    await turn()
    while executor.held:
        executor.run_one()
        await turn()
    await asyncio.gather(*tasks)
    pool.close()
    return order


def test_clients_take_turns() -> None:
    jobs = [("a", 1000, f"a{number}") for number in range(4)] + [("b", 1000, "b0"), ("b", 1000, "b1")]
    assert asyncio.run(order_of(jobs)) == ["a0", "a1", "b0", "a2", "b1", "a3"]


def test_small_work_does_not_wait_for_large_work_of_any_client() -> None:
    jobs = [("a", 100_000, f"a{number}") for number in range(3)] + [("a", 100, "small"), ("b", 200, "other")]
    assert asyncio.run(order_of(jobs)) == ["a0", "small", "other", "a1", "a2"]


def test_large_work_is_not_starved_by_small_work() -> None:
    jobs = [("a", 100, "first"), ("b", 1000, "large"), *(("a", 100, f"a{number}") for number in range(30))]
    order = asyncio.run(order_of(jobs))
    assert 5 < order.index("large") < 15


def test_large_work_never_has_all_threads() -> None:
    async def run() -> None:
        executor = HeldExecutor()
        pool = WorkPool(2, 100, executor=executor, trim=lambda: None)
        large = [asyncio.ensure_future(pool.run("a", LARGE, int)) for _ in range(3)]
        await turn()
        assert len(executor.held) == 1
        small = asyncio.ensure_future(pool.run("b", 10, int))
        await turn()
        assert len(executor.held) == 2
        while executor.held:
            executor.run_one()
            await turn()
        assert await asyncio.gather(small, *large) == [0] * 4
        pool.close()

    asyncio.run(run())


def test_the_queue_is_bounded_and_what_is_cancelled_does_not_run() -> None:
    async def run() -> None:
        executor, ran = HeldExecutor(), []
        pool = WorkPool(1, 2, executor=executor, trim=lambda: None)
        tasks = [asyncio.ensure_future(pool.run("a", 1, ran.append, number)) for number in range(3)]
        await turn()
        with pytest.raises(PoolFullError) as raised:
            await pool.run("b", 1, ran.append, 9)
        refused = ApiError.of(raised.value)
        assert (raised.value.num_waiting, refused.status, refused.retry_after) == (2, 429, 1)
        tasks[1].cancel()
        await turn()
        while executor.held:
            executor.run_one()
            await turn()
        assert ran == [0, 2]
        pool.close()

    asyncio.run(run())


def test_results_errors_and_the_context() -> None:
    name: ContextVar[str] = ContextVar("name")

    def fail() -> None:
        raise ValueError("no")

    async def run() -> None:
        pool = WorkPool(2, 10, nice=3, trim=lambda: None)
        assert await pool.run("a", 1, os.nice, 0) == os.nice(0) + 3 * (sys.platform == "linux")
        name.set("r")
        assert await pool.run("a", 1, name.get) == "r"
        with pytest.raises(ValueError, match="no"):
            await pool.run("a", 1, fail)
        assert pool.num_waiting == 0
        pool.close()

    asyncio.run(run())


def test_what_failed_work_held_is_freed_at_once() -> None:
    class Body:
        pass

    def fail(body: Body) -> None:
        raise ValueError("no")

    async def run() -> None:
        pool = WorkPool(1, 10, trim=lambda: None)
        body = Body()
        held = weakref.ref(body)
        with contextlib.suppress(ValueError):
            await pool.run("a", 1, fail, body)
        del body
        await turn()
        pool.close()
        assert held() is None

    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


def test_memory_is_given_back_after_large_work_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(cost: int) -> int:
        trimmed: list[int] = []
        pool = WorkPool(1, 10, trim=lambda: trimmed.append(1))
        loop = asyncio.get_running_loop()
        timers: list[Any] = []
        monkeypatch.setattr(loop, "call_later", lambda delay, *call: timers.append(call) or loop.call_soon(int))
        await pool.run("a", cost, int)
        await turn()
        for function, *arguments in timers:
            await function(*arguments)
        pool.close()
        return len(trimmed)

    assert asyncio.run(run(TRIM_COST)) == 1
    assert asyncio.run(run(TRIM_COST - 1)) == 0
