"""Torch without memory: what its operations do in a dry pass (`fleetfoot.kernels.runtime.compile_ahead`).

Within `dry_torch`, every operation runs on torch's ``meta`` device, which computes shapes and no values, for any device
of its tensors. Nothing is read or written: an in-place operation does not modify a weight or a buffer. The result is a
`DryTensor`. It has the device, dtype, shape, strides and storage offset of the real result, and an address with the
alignment of the real one, because Triton specializes kernels by the alignment of pointers.

Operations that need values or memory raise `DryPassError`: reading a tensor on the host, an operation with a result
shape that depends on values, and using a `DryTensor` after its dry pass. Collective operations send nothing. Buffers
that are allocated in a dry pass and outlive it are allocated within `real_memory`.

Torch implements nearly all operations for the ``meta`` device, but many of them in Python: the first one imports sympy
(0.3 s), some import torch._dynamo (more than 1 s), and a call takes up to 0.5 ms. The operations of this kind that the
engine uses have rules here (`Look`). Torch computes all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fleetfoot.kernels.runtime.internals import untracked

META = torch.device("meta")
_ADDRESS = 1 << 12
"""The address of all memory that torch would allocate: its allocators align to 64 bytes or more. It is never mapped, so
a program that dereferences it fails."""

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class DryPassError(RuntimeError):
    """A dry pass needs values or memory, which its tensors do not have."""


@contextmanager
def dry_torch() -> Iterator[None]:
    """A context in which torch's operations of this thread access no memory."""
    mode = _DryMode()
    try:
        with untracked(mode):
            yield
    finally:
        mode.is_over = True


def real_memory() -> AbstractContextManager[object]:
    """Within it, torch's operations are real in a dry pass too. For new tensors that outlive it."""
    real: AbstractContextManager[object] = torch._C._DisableTorchDispatch()
    return real


class DryTensor(torch.Tensor):
    """A tensor of a dry pass, on any device."""

    __slots__ = ("_dry_pass", "meta", "storage_address")

    _dry_pass: _DryMode
    meta: torch.Tensor
    """The same tensor on the ``meta`` device; its storage is shared with its views."""
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
        """The address of the real tensor, modulo 16."""
        if self._dry_pass.is_over:
            raise DryPassError(f"{self} is used after its dry pass: it has no memory")
        # Torch gives 0 for empty tensors.
        return self.storage_address + int(self.storage_offset()) * self.itemsize if self.numel() else 0

    def numpy(self, *, force: bool = False) -> Any:
        raise DryPassError(f"numpy() of {self} in a dry pass: its tensors have no values")

    def tolist(self) -> Any:
        raise DryPassError(f"tolist() of {self} in a dry pass: its tensors have no values")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DryTensor({list(self.shape)}, {self.dtype}, {self.device})"

    # Operations skip __torch_function__, which is faster.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Called for an operation outside of the mode of the dry pass."""
        raise DryPassError(f"{func} on a tensor of a dry pass, after it or within real_memory: it has no memory")


class _DryMode(TorchDispatchMode):
    """The dispatch mode of a dry pass."""

    is_over = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import torch._dynamo at the first operation, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):  # Inference mode does not decompose these. Their parts are intercepted one by one.
            with self:
                return func._op_dk(_COMPOSITE, *args, **kwargs)  # decompose() prefers slow decompositions in Python
        if func.namespace == "c10d":
            return _skip_collective(func, args)
        call = _MetaCall(self, kwargs.get("device"))
        args, kwargs = call.lower(args), {name: call.lower(value) for name, value in kwargs.items()}
        if _takes_device(func):
            kwargs["device"] = META
            kwargs.pop("pin_memory", None)
        try:
            result = result_on_meta(func, args, kwargs)
        except (RuntimeError, ValueError) as error:
            raise DryPassError(f"{func} in a dry pass: its tensors have no values: {error}") from error
        return call.lift(result)


