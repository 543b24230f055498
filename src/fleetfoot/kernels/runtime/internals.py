"""What the engine uses of Triton and torch beside their documented interfaces. A test holds it against the supported
versions. Both are imported when they are used.

Launches take less work on the host here: for every launch ``JITFunction.run`` reads environment variables, compares the
global variables of the kernel, makes a string of its options, and calls empty chains of hooks. Here a kernel that was
launched once is found by the specialization of its arguments, as there, and is passed to Triton's launcher as it is.
Other launches are left to ``run``, which raises, compiles and observes.
"""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from threading import Lock
from types import SimpleNamespace
from typing import Any

_VERSIONS = ("3.6.",)
"""Versions of Triton that have the internals of `direct_launch`, and with which the kernels in Gluon were tested: its
interface is experimental."""
_ATTRIBUTE = "_fleetfoot_launches"
_MOST_SYSTEM_ERRORS = 5
"""Errors of parsing one function, at most: see `parse_again`."""


@cache
def is_tested_triton() -> bool:
    """Whether the installed Triton is a version of `_VERSIONS`."""
    try:
        found = version("triton")
    except PackageNotFoundError:  # under another name, as with torch for ROCm
        import triton

        found = triton.__version__
    return found.startswith(_VERSIONS)


# --- compilation ------------------------------------------------------------------------------------------------------


def collecting_mode(executor: Any) -> Any:
    """Triton's mode in which a function of ``triton.jit`` submits compilations to an executor, and returns futures."""
    from triton import AsyncCompileMode

    return AsyncCompileMode(executor)


def active_mode() -> Any:
    """The mode of `collecting_mode` that is entered."""
    from triton.runtime._async_compile import active_mode

    return active_mode.get()


def inputs_of_job(job: Callable[[], object]) -> Mapping[str, Any] | None:
    """``src``, ``target`` and ``options`` of what that mode submits, which is a closure; None: it has another form."""
    known = inspect.getclosurevars(job).nonlocals if inspect.isfunction(job) else {}
    return known if {"src", "target", "options"} <= known.keys() else None


def compile_source(jit: Any, signature: Any, constants: Any, attributes: Any, target: Any, options: Any) -> None:
    """Compile a function of ``triton.jit`` or ``gluon.jit``, with its launcher, to the cache. Raises as Triton."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    source = (GluonASTSource if jit.is_gluon() else ASTSource)(jit, signature, constants, attributes)
    build_launcher(triton.compile(source, target=GPUTarget(*target), options=options))


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


@contextmanager
def absent_driver(capability: tuple[int, int]) -> Iterator[None]:
    """Triton's driver for an NVIDIA GPU that need not be here: kernels can be requested, not compiled or launched."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    device = object()  # of its own: what was requested for another one is not known
    before, target = driver._active, GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target,
            get_current_device=lambda: device,
            get_current_stream=lambda device: 0,
            map_python_to_cpp_type=str,
        )
    )
    try:
        yield
    finally:
        driver._active = before  # not its `reset_active`, which looks for a GPU


# --- launches ---------------------------------------------------------------------------------------------------------


def direct_launch(jit: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """The same as ``jit[grid]``, for a function of ``triton.jit`` or ``gluon.jit`` or anything else with a grid."""
    if not hasattr(jit, "device_caches") or not is_tested_triton():
        return jit[grid]
    launches = jit.__dict__.get(_ATTRIBUTE)
    if launches is None:
        launches = _Launches(jit)
        setattr(jit, _ATTRIBUTE, launches)
    return partial(launches.launch, grid)


class _Launches:
    """The launches of a ``triton.JITFunction``."""

    def __init__(self, jit: Any) -> None:
        from triton import knobs
        from triton.compiler import CompiledKernel
        from triton.runtime.driver import driver

        self._jit, self._driver, self._compiled_type = jit, driver, CompiledKernel
        self._knobs = knobs.runtime
        self._kernels: dict[tuple[Any, ...], Any] = {}

    def launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> Any:
        jit, knobs, driver = self._jit, self._knobs, self._driver.active
        device = driver.get_current_device()
        *_, bind = jit.device_caches[device]
        bound, specialization, others = bind(*arguments, **options)
        key = device, *specialization, *others.items()
        kernel = self._kernels.get(key)
        enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook  # chains, or what a program has set instead
        is_observed = getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or jit.pre_run_hooks
        if kernel is None or is_observed:
            kernel = jit[grid](*arguments, **options)
            if isinstance(kernel, self._compiled_type):
                self._kernels[key] = kernel
            return kernel
        stream = driver.get_current_stream(device)
        sizes = (*grid, 1, 1)[:3]
        metadata = hooks = None
        kernel.run(*sizes, stream, kernel.function, kernel.packed_metadata, metadata, hooks, hooks, *bound.values())
        return kernel


# --- torch ------------------------------------------------------------------------------------------------------------


@contextmanager
def untracked(mode: Any) -> Iterator[None]:
    """A context of a dispatch mode without torch's version counters of tensors and its view tracking."""
    import torch

    lifts_cpu_alone = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor then moves to its device by an operation
    try:
        tracking = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
        with torch._C._ExcludeDispatchKeyGuard(tracking), mode:
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts_cpu_alone)
