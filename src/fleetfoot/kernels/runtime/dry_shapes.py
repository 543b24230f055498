"""Results of torch's operations without values: shape, strides and dtype, as tensors on torch's ``meta`` device.

Torch knows them for nearly all operations. But for many it asks functions in Python, the first of which imports sympy
(0.3 s) and some torch._dynamo (more than 1 s), and which take up to 0.5 ms for each call. The operations of this kind
that the engine uses have rules here. All others are left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

META = torch.device("meta")


class Look(NamedTuple):
    """What a result looks like."""

    shape: Sequence[int]
    strides: Sequence[int] | None = None
    """None: it is contiguous."""
    dtype: torch.dtype | None = None
    """None: what the operation gives for arguments of these dtypes."""


Rule = Callable[..., Look | None]
"""An operation's arguments, keywords included -> what it returns; None: torch is to be asked."""


def result_on_meta(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an operation of ``torch.ops`` returns for tensors on the ``meta`` device.

    Raises:
        RuntimeError: it depends on values, or the arguments do not fit together.
    """
    if written := _written(func):
        outputs = [args[place] if place < len(args) else kwargs[name] for place, name in written]
        return outputs[0] if len(outputs) == 1 else tuple(outputs)
    rule = _rule(func)
    look = None if rule is None else rule(*args, **kwargs)
    if look is None:
        return func(*args, **kwargs)
    shape, strides, dtype = look
    if dtype is None:
        # It follows from dtypes and numbers of dimensions, so tensors without elements tell, at no cost.
        dtype = func(*(_sample(value) for value in args), **kwargs).dtype
    if strides is None:
        return torch.empty(shape, dtype=dtype, device=META)
    return torch.empty_strided(shape, strides, dtype=dtype, device=META)


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Of an operation that returns the arguments that it writes, and nothing else: their places and names."""
    returns = func._schema.returns
    is_it = returns and all(value.alias_info is not None and value.alias_info.is_write for value in returns)
    if not is_it or torch.Tag.inplace_view in func.tags:  # those change more than values
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
    """Of a tensor without gaps whose dimensions lie in the order in which those of ``like`` do."""
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
        return None  # masks, or not the first dimensions
    return Look([*_broadcast(shapes), *tensor.shape[len(shapes) :]])


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Look:
    shapes = [list(tensor.shape) for tensor in tensors if tensor.shape != (0,)] or [[0]]  # those fit any shape
    shape = shapes[0].copy()
    shape[dim] = sum(other[dim] for other in shapes)
    return Look(shape)


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Look:
    shape = list(tensors[0].shape)
    shape.insert(dim + (len(shape) + 1 if dim < 0 else 0), len(tensors))
    return Look(shape)


def _sum(tensor: torch.Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, **kwargs: Any) -> Look:
    every = range(tensor.ndim)
    summed = {dim % tensor.ndim for dim in dims} if dims else {*every}
    if keepdim:
        return Look([1 if dim in summed else tensor.shape[dim] for dim in every])
    return Look([tensor.shape[dim] for dim in every if dim not in summed])


_NOT_ELEMENTWISE = ("clone", "equal")
"""Whatever torch says: the first may be asked for other strides, the second returns a bool."""
_RULES: dict[str, Rule] = {
    "floor_divide": _elementwise,
    "empty_like": _like,
    "zeros_like": _like,
    "ones_like": _like,
    "full_like": _like,
    "arange": _arange,
    "cumsum": lambda tensor, *_, **__: Look(tensor.shape),
    "roll": lambda tensor, *_: Look(tensor.shape),
    "index_copy": lambda tensor, *_: Look(tensor.shape),
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
    """Raises:
    RuntimeError: the shapes do not go together.
    """
    if all(shape == shapes[0] for shape in shapes):
        return tuple(shapes[0])
    rank = max(map(len, shapes))
    broadcast = []
    for sizes in zip(*((1,) * (rank - len(shape)) + tuple(shape) for shape in shapes), strict=True):
        other = {size for size in sizes if size != 1}
        if len(other) > 1:
            raise RuntimeError(f"the shapes {[list(shape) for shape in shapes]} do not go together")
        broadcast.append(other.pop() if other else 1)
    return tuple(broadcast)
