"""What a machine can do at most, measured on the spot: the rate of a copy and of a matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

_COPY_BYTES = 256 << 20
_SQUARE = {"cuda": 8192, "cpu": 2048}
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Of one device."""

    bytes_per_s: float
    """Read and written together, by a copy that no cache holds."""
    flops_per_s: float
    """Of a square matrix product of the model's dtype; a multiplication with an addition counts as two."""


def measure_ceilings(device: str, dtype: str) -> Ceilings:
    """Takes a second or less, and memory for a moment: 1 GB on a GPU.

    Args:
        device: ``cpu`` or ``cuda``, the current one.
        dtype: torch's name.

    Raises:
        torch.OutOfMemoryError: the GPU has less to spare.
    """
    return Ceilings(_copy_rate(device), _product_rate(device, getattr(torch, dtype)))


def _copy_rate(device: str) -> float:
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / _seconds(lambda: target.copy_(source), device)


def _product_rate(device: str, dtype: torch.dtype) -> float:
    size = _SQUARE[device]
    a = torch.randn(size, size, dtype=dtype, device=device)
    b = torch.randn_like(a)
    out = torch.empty_like(a)
    return 2 * size**3 / _seconds(lambda: torch.mm(a, b, out=out), device)


def _seconds(work: Callable[[], object], device: str) -> float:
    """Median of a few runs, after one that warms up."""
    work()
    return median(_timed(work, device) for _ in range(_REPEATS))


def _timed(work: Callable[[], object], device: str) -> float:
    if device == "cpu":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    work()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3
