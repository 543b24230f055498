"""Which attention backend and which operations a device runs on."""

from __future__ import annotations

from importlib.util import find_spec

from fleetfoot.kernels.attention.backend import AttentionBackend
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.kernels.native_ops import native_ops
from fleetfoot.kernels.opset import OpSet
from fleetfoot.kernels.torch_ops import torch_ops
from fleetfoot.kernels.triton_ops import triton_ops
from fleetfoot.native.library import native_available


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


def select_attention(device_type: str) -> AttentionBackend:
    """The fastest backend that is available for ``device_type``."""
    if device_type == "cpu" and native_available()[0]:
        from fleetfoot.kernels.attention.native_backend import NativeBackend

        return NativeBackend()
    if device_type == "cuda" and find_spec("triton") is not None:
        from fleetfoot.kernels.attention.triton_backend import TritonBackend

        return TritonBackend()
    return SDPABackend()
