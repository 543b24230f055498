"""Causal attention of prompts, whole or in chunks, over the paged KV cache, for any mix of requests in one launch.

A program takes a tile of one request's query tokens, with all query heads of one KV head, and goes through the KV tiles
that it can see (FlashAttention-2, Dao, 2023). The grid follows from the number of tokens and of requests, so nothing
waits for lengths that the device alone knows: request ``i`` owns the slots from
``query_start_loc[i] // tile_tokens + i`` up to the next request's, enough for its tiles and at most one more.

On a Hopper GPU, `fleetfoot.kernels.attention.prefill_hopper` does the same faster, for the usual shapes.
`fleetfoot.kernels.attention.sdpa_backend.SDPABackend` is the twin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.runtime.gpu_limits import fit_tile, gpu_limits
from fleetfoot.kernels.runtime.triton_support import next_power_of_2, triton_kernel
from fleetfoot.kernels.runtime.triton_support import search_steps

if TYPE_CHECKING:
    import triton.language as tl


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """How the kernel is compiled; see `choose_prefill_tiling`."""

    rows: int
    """Query tokens of a tile times the query heads of a KV head, at most."""
    tile: int
    """KV positions in a tile."""
    num_warps: int
    num_stages: int


def choose_prefill_tiling(group: int, padded_dim: int, element_size: int, shared_bytes: int) -> PrefillTiling:
    """Tiles as large as shared memory and the accumulator's registers allow.

    Args:
        group: query heads of a KV head. padded_dim: head_dim, rounded up to a power of 2.
        shared_bytes: most shared memory of a program.
    """
    row_bytes = padded_dim * element_size
    rows = max(16, min(128, 32768 // row_bytes))
    num_warps = 4 if padded_dim <= 64 or rows < 128 else 8
    rows = max(rows, next_power_of_2(group))
    tile, num_stages = fit_tile(rows, max(16, min(64, 16384 // row_bytes)), row_bytes, shared_bytes)
    return PrefillTiling(rows, tile, num_warps, num_stages)


def paged_attention_prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int | None,
    *,
    out: torch.Tensor,
    tiling: PrefillTiling | None = None,
) -> None:
    """Causal attention of the last tokens of each request.

    Args:
        query: ``[num_tokens, num_heads, head_dim]``; the tokens may lie further apart.
        kv_cache: ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``; the blocks may lie further apart.
        query_start_loc: ``[num_reqs + 1]`` int32: where each request's query tokens begin in ``query``.
        seq_lens: ``[num_reqs]`` int32: context + query; 0 for a request that pads the batch.
        block_tables: ``[num_reqs, max_blocks]`` int32.
        scale: factor on the dot products, > 0.
        window: how many of the last positions a token sees, itself included; None: all.
        out: written, ``[num_tokens, num_heads, head_dim]`` contiguous, from the first request's first token to the end;
            zeros for tokens of padding requests and for those behind the last request's.
    """
    num_reqs = seq_lens.shape[0]
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    padded_dim = max(16, next_power_of_2(head_dim))
    if tiling is None:
        tiling = choose_prefill_tiling(group, padded_dim, query.element_size(), gpu_limits(query.device).shared_bytes)
    num_slots = num_tokens // (tiling.rows // group) + num_reqs + 1
    _paged_attention_prefill_kernel[(num_slots * num_kv_heads,)](
        query,
        kv_cache,
        out,
        query_start_loc,
        seq_lens,
        block_tables,
        num_reqs,
        num_tokens,
        search_steps(num_reqs + 1),
        query.stride(0),
        kv_cache.stride(0),
        block_tables.stride(0),
        scale * math.log2(math.e),
        0 if window is None else window,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        padded_dim=padded_dim,
        block_size=block_size,
        rows=tiling.rows,
        tile=tiling.tile,
        has_window=window is not None,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


@triton_kernel(specialize=False)
def _find_request(query_start_loc_ptr, num_reqs, steps, slot, tile_tokens: tl.constexpr):
    """The last request whose first slot is at most ``slot``; ``num_reqs`` stands for the tokens behind the last one."""
    first = tl.load(query_start_loc_ptr)
    low = 0
    high = num_reqs
    while steps > 0:
        middle = (low + high + 1) // 2
        first_slot = (tl.load(query_start_loc_ptr + middle) - first) // tile_tokens + middle
        low = tl.where(first_slot <= slot, middle, low)
        high = tl.where(first_slot <= slot, high, middle - 1)
        steps -= 1
    return low


@triton_kernel(specialize=False)
def _paged_attention_prefill_kernel(
    query_ptr,
    kv_ptr,
    out_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    num_reqs,
    num_tokens,
    steps,
    query_stride,
    block_stride,
    table_stride,
    scale_log2,
    window,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    rows: tl.constexpr,
    tile: tl.constexpr,
    has_window: tl.constexpr,
):
    tile_tokens: tl.constexpr = rows // group
    # The slots of a request go head by head, so that programs side by side read the same K and V. They go from the
    # back, where a prompt's tiles see the most: long work first leaves a short end.
    item = tl.num_programs(0) - 1 - tl.program_id(0)
    request = _find_request(query_start_loc_ptr, num_reqs, steps, item // num_kv_heads, tile_tokens)
    is_request = request < num_reqs
    first = tl.load(query_start_loc_ptr)
    query_begin = tl.load(query_start_loc_ptr + request)
    query_end = tl.load(query_start_loc_ptr + request + 1, mask=is_request, other=0)
    query_end = tl.where(is_request, query_end, num_tokens)
    seq_len = tl.load(seq_lens_ptr + request, mask=is_request, other=0)
    query_len = query_end - query_begin
    first_slot = (query_begin - first) // tile_tokens + request
    end_slot = (query_end - first) // tile_tokens + request + 1
    num_slots = tl.where(is_request, end_slot, tl.num_programs(0) // num_kv_heads) - first_slot
    kv_head = (item - first_slot * num_kv_heads) // num_slots
    first_token = (item - first_slot * num_kv_heads) % num_slots * tile_tokens

    if first_token < query_len:
        query_stride = tl.multiple_of(query_stride, 8)
        block_stride = tl.multiple_of(block_stride, 8)
        row = tl.arange(0, rows)
        column = tl.arange(0, padded_dim)
        is_column = column < head_dim
        token = first_token + row // group  # [rows]
        is_row = (row < tile_tokens * group) & (token < query_len)
        head = kv_head * group + row % group
        query_offset = (query_begin + token).to(tl.int64) * query_stride + head * head_dim
        query_ptrs = tl.multiple_of(query_ptr + query_offset[:, None] + column[None, :], (1, 16))
        q = tl.load(query_ptrs, mask=is_row[:, None] & is_column[None, :], other=0.0)  # [rows, padded_dim]

        # Row positions, and the KV positions that some row sees: from kv_begin up to kv_end.
        first_position = seq_len - query_len + first_token
        row_position = seq_len - query_len + token
        kv_end = tl.minimum(first_position + tile_tokens, seq_len)
        kv_begin = 0
        if has_window:
            kv_begin = tl.maximum(first_position + 1 - window, 0) // tile * tile

        table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
        head_ptr = kv_ptr + kv_head * (block_size * head_dim)
        position_in_tile = tl.arange(0, tile)
        top = tl.full([rows], -1.0e30, tl.float32)  # below any score, and finite: the difference of two is not NaN
        total = tl.zeros([rows], tl.float32)
        acc = tl.zeros([rows, padded_dim], tl.float32)
        # Block ids are read one tile ahead: the address of K must not wait for them.
        position = kv_begin + position_in_tile
        next_block = tl.load(table_ptr + position // block_size, mask=position < kv_end, other=0)
        for begin in tl.range(kv_begin, kv_end, tile):
            position = begin + position_in_tile
            is_position = position < kv_end
            block = next_block
            next_position = position + tile
            next_block = tl.load(table_ptr + next_position // block_size, mask=next_position < kv_end, other=0)
            offset = block.to(tl.int64) * block_stride + (position % block_size) * head_dim
            k_ptrs = tl.multiple_of(head_ptr + offset[:, None] + column[None, :], (1, 16))
            mask = is_position[:, None] & is_column[None, :]
            k = tl.load(k_ptrs, mask=mask, other=0.0)  # [tile, padded_dim]
            scores = tl.dot(q, k.T, input_precision="ieee")  # [rows, tile]
            hides = begin + tile > first_position + 1
            if has_window:
                hides |= begin <= kv_end - 1 - window
            if hides:
                visible = position[None, :] <= row_position[:, None]
                if has_window:
                    visible &= position[None, :] > row_position[:, None] - window
                scores = tl.where(visible, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2)
            p = tl.exp2(scores * scale_log2 - new_top[:, None])
            kept = tl.exp2(top - new_top)
            total = total * kept + tl.sum(p, 1)
            acc = acc * kept[:, None]
            # What no row sees must be cleared, not only hidden: it may be NaN, and 0 * NaN is NaN.
            v_ptrs = tl.multiple_of(k_ptrs + num_kv_heads * block_size * head_dim, (1, 16))
            v = tl.load(v_ptrs, mask=mask, other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
            top = new_top

        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_offset = (query_begin + token).to(tl.int64) * (num_kv_heads * group * head_dim) + head * head_dim
        out_ptrs = tl.multiple_of(out_ptr + out_offset[:, None] + column[None, :], (1, 16))
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
