"""The number of threads in the steps of an engine on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fleetfoot.native.loading import NativeUnavailableError, open_library
from fleetfoot.utils.process import num_cores


class StepThreads:
    """Limits the threads of a step: torch and the C kernels have at most as many as there are cores, and as many as the
    pool of the C library has while another process takes its cores. A program's own number is restored.

    Torch's threads spin for milliseconds after each operation that they share, on cores that the pool's need, and wait
    for each other at barriers, so they follow the pool. ``allowed``: how many of the requested threads a step has that
    starts now; None: those of the C library's pool, if it can be used.
    """

    def __init__(self, cores: int | None = None, allowed: Callable[[int], int] | None = None) -> None:
        self._cores, self._allowed = num_cores() if cores is None else cores, allowed or _pool_size()
        self._before: list[int] = []

    def __enter__(self) -> None:
        before = torch.get_num_threads()
        self._before.append(before)
        if (number := self._allowed(min(before, self._cores))) != before:
            torch.set_num_threads(number)

    def __exit__(self, *_: object) -> None:
        if (before := self._before.pop()) != torch.get_num_threads():
            torch.set_num_threads(before)


def _pool_size() -> Callable[[int], int]:
    try:
        function: Callable[[int], int] = open_library().ff_threads_of_step
    except (NativeUnavailableError, AttributeError):
        return lambda requested: requested
    return function
