"""Processes that compile kernels for another one, which finds them in Triton's cache on disk.

A compilation holds the interpreter's lock for a fifth of its time, up to 0.2 s at once. In a thread it would delay the
steps of a serving engine, and of all other threads that compile; a process has its own lock. It needs and sees no GPU:
each request has the target.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, BinaryIO

from fleetfoot.config import env
from fleetfoot.kernels.runtime.triton_support import TritonKernel
from fleetfoot.utils.process import num_cores

if TYPE_CHECKING:
    from fleetfoot.kernels.runtime.cuda_source import CudaSource

_IMPORTED = (
    "torch",
    "triton.compiler",
    "triton.backends.nvidia.driver",
    "fleetfoot.kernels.runtime.cuda_source",
)
"""What the processes share: imported once, at their priority, before they are forked."""
_DONE, _FAILED = b"+", b"-"
"""Replies of a process; the first one is a greeting."""
_NICE = 10
"""How much lower the priority of the processes is than that of the engine."""
_MOST_SYSTEM_ERRORS = 5
"""Of parsing one function: see `parse_again`."""
_MOST_PROCESSES = 16
MANY_PROCESSES = 8
"""With this number of processes a start waits for the kernels of all shapes with plain sampling."""


def count_processes(num_ranks: int = 1) -> int:
    """How many processes compile for one of ``num_ranks``, which share the cores: one for each core, up to 16."""
    return max(1, min(_MOST_PROCESSES, num_cores() // num_ranks))


@dataclass(frozen=True, slots=True)
class KernelSource:
    """The input of a compilation, in a form that another process can read."""

    module: str
    name: str
    """The kernel's name in its module."""
    signature: dict[str, str]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    target: tuple[Any, ...]
    options: dict[str, Any]

    @classmethod
    def of(cls, job: Callable[[], object]) -> KernelSource | None:
        """The source of a job of Triton's ``AsyncCompileMode``, which is a closure. None: the job has another form, or
        its kernel is not an attribute of a module."""
        if not inspect.isfunction(job):
            return None
        known = inspect.getclosurevars(job).nonlocals
        if not {"src", "target", "options"} <= known.keys():
            return None
        source, target = known["src"], known["target"]
        function = source.fn.fn
        if _jit_in(sys.modules.get(function.__module__), function.__name__) is not source.fn:
            return None
        return cls(
            function.__module__,
            function.__name__,
            dict(source.signature),
            dict(source.constants),
            dict(source.attrs),
            (target.backend, target.arch, target.warp_size),
            dict(known["options"].__dict__),
        )

    def compile(self) -> None:
        """Raises: any error of Triton."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        jit = _jit_in(import_module(self.module), self.name)
        kind = GluonASTSource if jit.is_gluon() else ASTSource
        source = kind(jit, self.signature, self.constants, self.attributes)
        build_launcher(triton.compile(source, target=GPUTarget(*self.target), options=self.options))


def has_cache() -> bool:
    """Whether Triton's cache on disk holds anything."""
    from triton import knobs

    folder = Path(knobs.cache.dir)
    return folder.is_dir() and any(folder.iterdir())


def is_cached(future: Any) -> bool:
    """Whether Triton's cache on disk has the result of a future of its ``AsyncCompileMode``."""
    from triton.runtime.cache import get_cache_manager

    key = getattr(future, "_key", None)
    if key is None:
        return False
    try:
        manager: Any = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
        folder = getattr(manager, "cache_dir", None)
        return folder is not None and any(name.startswith("__grp__") for name in os.listdir(folder))
    except OSError:  # the cache cannot be written; the compilation raises it
        return False


def hash_compiler() -> None:
    """Hash the compiler, which takes 0.3 s, before the first kernel of this process needs it for its key."""
    from triton.runtime.cache import triton_key

    triton_key()


def build_launcher(kernel: Any) -> None:
    """Build the launcher of a kernel, a few lines of C for each signature, so that it is in Triton's cache on disk too.

    Triton builds it at the first launch, where the C compiler takes 0.3 s. After a failure here, that launch raises.

    Args:
        kernel: ``triton.compiler.CompiledKernel``.
    """
    with suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)


def keep_launchers_apart() -> None:
    """Let threads build launchers side by side.

    Triton imports all launchers as modules of one name. The second import of a file updates the module of that name,
    which another thread may not have read yet: it would launch its kernel with the launcher of another.
    """
    from triton.runtime import build

    load: Callable[[str, str], Any] | None = getattr(build, "_load_module_from_path", None)
    if load is None or getattr(load, "keeps_apart", False):
        return
    importing = Lock()

    def load_apart(name: str, path: str) -> Any:
        with importing:
            return SimpleNamespace(**vars(load(name, path)))

    load_apart.keeps_apart = True  # type: ignore[attr-defined]
    build._load_module_from_path = load_apart


def parse_again() -> None:
    """Let threads parse kernels side by side, those that compile and the one that runs a dry pass.

    Up to Python 3.12, parsing raises SystemError now and then while another thread parses: both count the depth of
    their syntax trees in one place (CPython's issue 106905). Then it is tried again.
    """
    from triton.runtime.jit import JITCallable

    parse: Callable[[Any], Any] = JITCallable.parse
    if getattr(parse, "tries_again", False):
        return

    def parse_or_try_again(function: Any) -> Any:
        for _ in range(_MOST_SYSTEM_ERRORS):
            with suppress(SystemError):
                return parse(function)
        return parse(function)

    parse_or_try_again.tries_again = True  # type: ignore[attr-defined]
    JITCallable.parse = parse_or_try_again


