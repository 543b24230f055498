"""A CPU in place of a device with a queue, which counts the host's requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fleetfoot.kernels.prepare.staging import Event
from fleetfoot.runner.v2.device import CpuDevice


class RecordingDevice(CpuDevice):
    """Counts copies in, copies out and waits, and keeps their order in ``events``.

    With ``has_graphs``, "captured" work is run again at each replay, padding included, as a graph would.
    """

    def __init__(self, *, has_graphs: bool = False) -> None:
        super().__init__()
        self.has_graphs = has_graphs
        self.counts: Counter[str] = Counter()
        self.events: list[str] = []
        self.sizes_in: list[int] = []
        self.is_behind = False  # True: no event has been passed before a wait for it

    def _note(self, event: str) -> None:
        self.counts[event] += 1
        self.events.append(event)

    def capture(self, work: Callable[[], Any]) -> RecordedCapture:
        self._note("capture")
        work()
        return RecordedCapture(self, work)

    def copy_in(self, source: torch.Tensor, front: torch.Tensor, arena: torch.Tensor, num_writes: int) -> None:
        self._note("copy_in")
        self.sizes_in.append(front.numel() + 2 * num_writes)
        super().copy_in(source, front, arena, num_writes)

    def copy_out(self, source: torch.Tensor) -> tuple[torch.Tensor, Event]:
        self._note("copy_out")
        host, _ = super().copy_out(source)
        return host, RecordedEvent(self, "copy_out")

    def record(self) -> Event:
        return RecordedEvent(self, "copy_in")


@dataclass
class RecordedCapture:
    """Runs its work again."""

    device: RecordingDevice
    work: Callable[[], Any]
    output: Any = None

    def replay(self) -> None:
        self.device._note("replay")
        self.output = self.work()


@dataclass
class RecordedEvent:
    """Records waits, and for which event."""

    device: RecordingDevice
    what: str

    def query(self) -> bool:
        return not self.device.is_behind

    def synchronize(self) -> None:
        self.device._note(f"wait_{self.what}")
