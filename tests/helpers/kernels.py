"""Kernels as tests need them: every implementation of one kind, or what this machine's CPU gets."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import pytest
import torch

from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.registry import DeviceFacts, load_kernels, plan_kernels
from fleetfoot.kernels.runtime.gpu_limits import has_hopper_kernels
from fleetfoot.native.loading import native_problem, open_library, supported_variants

_PROBLEM = native_problem()
NATIVE_VARIANTS = [
    pytest.param(variant, marks=[pytest.mark.slow, pytest.mark.skipif(bool(_PROBLEM), reason=_PROBLEM)])
    for variant in (("native",) if _PROBLEM else supported_variants(open_library()))
]
"""Every variant of the C kernels that this processor runs, for `pytest.mark.parametrize`."""
CPU_VARIANTS = ["torch", *NATIVE_VARIANTS]
"""The references, and the C kernels."""


@cache
def cpu_kernels() -> Kernels:
    """What an engine on this machine's CPU runs."""
    return load_kernels(plan_kernels(DeviceFacts("cpu", has_native=not _PROBLEM)))


@cache
def reference_kernels() -> Kernels:
    """The references in torch."""
    return load_kernels(plan_kernels(DeviceFacts("meta")))


def native_kernels(variant: str | None = None) -> Kernels:
    """The kernels in C, of one instruction set; None: of the best one here."""
    return load_kernels(plan_kernels(DeviceFacts("cpu", has_native=True)), native_variant=variant)


@cache
def triton_kernels(*, has_hopper: bool | None = None) -> Kernels:
    """The Triton kernels, which an interpreter or a GPU runs. Skips the test, or its module, without Triton.
    ``has_hopper``: with those for Hopper GPUs; None: if there is one."""
    if find_spec("triton") is None:
        pytest.skip("needs Triton", allow_module_level=True)
    if has_hopper is None:
        has_hopper = torch.cuda.is_available() and has_hopper_kernels(torch.device("cuda"))
    return load_kernels(plan_kernels(DeviceFacts("cuda", has_triton=True, has_hopper=has_hopper)))


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """Within it, an operation that makes the host wait for the GPU raises."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