def release_sources(kernel: Any) -> None:
    """Release the texts of all stages of a compilation, 0.3 MB, which Triton keeps: launches need the binary only.

    Args:
        kernel: ``triton.compiler.CompiledKernel``.
    """
    for stage, code in [*getattr(kernel, "asm", {}).items()]:
        if isinstance(code, str):
            del kernel.asm[stage]


def _jit_in(module: object, name: str) -> Any:
    """The ``triton.JITFunction`` of a name in a module; None: it has no such name."""
    kernel = getattr(module, name, None)
    return kernel.jit if isinstance(kernel, TritonKernel) else kernel


class CompileWorker:
    """The client of a process of `CompilePool`.

    Args:
        end: of a connection to the process, which ends when it is closed.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._requests, self._replies = end.makefile("wb"), end.makefile("rb")
        self._has_greeted = self._is_closed = False
        self.has_ended = False
        """Whether the process was gone in a call."""

    @property
    def is_ready(self) -> bool:
        """Whether the process has imported what it needs, or has ended."""
        return self._has_greeted or bool(select.select([self._end], [], [], 0)[0])

    def compile(self, job: Callable[[], object]) -> bool:
        """Compile the kernel of ``job``, and wait for it. False: it failed; the job itself will raise the error.

        Raises:
            RuntimeError: this has been closed.
        """
        from fleetfoot.kernels.runtime.cuda_source import CudaSource  # imports torch, which a process does later

        try:
            source = job if isinstance(job, CudaSource) else KernelSource.of(job)
            if source is None:
                return False
            if not self._has_greeted:
                self._has_greeted = self._receive()
            pickle.dump(source, self._requests)
            self._requests.flush()
            return self._receive()
        except (OSError, EOFError, ValueError, TypeError, AttributeError, pickle.PickleError) as error:
            if self._is_closed:
                raise RuntimeError("the compile worker is closed") from error
            self.has_ended = isinstance(error, OSError | EOFError)
            return False  # the process has ended, or the source cannot be pickled

    def _receive(self) -> bool:
        if not (reply := self._replies.read(1)):
            raise EOFError("the process has ended")
        return reply == _DONE

    def close(self) -> None:
        """End the process, from any thread; a running compilation is lost."""
        self._is_closed = True
        with suppress(OSError):  # a call that waits in another thread ends
            self._end.shutdown(socket.SHUT_RDWR)
        for part in (self._requests, self._replies, self._end):
            with suppress(OSError, ValueError):  # unsent data is lost
                part.close()


class CompilePool:
    """Processes that compile. One imports what they need, takes a second or two for it, and is forked.

    They also end when this process does, because their connections are closed.

    Args:
        size: number of processes.
        command: of the first one; None: this module.
    """

    def __init__(self, size: int, command: Sequence[str] | None = None) -> None:
        pairs = [socket.socketpair() for _ in range(size)]
        ends = [end.fileno() for _, end in pairs]
        variables = {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1"}
        self._process: subprocess.Popen[bytes] | None = None
        with suppress(OSError):  # without a process, workers compile nothing
            self._process = subprocess.Popen(
                [*(command or (sys.executable, "-m", __name__)), *map(str, ends)],
                pass_fds=ends,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=env.for_child(variables),
                start_new_session=True,  # no interrupts from the keyboard
            )
        for _, end in pairs:
            end.close()
        self.workers = [CompileWorker(end) for end, _ in pairs]

    @classmethod
    def beside_imports(cls, num_ranks: int) -> CompilePool | None:
        """The processes of one of ``num_ranks``, started before this process imports torch: they import for as long,
        so they compile from the first request on. None: there are few cores, or no Triton."""
        number = count_processes(num_ranks)
        return cls(number) if number >= MANY_PROCESSES and find_spec("triton") is not None else None

    def close(self) -> None:
        """Kill the processes, from any thread; running compilations are lost."""
        for worker in self.workers:
            worker.close()
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Greet, and compile each request until the input is closed."""
    replies.write(_DONE)
    replies.flush()
    while True:
        try:
            source: KernelSource | CudaSource = pickle.load(requests)
        except EOFError:
            return
        try:
            source.compile()
            is_done = True
        except Exception:  # the client compiles it again, and raises the error
            is_done = False
        replies.write(_DONE if is_done else _FAILED)
        replies.flush()


def main(ends: Sequence[str]) -> None:
    """Fork a process for each of ``ends``, which are file descriptors, and wait for them."""
    os.nice(_NICE)
    for module in _IMPORTED:
        import_module(module)
    gc.freeze()  # collections would write to pages that the processes share
    for end in ends:
        if os.fork() == 0:
            try:
                connection = socket.socket(fileno=int(end))
                serve(connection.makefile("rb"), connection.makefile("wb"))
            finally:
                os._exit(0)
        os.close(int(end))
    for _ in ends:
        os.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
