"""Threads for work of a client's size, which an event loop must not do; shared fairly between clients."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import functools
import heapq
import os
import sys
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

_T = TypeVar("_T")

LARGE = 1 << 17
"""Cost of work that never has all threads of a pool, if it has more than one."""
TRIM_COST = 1 << 20
"""Cost of work after which memory is given back to the system."""
_TRIM_S = 1.0
"""Seconds from the end of such work until then: its results are in use at first."""


@dataclass
class PoolFullError(RuntimeError):
    """Too much work waits."""

    num_waiting: int

    def __str__(self) -> str:
        return f"{self.num_waiting} pieces of work wait for a thread of this server, which is the limit"


@dataclass(order=True, slots=True)
class _Job:
    tag: int
    """When it ends in virtual time, the unit of which is cost."""
    number: int
    cost: int = field(compare=False)
    work: Callable[[], Any] = field(compare=False)
    result: asyncio.Future[Any] = field(compare=False)


def _be_nice(nice: int) -> None:
    """Lower the priority of this thread, where it has one of its own."""
    if nice and sys.platform == "linux":
        os.nice(nice)


def trim_memory() -> None:
    """Give freed memory back to the system, where the C library can."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


class WorkPool:
    """Threads that take work in the order of self-clocked fair queueing (Golestani 1994); of one event loop.

    Clients get equal shares of cost, and so do small and large work of one client. Small work does not wait for all
    threads to end large work.

    Args:
        max_waiting: most work that waits.
        nice: added to the nice value of the threads (Linux); not for work that keeps the interpreter.
        trim: called in a thread after work of at least `TRIM_COST`.
    """

    def __init__(
        self,
        num_threads: int,
        max_waiting: int,
        *,
        nice: int = 0,
        executor: Executor | None = None,
        trim: Callable[[], object] = trim_memory,
    ) -> None:
        self._num_threads = num_threads
        self._max_waiting = max_waiting
        self._executor = executor or ThreadPoolExecutor(num_threads, "fleetfoot-work", _be_nice, (nice,))
        self._trim = trim
        self._waiting: tuple[list[_Job], list[_Job]] = ([], [])  # small and large
        self._running = [0, 0]
        self._tags: dict[tuple[object, int], int] = {}
        self._now = 0
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting))

    async def run(self, client: object, cost: int, function: Callable[..., _T], *arguments: Any) -> _T:
        """The result of a function, or what it raises.

        Args:
            cost: about the bytes that it reads.

        Raises:
            PoolFullError: too much waits. Then it does not run.
        """
        if self.num_waiting >= self._max_waiting:
            raise PoolFullError(self.num_waiting)
        flow = (client, cost.bit_length() // 4)
        tag = self._tags[flow] = max(self._now, self._tags.get(flow, 0)) + cost
        work = functools.partial(contextvars.copy_context().run, function, *arguments)
        job = _Job(tag, next(self._numbers), cost, work, asyncio.get_running_loop().create_future())
        heapq.heappush(self._waiting[cost >= LARGE], job)
        self._start()
        try:
            result: _T = await job.result
            return result
        finally:
            del job, work, arguments  # an exception refers to this frame: a cycle would keep what they hold

    def _start(self) -> None:
        while sum(self._running) < self._num_threads and (job := self._next()) is not None:
            if job.result.cancelled():
                continue
            self._now = job.tag
            self._running[job.cost >= LARGE] += 1
            done = asyncio.get_running_loop().run_in_executor(self._executor, job.work)
            done.add_done_callback(functools.partial(self._end, job))
        self._tags = {flow: tag for flow, tag in self._tags.items() if tag > self._now} if self._tags else {}

    def _next(self) -> _Job | None:
        small, large = self._waiting
        if large and (not small or large[0] < small[0]) and self._running[1] < max(1, self._num_threads - 1):
            return heapq.heappop(large)
        return heapq.heappop(small) if small else None

    def _end(self, job: _Job, done: asyncio.Future[Any]) -> None:
        self._running[job.cost >= LARGE] -= 1
        error = done.exception()
        if not job.result.done():
            if error is not None:
                job.result.set_exception(error)
            else:
                job.result.set_result(done.result())
        if job.cost >= TRIM_COST:
            self._trim_later()
        self._start()

    def _trim_later(self) -> None:
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(_TRIM_S, loop.run_in_executor, self._executor, self._trim)

    def close(self) -> None:
        """Take no more work."""
        if self._timer is not None:
            self._timer.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)
