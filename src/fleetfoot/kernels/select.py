"""Which implementation of the operations a device runs on."""

from __future__ import annotations

from importlib.util import find_spec

from fleetfoot.kernels.native_ops import native_available, native_ops
from fleetfoot.kernels.opset import OpSet
from fleetfoot.kernels.torch_ops import torch_ops
from fleetfoot.kernels.triton_ops import triton_ops


def select_ops(device_type: str, *, native: bool = True) -> OpSet:
    """The fastest operations that are available for ``device_type`` (``"cpu"``, ``"cuda"``, ...).

    Args:
        native: False keeps to torch on a CPU, also where the native library loads.
    """
    if device_type == "cpu" and native and native_available()[0]:
        return native_ops()
    if device_type == "cuda" and find_spec("triton") is not None:
        return triton_ops()
    return torch_ops()
