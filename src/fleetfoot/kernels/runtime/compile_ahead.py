"""Kernels compiled side by side, before anybody waits for them.

Triton compiles a kernel when it is first launched: one after the other, while all cores but one idle. Here a *dry pass*
runs the code that launches kernels, and launches none: each launch asks threads to compile its kernel, and returns. So
what is compiled is what will be launched, variants and all, and nobody has to keep a list of kernels. While everybody
waits, threads do: most of a compilation is spent in LLVM, the assembler and, for what launches the kernel, a C
compiler, outside of the interpreter's lock. While an engine serves, they leave it to processes
(`fleetfoot.kernels.runtime.compile_worker`).

Torch's own operations are dry too (`fleetfoot.kernels.runtime.dry_tensors`): they yield tensors that look like the
real ones and have no memory. So a dry pass reads nothing that a kernel would have written, and writes nothing. It
loads no library for matrix products, which are hundreds of megabytes, and needs no other ranks.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from importlib.util import find_spec
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from fleetfoot.kernels.runtime.compile_worker import CompileWorker, build_launcher
from fleetfoot.kernels.runtime.dry_tensors import dry_torch
from fleetfoot.kernels.runtime.triton_support import Launch, instead_of_launching

if TYPE_CHECKING:
    from triton import FutureKernel

logger = logging.getLogger(__name__)

_MOST_THREADS = 16
"""More have nothing to do: the front end holds the interpreter's lock for a sixth of a compilation."""


def can_compile_ahead(device: torch.device) -> bool:
    """Whether kernels are compiled for ``device`` at all, rather than interpreted or not used."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    import triton

    return not triton.knobs.runtime.interpret


class Compilations:
    """What a dry pass has queued."""

    def __init__(self, kernels: list[FutureKernel]) -> None:
        self._kernels = kernels

    def wait(self) -> int:
        """Until all are compiled. Returns how many failed: launching one compiles it again, and raises."""
        kernels = [kernel.result(ignore_errors=True) for kernel in self._kernels]
        return sum(kernel is None for kernel in kernels)


class CompileAhead:
    """Threads that compile what dry passes would launch.

    Args:
        num_threads: None: one for each core, up to 16.
    """

    def __init__(self, num_threads: int | None = None) -> None:
        from triton import AsyncCompileMode

        self.num_threads = num_threads or min(_MOST_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self.num_threads, thread_name_prefix="fleetfoot-compile")
        self._jobs = _Jobs()
        self._mode = AsyncCompileMode(self._jobs)  # one for all passes: what one has asked for, another does not
        self._tally = _Tally()
        self._workers: list[tuple[CompileWorker, Thread]] = []
        self._is_finished = False

    @property
    def num_compiled(self) -> int:
        """Kernels that are done and were not in the cache on disk."""
        return self._tally.were_found.count(False)

    @property
    def num_found(self) -> int:
        """Kernels that are done and were in the cache on disk."""
        return self._tally.were_found.count(True)

    def queue(self, dry_pass: Callable[[], object], at_once: int | None = None) -> Compilations:
        """Run ``dry_pass`` without launching kernels, and begin to compile those that it would have launched.

        Launches find each as soon as it is compiled, whether somebody waits or not. One that is launched before that is
        compiled twice.

        Args:
            at_once: so many at a time, each in a process of its own, as others go on meanwhile in this one; None: as
                many as there are threads, in this process.

        Raises:
            RuntimeError: after `finish`.
        """
        if self._is_finished:
            raise RuntimeError("queue was called after finish: nobody is left to compile")
        # In a context of its own: behind it launches are launches again.
        kernels = copy_context().run(self._collect, dry_pass)
        for _ in range(min(at_once or self.num_threads, self.num_threads)):
            if at_once:
                self._begin_beside(CompileWorker())
            else:
                self._pool.submit(self._jobs.work)
        return Compilations(kernels)

    def _begin_beside(self, worker: CompileWorker) -> None:
        def work() -> None:
            with worker:
                self._jobs.work(worker.compile)

        # An interpreter that ends does not wait for it, as it would for the threads of a pool.
        thread = Thread(target=work, name="fleetfoot-compile-beside", daemon=True)
        self._workers.append((worker, thread))
        thread.start()

    def _collect(self, dry_pass: Callable[[], object]) -> list[FutureKernel]:
        self._mode.__enter__()  # It is not left, which would wait for all: it ends with the context.
        compiler = _Compiler()
        instead_of_launching.set(compiler.launcher)
        with dry_torch():
            dry_pass()
        return compiler.kernels

    def finish(self) -> None:
        """Nothing more will be queued: the threads end as they run out of work."""
        self._is_finished = True
        self._tally.close()
        self._pool.shutdown(wait=False)

    def close(self) -> None:
        """Drop what has not begun, and wait for what has. No thread is left, and no process."""
        self._is_finished = True
        self._tally.close()
        self._jobs.drop()
        for worker, thread in self._workers:
            worker.close()
            thread.join()
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Jobs(Executor):
    """What a pass asks for. It begins when the pass is over, which threads at work would slow down many times."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._is_dropped = False

    def submit(self, job: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, partial(job, *arguments, **keywords) if arguments or keywords else job))
        return future

    def work(self, prepare: Callable[[Callable[[], Any]], object] = lambda job: None) -> None:
        """Do jobs until there are none left, in a thread of the pool.

        Args:
            prepare: is given each job before it is done, and may make it short.
        """
        for future, job in self._taken():
            if future.set_running_or_notify_cancel():
                try:
                    prepare(job)
                    kernel = job()
                    build_launcher(kernel)
                    future.set_result(kernel)
                except BaseException as error:
                    if not self._is_dropped:  # else it was told to stop
                        logger.warning("a kernel cannot be compiled ahead: %s: %s", type(error).__name__, error)
                    future.set_exception(error)

    def drop(self) -> None:
        """Cancel what has not begun."""
        self._is_dropped = True
        for future, _ in self._taken():
            future.cancel()

    def _taken(self) -> Iterator[tuple[Future[Any], Callable[[], Any]]]:
        """The jobs that wait, one after the other; no two threads get the same."""
        while True:
            try:
                yield self._waiting.popleft()
            except IndexError:
                return


class _Tally:
    """Hears from Triton of every compilation, and passes on what it hears to who was told before."""

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


class _Compiler:
    """Stands in for launches: asks for each kernel once for each kind of arguments."""

    def __init__(self) -> None:
        self.kernels: list[FutureKernel] = []
        self._asked: set[Any] = set()

    def launcher(self, jit: Any, grid: tuple[int, ...]) -> Launch:
        from triton import FutureKernel

        def launch(*arguments: Any, **options: Any) -> None:
            if self._is_new(jit, arguments, options):
                kernel = jit.warmup(*arguments, grid=grid, **options)
                if isinstance(kernel, FutureKernel):  # not one that has been compiled before
                    self.kernels.append(kernel)
                    kernel.future.add_done_callback(lambda _: kernel.result(ignore_errors=True))

        return launch

    def _is_new(self, jit: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """False spares Triton the look: a model has the same launches in every layer."""
        kinds = (id(jit), *map(_kind, arguments), *((name, _kind(value)) for name, value in options.items()))
        try:
            is_new = kinds not in self._asked
            self._asked.add(kinds)
        except TypeError:  # of a descriptor, which has no hash
            return True
        return is_new


def _kind(value: Any) -> tuple[Any, ...]:
    """At least as fine as what Triton tells apart: of a tensor its type and alignment, of anything else its value."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dtype, value.data_ptr() % 16
    return type(value), value
