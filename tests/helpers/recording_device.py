"""A CPU in place of a device with a queue: counts the requests of the host, and refuses operations that wait for it."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fleetfoot.kernels.interface import Kernels
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

    def capture(self, work: Callable[[], Any], warm_up: AbstractContextManager[object] | None) -> "RecordedCapture":
        self._note("capture")
        if warm_up is not None:
            with warm_up:
                work()
        return RecordedCapture(self, work, work())

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


ASKS_FOR_VALUES = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.repeat_interleave.Tensor,
}
"""What makes a host wait for its device: values, and shapes that depend on them."""


class NoValues(TorchDispatchMode):
    """Refuses operations that no graph can hold."""

    num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in ASKS_FOR_VALUES, func
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
            assert all(index is None or index.dtype is not torch.bool for index in args[1]), func
        NoValues.num_operations += 1
        return func(*args, **(kwargs or {}))


class StrictDevice(RecordingDevice):
    """Its graphs hold nothing that depends on a value."""

    def __init__(self) -> None:
        super().__init__(has_graphs=True)

    def capture(self, work: Callable[[], Any], warm_up: AbstractContextManager[object] | None) -> Any:
        def watched() -> Any:
            with NoValues():
                return work()

        return super().capture(watched, warm_up)


def unwatched(ops: Kernels) -> Kernels:
    """Operations that read values on a CPU, unlike the kernels of a GPU: draws under filters, and logprobs."""

    def without_modes(operation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            with _disable_current_modes():
                return operation(*args, **kwargs)

        return run

    return replace(ops, sample=without_modes(ops.sample), token_logprobs=without_modes(ops.token_logprobs))
