"""The few things that Model Runner V2 asks of a device besides arithmetic: copies, events and waiting.

They go through one small object, so that tests can count them, and so that a CPU, where everything has happened when
a call returns, needs no `if` anywhere else.
"""

from __future__ import annotations

from typing import Protocol

import torch


class Event(Protocol):
    """A point in the device's queue."""

    def passed(self) -> bool:
        """Whether the device has passed it; does not wait."""
        ...

    def wait(self) -> None:
        """Block the host until the device has passed it."""
        ...


class Device(Protocol):
    """Copies and events of one device."""

    torch_device: torch.device

    def pinned(self, size: int) -> torch.Tensor:
        """``[size]`` int32 on the host, page-locked where that makes copies asynchronous."""
        ...

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy from the host to the device."""
        ...

    def copy_out(self, source: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """Queue a copy to new host memory, beside the work that is queued later; the event says when it is there."""
        ...

    def record(self) -> Event:
        """An event behind everything queued so far."""
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

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)

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


class CudaDevice:
    """Implements `Device` on a GPU: work is queued on the current stream, outputs leave on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._out = torch.cuda.Stream(device)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, pin_memory=True)

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source, non_blocking=True)

    def copy_out(self, source: torch.Tensor) -> tuple[torch.Tensor, Event]:
        self._out.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(self._out):
            host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
            host.copy_(source, non_blocking=True)
            source.record_stream(self._out)  # its memory must not be reused before it is read
        return host, _CudaEvent(self._out)

    def record(self) -> Event:
        return _CudaEvent(torch.cuda.current_stream(self.torch_device))


def open_device(device: torch.device) -> Device:
    """The `Device` of a torch device."""
    return CpuDevice() if device.type == "cpu" else CudaDevice(device)
