"""Where in the KV cache each token's K and V go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fleetfoot.kernels.runtime.triton_support import cdiv, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl


def slot_mapping(
    positions: torch.Tensor,
    batch_index: torch.Tensor,
    idx_mapping: torch.Tensor,
    limits: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    *,
    slots: torch.Tensor,
) -> None:
    """Token ``position`` of a row lies in its block ``position // block_size`` at offset ``position % block_size``.

    Args:
        positions: ``[T]`` int64.
        batch_index: ``[T]``: each token's request; -1: padding.
        idx_mapping: ``[n]``: each request's row.
        limits: ``[R]``: positions from here on are never an input of their request: their K and V go nowhere.
        block_table: ``[R, B]``: block ids; rows may lie further apart than B.
        block_size: tokens in a block.
        slots: written, ``[T]`` int64: block id * block_size + offset; -1 for padding, and from the limit on.
    """
    implementation = slot_mapping_triton if slots.is_cuda else slot_mapping_cpu
    implementation(positions, batch_index, idx_mapping, limits, block_table, block_size, slots=slots)


def slot_mapping_cpu(
    positions: torch.Tensor,
    batch_index: torch.Tensor,
    idx_mapping: torch.Tensor,
    limits: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    *,
    slots: torch.Tensor,
) -> None:
    """The twin of the kernel, for CPU tensors."""
    requests, position_of, slot_of = batch_index.numpy(), positions.numpy(), slots.numpy()
    rows = idx_mapping.numpy().take(requests, mode="clip")  # [T]; padding reads a block that is replaced below
    blocks, offsets = np.divmod(position_of, block_size)
    np.multiply(block_table.numpy()[rows, blocks], block_size, out=slot_of, dtype=np.int64)
    np.add(slot_of, offsets, out=slot_of)
    slot_of[(requests < 0) | (position_of >= limits.numpy()[rows])] = -1


def slot_mapping_triton(
    positions: torch.Tensor,
    batch_index: torch.Tensor,
    idx_mapping: torch.Tensor,
    limits: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    *,
    slots: torch.Tensor,
) -> None:
    num_tokens = slots.shape[0]
    tile = 256
    _slot_mapping_kernel[(cdiv(num_tokens, tile),)](
        positions,
        batch_index,
        idx_mapping,
        limits,
        block_table,
        slots,
        num_tokens,
        block_table.stride(0),
        block_size=block_size,
        tile=tile,
    )


@triton_kernel(specialize=False)
def _slot_mapping_kernel(
    positions_ptr,
    batch_index_ptr,
    idx_mapping_ptr,
    limits_ptr,
    block_table_ptr,
    slots_ptr,
    num_tokens,
    row_stride,
    block_size: tl.constexpr,
    tile: tl.constexpr,
):
    token = tl.program_id(0) * tile + tl.arange(0, tile)
    request = tl.load(batch_index_ptr + token, mask=token < num_tokens, other=-1)
    is_token = request >= 0
    row = tl.load(idx_mapping_ptr + request, mask=is_token, other=0).to(tl.int64)
    position = tl.load(positions_ptr + token, mask=is_token, other=0)
    is_token = is_token & (position < tl.load(limits_ptr + row, mask=is_token, other=0))
    block_ids_ptr = block_table_ptr + row * row_stride
    block_id = tl.load(block_ids_ptr + position // block_size, mask=is_token, other=0).to(tl.int64)
    slot = block_id * block_size + position % block_size
    tl.store(slots_ptr + token, tl.where(is_token, slot, -1), mask=token < num_tokens)
