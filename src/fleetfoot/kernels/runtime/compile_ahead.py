"""Compilation of kernels in parallel, before they are launched.

Triton compiles a kernel at its first launch: one after the other, on one core. Here a *dry pass* runs the code that
launches kernels without launching them: each launch queues the compilation of its kernel, and returns. The kernels and
variants that are compiled are therefore those that will be launched, without a list of kernels. Processes compile
(`fleetfoot.kernels.runtime.compile_worker`), and with few cores, while these import the compiler, threads of this one.
To load a kernel on the device takes 1 to 3 ms of the interpreter's lock, so one thread at a time does.

Torch's operations are dry too (`fleetfoot.kernels.runtime.dry_tensors`): they return tensors without memory that have
the properties of the real ones. A dry pass therefore reads and writes no memory, loads no library for matrix products,
which are hundreds of megabytes, and needs no other ranks.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Executor, Future, as_completed
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass
from importlib.util import find_spec
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fleetfoot.kernels.runtime.compile_worker import (
    MANY_PROCESSES,
    CompilePool,
    CompileWorker,
    count_processes,
    has_cache,
)
from fleetfoot.kernels.runtime.dry_tensors import dry_torch
from fleetfoot.kernels.runtime.internals import (
    build_launcher,
    collecting_mode,
    hash_compiler,
    is_cached,
    keep_launchers_apart,
    parse_again,
    release_sources,
)
from fleetfoot.kernels.runtime.triton_support import Launch, instead_of_launching
from fleetfoot.utils.progress import report_progress

if TYPE_CHECKING:
    from triton import FutureKernel

_SWITCH_INTERVAL_S = 0.0005


class KernelCompileError(RuntimeError):
    """A kernel that steps launch cannot be compiled or loaded."""

    def __init__(self, name: str, cause: BaseException) -> None:
        super().__init__(f"the kernel {name} cannot be compiled: {type(cause).__name__}: {cause}")
        self.name = name


class CompiledKernels(NamedTuple):
    """Numbers of kernels: found in the cache on disk, and compiled."""

    num_found: int = 0
    num_compiled: int = 0


def can_compile_ahead(device: torch.device) -> bool:
    """Whether Triton kernels are used on ``device``, and compiled instead of interpreted."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    import triton

    return not triton.knobs.runtime.interpret


@dataclass(eq=False, slots=True)
class _Job:
    """``run``: compiles a kernel or reads it from the cache."""

    future: Future[Any]
    run: Callable[[], Any]


