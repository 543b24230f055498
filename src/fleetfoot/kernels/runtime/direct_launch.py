"""Launches of compiled Triton kernels with less work on the host.

For every launch ``JITFunction.run`` reads environment variables, compares the global variables of the kernel, makes a
string of its options, and calls empty chains of hooks. Here a kernel that was launched once is found by the
specialization of its arguments, as there, and is passed to Triton's launcher as it is. Other launches are left to
``run``, which raises, compiles and observes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

_VERSIONS = ("3.6.",)
"""Versions of Triton that have the internals which are used here."""
_ATTRIBUTE = "_fleetfoot_launches"


def direct_launch(jit: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """The same as ``jit[grid]``, for a function of ``triton.jit`` or ``gluon.jit`` or anything else with a grid."""
    if not hasattr(jit, "device_caches") or not _has_internals():
        return jit[grid]
    launches = jit.__dict__.get(_ATTRIBUTE)
    if launches is None:
        launches = _Launches(jit)
        setattr(jit, _ATTRIBUTE, launches)
    return partial(launches.launch, grid)


@cache
def _has_internals() -> bool:
    import triton

    return triton.__version__.startswith(_VERSIONS)


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
