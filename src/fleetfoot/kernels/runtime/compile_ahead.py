"""Compilation of kernels in parallel, before they are launched.

Triton compiles a kernel at its first launch: one after the other, on one core. Here a *dry pass* runs the code that
launches kernels without launching them: each launch queues the compilation of its kernel, and returns. The kernels and
variants that are compiled are therefore those that will be launched, without a list of kernels. At the start, threads
compile: most of a compilation is spent in LLVM, the assembler and the C compiler of the launcher, outside of the
interpreter's lock. While an engine serves, processes compile (`fleetfoot.kernels.runtime.compile_worker`).

Torch's operations are dry too (`fleetfoot.kernels.runtime.dry_tensors`): they return tensors without memory that have
the properties of the real ones. A dry pass therefore reads and writes no memory, loads no library for matrix products,
which are hundreds of megabytes, and needs no other ranks.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from importlib.util import find_spec
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from fleetfoot.kernels.runtime.compile_worker import CompileWorker, build_launcher, release_sources
from fleetfoot.kernels.runtime.dry_tensors import dry_torch
from fleetfoot.kernels.runtime.triton_support import Launch, instead_of_launching

if TYPE_CHECKING:
    from triton import FutureKernel

logger = logging.getLogger(__name__)

_MOST_THREADS = 16
"""More threads would idle: the front end holds the interpreter's lock for a sixth of a compilation."""


def can_compile_ahead(device: torch.device) -> bool:
    """Whether Triton kernels are used on ``device``, and compiled instead of interpreted."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    import triton

    return not triton.knobs.runtime.interpret


class Compilations:
    """The compilations that a dry pass has queued."""

    def __init__(self, kernels: list[FutureKernel]) -> None:
        self._kernels = kernels

    def wait(self) -> int:
        """Wait for all. Returns the number of failures; a launch of such a kernel compiles it again, and raises."""
        kernels = [kernel.result(ignore_errors=True) for kernel in self._kernels]
        return sum(kernel is None for kernel in kernels)


class CompileAhead:
    """Compiles the kernels that dry passes would launch, in threads or processes.

    Args:
        num_threads: None: one for each core, up to 16.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        from triton import AsyncCompileMode

        self.num_threads = num_threads or min(_MOST_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="fleetfoot-compile")
        self._jobs = _Jobs()
        self._mode = AsyncCompileMode(self._jobs)  # shared by all passes, so that no kernel is queued twice
        self._tally = _Tally()
        self._workers: list[tuple[CompileWorker, Thread]] = []
        self._is_finished = False

    @property
    def num_compiled(self) -> int:
        """Number of compiled kernels that were not in the cache on disk."""
        return self._tally.were_found.count(False)

    @property
    def num_found(self) -> int:
        """Number of kernels that were in the cache on disk."""
        return self._tally.were_found.count(True)

    def queue(self, dry_pass: Callable[[], object], at_once: int | None = None) -> Compilations:
        """Run ``dry_pass`` without launching kernels, and start to compile those that it would have launched.

        A launch uses a kernel as soon as it is compiled. A kernel that is launched earlier is compiled twice.

        Args:
            at_once: number of processes that compile, so that this one can serve; None: the threads of this process
                compile.

        Raises:
            RuntimeError: after `finish`.
        """
        if self._is_finished:
            raise RuntimeError("queue was called after finish")
        # in a context of its own, so that later launches are real
        kernels = copy_context().run(self._collect, dry_pass)
        for _ in range(min(at_once or self.num_threads, self.num_threads)):
            if at_once:
                worker = CompileWorker()
                # a daemon: unlike for the threads of a pool, the interpreter does not wait for it at its end
                thread = Thread(target=self._work_beside, args=(worker,), name="fleetfoot-compile-beside", daemon=True)
                self._workers.append((worker, thread))
                thread.start()
            else:
                self._pool.submit(self._jobs.work)
        return Compilations(kernels)

    def _work_beside(self, worker: CompileWorker) -> None:
        with worker:
            self._jobs.work(worker.compile)

    def _collect(self, dry_pass: Callable[[], object]) -> list[FutureKernel]:
        """The kernels that ``dry_pass`` would launch and that were not compiled before."""
        from triton import FutureKernel

        kernels: list[FutureKernel] = []
        requested: set[Any] = set()

        def launcher(jit: Any, grid: tuple[int, ...]) -> Launch:
            def launch(*arguments: Any, **options: Any) -> None:
                # a model repeats its launches in every layer
                kinds = (id(jit), *map(_kind, arguments), *((name, _kind(value)) for name, value in options.items()))
                with suppress(TypeError):  # a descriptor has no hash
                    if kinds in requested:
                        return
                    requested.add(kinds)
                kernel = jit.warmup(*arguments, grid=grid, **options)
                if isinstance(kernel, FutureKernel):
                    kernels.append(kernel)
                    kernel.future.add_done_callback(lambda _: release_sources(kernel.result(ignore_errors=True)))

            return launch

        self._mode.__enter__()  # without an exit, which would wait for all: it ends with the context
        instead_of_launching.set(launcher)
        with dry_torch():
            dry_pass()
        return kernels

    def finish(self) -> None:
        """Let the threads end when the queue is empty; `queue` cannot be called afterwards."""
        self._is_finished = True
        self._tally.close()
        self._pool.shutdown(wait=False)

    def close(self) -> None:
        """Cancel what has not started, and wait for the rest. No thread or process is left."""
        self.finish()
        self._jobs.drop()
        for worker, thread in self._workers:
            worker.close()
            thread.join()
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Jobs(Executor):
    """The queue of a pass. Work starts after the pass, which running threads would slow down many times."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._is_dropped = False

    def submit(self, job: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, partial(job, *arguments, **keywords) if arguments or keywords else job))
        return future

    def work(self, prepare: Callable[[Callable[[], Any]], object] = lambda job: None) -> None:
        """Run jobs until the queue is empty, in a thread of the pool.

        Args:
            prepare: called with each job before it runs; it may shorten the job.
        """
        for future, job in self._taken():
            if future.set_running_or_notify_cancel():
                try:
                    prepare(job)
                    kernel = job()
                    build_launcher(kernel)
                    future.set_result(kernel)
                except BaseException as error:
                    if not self._is_dropped:  # an error of `drop` is expected
                        logger.warning("a kernel cannot be compiled ahead: %s: %s", type(error).__name__, error)
                    future.set_exception(error)

    def drop(self) -> None:
        """Cancel what has not started."""
        self._is_dropped = True
        for future, _ in self._taken():
            future.cancel()

    def _taken(self) -> Iterator[tuple[Future[Any], Callable[[], Any]]]:
        """The queued jobs; each is returned to one thread."""
        while True:
            try:
                yield self._waiting.popleft()
            except IndexError:
                return


class _Tally:
    """Triton's compilation listener; it also calls the listener that was set before."""

    def __init__(self) -> None:
        from triton import knobs

        self.were_found: list[bool] = []
        self._before = knobs.compilation.listener
        knobs.compilation.listener = self

    def __call__(self, *, cache_hit: bool, **others: Any) -> None:
        self.were_found.append(cache_hit)
        if self._before is not None:
            self._before(cache_hit=cache_hit, **others)

    def close(self) -> None:
        from triton import knobs

        if knobs.compilation.listener is self:
            knobs.compilation.listener = self._before


def _kind(value: Any) -> tuple[Any, ...]:
    """A key at least as fine as Triton's: dtype and alignment of a tensor, the value of anything else."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dtype, value.data_ptr() % 16
    return type(value), value
