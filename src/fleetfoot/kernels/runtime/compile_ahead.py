"""Compilation of kernels in parallel, before they are launched.

Triton compiles a kernel at its first launch: one after the other, on one core. Here a *dry pass* runs the code that
launches kernels without launching them: each launch queues the compilation of its kernel, and returns. The kernels and
variants that are compiled are therefore those that will be launched, without a list of kernels. Processes compile
(`fleetfoot.kernels.runtime.compile_worker`), and with few cores, while these import the compiler, threads of this one.
A thread loads what processes have compiled, in an order that leaves the interpreter's lock to the steps
(`fleetfoot.kernels.runtime.compile_jobs`).

A step that serves requests never waits for a compilation. Within `CompileAhead.serving`, the launch of a kernel that is
not ready queues its compilation and raises `KernelNotReadyError`, and the operation takes another path
(`fleetfoot.kernels.runtime.triton_support.or_reference`). Compiled kernels become ready between two steps, in
`CompileAhead.advance`, in the order in which they were queued. So all ranks of a group, which queue the same kernels in
the same order, change to a kernel in the same step if they pass the same number.

Torch's operations are dry too (`fleetfoot.kernels.runtime.dry_tensors`): they return tensors without memory that have
the properties of the real ones. A dry pass therefore reads and writes no memory, loads no library for matrix products,
which are hundreds of megabytes, and needs no other ranks.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import copy_context
from importlib.util import find_spec
from queue import SimpleQueue
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

import torch

from fleetfoot.kernels.runtime.compile_jobs import CompileJobs, LoadPacer
from fleetfoot.kernels.runtime.compile_worker import (
    MANY_PROCESSES,
    CompilePool,
    CompileWorker,
    count_processes,
    has_cache,
    hash_compiler,
    keep_launchers_apart,
    parse_again,
)
from fleetfoot.kernels.runtime.direct_launch import direct_launch
from fleetfoot.kernels.runtime.dry_tensors import dry_torch
from fleetfoot.kernels.runtime.triton_support import KernelNotReadyError, Launch, instead_of_launching, launcher

if TYPE_CHECKING:
    from triton import FutureKernel

logger = logging.getLogger(__name__)

_SWITCH_INTERVAL_S = 0.0005


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
        """Wait for all, and make them ready. Returns the number of failures; a launch of such a kernel outside of
        `CompileAhead.serving` compiles it again, and raises."""
        kernels = [kernel.result(ignore_errors=True) for kernel in self._kernels]
        return sum(kernel is None for kernel in kernels)


class CompileAhead:
    """Compiles the kernels that dry passes would launch.

    Args:
        num_processes: None: one for each core, up to 16.
        pool: ``num_processes`` that have been started; they end with `close`.
        starts_at_once: start the processes now, and not when the first kernel is not in the cache.
        device: a GPU to load the kernels on; None: they are loaded at their first launch.
        on_compiled: called in another thread with `num_compiled_in_order` when that has grown.
        is_ordered: compile and load in the order in which kernels were queued, in which they become ready on several
            ranks; else those that a step has missed are first.
    """

    def __init__(
        self,
        num_processes: int | None = None,
        device: torch.device | None = None,
        on_compiled: Callable[[int], object] = lambda number: None,
        *,
        pool: CompilePool | None = None,
        starts_at_once: bool = False,
        is_ordered: bool = False,
    ) -> None:
        from triton import AsyncCompileMode

        self._hashing = Thread(target=hash_compiler, name="fleetfoot-compile", daemon=True)
        self._hashing.start()
        self.num_processes = num_processes or count_processes()
        self._device = device
        self._on_compiled = on_compiled
        self._is_ordered = is_ordered
        self._pacer = LoadPacer()
        self._jobs = CompileJobs(device, self._pacer, self.num_processes)
        self._mode = AsyncCompileMode(self._jobs)  # shared by all passes, so that no kernel is queued twice
        self._tally = _Tally()
        self._threads: list[Thread] = []
        self._pool: CompilePool | None = None
        self._free: SimpleQueue[CompileWorker] = SimpleQueue()
        self._is_finished = False
        self.compiles_here = self.num_processes < MANY_PROCESSES
        """Whether threads compile while the processes start. With few cores, a start that waits for these kernels is
        shorter. With many, threads hold up the dry passes, and their kernels take longer than the processes' start."""
        self._is_serving = False
        self._num_by_processes = 0
        self._interval = sys.getswitchinterval()
        self._kernels: list[FutureKernel] = []  # in the order in which they were queued
        self._waiting: list[int] = []  # numbers of those that are not ready
        # launches that had to take another path, of each function, by its `id`
        self._requested: dict[int, dict[tuple[Any, ...], FutureKernel]] = {}
        self._missed: dict[FutureKernel, str] = {}
        self._missed_optional: dict[FutureKernel, str] = {}
        self._num_done = self._num_compiled_in_order = 0
        self._advanced: tuple[int, int | None] = 0, 0
        """`_num_done`, and the argument, of the last `advance` that looked: 60 kernels take 20 us in every step."""
        self._counting, self._opening = Lock(), Lock()
        self._is_closed = self._has_lost_processes = False
        _raise_in_steps()
        keep_launchers_apart()
        parse_again()
        if pool is not None or starts_at_once:
            self._use(pool or CompilePool(self.num_processes))

    @classmethod
    def of_rank(
        cls,
        num_ranks: int,
        device: torch.device,
        on_compiled: Callable[[int], object],
        pool: CompilePool | None = None,
    ) -> CompileAhead:
        """For one of ``num_ranks``, which share the cores. ``pool``: from `CompilePool.beside_imports`; None: with few
        cores and a warm cache, no process is started."""
        number = count_processes(num_ranks) if pool is None else len(pool.workers)
        starts_at_once = number >= MANY_PROCESSES or not has_cache()
        is_ordered = num_ranks > 1
        return cls(number, device, on_compiled, pool=pool, starts_at_once=starts_at_once, is_ordered=is_ordered)

    @property
    def num_compiled(self) -> int:
        """Number of compiled kernels that were not in the cache on disk."""
        return self._tally.were_found.count(False) + self._num_by_processes

    @property
    def num_found(self) -> int:
        """Number of kernels that were in the cache on disk."""
        return self._tally.were_found.count(True) - self._num_by_processes

    @property
    def num_uncached(self) -> int:
        """Number of kernels that were not in the cache on disk when `queue` was called."""
        return self._jobs.num_uncached

    def queue(self, dry_pass: Callable[[], object], begin: float = 0.0) -> Compilations:
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
        # in a context of its own, so that later launches are real
        kernels = copy_context().run(self._collect, dry_pass)
        self._jobs.rotate(int(begin * len(kernels)))
        self._jobs.find_cached()
        self._start_work()
        return Compilations(kernels)

    def _start_work(self) -> None:
        # what waits for the interpreter's lock while a thread loads kernels gets it sooner
        sys.setswitchinterval(min(self._interval, _SWITCH_INTERVAL_S))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        for _ in range(self._jobs.claim_threads(self.num_processes + 1)):  # and one that loads
            # a daemon: unlike for the threads of a pool, the interpreter does not wait for it at its end
            thread = Thread(target=self._jobs.work, args=(self._compile,), name="fleetfoot-compile", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _compile(self, job: Callable[[], Any]) -> bool:
        """In a thread: let a process compile a job's kernel. False: this process is to compile it, as it does while the
        others still import the compiler."""
        with self._opening:
            if self._pool is None and not self._is_closed:
                self._use(CompilePool(len(self._threads)))
            free = self._free
        worker = free.get()
        try:
            if self.compiles_here and not worker.is_ready:
                return False
            is_compiled = worker.compile(job)
            if worker.has_ended:
                self._lose_processes()
        finally:
            free.put(worker)
        with self._counting:
            self._num_by_processes += is_compiled
        return is_compiled

    def _lose_processes(self) -> None:
        """Threads compile instead. The compiler holds the lock that steps need: behind the start, while none runs."""
        if self._is_serving:
            self._jobs.most_compiling, self._jobs.only_while_idle = 1, True
        if not self._has_lost_processes:
            logger.warning("the processes that compile have ended; threads compile, which holds up steps")
        self._has_lost_processes = True

    def _use(self, pool: CompilePool) -> None:
        self._pool, self._free = pool, SimpleQueue()
        for worker in pool.workers:
            self._free.put(worker)

    def _close_pool(self) -> None:
        with self._opening:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.close()
        sys.setswitchinterval(self._interval)

    def _collect(self, dry_pass: Callable[[], object]) -> list[FutureKernel]:
        """The kernels that ``dry_pass`` would launch and that were not compiled before."""
        kernels: list[FutureKernel] = []
        requested: set[Any] = set()

        def dry_launcher(jit: Any, grid: tuple[int, ...]) -> Launch:
            def launch(*arguments: Any, **options: Any) -> None:
                # a model repeats its launches in every layer
                kinds = _kinds(jit, arguments, options)
                with suppress(TypeError):  # an argument has no hash
                    if kinds in requested:
                        return
                    requested.add(kinds)
                kernel = self._request(jit, grid, arguments, options)
                if kernel is not None:
                    kernels.append(kernel)

            return launch

        self._mode.__enter__()  # without an exit, which would wait for all: it ends with the context
        instead_of_launching.set(dry_launcher)
        with dry_torch():
            dry_pass()
        return kernels

    def _request(self, jit: Any, grid: tuple[int, ...], arguments: Any, options: Any) -> FutureKernel | None:
        """Queue the compilation of a launch's kernel; None: it is ready. Within the context of the mode."""
        from triton import FutureKernel

        num_before = len(self._mode.future_kernels)
        kernel = jit.warmup(*arguments, grid=grid, **options)
        if not isinstance(kernel, FutureKernel):
            return None
        if len(self._mode.future_kernels) > num_before:
            if getattr(jit, "compiles_slowly", False):
                self._jobs.begin_with(kernel.future)
            self._waiting.append(len(self._kernels))
            self._kernels.append(kernel)
            kernel.future.add_done_callback(lambda _: self._count())
        return kernel

    # --- steps that do not wait ---------------------------------------------------------------------------------------

    @contextmanager
    def serving(self) -> Iterator[None]:
        """A context in which the launch of a kernel that is not ready raises `KernelNotReadyError`, and queues it."""
        before = instead_of_launching.set(self._launcher)
        self._pacer.step_begins()
        try:
            yield
        finally:
            self._pacer.step_ends()
            instead_of_launching.reset(before)

    def _launcher(self, jit: Any, grid: tuple[int, ...]) -> Launch:
        real = direct_launch(jit, grid)

        def launch(*arguments: Any, **options: Any) -> Any:
            kinds = None
            missed = self._missed_optional if getattr(jit, "is_optional", False) else self._missed
            requested = self._requested.get(id(jit))
            if requested is not None:  # finding out again that a kernel is missing would take 0.1 ms
                kinds = _kinds(jit, arguments, options)
                kernel = requested.get(kinds)
                if kernel is not None:
                    missed[kernel] = jit.__name__
                    raise KernelNotReadyError(jit.__name__)
            try:
                return real(*arguments, **options)
            except KernelNotReadyError:
                kinds = kinds or _kinds(jit, arguments, options)
                (kernel,) = self._queue_beside(lambda: launcher(jit, grid)(*arguments, **options)) or (None,)
                if kernel is None:
                    return real(*arguments, **options)
                self._requested.setdefault(id(jit), {})[kinds] = kernel
                missed[kernel] = jit.__name__
                raise KernelNotReadyError(jit.__name__, self._queue_beside) from None

        return launch

    def _queue_beside(self, dry_pass: Callable[[], object]) -> list[FutureKernel]:
        """Queue the kernels of ``dry_pass``, which a step has missed, for a process."""
        kernels = copy_context().run(self._collect, dry_pass)
        urgent = kernels
        if self._is_ordered and kernels:  # they become ready behind all that were queued before
            urgent = self._kernels[: 1 + max(map(self._kernels.index, kernels))]
        self._jobs.hurry(kernel.future for kernel in urgent)
        self._start_work()
        return kernels

    def advance(self, num_kernels: int | None = None) -> None:
        """Make kernels ready, between two steps: the first ``num_kernels`` that were queued, which must be compiled;
        None: all that are compiled."""
        if not self._waiting or self._advanced == (self._num_done, num_kernels):
            return
        self._advanced = self._num_done, num_kernels
        end = len(self._kernels) if num_kernels is None else num_kernels
        done = {number for number in self._waiting if number < end and self._kernels[number].future.done()}
        for number in sorted(done):
            self._kernels[number].result(ignore_errors=True)
        self._waiting = [number for number in self._waiting if number not in done]
        for requested in self._requested.values():
            for kinds in [kinds for kinds, kernel in requested.items() if kernel.kernel is not None]:
                del requested[kinds]
        self._requested = {function: requested for function, requested in self._requested.items() if requested}

    def wait_for_all(self) -> int:
        """Wait for all kernels that were queued. Returns the number of failures."""
        return Compilations(self._kernels).wait()

    def take_missed(self) -> dict[FutureKernel, str]:
        """Kernels, with their names, that were not ready in a launch since the last call."""
        missed, self._missed = self._missed, {}
        return missed

    def take_missed_optional(self) -> dict[FutureKernel, str]:
        """The same for kernels without which a graph is captured: it is captured again when they are ready."""
        missed, self._missed_optional = self._missed_optional, {}
        return missed

    def _count(self) -> None:
        """In a thread that compiles: count the kernels that are compiled, up to the first one that is not."""
        with self._counting:
            self._num_done += 1
            before = self._num_compiled_in_order
            while self._num_compiled_in_order < len(self._kernels):
                if not self._kernels[self._num_compiled_in_order].future.done():
                    break
                self._num_compiled_in_order += 1
            number = self._num_compiled_in_order
        if number > before:
            if number == len(self._kernels):
                logger.info("kernels: all %d are compiled", number)
                if self._is_finished:
                    self._close_pool()
            self._on_compiled(number)

    def leave_cores(self) -> None:
        """From now on steps run: half of the processes compile beside them, and no thread."""
        self.compiles_here, self._is_serving = False, True
        self._jobs.most_compiling = max(1, self.num_processes // 2)
        if self._has_lost_processes:
            self._lose_processes()

    def finish(self) -> None:
        """Let the processes end when all that is queued is compiled. Later kernels start them again."""
        self._is_finished = self._is_serving = True
        self.compiles_here = False
        if all(kernel.future.done() for kernel in self._kernels):
            self._close_pool()

    def close(self) -> None:
        """Cancel what has not started, and end the rest. No thread or process is left."""
        self._is_closed = True
        self._tally.close()
        self._jobs.drop()
        self._close_pool()
        for thread in (self._hashing, *self._threads):
            thread.join()


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


def _raise_in_steps() -> None:
    """Let launches within `CompileAhead.serving` raise instead of compiling. Triton calls its hook for kernels that it
    has not compiled."""
    from triton import knobs

    before = knobs.runtime.jit_cache_hook
    if getattr(before, "raises_in_steps", False):
        return

    def hook(*, fn: Any, is_manual_warmup: bool, **others: Any) -> bool | None:
        if not is_manual_warmup and isinstance(getattr(instead_of_launching.get(), "__self__", None), CompileAhead):
            raise KernelNotReadyError(fn.name)
        return None if before is None else before(fn=fn, is_manual_warmup=is_manual_warmup, **others)

    hook.raises_in_steps = True  # type: ignore[attr-defined]
    knobs.runtime.jit_cache_hook = hook


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
