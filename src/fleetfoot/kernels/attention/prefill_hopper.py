"""Causal attention of prompts over the paged KV cache for Hopper GPUs: warps with roles, in Gluon.

What `fleetfoot.kernels.attention.prefill` computes, for 16-bit types and heads of 128 or 64 elements. Its programs
stay on their multiprocessor and draw items, a tile of query tokens for one KV head, until there are none left. In a
program

- one warp *schedules*: it draws the items, says what they are, and fetches their queries, an item ahead;
- one warp *loads* K and V, block by block, through the tensor memory accelerator, some tiles ahead;
- two groups of four warps *attend*, 64 rows of the item each. While the tensor cores multiply the weights of
  one tile with V, a group computes the weights of the next; and the groups take turns in giving the tensor cores work,
  so that one computes weights while the other's products run (FlashAttention-3, Shah et al., 2024).

They meet at barriers in shared memory. Gluon, which places data and waits by hand, has no interpreter: the kernel is
held against `fleetfoot.kernels.attention.sdpa_backend.SDPABackend` on a GPU. This module imports Triton.
"""

from __future__ import annotations

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fleetfoot.kernels.runtime.gluon_support import get_field
from fleetfoot.kernels.attention.prefill_hopper_producer import (
    FIRST_POSITION,
    FIRST_TILE,
    FIRST_TOKEN,
    KV_HEAD,
    NUM_FIELDS,
    NUM_TILES,
    NUM_TOKENS,
    load,
    schedule,
)
from fleetfoot.kernels.runtime.gpu_limits import gpu_limits
from fleetfoot.kernels.runtime.triton_support import launcher

_TILE = 128  # KV positions
_ROWS = 128  # query heads of a KV head within query tokens: 64 for each of two groups of warps
_PASS_BYTES = 24 << 20  # of K and V that programs read at the same time: about half of the L2 cache
_GROUP_OF_64, _TOKENS_OF_64 = 2, 2048
"""With heads of 64: groups up to so large, or chunks from so many tokens on. An H100's TFLOP/s, and the plain kernel's:
4096 tokens of 16 heads, no groups, 360 and 285; 8192 tokens, groups of 2, 390 and 316; groups of 4, 398 and 390; 16 x
512, groups of 4, 168 and 198."""


def serves(query: torch.Tensor, kv_cache: torch.Tensor, max_query_len: int) -> bool:
    """Whether the kernel takes these types and shapes, and is the faster one."""
    group = query.shape[1] // kv_cache.shape[2]
    block_size, head_dim = kv_cache.shape[3:]
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and (head_dim == 128 or (head_dim == 64 and (group <= _GROUP_OF_64 or max_query_len >= _TOKENS_OF_64)))
        and group <= 64
        and block_size >= 8
        and block_size & (block_size - 1) == 0
        and kv_cache.stride(0) % head_dim == 0
    )


