"""The block tables of a batch, in batch order, as attention reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.runtime.triton_support import cdiv, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl


def gather_block_tables(
    block_table: torch.Tensor,
    idx_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    *,
    out: torch.Tensor,
) -> None:
    """Copy the blocks that hold each request's ``seq_lens`` tokens.

    Args:
        block_table: ``[R, B]``: block ids; rows may lie further apart than B.
        idx_mapping: ``[n]``: each request's row; -1: padding.
        seq_lens: ``[n]``
        block_size: tokens in a block.
        out: written, ``[n, W]``, W <= B, W * block_size >= each of ``seq_lens``: the first
            ``ceil(seq_len / block_size)`` entries of each row. What lies behind them means nothing.
    """
    implementation = gather_block_tables_triton if out.is_cuda else gather_block_tables_cpu
    implementation(block_table, idx_mapping, seq_lens, block_size, out=out)


def gather_block_tables_cpu(
    block_table: torch.Tensor,
    idx_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    *,
    out: torch.Tensor,
) -> None:
    """The twin of the kernel, for CPU tensors. It copies as many blocks of each request as the longest one has."""
    most_blocks = cdiv(int(seq_lens.numpy().max(initial=0)), block_size)
    # Padding is row -1, the last one: its blocks mean nothing either.
    out.numpy()[:, :most_blocks] = block_table.numpy()[:, :most_blocks][idx_mapping.numpy()]


def gather_block_tables_triton(
    block_table: torch.Tensor,
    idx_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    *,
    out: torch.Tensor,
) -> None:
    _gather_block_tables_kernel[(out.shape[0],)](
        block_table,
        idx_mapping,
        seq_lens,
        out,
        block_table.stride(0),
        out.stride(0),
        block_size=block_size,
        tile=1024,
    )


@triton_kernel(specialize=False)
def _gather_block_tables_kernel(
    block_table_ptr,
    idx_mapping_ptr,
    seq_lens_ptr,
    out_ptr,
    row_stride,
    out_stride,
    block_size: tl.constexpr,
    tile: tl.constexpr,
):
    # One program for each request. Most tables fit one tile, and the launch must not depend on those that do not.
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + request).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request)
    num_blocks = tl.where(row >= 0, tl.cdiv(seq_len, block_size), 0)
    begin = 0
    while begin < num_blocks:
        block = begin + tl.arange(0, tile)
        block_id = tl.load(block_table_ptr + row * row_stride + block, mask=block < num_blocks)
        tl.store(out_ptr + request * out_stride + block, block_id, mask=block < num_blocks)
        begin += tile
