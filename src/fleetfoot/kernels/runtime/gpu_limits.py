"""Properties of a GPU that launches depend on, and the tile sizes and kernels that follow from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

import torch

from fleetfoot.kernels.runtime.internals import absent_driver, is_tested_triton


@dataclass(frozen=True, slots=True)
class GPULimits:
    """Properties of a GPU that tilings depend on."""

    num_sms: int
    shared_bytes: int
    """Maximum shared memory of a program."""
    capability: tuple[int, int]


HOPPER_LIMITS = GPULimits(num_sms=132, shared_bytes=232448, capability=(9, 0))
"""Those of an H100 SXM and of an H200."""
_absent: ContextVar[GPULimits] = ContextVar("absent_gpu")


@contextmanager
def absent_gpu(limits: GPULimits) -> Iterator[torch.device]:
    """A GPU that need not be here, for dry passes: torch's ``meta`` device, whose tensors have no memory."""
    gpu_limits.cache_clear()
    token = _absent.set(limits)
    try:
        with absent_driver(limits.capability):
            yield torch.device("meta")
    finally:
        _absent.reset(token)
        gpu_limits.cache_clear()


@cache
def gpu_limits(device: torch.device) -> GPULimits:
    """The limits of ``device``. For a CPU, where kernels are interpreted, those of a small hypothetical GPU."""
    if device.type == "meta":
        return _absent.get()
    if device.type != "cuda":
        return GPULimits(num_sms=4, shared_bytes=100 * 1024, capability=(0, 0))
    properties = torch.cuda.get_device_properties(device)
    return GPULimits(
        num_sms=properties.multi_processor_count,
        # The opt-in maximum; not every platform reports it.
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block),
        capability=(properties.major, properties.minor),
    )


@cache
def has_hopper_kernels(device: torch.device) -> bool:
    """Whether ``device`` is a Hopper GPU and the installed Triton is a version that the kernels in Gluon support."""
    return torch.version.hip is None and gpu_limits(device).capability == (9, 0) and is_tested_triton()


def fit_tile(rows: int, tile: int, row_bytes: int, shared_bytes: int) -> tuple[int, int]:
    """The KV tile size, at most ``tile``, and the number of pipeline stages that fit in shared memory.

    Args:
        rows: rows of the query tile, which is in shared memory as well. row_bytes: bytes of a head of Q, K or V.
    """
    stages = 3
    while (rows + 2 * stages * tile) * row_bytes > shared_bytes:
        if tile > 16:
            tile //= 2
        elif stages > 1:
            stages -= 1
        else:
            break
    return tile, stages