class _Submitted(Executor):
    """The jobs of a dry pass: what Triton submits."""

    def __init__(self) -> None:
        self.jobs: list[_Job] = []

    def submit(self, job: Callable[..., Any], /, *_: Any, **__: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append(_Job(future, job))
        return future


class DryPasses:
    """Runs dry passes, and has the kernels that they would launch, each once."""

    def __init__(self) -> None:
        self.kernels: list[tuple[str, FutureKernel]] = []
        """Their names, and how they become ready."""
        self._submitted = _Submitted()
        self._mode = collecting_mode(self._submitted)  # shared by all passes, so that no kernel is queued twice
        self._requested: set[Any] = set()
        self._slow: set[Future[Any]] = set()

    def queue(self, dry_pass: Callable[[], object], begin: float = 0.0) -> None:
        """Run ``dry_pass`` without launching kernels. ``begin``: as of `CompileAhead.queue`."""
        # in a context of its own, so that later launches are real
        copy_context().run(self._collect, dry_pass)

    def _collect(self, dry_pass: Callable[[], object]) -> None:
        self._mode.__enter__()  # without an exit, which would wait for all: it ends with the context
        instead_of_launching.set(self._dry_launcher)
        with dry_torch():
            dry_pass()

    def _dry_launcher(self, jit: Any, grid: tuple[int, ...]) -> Launch:
        def launch(*arguments: Any, **options: Any) -> None:
            # a model repeats its launches in every layer
            kinds = _kinds(jit, arguments, options)
            with suppress(TypeError):  # an argument has no hash
                if kinds in self._requested:
                    return
                self._requested.add(kinds)
            num_before = len(self._submitted.jobs)
            kernel = jit.warmup(*arguments, grid=grid, **options)
            if len(self._submitted.jobs) > num_before:
                self.kernels.append((jit.__name__, kernel))
                if getattr(jit, "compiles_slowly", False):
                    self._slow.add(kernel.future)

        return launch


class CompileAhead(DryPasses):
    """Compiles the kernels that dry passes would launch.

    Args:
        num_processes: None: one for each core, up to 16.
        device: a GPU to load the kernels on; None: they are loaded at their first launch.
        pool: ``num_processes`` that have been started; they end with `close`.
        starts_at_once: start the processes now, and not when the first kernel is not in the cache.
    """

    def __init__(
        self,
        num_processes: int | None = None,
        device: torch.device | None = None,
        *,
        pool: CompilePool | None = None,
        starts_at_once: bool = False,
    ) -> None:
        super().__init__()
        self._hashing = Thread(target=hash_compiler, name="fleetfoot-compile", daemon=True)
        self._hashing.start()
        self.num_processes = num_processes or count_processes()
        self._device = device
        self._to_compile: deque[_Job] = deque()
        self._to_load: deque[_Job] = deque()
        self._threads: list[Thread] = []
        self._pool: CompilePool | None = None
        self._free: SimpleQueue[CompileWorker] = SimpleQueue()
        self._compiles_here = self.num_processes < MANY_PROCESSES
        """Whether threads compile while the processes start. With few cores a start is shorter so. With many, threads
        hold up the dry passes, and their kernels take longer than the processes' start."""
        self._num_compiled = 0
        self._interval = sys.getswitchinterval()
        self._opening, self._loading, self._counting, self._choosing = Lock(), Lock(), Lock(), Lock()
        self._is_closed = False
        keep_launchers_apart()
        parse_again()
        if pool is not None or starts_at_once:
            self._use(pool or CompilePool(self.num_processes))

    @classmethod
    def of_rank(cls, num_ranks: int, device: torch.device, pool: CompilePool | None = None) -> CompileAhead:
        """The compiler of one of ``num_ranks``, which share the cores. ``pool``: from `CompilePool.beside_imports`;
        None: with few cores and a warm cache, no process is started."""
        number = count_processes(num_ranks) if pool is None else len(pool.workers)
        starts_at_once = number >= MANY_PROCESSES or not has_cache()
        return cls(number, device, pool=pool, starts_at_once=starts_at_once)

    @property
    def numbers(self) -> CompiledKernels:
        """Numbers of the kernels that are ready."""
        num_ready = sum(kernel.kernel is not None for _, kernel in self.kernels)
        return CompiledKernels(num_ready - self._num_compiled, self._num_compiled)

    # --- dry passes ---------------------------------------------------------------------------------------------------

    def queue(self, dry_pass: Callable[[], object], begin: float = 0.0) -> None:
        """Run ``dry_pass`` without launching kernels, and start to compile those that it would have launched.

        Args:
            begin: the share of the kernels that are compiled last. Ranks that begin at different kernels find the
                others in the cache.

        Raises:
            RuntimeError: after `close`.
        """
        if self._is_closed:
            raise RuntimeError("queue was called after close")
        self._hashing.join()
        super().queue(dry_pass)
        jobs, self._submitted.jobs = self._submitted.jobs, []
        uncached: deque[_Job] = deque()
        for job in jobs:
            (self._to_load if is_cached(job.future) else uncached).append(job)
        uncached.rotate(-int(begin * len(uncached)))
        for job in uncached:  # a start ends with the last kernel: those that take seconds come first
            (self._to_compile.appendleft if job.future in self._slow else self._to_compile.append)(job)
        self._start_threads()

    def wait(self) -> CompiledKernels:
        """Wait until all kernels are ready, and return their numbers.

        Raises:
            KernelCompileError: one of them cannot be compiled or loaded.
        """
        names = {kernel.future: (name, kernel) for name, kernel in self.kernels}
        report_progress("kernels", 0, len(names))
        for number, future in enumerate(as_completed(names), 1):
            name, kernel = names[future]
            try:
                kernel.result()
            except Exception as error:
                raise KernelCompileError(name, error) from error
            report_progress("kernels", number, len(names))
        return self.numbers

    # --- threads ------------------------------------------------------------------------------------------------------

    def _start_threads(self) -> None:
        # what waits for the interpreter's lock while a thread loads kernels gets it sooner
        sys.setswitchinterval(min(self._interval, _SWITCH_INTERVAL_S))
        with self._choosing:
            room = max(0, self.num_processes + 1 - len(self._threads))
            works = [self._load_all] * bool(self._to_load) + [self._compile_all] * len(self._to_compile)
            for work in works[:room]:
                # a daemon: unlike for the threads of a pool, the interpreter does not wait for it at its end
                thread = Thread(target=work, name="fleetfoot-compile", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _load_all(self) -> None:
        self._run_all((self._to_load, False), (self._to_compile, True))

    def _compile_all(self) -> None:
        self._run_all((self._to_compile, True), (self._to_load, False))

    def _run_all(self, *order: tuple[deque[_Job], bool]) -> None:
        """Do the jobs of both queues, and those of the first one first: any job may come while no thread is free.

        ``order``: jobs, and whether their kernels are to be compiled.
        """
        while True:
            with self._choosing:
                jobs, compiles = next((each for each in order if each[0]), (None, False))
                if jobs is None or self._is_closed:
                    # under the lock: who queues a job later sees that this thread does not do it
                    self._threads = [thread for thread in self._threads if thread is not current_thread()]
                    return
                job = jobs.popleft()
            try:
                if compiles:
                    self._compile(job)
                with self._loading:
                    kernel = job.run()
                    self._load(kernel)
            except BaseException as error:
                job.future.set_exception(error)
            else:
                job.future.set_result(kernel)

    def _compile(self, job: _Job) -> None:
        """Compile the kernel of a job to the cache, by a process if that is possible, and else here."""
        if is_cached(job.future):  # another rank has compiled it
            return
        with self._counting:
            self._num_compiled += 1
        with self._opening:
            if self._pool is None and not self._is_closed:
                self._use(CompilePool(max(1, len(self._threads))))
            free = self._free
        worker = free.get()
        try:
            compiles_here = (self._compiles_here and not worker.is_ready) or not worker.compile(job.run)
        finally:
            free.put(worker)
        if self._is_closed:
            raise CancelledError
        if compiles_here:
            build_launcher(job.run())

    def _load(self, kernel: Any) -> None:
        """Load a kernel on the device, so that its first launch does not."""
        if self._device is not None and self._device.type == "cuda":
            if self._device.index is not None:
                torch.cuda.set_device(self._device)  # of this thread
            kernel._init_handles()
        release_sources(kernel)

    def _use(self, pool: CompilePool) -> None:
        self._pool, self._free = pool, SimpleQueue()
        for worker in pool.workers:
            self._free.put(worker)

    def close(self) -> None:
        """Cancel what has not started, and end the rest. No thread or process is left."""
        self._is_closed = True
        with self._choosing:
            threads = [self._hashing, *self._threads]
        for job in (*self._to_compile, *self._to_load):
            job.future.cancel()
        with self._opening:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(self._interval)


def _kinds(jit: Any, arguments: Sequence[Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """What determines the kernel of a launch, at least as finely as for Triton. Constants are keywords."""
    return (id(jit), *map(_kind, arguments), *((name, _kind(value, True)) for name, value in options.items()))


def _kind(value: Any, is_constant: bool = False) -> tuple[Any, ...]:
    """Dtype and alignment of a tensor, the properties of an integer that Triton specializes for; else the value."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.dtype, value.data_ptr() % 16
    if type(value) is int and not is_constant:
        return int, value == 1, value % 16 == 0, -(1 << 31) <= value < 1 << 31, value < 1 << 63
    if hasattr(value, "block_shape"):  # a tensor descriptor
        return type(value), value.base.dtype, *value.block_shape
    return (float,) if type(value) is float and not is_constant else (type(value), value)
