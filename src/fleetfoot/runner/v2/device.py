"""Copies, events and graphs of a device, behind one interface: on a CPU, where every call is complete when it returns,
the runner has the same code, and tests count the calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.prepare.reference import apply_staged_writes_numpy
from fleetfoot.kernels.prepare.staging import Event, StagingDevice
from fleetfoot.runner.graphs import Capture

ApplyStagedWrites = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]


class Device(StagingDevice, Protocol):
    """Copies, events and graphs of one device."""

    has_graphs: bool

    def capture(self, work: Callable[[], Any]) -> Capture:
        """Run ``work`` once, which compiles its kernels, and once more under capture."""
        ...

    def copy_out(self, source: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Queue a copy to new host memory, concurrent with work that is queued later; the event is behind the copy."""
        ...


class _PassedEvent:
    """An event on a device without a queue."""

    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class CpuDevice:
    """Implements `Device` on the host."""

    torch_device = torch.device("cpu")
    has_graphs = False

    def __init__(self, apply_staged_writes: ApplyStagedWrites = apply_staged_writes_numpy) -> None:
        self._apply_staged_writes = apply_staged_writes

    def capture(self, work: Callable[[], Any]) -> Capture:
        raise RuntimeError("a CPU has no graphs to capture")

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def copy_in(self, source: torch.Tensor, front: torch.Tensor, arena: torch.Tensor, num_writes: int) -> None:
        self._apply_staged_writes(source, front, arena, num_writes)

    def copy_out(self, source: torch.Tensor) -> tuple[torch.Tensor, Event]:
        return source, _PASSED

    def record(self) -> Event:
        return _PASSED


_PASSED = _PassedEvent()


class _CudaEvent:
    __slots__ = ("_event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def passed(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


class _CudaCapture:
    """A CUDA graph. All graphs of a device share one memory pool, because they never run concurrently."""

    def __init__(self, work: Callable[[], Any], pool: Any, stream: torch.cuda.Stream) -> None:
        work()
        # not the whole device: a send to a pipeline rank that is capturing may still be queued
        torch.cuda.current_stream().synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # not `torch.cuda.graph`, which collects garbage and empties caches first: the step that captures waits for this
        with torch.cuda.stream(stream):
            self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.output = work()
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def replay(self) -> None:
        self._graph.replay()


class CudaDevice:
    """Implements `Device` on a GPU: work is queued on the current stream, and outputs are copied on another stream."""

    has_graphs = True

    def __init__(self, device: torch.device, apply_staged_writes: ApplyStagedWrites) -> None:
        self.torch_device = device
        self._apply_staged_writes = apply_staged_writes
        self._out = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._capturing = torch.cuda.Stream(device)

    def capture(self, work: Callable[[], Any]) -> Capture:
        return _CudaCapture(work, self._pool, self._capturing)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def copy_in(self, source: torch.Tensor, front: torch.Tensor, arena: torch.Tensor, num_writes: int) -> None:
        self._apply_staged_writes(source, front, arena, num_writes)

    def copy_out(self, source: torch.Tensor) -> tuple[torch.Tensor, Event]:
        self._out.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._out):
            host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            host.copy_(source, non_blocking=True)
            source.record_stream(self._out)  # keep its memory until the copy has read it
        return host, _CudaEvent(self._out)

    def record(self) -> Event:
        return _CudaEvent(torch.cuda.current_stream(self.torch_device))


def open_device(device: torch.device, kernels: Kernels) -> Device:
    """The `Device` of a torch device."""
    if device.type == "cpu":
        return CpuDevice(kernels.apply_staged_writes)
    return CudaDevice(device, kernels.apply_staged_writes)
