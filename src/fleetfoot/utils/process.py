"""The process while an engine runs: interrupts, its exit, garbage collection, clean-up."""

from __future__ import annotations

import atexit
import gc
import logging
import os
import resource
import signal
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

logger = logging.getLogger(__name__)


_MAX_FILES = 1 << 20
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def num_cores() -> int:
    """How many cores this process can keep busy: by its affinity, and by the quotas of its control group and of those
    above it, as containers and services have."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in _quota_files():
        with suppress(OSError, ValueError):
            quota, period = (int(text) for file in files for text in file.read_text().split())
            if quota > 0 and period > 0:
                cores = min(cores, quota // period)
    return max(1, cores)


def raise_file_limit() -> int:
    """Let this process, and those that it starts, open as many files as they may. Returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return soft if soft != resource.RLIM_INFINITY else _MAX_FILES
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def as_exception(error: BaseException) -> Exception:
    """The error, or for a panic of a library in Rust, which is no `Exception`, one that is. Raises others."""
    if isinstance(error, Exception):
        return error
    if type(error).__name__ != "PanicException":  # each library has its own class
        raise error
    return RuntimeError(f"a library has failed: {error}").with_traceback(error.__traceback__)


def _quota_files() -> Iterator[tuple[Path, ...]]:
    """The files that have the CPU time and the period of each group, of version 2 and 1. A container may see its own
    group as the root, and the paths of the host. Source: Linux, cgroups(7)."""
    paths = {"": Path("/"), "cpu": Path("/")}
    with suppress(OSError):
        for line in _MEMBERSHIP.read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            for controller in controllers.split(","):
                paths[controller] = Path(place)
    for root, path, names in (
        (_CGROUPS, paths[""], ("cpu.max",)),
        (_CGROUPS / "cpu", paths["cpu"], ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
    ):
        for group in (path, *path.parents):
            yield tuple(root / group.relative_to("/") / name for name in names)


def write_to(process: subprocess.Popen[bytes], data: bytes) -> None:
    """Write to the standard input of a process, which may have ended."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(data)
        process.stdin.flush()


def error_text(error: Exception) -> str:
    """What ended a command, for a user: the message, and the type if it is not one that is raised for users."""
    if isinstance(error, RuntimeError | OSError | ValueError):
        return str(error) or type(error).__name__
    return f"{type(error).__name__}: {error}"  # the text of a KeyError is only the key


class Terminated(KeyboardInterrupt):
    """SIGTERM, in a command: it ends as with Ctrl-C, with another exit code."""


def terminate(*_: object) -> None:
    """A handler of SIGTERM."""
    raise Terminated


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated` in the block; not outside the main thread, or under a program's own handler."""
    is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not is_free or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class StopSignal:
    """Context manager: the first Ctrl-C only sets ``is_set``, the second raises KeyboardInterrupt.

    Within `terminable` so does SIGTERM, which raises `Terminated` at the end of the block if nothing else is raised.
    Outside the main thread, to which Python delivers signals, it does nothing.

    Args:
        only_default: leave Ctrl-C alone if Python's own handler has been replaced.
    """

    def __init__(self, *, only_default: bool = False) -> None:
        self.is_set = False
        self.kind: type[KeyboardInterrupt] = KeyboardInterrupt
        self._only_default = only_default
        self._undo = ExitStack()

    def check(self) -> None:
        """Raise a deferred KeyboardInterrupt."""
        if self.is_set:
            raise self.kind

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is not threading.main_thread():
            return self
        previous = signal.getsignal(signal.SIGINT)
        if not self._only_default or previous is signal.default_int_handler:
            # None is a handler that was not installed from Python, and cannot be restored
            self._replace(signal.SIGINT, signal.default_int_handler if previous is None else previous)
        if signal.getsignal(signal.SIGTERM) is terminate:
            self._replace(signal.SIGTERM, terminate)
        return self

    def _replace(self, number: signal.Signals, restored: Any) -> None:
        signal.signal(number, self._receive)
        self._undo.callback(signal.signal, number, restored)

    def __exit__(self, kind: object, *_: object) -> None:
        self._undo.close()
        if kind is None and self.kind is Terminated:
            raise Terminated

    def _receive(self, number: int, *_: object) -> None:
        if number == signal.SIGTERM:
            self.kind = Terminated
        self.check()
        self.is_set = True


@contextmanager
def deferred_interrupts() -> Iterator[StopSignal]:
    """Defer Ctrl-C until the block calls `StopSignal.check` or ends: an interrupted step would leave partial state.

    Applies only where Ctrl-C would raise KeyboardInterrupt: in the main thread, under Python's own handler. So it is
    with SIGTERM within `terminable`.
    """
    stop = StopSignal(only_default=True)
    try:
        with stop:
            yield stop
    except Exception as error:
        if stop.is_set:
            raise stop.kind from error
        raise
    stop.check()


EXIT_S = 30.0
"""How long the interpreter's exit waits for a step."""


class ExitGuard(ContextDecorator):
    """Around native code, which must not return to a daemon thread while Python exits: unwinding aborts the process.

    At exit, engines are shut down when threads have left it. A thread that enters then waits for ever.
    """

    def __init__(self) -> None:
        self.is_forked = self._was_used = False
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self.is_forked |= self._was_used  # whether an engine had started in a parent
        self._changed = threading.Condition()  # a parent's thread may hold the old one
        self._depths: Counter[int] = Counter()  # by thread
        self._is_exiting = False
        self.threads: weakref.WeakSet[Any] = weakref.WeakSet()
        """At exit their ``stop_at_exit`` is called first."""
        self._engines: weakref.WeakSet[Any] = weakref.WeakSet()

    def add_thread(self, owner: Any) -> None:
        """Add to `threads`. Raises RuntimeError at exit: the thread could not enter."""
        if self._is_exiting:
            raise RuntimeError("the interpreter exits, and no thread can start; use LLM, which needs none")
        self.threads.add(owner)

    def add_engine(self, engine: Any) -> None:
        """Call its ``shutdown`` at exit."""
        self._was_used = True
        self._engines.add(engine)
        atexit.unregister(self._exit)
        atexit.register(self._exit)  # it runs before the finalizers of what the engine has made

    def __enter__(self) -> None:
        thread = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._is_exiting or thread in self._depths)
            self._depths[thread] += 1

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._depths[threading.get_ident()] -= 1
            self._depths = +self._depths  # without zeros
            if self._is_exiting:
                self._changed.notify_all()

    def _exit(self) -> None:
        for owner in list(self.threads):
            owner.stop_at_exit()
        with self._changed:
            self._is_exiting = True
            self._depths[threading.get_ident()] += 1
            self._changed.wait_for(lambda: len(self._depths) == 1, EXIT_S)
        try:
            run_all(*(engine.shutdown for engine in list(self._engines)))
        except Exception as error:  # the program's own exit code counts
            logger.info("an engine could not shut down cleanly: %r", error)


