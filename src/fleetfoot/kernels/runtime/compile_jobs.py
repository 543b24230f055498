"""The order in which kernels are compiled, and loaded beside the steps of an engine.

To load a kernel takes 1 to 3 ms of the interpreter's lock, which the steps need too. `LoadPacer` decides when that is
possible; `CompileJobs` has the queue.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from threading import Condition
from typing import Any

import torch

from fleetfoot.kernels.runtime.compile_worker import build_launcher, is_cached, release_sources

logger = logging.getLogger(__name__)

_NOTHING = object()

IDLE_S = 0.02
"""An engine is idle when its last step has ended that long ago."""
BUSY_FACTOR = 100
"""While the engine is busy, the pause after a kernel is that many times as long as its loading."""
_RECHECK_S = 0.1


class LoadPacer:
    """Decides when a kernel that no step has missed is loaded: at once before the first step and while the engine is
    idle, else with pauses, so that steps lose 1% of their time. ``clock``: seconds; ``cpu_clock``: those that the
    calling thread has computed."""

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, cpu_clock: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock, self._cpu_clock = clock, cpu_clock
        self._num_running = 0
        self._last_step: float | None = None
        self._next_load = 0.0

    def step_begins(self) -> None:
        self._num_running += 1

    def step_ends(self) -> None:
        self._num_running -= 1
        self._last_step = self._clock()

    @property
    def is_idle(self) -> bool:
        """Whether no step runs or has run in the last `IDLE_S` seconds."""
        if self._num_running:
            return False
        return self._last_step is None or self._clock() - self._last_step >= IDLE_S

    @contextmanager
    def load(self) -> Iterator[None]:
        """A context in which a kernel is loaded."""
        begin = self._cpu_clock()
        yield
        self._next_load = self._clock() + BUSY_FACTOR * (self._cpu_clock() - begin)

    def delay(self) -> float:
        """Seconds after which this is to be called again; 0: a kernel can be loaded now."""
        if self.is_idle:
            return 0.0
        return min(max(0.0, self._next_load - self._clock()), _RECHECK_S)


@dataclass(eq=False, slots=True)
class _Job:
    """``run``: Triton's, which compiles a kernel or reads it from the cache; ``kernel``: its result, if this process
    has compiled it."""

    future: Future[Any]
    run: Callable[[], Any]
    kernel: Any = _NOTHING


class CompileJobs(Executor):
    """The queue of `CompileAhead`: jobs are compiled, by any number of threads, and then loaded, one at a time.

    Work starts after a dry pass, which running threads would slow down many times.

    Args:
        device: a GPU to load the kernels on; None: they are loaded at their first launch.
        most_compiling: number of jobs that are compiled at a time.
    """

    def __init__(
        self, device: torch.device | None = None, pacer: LoadPacer | None = None, most_compiling: int = 1
    ) -> None:
        self._device = device
        self._pacer = pacer or LoadPacer()
        self.most_compiling = most_compiling
        self.only_while_idle = False
        """Whether jobs are compiled only while no step runs."""
        self._to_compile: deque[_Job] = deque()
        self._to_load: deque[_Job] = deque()
        self._urgent: set[Future[Any]] = set()
        self._slow: set[Future[Any]] = set()
        self._changed = Condition()
        self.num_uncached = 0
        """Number of kernels that `find_cached` has not found."""
        self._num_threads = self._num_compiling = 0
        self._is_loading = self._is_waiting = self._is_dropped = False

    def submit(self, job: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        future: Future[Any] = Future()
        run = partial(job, *arguments, **keywords) if arguments or keywords else job
        with self._changed:
            self._to_compile.append(_Job(future, run))
        return future

    def rotate(self, number: int) -> None:
        """Move the first jobs to the end."""
        with self._changed:
            self._to_compile.rotate(-number)

    def find_cached(self) -> None:
        """Let the kernels that are in the cache on disk wait for loading only."""
        with self._changed:
            jobs = [*self._to_compile]
            self._to_compile.clear()
            for job in jobs:
                (self._to_load if is_cached(job.future) else self._to_compile).append(job)
            self.num_uncached += len(self._to_compile)

    def hurry(self, futures: Iterable[Future[Any]]) -> None:
        """Compile and load these before all others, without pauses: a step has missed them."""
        with self._changed:
            self._urgent.update(future for future in futures if not future.done())
            self._changed.notify_all()

    def begin_with(self, future: Future[Any]) -> None:
        """Compile this before others that no step has missed: it takes seconds, and a start ends with the last one."""
        with self._changed:
            self._slow.add(future)

    def claim_threads(self, most: int) -> int:
        """The number of threads to start with `work`, so that there are no more than ``most``."""
        with self._changed:
            number = max(0, min(most - self._num_threads, len(self._to_compile) + bool(self._to_load)))
            self._num_threads += number
        return number

    def work(self, prepare: Callable[[Callable[[], Any]], bool] = lambda job: False) -> None:
        """Run jobs until none is left that another thread does not run.

        Args:
            prepare: called with each job that is not in the cache; returns whether it is there now.
        """
        while (step := self._next()) is not None:
            run, job = step
            try:
                run(job, prepare)
            except BaseException as error:
                if not self._is_dropped:  # an error of `drop` is expected
                    logger.warning("a kernel cannot be compiled ahead: %s: %s", type(error).__name__, error)
                job.future.set_exception(error)

    def _next(self) -> tuple[Callable[[_Job, Any], None], _Job] | None:
        """What a thread does next; None: it ends."""
        with self._changed:
            while not self._is_dropped:
                delay = 0.0
                if self._to_load and not self._is_loading:
                    first = self._first(self._to_load)
                    delay = 0.0 if first.future in self._urgent else self._pacer.delay()
                    if delay == 0:
                        self._to_load.remove(first)
                        self._is_loading = True
                        return self._load, first
                if self._to_compile and self.only_while_idle and not self._pacer.is_idle:
                    delay = _RECHECK_S
                elif self._to_compile and self._num_compiling < self.most_compiling:
                    first = self._first(self._to_compile)
                    self._to_compile.remove(first)
                    self._num_compiling += 1
                    return self._compile, first
                if delay == 0 or self._is_waiting:
                    break
                self._is_waiting = True
                self._changed.wait(delay)
                self._is_waiting = False
            self._num_threads -= self._num_threads > 0
            return None

    def _first(self, jobs: deque[_Job]) -> _Job:
        """An urgent job, else a slow one, else the first one."""
        return next((job for first in (self._urgent, self._slow) for job in jobs if job.future in first), jobs[0])

    def _compile(self, job: _Job, prepare: Callable[[Callable[[], Any]], bool]) -> None:
        try:
            if not job.future.set_running_or_notify_cancel():
                return
            if not (is_cached(job.future) or prepare(job.run)):
                job.kernel = job.run()
                build_launcher(job.kernel)
        finally:
            with self._changed:
                self._num_compiling -= 1
        with self._changed:
            if self._is_dropped:
                raise CancelledError
            self._to_load.append(job)

    def _load(self, job: _Job, _: object) -> None:
        """Load a kernel on the device, so that its first launch does not. Loading is what holds the steps up."""
        try:
            if not (job.future.running() or job.future.set_running_or_notify_cancel()):
                return
            with self._pacer.load():
                kernel = job.run() if job.kernel is _NOTHING else job.kernel
                if self._device is not None and self._device.type == "cuda":
                    if self._device.index is not None:
                        torch.cuda.set_device(self._device)  # of this thread
                    with suppress(Exception):  # the first launch raises it
                        kernel._init_handles()
                release_sources(kernel)
        finally:
            with self._changed:
                self._is_loading = False
                self._urgent.discard(job.future)
                self._slow.discard(job.future)
        job.future.set_result(kernel)

    def drop(self) -> None:
        """Cancel what has not started."""
        with self._changed:
            self._is_dropped = True
            jobs = [*self._to_compile, *self._to_load]
            self._to_compile.clear()
            self._to_load.clear()
            self._changed.notify_all()
        for job in jobs:
            if not job.future.cancel():  # compiled, and not loaded
                job.future.set_exception(CancelledError())
