"""The few things that Model Runner V2 asks of a device besides arithmetic: copies, events and waiting.

They go through one small object, so that tests can count them, and so that a CPU, where everything has happened when
a call returns, needs no `if` anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.prepare.reference import apply_staged_writes_numpy
from fleetfoot.kernels.prepare.staging import Event, StagingDevice

ApplyStagedWrites = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], None]


class Capture(Protocol):
    """Work that was captured once and can be queued again as a whole."""

    output: Any
    """What the captured work returned; its tensors are filled anew by each replay."""

    def replay(self) -> None: ...


class Device(StagingDevice, Protocol):
    """Copies, events and graphs of one device."""

    has_graphs: bool

    def capture(self, work: Callable[[], Any]) -> Capture:
        """Run ``work`` once, so that all it needs is compiled, and once more under capture."""
        ...

    def copy_out(self, source: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Queue a copy to new host memory, beside the work that is queued later; the event says when it is there."""
        ...


class _Passed:
    """An event on a device that does not queue."""

    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class CpuDevice:
    """Implements `Device` where the host computes itself."""

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


_PASSED = _Passed()


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
    """A CUDA graph. All of a device's graphs share one memory pool: no two of them run at the same time."""

    def __init__(self, work: Callable[[], Any], pool: Any, stream: torch.cuda.Stream) -> None:
        work()
        # Not the whole device: in a pipeline it may be sending what the peer, which captures too, takes later.
        torch.cuda.current_stream().synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # Not `torch.cuda.graph`, which collects garbage and empties caches first: a step that captures waits for this.
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
    """Implements `Device` on a GPU: work is queued on the current stream, outputs leave on a stream of their own."""

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
            source.record_stream(self._out)  # its memory must not be reused before it is read
        return host, _CudaEvent(self._out)

    def record(self) -> Event:
        return _CudaEvent(torch.cuda.current_stream(self.torch_device))


def open_device(device: torch.device, kernels: Kernels) -> Device:
    """The `Device` of a torch device."""
    if device.type == "cpu":
        return CpuDevice(kernels.apply_staged_writes)
    return CudaDevice(device, kernels.apply_staged_writes)