def paged_attention_prefill_hopper(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int | None,
    *,
    counter: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """See `fleetfoot.kernels.attention.prefill.paged_attention_prefill`.

    Args:
        counter: ``[1]`` int32, 0, and 0 again when the kernel is done.
    """
    num_reqs = seq_lens.shape[0]
    num_tokens, num_heads, head_dim = query.shape
    num_blocks, _, num_kv_heads, block_size, _ = kv_cache.shape
    group = num_heads // num_kv_heads
    rows_per_block = kv_cache.stride(0) // head_dim
    num_rows = (num_blocks - 1) * rows_per_block + 2 * num_kv_heads * block_size
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    rows_of_cache = TensorDescriptor(
        kv_cache, [num_rows, head_dim], [head_dim, 1], [min(block_size, _TILE), 64], layout
    )
    num_items = (num_tokens // (_ROWS // group) + num_reqs + 1) * num_kv_heads
    launcher(_paged_attention_prefill_kernel, (gpu_limits(query.device).num_sms,))(
        query,
        rows_of_cache,
        out,
        query_start_loc,
        seq_lens,
        block_tables,
        counter,
        num_reqs,
        num_tokens,
        num_items,
        num_rows,
        rows_per_block,
        query.stride(0),
        block_tables.stride(0),
        scale * math.log2(math.e),
        0 if window is None else window,
        _PASS_BYTES // (4 * head_dim),
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        rows=_ROWS,
        tile=_TILE,
        stages=2,
        has_window=window is not None,
        num_warps=4,
    )


@gluon.jit
def _hide(
    scores, begin, row_position, first_position, last_position, window, tile: gl.constexpr, has_window: gl.constexpr
):
    """Scores of positions that a row does not see become -inf. Most tiles are seen by all rows as they are."""
    hides = begin + tile > first_position + 1
    if has_window:
        hides = hides | (begin <= last_position - window)
    if hides:
        position = gl.expand_dims(begin + gl.arange(0, tile, gl.SliceLayout(0, scores.type.layout)), 0)
        visible = position <= gl.expand_dims(row_position, 1)
        if has_window:
            visible = visible & (position > gl.expand_dims(row_position, 1) - window)
        scores = gl.where(visible, scores, float("-inf"))
    return scores


@gluon.jit
def _weigh(scores, top, total, scale_log2):
    """The weights relative to the largest score so far, that score, the sum of weights, what is kept of older sums."""
    new_top = gl.maximum(top, gl.max(scores, 1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - gl.expand_dims(new_top, 1))
    kept = gl.exp2(top - new_top)
    return weights, new_top, total * kept + gl.sum(weights, 1), kept


@gluon.jit
def _attend(
    out_ptr,
    queries,
    slots,
    key_stages,
    value_stages,
    turns,
    scale_log2,
    window,
    part_of_rows: gl.constexpr,
    num_kv_heads: gl.constexpr,
    group: gl.constexpr,
    head_dim: gl.constexpr,
    rows: gl.constexpr,
    tile: gl.constexpr,
    stages: gl.constexpr,
    has_window: gl.constexpr,
):
    """Attention of 64 rows of each item, from row ``64 * part_of_rows`` on."""
    items, _, filled, free = slots
    keys, k_filled, k_free = key_stages
    values, v_filled, v_free = value_stages
    num_groups: gl.constexpr = rows // 64
    tile_tokens: gl.constexpr = rows // group
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    zeros = gl.zeros([64, tile], gl.float32, scores_layout)
    row = part_of_rows * 64 + gl.arange(0, 64, row_layout)
    count = 0
    step = 0
    turn = 0
    mbarrier.wait(filled.index(0), 0)
    num_tiles = get_field(items, 0, NUM_TILES, NUM_FIELDS, 4)
    while num_tiles > 0:
        slot = count % 2
        item_position = get_field(items, slot, FIRST_POSITION, NUM_FIELDS, 4)
        row_position = item_position + row // group
        first_position = item_position + part_of_rows * 64 // group  # of this part's rows
        last_position = item_position + (part_of_rows * 64 + 63) // group
        begin = get_field(items, slot, FIRST_TILE, NUM_FIELDS, 4) * tile
        first_token = get_field(items, slot, FIRST_TOKEN, NUM_FIELDS, 4)
        num_tokens = get_field(items, slot, NUM_TOKENS, NUM_FIELDS, 4)
        kv_head = get_field(items, slot, KV_HEAD, NUM_FIELDS, 4)
        q = queries.index(slot * num_groups + part_of_rows)

        stage = step % stages
        mbarrier.wait(k_filled.index(stage), (step // stages) & 1)
        mbarrier.wait(turns.index(part_of_rows), (turn & 1) ^ (1 - part_of_rows))
        scores = warpgroup_mma(q, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.arrive(turns.index(1 - part_of_rows), count=1)
        turn += 1
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_free.index(stage), count=1)
        scores = _hide(scores, begin, row_position, first_position, last_position, window, tile, has_window)
        top = gl.full([64], -1.0e30, gl.float32, row_layout)  # below any score, and finite
        total = gl.zeros([64], gl.float32, row_layout)
        acc = gl.zeros([64, head_dim], gl.float32, acc_layout)
        weights, top, total, kept = _weigh(scores, top, total, scale_log2)
        p = gl.convert_layout(weights.to(keys.dtype), weights_layout)
        next_step = step + 1
        mbarrier.wait(k_filled.index(next_step % stages), (next_step // stages) & 1, pred=num_tiles > 1)
        for index in range(1, num_tiles):
            v_stage = step % stages
            v_phase = (step // stages) & 1
            step += 1
            stage = step % stages
            mbarrier.wait(turns.index(part_of_rows), (turn & 1) ^ (1 - part_of_rows))
            next_scores = warpgroup_mma(q, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_filled.index(v_stage), v_phase)
            next_acc = warpgroup_mma(p, values.index(v_stage), acc, is_async=True)
            mbarrier.arrive(turns.index(1 - part_of_rows), count=1)
            turn += 1
            scores = warpgroup_mma_wait(1, deps=[next_scores])
            mbarrier.arrive(k_free.index(stage), count=1)
            begin += tile
            scores = _hide(scores, begin, row_position, first_position, last_position, window, tile, has_window)
            weights, top, total, kept = _weigh(scores, top, total, scale_log2)
            next_p = gl.convert_layout(weights.to(keys.dtype), weights_layout)
            # To wait for the next K here, while the product with V runs, also keeps the assembler from moving the
            # weights' arithmetic behind the end of that product.
            next_step = step + 1
            is_next = index + 1 < num_tiles
            mbarrier.wait(k_filled.index(next_step % stages), (next_step // stages) & 1, pred=is_next)
            acc, p = warpgroup_mma_wait(0, deps=[next_acc, p])
            mbarrier.arrive(v_free.index(v_stage), count=1)
            acc = acc * gl.convert_layout(gl.expand_dims(kept, 1), acc_layout)
            p = next_p
        mbarrier.arrive(free.index(slot), count=1)
        v_stage = step % stages
        mbarrier.wait(v_filled.index(v_stage), (step // stages) & 1)
        next_acc = warpgroup_mma(p, values.index(v_stage), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[next_acc, p])
        mbarrier.arrive(v_free.index(v_stage), count=1)
        step += 1

        factor = gl.convert_layout(gl.expand_dims(1.0 / gl.where(total > 0, total, 1.0), 1), acc_layout)
        result = (acc * factor).to(out_ptr.dtype.element_ty)
        out_row = part_of_rows * 64 + gl.arange(0, 64, gl.SliceLayout(1, acc_layout))
        column = gl.expand_dims(gl.arange(0, head_dim, gl.SliceLayout(0, acc_layout)), 0)
        token = out_row // group
        token_offset = (first_token + token).to(gl.int64) * (num_kv_heads * group * head_dim)
        offset = token_offset + (kv_head * group + out_row % group) * head_dim
        is_row = (token < num_tokens) & (out_row < tile_tokens * group)
        gl.store(out_ptr + gl.expand_dims(offset, 1) + column, result, mask=gl.expand_dims(is_row, 1))
        count += 1
        mbarrier.wait(filled.index(count % 2), (count // 2) & 1)
        num_tiles = get_field(items, count % 2, NUM_TILES, NUM_FIELDS, 4)


# Query and output are aligned, which is checked; the others may be slices that begin anywhere.
@gluon.jit(
    do_not_specialize=[
        "query_start_loc_ptr", "seq_lens_ptr", "block_tables_ptr", "counter_ptr",
        "num_reqs", "num_tokens", "num_items", "num_rows", "rows_per_block", "query_stride", "table_stride", "window",
        "pass_positions",
    ]
)  # fmt: skip
def _paged_attention_prefill_kernel(
    query_ptr,
    rows_of_cache,
    out_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    counter_ptr,
    num_reqs,
    num_tokens,
    num_items,
    num_rows,
    rows_per_block,
    query_stride,
    table_stride,
    scale_log2,
    window,
    pass_positions,
    num_kv_heads: gl.constexpr,
    group: gl.constexpr,
    head_dim: gl.constexpr,
    block_size: gl.constexpr,
    rows: gl.constexpr,
    tile: gl.constexpr,
    stages: gl.constexpr,
    has_window: gl.constexpr,
):
    dtype: gl.constexpr = rows_of_cache.dtype
    num_groups: gl.constexpr = rows // 64
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    word_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(dtype, [2 * num_groups, 64, head_dim], tile_layout)
    keys = gl.allocate_shared_memory(dtype, [stages, tile, head_dim], tile_layout)
    values = gl.allocate_shared_memory(dtype, [stages, tile, head_dim], tile_layout)
    items = gl.allocate_shared_memory(gl.int32, [2 * NUM_FIELDS, 1], word_layout)
    # Of the two slots: described for the loading warp, filled (the queries, too) for the others, free again.
    described = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    filled = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    free = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    # Of the stages.
    k_filled = gl.allocate_shared_memory(gl.int64, [stages, 1], barrier_layout)
    k_free = gl.allocate_shared_memory(gl.int64, [stages, 1], barrier_layout)
    v_filled = gl.allocate_shared_memory(gl.int64, [stages + 1, 1], barrier_layout)
    v_free = gl.allocate_shared_memory(gl.int64, [stages, 1], barrier_layout)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    for slot in gl.static_range(2):
        mbarrier.init(described.index(slot), count=1)
        mbarrier.init(filled.index(slot), count=1)
        mbarrier.init(free.index(slot), count=num_groups + 1)
    for stage in gl.static_range(stages):
        mbarrier.init(k_filled.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=num_groups)
        mbarrier.init(v_filled.index(stage), count=1)
        mbarrier.init(v_free.index(stage), count=num_groups)
    mbarrier.init(v_filled.index(stages), count=1)
    for part in gl.static_range(2):
        mbarrier.init(turns.index(part), count=1)
    fence_async_shared()

    # The last list is registers of a thread: the three groups of four warps share 504, and the first gets the rest.
    slots = (items, described, filled, free)
    keys = (keys, k_filled, k_free)
    values = (values, v_filled, v_free)
    # fmt: off
    gl.warp_specialize([
        (_attend, (out_ptr, queries, slots, keys, values, turns, scale_log2, window, 0, num_kv_heads, group, head_dim,
                   rows, tile, stages, has_window)),
        (_attend, (out_ptr, queries, slots, keys, values, turns, scale_log2, window, 1, num_kv_heads, group, head_dim,
                   rows, tile, stages, has_window)),
        (schedule, (query_ptr, query_start_loc_ptr, seq_lens_ptr, counter_ptr, queries, slots, num_reqs, num_tokens,
                    num_items, query_stride, window, pass_positions, num_kv_heads, group, head_dim, rows, tile,
                    has_window)),
        (load, (rows_of_cache, block_tables_ptr, slots, keys, values, num_rows, rows_per_block, table_stride,
                num_kv_heads, head_dim, block_size, tile, stages)),
    ], [4, 1, 1], [232, 40, 40])
    # fmt: on
