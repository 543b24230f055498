"""A context in which nothing is compiled, captured or loaded on a GPU."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from triton.compiler import compiler
from triton.runtime import build, jit
from triton.runtime.driver import driver

from fleetfoot.kernels.runtime import cuda_source


class CompiledLateError(AssertionError):
    """Work that belongs before the first request."""


@contextmanager
def nothing_compiles() -> Iterator[list[str]]:
    """Within it, compilers, graph capture and the loading of modules raise `CompiledLateError`. Yields what did."""
    late: list[str] = []

    def refuse(what: str, name: Callable[..., object]) -> Callable[..., Any]:
        def refused(*arguments: Any, **options: Any) -> Any:
            late.append(f"{what}: {name(*arguments)}")
            raise CompiledLateError(late[-1])

        return refused

    driver_call = cuda_source.driver_call

    def call(name: str, *arguments: Any) -> None:
        if name == "cuModuleLoadData":
            refuse("CUDA module", lambda: name)()
        driver_call(name, *arguments)

    utils = driver.active.utils
    with ExitStack() as stack:
        for owner, attribute, what, name in (
            (jit.JITFunction, "_do_compile", "Triton", lambda function, key, *_: f"{function.__name__} {key}"),
            (compiler, "compile", "Triton", lambda source, *_: source),
            (build, "_build", "launcher", lambda name, *_: name),
            (cuda_source._Nvrtc, "compile", "NVRTC", lambda _, path, *__: path),
            (torch.cuda.CUDAGraph, "capture_begin", "graph", lambda *_: ""),
            (utils, "load_binary", "Triton module", lambda name, *_: name),
        ):
            stack.enter_context(patch.object(owner, attribute, refuse(what, name)))
        stack.enter_context(patch.object(cuda_source, "driver_call", call))
        yield late
