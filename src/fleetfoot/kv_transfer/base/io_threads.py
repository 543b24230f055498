"""Threads for transfers that run beside the steps."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class IOThreads:
    """A fixed number of threads, which start with the first job.

    They are daemons: a disk that hangs must not keep the process from ending.

    Args:
        name: of the threads, for stack dumps.
        num_threads: how many jobs run at the same time.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._jobs: deque[Callable[[], None]] = deque()
        self._condition = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._is_stopped = False

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job, which reports its own errors.

        Raises:
            RuntimeError: the threads were stopped.
        """
        with self._condition:
            if self._is_stopped:
                raise RuntimeError(f"the threads of {self._name} were stopped")
            self._jobs.append(job)
            self._condition.notify()
            if len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def stop(self, timeout: float, *, finish: bool) -> bool:
        """Stop the threads, after the queued jobs if ``finish``. Jobs that have not begun after ``timeout`` seconds are
        dropped. Returns whether all threads have ended."""
        with self._condition:
            self._is_stopped = True
            if not finish:
                self._jobs.clear()
            self._condition.notify_all()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._condition:
            self._jobs.clear()
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._jobs:
                    if self._is_stopped:
                        return
                    self._condition.wait()
                job = self._jobs.popleft()
            try:
                job()
            except Exception:
                logger.exception("a job of %s failed", self._name)


def drain(results: queue.SimpleQueue[_T]) -> Iterator[_T]:
    """The items of a queue that has no other consumer; does not wait."""
    while not results.empty():
        yield results.get()
