"""Attention backends and operations by the names that a plan gives them."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

from fleetfoot.kernels.attention.backend import AttentionBackend
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.kernels.native_ops import native_ops
from fleetfoot.kernels.opset import OpSet
from fleetfoot.kernels.torch_ops import torch_ops
from fleetfoot.kernels.triton_ops import triton_ops
from fleetfoot.native.library import native_available
from fleetfoot.native.loading import NativeUnavailableError

_T = TypeVar("_T")


class KernelUnavailableError(RuntimeError):
    """What the plan names cannot be built here; the message has both the name and the cause."""


def ops_by_name(name: str) -> OpSet:
    """The operations ``native``, ``triton`` or ``torch``.

    Raises:
        KernelUnavailableError: they cannot be used in this process.
        ValueError: there is no such name.
    """
    makers: dict[str, Callable[[], OpSet]] = {"native": native_ops, "triton": triton_ops, "torch": torch_ops}
    return _build("operations", name, makers)


def attention_by_name(name: str) -> AttentionBackend:
    """The attention backend ``native``, ``triton`` or ``sdpa``.

    Raises:
        KernelUnavailableError: it cannot be used in this process.
        ValueError: there is no such name.
    """
    return _build("attention backend", name, {"native": _native, "triton": _triton, "sdpa": SDPABackend})


def _build(kind: str, name: str, makers: dict[str, Callable[[], _T]]) -> _T:
    if name not in makers:
        raise ValueError(f"{kind}: {name!r} is unknown; it can be {', '.join(makers)}")
    if name == "triton" and find_spec("triton") is None:
        raise KernelUnavailableError(f"the plan names the {kind} 'triton', but Triton is not installed")
    try:
        return makers[name]()
    except NativeUnavailableError as error:
        raise KernelUnavailableError(
            f"the plan names the {kind} {name!r}, which cannot be built in this process: {error}"
        ) from error


def _native() -> AttentionBackend:
    from fleetfoot.kernels.attention.native_backend import NativeBackend

    return NativeBackend()


def _triton() -> AttentionBackend:
    from fleetfoot.kernels.attention.triton_backend import TritonBackend

    return TritonBackend()


# --- TEMP
def select_ops(device_type: str, *, native: bool = True) -> OpSet:
    """The fastest operations that are available for ``device_type`` (``"cpu"``, ``"cuda"``, ...)."""
    if device_type == "cpu" and native and native_available()[0]:
        return native_ops()
    if device_type == "cuda" and find_spec("triton") is not None:
        return triton_ops()
    return torch_ops()


def select_attention(device_type: str) -> AttentionBackend:
    """The fastest backend that is available for ``device_type``."""
    if device_type == "cpu" and native_available()[0]:
        return _native()
    if device_type == "cuda" and find_spec("triton") is not None:
        return _triton()
    return SDPABackend()
