"""Causal attention of prompts, whole or in chunks, over the paged KV cache, for any mix of requests in one launch.

A program processes a tile of one request's query tokens, with all query heads of one KV head, and iterates over the KV
tiles that they attend to (FlashAttention-2, Dao, 2023). The grid depends on the number of tokens and of requests only,
not on lengths that only the device has: request ``i`` owns the slots from ``query_start_loc[i] // tile_tokens + i`` up
to the next request's, which is enough for its tiles and at most one more.

On Hopper GPUs, `fleetfoot.kernels_hopper.attention.prefill_hopper` is faster for common shapes.
`fleetfoot.kernels.attention.sdpa_backend.SDPABackend` is the reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.attention import AttentionInputs
from fleetfoot.kernels.attention.split_kv import add_sinks, base_2_scores, for_kv
from fleetfoot.kernels.runtime.gpu_limits import fit_tile, gpu_limits
from fleetfoot.kernels.runtime.triton_support import compiles_slowly, next_power_of_2, search_steps, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """Compile options of the kernel; see `choose_prefill_tiling`."""

    rows: int
    """Maximum query tokens of a tile times query heads per KV head."""
    tile: int
    """KV positions in a tile."""
    num_warps: int
    num_stages: int


def choose_prefill_tiling(group: int, padded_dim: int, element_size: int, shared_bytes: int) -> PrefillTiling:
    """The largest tiles that shared memory and the registers of the accumulator allow.

    Args:
        group: query heads per KV head. padded_dim: head_dim, rounded up to a power of 2.
        shared_bytes: maximum shared memory of a program.
    """
    row_bytes = padded_dim * element_size
    rows = max(16, min(128, 32768 // row_bytes))
    num_warps = 4 if padded_dim <= 64 or rows < 128 else 8
    rows = max(rows, next_power_of_2(group))
    tile, num_stages = fit_tile(rows, max(16, min(64, 16384 // row_bytes)), row_bytes, shared_bytes)
    return PrefillTiling(rows, tile, num_warps, num_stages)


def paged_attention_prefill(inputs: AttentionInputs, *, out: torch.Tensor, tiling: PrefillTiling | None = None) -> None:
    """Causal attention of the last tokens of each request.

    Args:
        out: written, ``[num_tokens, num_heads, head_dim]`` contiguous, from the first request's first token to the end;
            zeros for tokens of padding requests and for those after the last request's.
    """
    query, kv_cache, query_start_loc, seq_lens, block_tables, scale, window, _, soft_cap, sinks, scales = inputs
    num_reqs = seq_lens.shape[0]
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    padded_dim = max(16, next_power_of_2(head_dim))
    if tiling is None:
        tiling = choose_prefill_tiling(group, padded_dim, query.element_size(), gpu_limits(query.device).shared_bytes)
    num_slots = num_tokens // (tiling.rows // group) + num_reqs + 1
    _paged_attention_prefill_kernel[(num_slots * num_kv_heads,)](
        query, kv_cache, out, query_start_loc, seq_lens, block_tables, num_reqs, num_tokens, search_steps(num_reqs + 1),
        query.stride(0), kv_cache.stride(0), block_tables.stride(0), scale * math.log2(math.e), window or 0,
        query if sinks is None else sinks, query if scales is None else scales,
        num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, padded_dim=padded_dim, block_size=block_size,
        **inputs.kv_strides, rows=tiling.rows, tile=tiling.tile, has_window=window is not None,
        soft_cap=soft_cap or 0.0, has_sinks=sinks is not None, has_scales=scales is not None,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip


@triton_kernel(specialize=False)
def _find_request(query_start_loc_ptr, num_reqs, steps, slot, tile_tokens: tl.constexpr):
    """The last request with a first slot <= ``slot``; ``num_reqs`` represents the tokens after the last request."""
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
def _find_tile(
    query_start_loc_ptr, seq_lens_ptr, num_reqs, num_tokens, steps,
    num_kv_heads: tl.constexpr, tile_tokens: tl.constexpr,
):  # fmt: skip
    """The tile of this program: its request, KV head and first query token; with the request's first row, number of
    query tokens and length. Without a tile, the first token is not below the number of tokens."""
    # The slots of a request are ordered by KV head, so that neighboring programs read the same K and V. They are
    # processed from the back, where a prompt's tiles attend to the most positions: longest work first.
    work_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    request = _find_request(query_start_loc_ptr, num_reqs, steps, work_tile // num_kv_heads, tile_tokens)
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
    kv_head = (work_tile - first_slot * num_kv_heads) // num_slots
    first_token = (work_tile - first_slot * num_kv_heads) % num_slots * tile_tokens
    return request, kv_head, first_token, query_begin, query_len, seq_len


@compiles_slowly
@triton_kernel(specialize=False)
def _paged_attention_prefill_kernel(
    query_ptr, kv_ptr, out_ptr, query_start_loc_ptr, seq_lens_ptr, block_tables_ptr, num_reqs, num_tokens, steps,
    query_stride, block_stride, table_stride, scale_log2, window, sinks_ptr, kv_scales_ptr,
    num_kv_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, padded_dim: tl.constexpr,
    block_size: tl.constexpr, value_offset: tl.constexpr, head_stride: tl.constexpr, token_stride: tl.constexpr,
    rows: tl.constexpr, tile: tl.constexpr, has_window: tl.constexpr, soft_cap: tl.constexpr,
    has_sinks: tl.constexpr, has_scales: tl.constexpr,
):  # fmt: skip
    tile_tokens: tl.constexpr = rows // group
    request, kv_head, first_token, query_begin, query_len, seq_len = _find_tile(
        query_start_loc_ptr, seq_lens_ptr, num_reqs, num_tokens, steps, num_kv_heads, tile_tokens
    )
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
        if has_scales:
            q = for_kv(q, 1.0)
            scale_log2 *= tl.load(kv_scales_ptr)

        # Positions of the rows, and the range of KV positions that any row attends to.
        first_position = seq_len - query_len + first_token
        row_position = seq_len - query_len + token
        kv_end = tl.minimum(first_position + tile_tokens, seq_len)
        kv_begin = 0
        if has_window:
            kv_begin = tl.maximum(first_position + 1 - window, 0) // tile * tile

        table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
        head_ptr = kv_ptr + kv_head * head_stride
        position_in_tile = tl.arange(0, tile)
        row_max = tl.full([rows], -1.0e30, tl.float32)  # finite, so that differences are not NaN
        row_sum = tl.zeros([rows], tl.float32)
        acc = tl.zeros([rows, padded_dim], tl.float32)
        # Block ids are loaded one tile ahead, so that the address of K does not wait for them.
        position = kv_begin + position_in_tile
        next_block = tl.load(table_ptr + position // block_size, mask=position < kv_end, other=0)
        for begin in tl.range(kv_begin, kv_end, tile):
            position = begin + position_in_tile
            is_position = position < kv_end
            block = next_block
            next_position = position + tile
            next_block = tl.load(table_ptr + next_position // block_size, mask=next_position < kv_end, other=0)
            offset = block.to(tl.int64) * block_stride + (position % block_size) * token_stride
            k_ptrs = tl.multiple_of(head_ptr + offset[:, None] + column[None, :], (1, 16))
            mask = is_position[:, None] & is_column[None, :]
            k = tl.load(k_ptrs, mask=mask, other=0.0).to(q.dtype)  # [tile, padded_dim]
            scores = tl.dot(q, k.T, input_precision="ieee")  # [rows, tile]
            factor = scale_log2
            if soft_cap > 0:
                scores = base_2_scores(scores, scale_log2, soft_cap)
                factor = 1.0
            needs_mask = begin + tile > first_position + 1
            if has_window:
                needs_mask |= begin <= kv_end - 1 - window
            if needs_mask:
                visible = position[None, :] <= row_position[:, None]
                if has_window:
                    visible &= position[None, :] > row_position[:, None] - window
                scores = tl.where(visible, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
            p = tl.exp2(scores * factor - new_max[:, None])
            rescale = tl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + tl.sum(p, 1)
            acc = acc * rescale[:, None]
            # Positions past the end must be zeroed, not only masked: they may be NaN, and 0 * NaN is NaN.
            v_ptrs = tl.multiple_of(k_ptrs + value_offset, (1, 16))
            v = tl.load(v_ptrs, mask=mask, other=0.0).to(q.dtype)
            acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
            row_max = new_max

        if has_scales:
            acc *= tl.load(kv_scales_ptr + 1)
        if has_sinks:
            row_max, row_sum, acc = add_sinks(row_max, row_sum, acc, sinks_ptr, head, is_row)
        result = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        out_offset = (query_begin + token).to(tl.int64) * (num_kv_heads * group * head_dim) + head * head_dim
        out_ptrs = tl.multiple_of(out_ptr + out_offset[:, None] + column[None, :], (1, 16))
        tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
