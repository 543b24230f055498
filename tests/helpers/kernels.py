"""Kernels as tests need them: every implementation of one kind, or what this machine's CPU gets."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import pytest

from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.registry import DeviceFacts, load_kernels, plan_kernels
from fleetfoot.native.loading import native_problem


@cache
def cpu_kernels() -> Kernels:
    """What an engine on this machine's CPU runs."""
    return load_kernels(plan_kernels(DeviceFacts("cpu", has_native=not native_problem())))


@cache
def reference_kernels() -> Kernels:
    """The references in torch."""
    return load_kernels(plan_kernels(DeviceFacts("meta")))


def native_kernels(variant: str | None = None) -> Kernels:
    """The kernels in C, of one instruction set; None: of the best one here."""
    return load_kernels(plan_kernels(DeviceFacts("cpu", has_native=True)), native_variant=variant)


@cache
def triton_kernels() -> Kernels:
    """The Triton kernels, which an interpreter or a GPU runs. Skips the test, or its module, without Triton."""
    if find_spec("triton") is None:
        pytest.skip("needs Triton", allow_module_level=True)
    return load_kernels(plan_kernels(DeviceFacts("cuda", has_triton=True)))
