"""Threads for transfers that run beside the steps."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class IOThreads:
    """A fixed number of threads, which start with the first jobs. Its methods are called in one thread.

    They are daemons: a disk that hangs must not keep the process from ending. ``name``: of the threads, for stack
    dumps; ``num_threads``: how many jobs run at the same time.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._name, self._num_threads = name, num_threads
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None stops the threads
        self._threads: list[threading.Thread] = []
        self._is_stopped = False

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job, which reports its own errors. Raises RuntimeError if the threads were stopped."""
        if self._is_stopped:
            raise RuntimeError(f"the threads of {self._name} were stopped")
        self._jobs.put(job)
        if len(self._threads) < self._num_threads:
            name = f"{self._name}-{len(self._threads)}"
            self._threads.append(threading.Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()

    def stop(self, timeout: float, *, finish: bool) -> bool:
        """Stop the threads, after the queued jobs if ``finish``. Jobs that have not begun after ``timeout`` seconds are
        dropped. Returns whether all threads have ended."""
        self._is_stopped = True
        if not finish:
            self._drop_jobs()
        self._jobs.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._drop_jobs()
        self._jobs.put(None)
        return not any(thread.is_alive() for thread in self._threads)

    def _drop_jobs(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                logger.exception("a job of %s failed", self._name)
        self._jobs.put(None)  # for the next thread


def drain(results: queue.SimpleQueue[_T]) -> Iterator[_T]:
    """The items of a queue that has no other consumer; does not wait."""
    while not results.empty():
        yield results.get()
