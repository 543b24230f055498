"""What the decode kernel writes: pieces of (request, KV head) pairs, their merging, and rows of the output.

A piece is what attention over some of the pair's positions yields: for each row the largest score, the sum of the
weights relative to it, and the weighted sum of V (Flash-Decoding, Dao et al., 2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.runtime.dry_tensors import real_memory
from fleetfoot.kernels.runtime.gpu_limits import gpu_limits
from fleetfoot.kernels.runtime.triton_support import next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl


class AttentionWorkspace:
    """Device memory that the kernels share: pieces, a count of the pieces written for each pair, and a counter.

    Kernels find the counts and the counter at 0 and leave them at 0, so one workspace serves all layers, as long as
    they run one after the other. Buffers that were outgrown are kept: captured graphs may still use them.
    """

    def __init__(self, device: torch.device, num_programs: int | None = None) -> None:
        """``num_programs``: programs in a launch of the decode kernel; None: as many as its tiling wants."""
        self._num_programs = num_programs
        self._num_sms = gpu_limits(device).num_sms
        with real_memory():
            self._pieces = torch.empty(0, dtype=torch.float32, device=device)
            self._arrivals = torch.empty(0, dtype=torch.int32, device=device)
        self._outgrown: list[torch.Tensor] = []
        self.counter = _zeros(1, self._arrivals)
        """``[1]`` int32, for a kernel whose programs draw their work."""

    def num_programs(self, programs_per_sm: int) -> int:
        return self._num_programs or self._num_sms * programs_per_sm

    def reserve(self, num_floats: int, num_counts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory of the pieces, float32, and the counts, int32, at least so long.

        Raises:
            RuntimeError: they are shorter, and a graph is being captured, in which they cannot grow.
        """
        if num_floats > self._pieces.numel():
            self._outgrown.append(self._pieces)
            self._pieces = _zeros(num_floats, self._pieces)
        if num_counts > self._arrivals.numel():
            self._outgrown.append(self._arrivals)
            self._arrivals = _zeros(next_power_of_2(num_counts), self._arrivals)
        return self._pieces, self._arrivals


def _zeros(size: int, like: torch.Tensor) -> torch.Tensor:
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"attention's workspace would have to grow to {size} elements within a graph that is being captured, where "
            "its zeros are not written: run a step of this shape once before capturing it"
        )
    with real_memory():  # it is kept, even if a dry pass is the first to want it
        return torch.zeros(size, dtype=like.dtype, device=like.device)


@triton_kernel(specialize=False)
def store_piece(
    pieces_ptr,
    stats_ptr,
    piece,
    top,
    total,
    acc,
    is_row,
    rows: tl.constexpr,
    padded_dim: tl.constexpr,
    stored_rows: tl.constexpr,
):
    """Write ``top``, ``total`` ``[rows]`` and ``acc`` ``[rows, padded_dim]``, of which ``stored_rows`` may be valid."""
    row = tl.arange(0, rows)
    column = tl.arange(0, padded_dim)
    piece_ptrs = pieces_ptr + (piece * stored_rows + row[:, None]) * padded_dim + column[None, :]
    tl.store(tl.multiple_of(piece_ptrs, (1, 16)), acc, mask=is_row[:, None])
    tl.store(stats_ptr + piece * (2 * stored_rows) + row, top, mask=is_row)
    tl.store(stats_ptr + piece * (2 * stored_rows) + stored_rows + row, total, mask=is_row)


@triton_kernel(specialize=False)
def merge_pieces(
    pieces_ptr,
    stats_ptr,
    first_program,
    last_program,
    is_row,
    padded_dim: tl.constexpr,
    stored_rows: tl.constexpr,
    merge_tile: tl.constexpr,
):
    """``[stored_rows, padded_dim]``: attention over all positions of a pair, from the pieces of some programs.

    It reads ``merge_tile`` pieces at once, so that their loads are in flight together. A program's piece stands at
    2 * program, or behind it if the piece begins the pair.
    """
    row = tl.arange(0, stored_rows)
    column = tl.arange(0, padded_dim)
    top = tl.full([stored_rows], -1.0e30, tl.float32)
    total = tl.zeros([stored_rows], tl.float32)
    acc = tl.zeros([stored_rows, padded_dim], tl.float32)
    for begin in tl.range(first_program, last_program + 1, merge_tile, num_stages=1):
        # Rows first: the compiler gives warps to the first dimension, and the pieces of a row should be one thread's.
        program = begin + tl.arange(0, merge_tile)
        is_piece = is_row[:, None] & (program <= last_program)[None, :]
        piece = (program * 2 + (program == first_program).to(tl.int32))[None, :]
        stat_ptrs = stats_ptr + piece * (2 * stored_rows) + row[:, None]
        piece_top = tl.load(stat_ptrs, mask=is_piece, other=-1.0e30, cache_modifier=".cg")
        piece_total = tl.load(stat_ptrs + stored_rows, mask=is_piece, other=0.0, cache_modifier=".cg")
        piece_row = piece * stored_rows + row[:, None]  # [stored_rows, merge_tile]
        piece_ptrs = pieces_ptr + piece_row[:, :, None] * padded_dim + column[None, None, :]
        piece_ptrs = tl.multiple_of(piece_ptrs, (1, 1, 16))
        piece_acc = tl.load(piece_ptrs, mask=is_piece[:, :, None], other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(piece_top, 1))
        kept = tl.exp2(top - new_top)
        taken = tl.exp2(piece_top - new_top[:, None])
        total = total * kept + tl.sum(piece_total * taken, 1)
        acc = acc * kept[:, None] + tl.sum(piece_acc * taken[:, :, None], 1)
        top = new_top
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton_kernel(specialize=False)
def store_rows(
    out_ptr,
    result,
    query_begin,
    query_len,
    kv_head,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    num_rows: tl.constexpr,
    padded_dim: tl.constexpr,
):
    """Write ``result`` ``[num_rows, padded_dim]``, whose rows are query heads within query tokens."""
    row = tl.arange(0, num_rows)
    column = tl.arange(0, padded_dim)
    token = row // group
    token_offset = (query_begin + token).to(tl.int64) * (num_kv_heads * group * head_dim)
    head_offset = (kv_head * group + row % group) * head_dim
    out_ptrs = tl.multiple_of(out_ptr + (token_offset + head_offset)[:, None] + column[None, :], (1, 16))
    mask = (token < query_len)[:, None] & (column < head_dim)[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton_kernel(specialize=False)
def store_zeros(
    out_ptr,
    token,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    num_rows: tl.constexpr,
    padded_dim: tl.constexpr,
):
    """All heads of a token that belongs to nobody."""
    row = tl.arange(0, num_rows)
    column = tl.arange(0, padded_dim)
    mask = (row < group)[:, None] & (column < head_dim)[None, :]
    for kv_head in tl.range(0, num_kv_heads, num_stages=1):
        head_offset = (kv_head * group + row)[:, None] * head_dim + column[None, :]
        out_ptrs = out_ptr + token.to(tl.int64) * (num_kv_heads * group * head_dim) + head_offset
        tl.store(
            tl.multiple_of(out_ptrs, (1, 16)), tl.zeros([num_rows, padded_dim], out_ptr.dtype.element_ty), mask=mask
        )