class _MetaCall:
    """The tensors of an operation on their way to the ``meta`` device and back.

    Args:
        device: the ``device`` argument of the operation; None: that of its arguments.
    """

    def __init__(self, dry_pass: _DryMode, device: torch.device | None) -> None:
        self._dry_pass = dry_pass
        self._device = torch.device("cpu") if device is None else device
        if self._device == torch.device("cuda"):  # without an index, which a tensor reports
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._finds_device = device is None
        self._arguments: dict[int, torch.Tensor] = {}  # id of the meta tensor -> argument
        self._addresses: dict[int, int] = {}  # meta storage, which views share -> address

    def lower(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            meta, address = (value.meta, value.storage_address) if isinstance(value, DryTensor) else _of_real(value)
            self._arguments[id(meta)] = value
            self._addresses[meta.untyped_storage()._cdata] = address
            if self._finds_device and value.device.type != "cpu":  # a CPU tensor may be a scalar
                self._device = value.device
            return meta
        return [self.lower(item) for item in value] if isinstance(value, list | tuple) else value

    def lift(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            argument = self._arguments.get(id(value))
            if argument is not None:  # an argument that the operation writes
                if argument.shape != value.shape or argument.stride() != value.stride():
                    raise DryPassError(f"{argument!r} would be resized in place to {list(value.shape)}")
                return argument
            address = self._addresses.get(value.untyped_storage()._cdata, _ADDRESS)
            return DryTensor.of(value, self._device, address, self._dry_pass)
        return type(value)(map(self.lift, value)) if isinstance(value, list | tuple) else value


def _of_real(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The tensor on the ``meta`` device, and the address of its storage."""
    storage = tensor.untyped_storage()
    meta, memory = torch.empty(0, dtype=tensor.dtype, device=META), torch.UntypedStorage(storage.nbytes(), device=META)
    meta.set_(memory, tensor.storage_offset(), tensor.shape, tensor.stride())
    return meta, storage.data_ptr()


@cache
def _is_composite(func: Any) -> bool:
    """Whether an operation is composed of others. Some of them depend on the device, which must not be ``meta``."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), _COMPOSITE)


@cache
def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _skip_collective(func: Any, args: Any) -> Any:
    """What a collective operation of torch.distributed returns: its first argument, if anything, and a handle to wait
    for it, which is complete."""
    from torch._C._distributed_c10d import FakeWork

    handle = FakeWork().boxed()
    return handle if len(func._schema.returns) == 1 else (args[0], handle)


class Look(NamedTuple):
    """Shape, strides and dtype of a result."""

    shape: Sequence[int]
    strides: Sequence[int] | None = None
    """None: contiguous."""
    dtype: torch.dtype | None = None
    """None: the result type of the operation for its arguments."""


Rule = Callable[..., Look | None]
"""An operation's arguments and keywords -> its result; None: torch computes it."""


def result_on_meta(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an operation of ``torch.ops`` for tensors on the ``meta`` device.

    Raises:
        RuntimeError, ValueError: the result depends on values, or the arguments do not match.
    """
    if written := _written(func):
        outputs = [args[place] if place < len(args) else kwargs[name] for place, name in written]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)
    rule = _rule(func)
    look = None if rule is None else rule(*args, **kwargs)
    if look is None:
        return func(*args, **kwargs)
    # The dtype depends on dtypes and numbers of dimensions only, so empty tensors are enough.
    dtype = look.dtype or func(*(_sample(value) for value in args), **kwargs).dtype
    if look.strides is None:
        return torch.empty(look.shape, dtype=dtype, device=META)
    return torch.empty_strided(look.shape, look.strides, dtype=dtype, device=META)


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the written arguments, if the operation returns exactly these; otherwise empty."""
    returns = func._schema.returns
    is_it = returns and all(value.alias_info is not None and value.alias_info.is_write for value in returns)
    if not is_it or torch.Tag.inplace_view in func.tags:  # these change metadata as well
        return ()
    arguments = enumerate(func._schema.arguments)
    return tuple((place, value.name) for place, value in arguments if value.alias_info and value.alias_info.is_write)


@cache
def _rule(func: Any) -> Rule | None:
    name = func._schema.name.removeprefix("aten::")
    if torch.Tag.pointwise in func.tags and name not in _NOT_ELEMENTWISE:
        return _elementwise
    return _RULES.get(name)


def _elementwise(*args: Any, **kwargs: Any) -> Look:
    tensors = list(_tensors(args))
    shape = _broadcast([tensor.shape for tensor in tensors])
    if all(tensor.is_contiguous() for tensor in tensors):
        return Look(shape)
    like = next((tensor for tensor in tensors if tensor.shape == shape), None)
    return Look(shape, None if like is None else _dense_strides(like))


def _like(tensor: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Look:
    preserves = kwargs.get("memory_format") in (None, torch.preserve_format)
    strides = _dense_strides(tensor) if preserves and not tensor.is_contiguous() else None
    return Look(tensor.shape, strides, dtype or tensor.dtype)


def _dense_strides(like: torch.Tensor) -> list[int]:
    """Strides of a dense tensor with the dimension order of ``like``."""
    strides, size = [0] * like.ndim, 1
    for dim in sorted(reversed(range(like.ndim)), key=like.stride):
        strides[dim], size = size, size * max(1, like.shape[dim])
    return strides


def _arange(*bounds: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Look | None:
    if len(bounds) > 2 or not all(type(bound) is int for bound in bounds):
        return None
    begin, end = (0, *bounds)[-2:]
    return Look([max(0, end - begin)], dtype=dtype or torch.int64)


def _index(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Look | None:
    shapes = [index.shape for index in indices if index is not None and index.dtype in (torch.int32, torch.int64)]
    if len(shapes) < len(indices) or not tensor.is_contiguous():
        return None  # masks, or not the leading dimensions
    return Look([*_broadcast(shapes), *tensor.shape[len(shapes) :]])


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Look:
    shapes = [list(tensor.shape) for tensor in tensors if tensor.shape != (0,)] or [[0]]  # these match any shape
    shape = shapes[0].copy()
    shape[dim] = sum(other[dim] for other in shapes)
    return Look(shape)


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Look:
    shape = list(tensors[0].shape)
    shape.insert(dim + (len(shape) + 1 if dim < 0 else 0), len(tensors))
    return Look(shape)


def _sum(tensor: torch.Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, **kwargs: Any) -> Look:
    summed = {dim % tensor.ndim for dim in dims or range(tensor.ndim)}
    sizes = enumerate(tensor.shape)
    return Look([1 if dim in summed else size for dim, size in sizes if keepdim or dim not in summed])


_NOT_ELEMENTWISE = ("clone", "equal")
"""Tagged as pointwise, but ``clone`` may change strides, and ``equal`` returns a bool."""
_RULES: dict[str, Rule] = {
    **dict.fromkeys(("empty_like", "zeros_like", "ones_like", "full_like"), _like),
    **dict.fromkeys(("cumsum", "roll", "index_copy"), lambda tensor, *_, **__: Look(tensor.shape)),
    "floor_divide": _elementwise,
    "arange": _arange,
    "index": _index,
    "gather": lambda tensor, dim, index, **_: Look(index.shape),
    "embedding": lambda weight, indices, *_: Look([*indices.shape, weight.shape[1]]),
    "mm": lambda x, y: Look([x.shape[0], y.shape[1]]),
    "addmm": lambda bias, x, y, **_: Look([x.shape[0], y.shape[1]]),
    "cat": _cat,
    "stack": _stack,
    "sum": _sum,
}


def _sample(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.ones((0,) * value.ndim, dtype=value.dtype)
    return [_sample(item) for item in value] if isinstance(value, list | tuple) else value


def _tensors(args: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _broadcast(shapes: Sequence[torch.Size]) -> tuple[int, ...]:
    return tuple(shapes[0]) if all(shape == shapes[0] for shape in shapes) else np.broadcast_shapes(*shapes)
