"""A CPU that plays a device with a queue, and counts what the host asks of it."""

from __future__ import annotations

from collections import Counter

import torch

from fleetfoot.runner.v2.device import CpuDevice, Event


class RecordingDevice(CpuDevice):
    """Implements `Device`; counts copies in, copies out and waits, and keeps the order of everything in ``events``."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.events: list[str] = []
        self.sizes_in: list[int] = []
        self.is_behind = False  # True: no event has been passed before somebody waits for it

    def _note(self, event: str) -> None:
        self.counts[event] += 1
        self.events.append(event)

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._note("copy_in")
        self.sizes_in.append(source.numel())
        super().copy_in(destination, source)

    def copy_out(self, source: torch.Tensor) -> tuple[torch.Tensor, Event]:
        self._note("copy_out")
        host, _ = super().copy_out(source)
        return host, RecordedEvent(self, "copy_out")

    def record(self) -> Event:
        return RecordedEvent(self, "copy_in")


class RecordedEvent:
    """Notes that somebody waited, and for what."""

    def __init__(self, device: RecordingDevice, what: str) -> None:
        self._device = device
        self._what = what

    def passed(self) -> bool:
        return not self._device.is_behind

    def wait(self) -> None:
        self._device._note(f"wait_{self._what}")
