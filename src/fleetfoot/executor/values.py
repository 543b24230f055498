"""Results and errors of workers as data. What a worker replies is decoded as known types, and never unpickled."""

from __future__ import annotations

import sys
from dataclasses import fields
from importlib import import_module
from typing import Any

import msgspec
import numpy as np
from msgspec.msgpack import Ext

_TUPLE, _SET, _FROZENSET, _DICT, _INTEGER, _ARRAY, _TENSOR, _RECORD = range(1, 9)
_COLLECTIONS: dict[type, int] = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}
_MAKERS: dict[int, Any] = {code: kind for kind, code in _COLLECTIONS.items()}
_RECORDS = {"StageReport": "fleetfoot.weights.store"}
"""Dataclasses that can be results: the name and the module."""
_ERRORS = {
    **dict.fromkeys(
        (
            *("ValueError", "TypeError", "KeyError", "IndexError", "AttributeError", "NotImplementedError"),
            *("RuntimeError", "MemoryError", "OverflowError", "ZeroDivisionError", "AssertionError", "ImportError"),
            *("ModuleNotFoundError", "OSError", "FileNotFoundError", "PermissionError", "TimeoutError"),
            *("ConnectionError", "EOFError", "LookupError", "ArithmeticError", "FileExistsError"),
        ),
        "builtins",
    ),
    "OutOfMemoryError": "torch",
    "PlanMismatchError": "fleetfoot.executor.protocol",
    "WeightError": "fleetfoot.records.weights",
    "KernelUnavailableError": "fleetfoot.kernels.registry",
    "ModelNotFoundError": "fleetfoot.weights.hub",
}
"""Exceptions that are made again: the name and the module. Others are made as the nearest of these that they derive
from."""


def encode_value(value: Any) -> bytes:
    """The result of a call. Raises TypeError: it holds an object that is no data."""
    return msgspec.msgpack.encode(_pack(value))


def decode_value(content: bytes) -> Any:
    """The argument of `encode_value`. Raises ValueError: it is not one."""
    return _DECODER.decode(content)


def error_kind(error: BaseException) -> str:
    """The name under which `make_error` makes the exception again; empty: it does not."""
    for kind in type(error).__mro__:
        if _ERRORS.get(kind.__name__) == kind.__module__:
            return kind.__name__
    return ""


def make_error(kind: str, message: str) -> Exception | None:
    """The exception of `error_kind`; None: it is not known."""
    if kind not in _ERRORS:
        return None
    error: Exception = getattr(import_module(_ERRORS[kind]), kind)(message)
    return error


def _pack(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, float, str, bytes):
        return value
    if kind is int:
        if -(1 << 63) <= value < 1 << 64:
            return value
        return Ext(_INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
    if kind is list:
        return [_pack(item) for item in value]
    if kind in _COLLECTIONS:
        return _ext(_COLLECTIONS[kind], [_pack(item) for item in value])
    if kind is dict:
        return _ext(_DICT, [[_pack(key), _pack(item)] for key, item in value.items()])
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject and value.dtype.names is None:
        return _ext(_ARRAY, [value.dtype.str, value.shape, value.tobytes(), isinstance(value, np.generic)])
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.layout == torch.strided:
        plain = value.detach().cpu().contiguous()
        content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _ext(_TENSOR, [str(plain.dtype).removeprefix("torch."), tuple(plain.shape), content])
    if _RECORDS.get(kind.__name__) == kind.__module__:
        return _ext(_RECORD, [kind.__name__, *(_pack(getattr(value, item.name)) for item in fields(value))])
    raise TypeError(
        f"the result holds a {kind.__module__}.{kind.__qualname__}, which does not leave a worker's process; return "
        "None, numbers, strings, bytes, lists, tuples, sets, dicts, numpy arrays or tensors"
    )


def _ext(code: int, content: Any) -> Ext:
    return Ext(code, msgspec.msgpack.encode(content))


def _unpack(code: int, data: memoryview) -> Any:
    if code == _INTEGER:
        return int.from_bytes(data, "little", signed=True)
    items = _DECODER.decode(data)
    if code in _MAKERS:
        return _MAKERS[code](items)
    if code == _DICT:
        return dict(items)
    if code == _RECORD:
        name, *values = items
        return getattr(import_module(_RECORDS[name]), name)(*values)
    if code == _ARRAY:
        dtype, shape, content, is_scalar = items
        array = np.frombuffer(content, np.dtype(dtype)).reshape(shape).copy()
        return array[()] if is_scalar else array
    if code == _TENSOR:
        import torch

        name, shape, content = items
        if not isinstance(dtype := getattr(torch, name, None), torch.dtype):
            raise ValueError(f"{name!r} is no dtype")
        flat = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.reshape(shape)
    raise ValueError(f"an extension of msgpack with the code {code} is not known")


_DECODER = msgspec.msgpack.Decoder(ext_hook=_unpack)
