"""Processes that compile kernels for another one, which finds them in Triton's cache on disk.

A compilation holds the interpreter's lock for a fifth of its time, up to 0.2 s at once. In a thread it would delay the
steps of a serving engine, and of all other threads that compile; a process has its own lock. It needs and sees no GPU:
each request has the target.
"""

from __future__ import annotations

import gc
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
from typing import TYPE_CHECKING, Any, BinaryIO

from fleetfoot.config import env
from fleetfoot.kernels.runtime.internals import compile_source, inputs_of_job
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
_MOST_PROCESSES = 16
MANY_PROCESSES = 8
"""Number of processes with which a start waits for the kernels of all shapes with plain sampling."""


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
        known = inputs_of_job(job)
        if known is None:
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
        jit = _jit_in(import_module(self.module), self.name)
        compile_source(jit, self.signature, self.constants, self.attributes, self.target, self.options)


def has_cache() -> bool:
    """Whether Triton's cache on disk holds anything."""
    from triton import knobs

    folder = Path(knobs.cache.dir)
    return folder.is_dir() and any(folder.iterdir())


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
