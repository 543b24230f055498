"""A process that compiles kernels for another one, which finds them in Triton's cache on disk.

A compilation holds the interpreter's lock for a fifth of its time, up to 0.2 s at once. In a thread it would delay the
steps of a serving engine; a process has its own lock. It needs and sees no GPU: each request has the target.
"""

from __future__ import annotations

import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from threading import Lock
from typing import Any, BinaryIO

from fleetfoot.config import env
from fleetfoot.kernels.runtime.triton_support import TritonKernel


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


def build_launcher(kernel: Any) -> None:
    """Build the launcher of a kernel, a few lines of C for each signature, so that it is in Triton's cache on disk too.

    Triton builds it at the first launch, where the C compiler takes 0.3 s. After a failure here, that launch raises.

    Args:
        kernel: ``triton.compiler.CompiledKernel``.
    """
    with suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)


def release_sources(kernel: Any) -> None:
    """Release the texts of all stages of a compilation, 0.3 MB, which Triton keeps: launches need the binary only.

    Args:
        kernel: ``triton.compiler.CompiledKernel``; None: the compilation failed.
    """
    for stage, code in [] if kernel is None else [*kernel.asm.items()]:
        if isinstance(code, str):
            del kernel.asm[stage]


def _jit_in(module: object, name: str) -> Any:
    """The ``triton.JITFunction`` of a name in a module; None: it has no such name."""
    kernel = getattr(module, name, None)
    return kernel.jit if isinstance(kernel, TritonKernel) else kernel


class CompileWorker:
    """The client of the process, which starts with the first kernel, and ends with the ``with`` block.

    The process also ends when the client's does, because its input is closed.

    Args:
        command: of the process; None: this module.
    """

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self._command = command or (sys.executable, "-m", __name__)
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False
        self._lock = Lock()  # of the two fields above

    def __enter__(self) -> CompileWorker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                with suppress(OSError):  # unsent data is lost
                    assert pipe is not None
                    pipe.close()

    def compile(self, job: Callable[[], object]) -> bool:
        """Compile the kernel of ``job``, and wait for it. False: it failed; the job itself will raise the error.

        Raises:
            RuntimeError: this has been closed.
        """
        try:
            source = KernelSource.of(job)
            if source is None:
                return False
            process = self._started()
            assert process.stdin is not None and process.stdout is not None
            pickle.dump(source, process.stdin)
            process.stdin.flush()
            return bool(pickle.load(process.stdout))
        except (OSError, EOFError, ValueError, TypeError, AttributeError, pickle.PickleError) as error:
            if self._is_closed:
                raise RuntimeError("the compile worker is closed") from error
            return False  # the process has ended, or the source cannot be pickled

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_closed:
                raise ValueError("the worker is closed")
            if self._process is None:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=env.for_child({"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}),
                    start_new_session=True,  # no interrupts from the keyboard
                )
            return self._process

    def close(self) -> None:
        """Kill the process, from any thread; a running compilation is lost."""
        with self._lock:
            self._is_closed = True
            process = self._process
        if process is not None:
            process.kill()
            process.wait()


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Compile each request until the input is closed."""
    while True:
        try:
            source: KernelSource = pickle.load(requests)
        except EOFError:
            return
        try:
            source.compile()
            is_done = True
        except Exception:  # the client compiles it again, and raises the error
            is_done = False
        pickle.dump(is_done, replies)
        replies.flush()


def main() -> None:
    """Compile what the parent process sends, until its end."""
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)  # keep the output of compilers out of the replies
        serve(requests, replies)


if __name__ == "__main__":
    main()
