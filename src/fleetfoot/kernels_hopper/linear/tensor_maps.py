"""Tensor maps of bulk copies to shared memory, and arguments with them, for kernels in CUDA C++."""

from __future__ import annotations

import ctypes

from fleetfoot.kernels.runtime.cuda_source import driver_call

TensorMap = ctypes.c_uint64 * 16
"""``CUtensorMap``."""
_BFLOAT16, _SWIZZLE_128, _PROMOTION_256 = 9, 3, 3  # of CUtensorMap


def tensor_map(
    pointer: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> ctypes.Array[ctypes.c_uint64]:
    """A `TensorMap` of bfloat16 in the 128-byte swizzle. All innermost first; ``strides``: bytes, without the
    innermost dimension."""
    buffer = ctypes.create_string_buffer(128 + 64)
    address = (ctypes.addressof(buffer) + 63) // 64 * 64
    rank = len(sizes)
    driver_call(
        "cuTensorMapEncodeTiled", ctypes.c_void_p(address), _BFLOAT16, rank, ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * rank)(*sizes), (ctypes.c_uint64 * (rank - 1))(*strides), (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank), 0, _SWIZZLE_128, _PROMOTION_256, 0,
    )  # fmt: skip
    return TensorMap.from_buffer_copy(ctypes.string_at(address, 128))


def argument_bytes(arguments: ctypes.Structure) -> bytes:
    """A kernel's parameter with tensor maps, to 64 bytes of which it is aligned."""
    return bytes(arguments) + bytes(-ctypes.sizeof(arguments) % 64)
