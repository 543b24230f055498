"""Rows of tensors that ``decode_product.cu`` and ``gated_product.cu`` copy in whole tiles.

A bulk copy that ends after the last row fills in zeros, and is slow: four products of Qwen3-0.6B with 136 rows took
37 us on an H200, and 29 us with copies of rows that are there. So what such a product reads has room for whole tiles,
and copies read whatever is in it. No output depends on it. What is computed for such a product ends with zeros there,
though: the power that the GPU may draw bounds products of many rows, and zeros take less. On an H200, us a layer of
Llama-3.1-8B with 72 and 96 rows, with random padding 144.6 and 144.9, with zeros 138.1 and 141.0.
"""

from __future__ import annotations

import torch

from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2

_FEWEST, _LEAST_ROOM, _MOST = 17, 64, 256


def empty_rows(num_rows: int, *sizes: int, like: torch.Tensor) -> torch.Tensor:
    """Uninitialized ``[num_rows, *sizes]``, contiguous, of the dtype and device of ``like``, with room for
    `padded_rows`."""
    room = padded_rows(num_rows)
    rows = like.new_empty((room, *sizes))
    return rows if room == num_rows else rows[:num_rows]


def padded_rows(num_rows: int) -> int:
    """The rows of `empty_rows` that are in its storage: from 17 to 256 rows, 64, 128 or 256."""
    return max(next_power_of_2(num_rows), _LEAST_ROOM) if _FEWEST <= num_rows < _MOST else num_rows


def readable_rows(x: torch.Tensor, tile: int) -> int:
    """Rows of ``x [n, size]``, with those after it, up to whole tiles, that are in its storage."""
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset() - x.shape[1]
    return max(len(x), min(cdiv(len(x), tile) * tile, room // x.stride(0) + 1))
