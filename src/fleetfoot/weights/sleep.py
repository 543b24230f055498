"""Sleep: giving the memory of weights and KV back while their tensors keep their addresses.

Addresses stay, so captured graphs and kernels' arguments stay valid. On a GPU the pages are unmapped, and new ones
mapped at wake-up (``native/device_memory.c``). On a CPU the operating system takes the pages, and gives zeros when they
are accessed again.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from fleetfoot.native.loading import PATH, NativeUnavailableError, load_device_memory
from fleetfoot.records.weights import Span
from fleetfoot.utils.memory import release_pages, trim_heap
from fleetfoot.utils.process import no_collections

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)
"""What can be woken separately; vLLM's names."""


class SleepMemory(ABC):
    """The memory of an engine's weights and KV on one device."""

    @contextmanager
    def allocating(self, tag: str) -> Iterator[None]:
        """What this thread allocates within belongs to the tag, one of TAGS. Once for each."""
        yield

    @abstractmethod
    def release(self, tag: str, spans: Iterable[Span] = (), *, keeps_rest: bool = True) -> None:
        """Give the memory of a tag back, while no step runs. The content of ``spans`` is dropped. All else is copied to
        the host, where it is not there already, or with ``keeps_rest`` False dropped too.

        Raises MemoryError: the host has no memory for the copy; nothing has changed.
        """

    @abstractmethod
    def restore(self, tag: str) -> None:
        """Undo `release`. What was dropped is 0. Raises torch.OutOfMemoryError: the device has no memory for
        it; nothing has changed."""

    def close(self) -> None:  # noqa: B027
        """Free what is kept on the host, once the tensors are not used any more."""


class CpuMemory(SleepMemory):
    """On a CPU only what is dropped is given back: all else is in the host's memory anyway."""

    def release(self, tag: str, spans: Iterable[Span] = (), *, keeps_rest: bool = True) -> None:
        for address, size in spans:
            release_pages(address, size)
        trim_heap()

    def restore(self, tag: str) -> None:
        """Pages come back when they are accessed."""


@dataclass(slots=True)
class _Pool:
    """A torch memory pool, and what is kept of it while it is released."""

    memory_pool: Any
    number: int
    """In the library."""
    kept: list[Span] = field(default_factory=list)
    host: Span = (0, 0)
    """Pinned memory with what is kept, which is allocated at the first `release`."""


class CudaMemory(SleepMemory):
    """On a GPU, memory pools with an allocator of their own. Raises NativeUnavailableError: the C library or the driver
    does not have it."""

    def __init__(self, device: torch.device) -> None:
        self._library = load_device_memory()
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)  # torch.cuda.use_mem_pool needs the index
        self._pools: dict[str, _Pool] = {}

    @contextmanager
    def allocating(self, tag: str) -> Iterator[None]:
        pool = _Pool(torch.cuda.MemPool(_allocator().allocator()), self._library.new_tag())
        self._pools[tag] = pool
        self._library.set_tag(pool.number)
        gc.collect()
        try:
            with no_collections(), torch.cuda.use_mem_pool(pool.memory_pool, self._device):
                yield
        finally:
            self._library.set_tag(0)

    def release(self, tag: str, spans: Iterable[Span] = (), *, keeps_rest: bool = True) -> None:
        torch.cuda.synchronize(self._device)
        pool = self._pools[tag]
        kept = remaining(self._allocations(pool), spans) if keeps_rest else []
        self._fit_host(pool, sum(size for _, size in kept))
        self._copy([(source, host, size) for source, host, size in self._on_host(pool, kept)])
        pool.kept = kept
        self._check(self._library.unmap(pool.number))
        torch.cuda.empty_cache()

    def restore(self, tag: str) -> None:
        torch.cuda.empty_cache()  # activations may have what is needed
        pool = self._pools[tag]
        if self._library.map(pool.number):
            raise torch.OutOfMemoryError(
                f"the GPU has no memory for {tag} ({self._error()}); free what else uses it, and call wake_up again"
            )
        self._copy([(host, address, size) for address, host, size in self._on_host(pool, pool.kept)])

    def close(self) -> None:
        for pool in self._pools.values():
            self._fit_host(pool, 0)
        self._pools.clear()

    def _allocations(self, pool: _Pool) -> list[Span]:
        count = self._library.list(pool.number, None, 0)
        spans = np.empty((count, 2), dtype=np.uint64)
        self._library.list(pool.number, spans.ctypes.data, count)
        return [(address, size) for address, size in spans.tolist()]

    def _fit_host(self, pool: _Pool, size: int) -> None:
        """Have ``size`` bytes on the host."""
        address, capacity = pool.host
        if capacity == size:
            return
        if capacity:
            self._library.host_free(address, capacity)
        pool.host = (0, 0)
        if size:
            if not (address := self._library.host_alloc(size)):
                raise MemoryError(f"sleep copies {size:,} bytes to pinned host memory: {self._error()}")
            pool.host = (address, size)

    @staticmethod
    def _on_host(pool: _Pool, kept: Sequence[Span]) -> Iterator[tuple[int, int, int]]:
        """Address on the device, address on the host, and bytes of each span."""
        host = pool.host[0]
        for address, size in kept:
            yield address, host, size
            host += size

    def _copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Source, destination and bytes of each copy."""
        table = np.array(copies, dtype=np.uint64).reshape(-1, 3)
        self._check(self._library.copy(table.ctypes.data, len(table)))

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"the CUDA driver has failed: {self._error()}")

    def _error(self) -> str:
        return (self._library.error() or b"").decode(errors="replace")


@cache
def _allocator() -> Any:
    """Torch's end of the library's allocator. One for the process: torch keeps a pointer to it."""
    return torch.cuda.memory.CUDAPluggableAllocator(str(PATH), "ff_device_alloc", "ff_device_free")


class ResidentMemory(SleepMemory):
    """Memory of an engine that does not sleep."""

    def release(self, tag: str, spans: Iterable[Span] = (), *, keeps_rest: bool = True) -> None:
        raise ValueError("this engine cannot sleep; start it with enable_sleep_mode=True")

    restore = release


RESIDENT = ResidentMemory()


def make_sleep_memory(device: torch.device, *, is_enabled: bool) -> SleepMemory:
    """The memory for a device. Raises ValueError: it cannot be given back there."""
    if not is_enabled:
        return RESIDENT
    try:
        return CpuMemory() if device.type == "cpu" else CudaMemory(device)
    except NativeUnavailableError as error:
        raise ValueError(f"enable_sleep_mode is True, but GPU memory cannot be given back: {error}") from error


def remaining(whole: Iterable[Span], removed: Iterable[Span]) -> list[Span]:
    """The parts of ``whole`` that no span of ``removed`` covers, in order."""
    cuts = sorted((address, address + size) for address, size in removed)
    found = []
    for address, size in sorted(whole):
        begin, end = address, address + size
        for first, last in cuts:
            if last <= begin or first >= end:
                continue
            if first > begin:
                found.append((begin, first - begin))
            begin = max(begin, last)
        if end > begin:
            found.append((begin, end - begin))
    return found