EXIT_GUARD = ExitGuard()


_FROZEN_BY_PYTHON = 1000
"""Maximum number of objects that Python itself freezes at its start: 375 in 3.12, none in other versions."""


class ShortCollections(AbstractContextManager[None]):
    """Exclude existing objects from garbage collection while a thread is in the block.

    A full collection visits every object: after torch, Triton and an engine have been loaded, that takes 0.07 s on a
    CPU and 0.14 s beside a GPU, and no step is queued meanwhile. Does nothing if the program has called `gc.freeze`.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler can generate, too
        self._num_users = 0
        self._has_frozen = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_users and gc.get_freeze_count() <= _FROZEN_BY_PYTHON:  # which visits every frozen object
                self._has_frozen = True
                gc.freeze()
            self._num_users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_users -= 1
            if not self._num_users and self._has_frozen:
                self._has_frozen = False
                gc.unfreeze()


SHORT_COLLECTIONS = ShortCollections()


@contextmanager
def no_collections() -> Iterator[None]:
    """No garbage is collected in the block.

    What an earlier engine has left, CUDA graphs and memory pools, must not be destroyed while graphs are captured or
    pools allocate: a capture fails, and torch aborts the process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def tune_collections() -> None:
    """Exclude, for the rest of a process that serves, existing objects from garbage collection, and collect seldom.

    Each step makes objects for each of its sequences, which end without collections. By default one of them runs for
    every 700 objects, and those that live meanwhile are visited again and again. A collection stops all threads: that
    of the youngest objects for a millisecond or two, that of the objects of 2,000 requests for 60 to 90.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(5_000, 1_000, 100)


def run_all(*actions: Callable[[], object]) -> None:
    """Call each action, even if others raise.

    Raises:
        BaseException: the first error; later ones are logged.
    """
    errors = []
    for action in actions:
        try:
            action()
        except BaseException as error:
            errors.append(error)
    for later in errors[1:]:
        logger.error("another error during clean-up", exc_info=later)
    if errors:
        raise errors[0]
