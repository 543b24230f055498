"""Torch without memory: its operations in a dry pass (`fleetfoot.kernels.runtime.compile_ahead`).

Within `dry_torch`, every operation runs on torch's ``meta`` device, which knows shapes and no values, whatever device
its tensors are on. Nothing is read, and nothing is written: an in-place operation on a weight or a buffer leaves it as
it is. The result is a `DryTensor`. It has the device, dtype, shape, strides and storage offset of the real result, and
an address that is aligned as the real one would be, because Triton compiles a kernel anew for pointers that are not.

What needs values or memory fails with `DryPassError`: reading a tensor on the host, an operation whose result's shape
depends on values, and using a `DryTensor` behind its dry pass. Messages between ranks are not sent. What is allocated
in a dry pass and kept is allocated within `real_memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fleetfoot.kernels.runtime.dry_shapes import META, result_on_meta

_ADDRESS = 1 << 12
"""Of all memory that torch would allocate: its allocators align to 64 bytes or more. No process has memory there, so a
program that uses the address all the same is stopped."""

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_TRACKING = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
"""The count of writes that torch keeps for each tensor, and which of them are views of others."""


class DryPassError(RuntimeError):
    """A dry pass needs values, or memory, that its tensors do not have."""


@contextmanager
def dry_torch() -> Iterator[None]:
    """A context in which torch's operations of this thread access no memory."""
    mode = _DryMode()
    lifts_cpu_alone = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor then goes to its device by an operation, which is dry
    try:
        with torch._C._ExcludeDispatchKeyGuard(_TRACKING), mode:
            yield
    finally:
        mode.is_over = True
        torch._C._set_only_lift_cpu_tensors(lifts_cpu_alone)


def real_memory() -> AbstractContextManager[object]:
    """Within it, torch's operations are real in a dry pass too. For new tensors that are kept behind it."""
    real: AbstractContextManager[object] = torch._C._DisableTorchDispatch()
    return real


class DryTensor(torch.Tensor):
    """A tensor of a dry pass, on any device."""

    __slots__ = ("_dry_pass", "meta", "storage_address")

    _dry_pass: _DryMode
    meta: torch.Tensor
    """The same tensor on the ``meta`` device, where it shares its storage with its views."""
    storage_address: int

    @classmethod
    def of(cls, meta: torch.Tensor, device: torch.device, storage_address: int, dry_pass: _DryMode) -> DryTensor:
        tensor: DryTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        tensor.meta, tensor.storage_address, tensor._dry_pass = meta, storage_address, dry_pass
        return tensor

    def data_ptr(self) -> int:
        """What the real tensor's would be, modulo 16."""
        if self._dry_pass.is_over:
            raise DryPassError(f"{self} is used behind its dry pass: it has no memory")
        # An empty tensor is at 0, as torch has it.
        return self.storage_address + int(self.storage_offset()) * self.itemsize if self.numel() else 0

    def numpy(self, *, force: bool = False) -> Any:
        raise DryPassError(f"numpy() of {self} in a dry pass, whose tensors have no values")

    def tolist(self) -> Any:
        raise DryPassError(f"tolist() of {self} in a dry pass, whose tensors have no values")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DryTensor({list(self.shape)}, {self.dtype}, {self.device})"

    # Operations go to the dispatcher at once, which is faster.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """An operation where the mode of the dry pass is off."""
        raise DryPassError(f"{func} on a tensor of a dry pass, behind it or within real_memory: it has no memory")


class _DryMode(TorchDispatchMode):
    """The dispatch mode of a dry pass."""

    is_over = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch._dynamo at the first operation, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):  # In inference mode these come here whole. Their parts come here one by one.
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)  # not decompose(), which prefers slow ones in Python
        if func.namespace == "c10d":
            return _not_sent(func, args)
        call = _MetaCall(self, kwargs.get("device"))
        args, kwargs = call.lower(args), {name: call.lower(value) for name, value in kwargs.items()}
        if _takes_device(func):
            kwargs["device"] = META
            kwargs.pop("pin_memory", None)
        try:
            result = result_on_meta(func, args, kwargs)
        except RuntimeError as error:
            raise DryPassError(f"{func} in a dry pass, whose tensors have no values: {error}") from error
        return call.lift(result)


class _MetaCall:
    """The tensors of an operation on their way to the ``meta`` device and back.

    Args:
        device: the ``device`` argument of the operation; None: that of its arguments.
    """

    def __init__(self, dry_pass: _DryMode, device: torch.device | None) -> None:
        self._dry_pass = dry_pass
        self._device = torch.device("cpu") if device is None else _numbered(device)
        self._finds_device = device is None
        self._arguments: dict[int, torch.Tensor] = {}  # by the id of the meta tensor
        self._addresses: dict[int, int] = {}  # by the meta storage, which a view shares

    def lower(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            meta, address = _of_dry(value) if isinstance(value, DryTensor) else _of_real(value)
            self._arguments[id(meta)] = value
            self._addresses[meta.untyped_storage()._cdata] = address
            if self._finds_device and value.device.type != "cpu":  # numbers go along on the CPU
                self._device = value.device
            return meta
        return [self.lower(item) for item in value] if isinstance(value, list | tuple) else value

    def lift(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            argument = self._arguments.get(id(value))
            if argument is not None:  # which was to be written, and is not
                if argument.shape != value.shape or argument.stride() != value.stride():
                    raise DryPassError(f"{argument!r} would be given the shape {list(value.shape)} where it lies")
                return argument
            address = self._addresses.get(value.untyped_storage()._cdata, _ADDRESS)
            return DryTensor.of(value, self._device, address, self._dry_pass)
        return type(value)(map(self.lift, value)) if isinstance(value, list | tuple) else value


def _of_dry(tensor: DryTensor) -> tuple[torch.Tensor, int]:
    return tensor.meta, tensor.storage_address


def _of_real(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The tensor on the ``meta`` device, and the address of its storage."""
    storage = tensor.untyped_storage()
    meta = torch.empty(0, dtype=tensor.dtype, device=META)
    meta.set_(
        torch.UntypedStorage(storage.nbytes(), device=META), tensor.storage_offset(), tensor.shape, tensor.stride()
    )
    return meta, storage.data_ptr()


def _numbered(device: torch.device) -> torch.device:
    """As a tensor on it says: the current GPU, if it is just any."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


@cache
def _is_composite(func: Any) -> bool:
    """Whether an operation is made of others. Some of these depend on the device, which must not be ``meta``."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)


@cache
def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _not_sent(func: Any, args: Any) -> Any:
    """What a collective operation of torch.distributed returns: its first argument, if anything, and a handle to wait
    for it, which is complete."""
    from torch._C._distributed_c10d import FakeWork

    handle = FakeWork().boxed()
    return handle if len(func._schema.returns) == 1 else (args[0], handle)
