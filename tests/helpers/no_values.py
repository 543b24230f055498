"""A mode for tests in which operations that would wait for a device fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fleetfoot.kernels.interface import Kernels
from tests.helpers.recording_device import RecordingDevice

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

    def capture(self, work: Callable[[], Any]) -> Any:
        def watched() -> Any:
            with NoValues():
                return work()

        return super().capture(watched)


def unwatched(ops: Kernels) -> Kernels:
    """Operations that read values on a CPU, unlike the kernels of a GPU: draws under filters, and logprobs."""

    def without_modes(operation: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any, **kwargs: Any) -> torch.Tensor:
            with _disable_current_modes():
                return operation(*args, **kwargs)

        return run

    return replace(ops, sample=without_modes(ops.sample), token_logprobs=without_modes(ops.token_logprobs))
