"""Which attention backend a device runs on."""

from __future__ import annotations

from importlib.util import find_spec

from fleetfoot.kernels.attention.backend import AttentionBackend
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend


def select_attention(device_type: str) -> AttentionBackend:
    """The fastest backend that is available for ``device_type``."""
    if device_type == "cpu":
        from fleetfoot.kernels.native_ops import native_available

        if native_available()[0]:
            from fleetfoot.kernels.attention.native_backend import NativeBackend

            return NativeBackend()
    if device_type == "cuda" and find_spec("triton") is not None:
        from fleetfoot.kernels.attention.triton_backend import TritonBackend

        return TritonBackend()
    return SDPABackend()
