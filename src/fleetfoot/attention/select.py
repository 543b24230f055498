"""Which attention backend a device runs on."""

from __future__ import annotations

from importlib.util import find_spec

from fleetfoot.attention.backend import AttentionBackend
from fleetfoot.attention.sdpa import SDPABackend


def select_attention(device_type: str) -> AttentionBackend:
    """The fastest backend that is available for ``device_type``."""
    if device_type == "cpu":
        from fleetfoot.ops.native_ops import native_available

        if native_available()[0]:
            from fleetfoot.attention.native import NativeBackend

            return NativeBackend()
    if device_type == "cuda" and find_spec("triton") is not None:
        from fleetfoot.attention.triton import TritonBackend

        return TritonBackend()
    return SDPABackend()
