"""KV blocks as rows: a row is what all layers have of a block, one piece after the other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.runtime.triton_support import cdiv, triton_kernel
from fleetfoot.records.kv_layout import KVLayout

if TYPE_CHECKING:
    import triton.language as tl

_TILE = 2048
"""Words that one program moves."""


class LayerRows:
    """The caches of all layers, to be read and written by rows.

    Args:
        kv_caches: a layer each, ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``.
        use_triton: move a batch with one launch; False: with two operations of torch for each layer.

    Raises:
        ValueError: a cache is not one piece of memory.
    """

    def __init__(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout, *, use_triton: bool) -> None:
        pieces = layout.layer_block_bytes
        # wide words copy faster; only pieces of odd shapes are no multiple of 8 bytes
        self.word = torch.int64 if all(piece % 8 == 0 for piece in pieces) else torch.uint8
        self._layers = [_flat(cache, self.word) for cache in kv_caches]  # [num_blocks, words of the piece] each
        self._borders = list(accumulate((layer.shape[1] for layer in self._layers), initial=0))  # of layers in a row
        self.num_words = self._borders[-1]
        self._use_triton = use_triton and self.word is torch.int64
        if self._use_triton:
            device = kv_caches[0].device
            self._most_words = max(layer.shape[1] for layer in self._layers)
            self._pointers = torch.tensor([layer.data_ptr() for layer in self._layers], device=device)
            self._device_borders = torch.tensor(self._borders, device=device)

    def gather(self, block_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy blocks to rows.

        Args:
            block_ids: ``[n]`` int64, on the caches' device.
            rows: written, ``[n, num_words]`` of `word`.
        """
        if self._use_triton:
            self._launch(block_ids, rows, is_gather=True)
            return
        for layer, begin, end in self._spans():
            rows[:, begin:end].copy_(layer.index_select(0, block_ids))

    def scatter(self, rows: torch.Tensor, block_ids: torch.Tensor) -> None:
        """Copy rows to blocks, all of them different ones; arguments as in `gather`."""
        if self._use_triton:
            self._launch(block_ids, rows, is_gather=False)
            return
        for layer, begin, end in self._spans():
            layer.index_copy_(0, block_ids, rows[:, begin:end])

    def _spans(self) -> list[tuple[torch.Tensor, int, int]]:
        return list(zip(self._layers, self._borders[:-1], self._borders[1:], strict=True))

    def _launch(self, block_ids: torch.Tensor, rows: torch.Tensor, *, is_gather: bool) -> None:
        grid = (len(block_ids), len(self._layers), cdiv(self._most_words, _TILE))
        _move_kernel[grid](
            self._pointers, self._device_borders, block_ids, rows, rows.stride(0), is_gather=is_gather, tile=_TILE
        )


@triton_kernel(specialize=False)
def _move_kernel(
    pointers_ptr,
    borders_ptr,
    block_ids_ptr,
    rows_ptr,
    row_stride,
    is_gather: tl.constexpr,
    tile: tl.constexpr,
):
    """One program moves a tile of one layer's piece of one block. Every word moves as int64."""
    index, layer = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(borders_ptr + layer), tl.load(borders_ptr + layer + 1)
    block = tl.load(block_ids_ptr + index)
    piece = tl.load(pointers_ptr + layer).to(tl.pointer_type(tl.int64)) + block * (end - begin)
    row = rows_ptr + index.to(tl.int64) * row_stride + begin
    word = tl.program_id(2) * tile + tl.arange(0, tile)
    is_there = word < end - begin
    if is_gather:
        tl.store(row + word, tl.load(piece + word, mask=is_there), mask=is_there)
    else:
        tl.store(piece + word, tl.load(row + word, mask=is_there), mask=is_there)


def _flat(cache: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """``[num_blocks, words of a block]``, the same memory."""
    if not cache.is_contiguous():
        raise ValueError(f"a layer's KV cache of shape {tuple(cache.shape)} is not one piece of memory")
    return cache.view(cache.shape[0], -1).view(word)
