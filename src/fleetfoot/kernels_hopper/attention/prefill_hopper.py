"""Causal attention of prompts over the paged KV cache for Hopper GPUs: warp-specialized and persistent, in Gluon.

Computes `fleetfoot.kernels.attention.prefill` for 16-bit types and heads of 128 or 64 elements. The grid is persistent:
programs fetch work tiles, each a tile of query tokens for one KV head, until none is left. A program has

- one scheduler warp: it fetches the work tiles, writes their descriptors with the first block ids, and loads their
  queries by TMA (the tensor memory accelerator) one work tile ahead;
- one producer warp: it loads K and V block by block by TMA several tiles ahead;
- two consumer warp groups of four warps, with 64 rows of the work tile each. While the tensor cores multiply the
  weights of one tile with V, a group computes the softmax of the next tile; and the groups issue their matmuls in turn
  (pingpong scheduling), so that one computes its softmax while the other's matmuls run (FlashAttention-3, Shah et al.,
  2024).

They synchronize with barriers in shared memory. Gluon has no interpreter: a GPU test compares the kernel with
`fleetfoot.kernels.attention.sdpa_backend.SDPABackend`. This module imports Triton.
"""

from __future__ import annotations

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fleetfoot.kernels.attention import AttentionInputs
from fleetfoot.kernels.runtime.gluon_support import get_field, tensor_descriptor, wait_for_work
from fleetfoot.kernels.runtime.gpu_limits import gpu_limits
from fleetfoot.kernels.runtime.triton_support import compiles_slowly, launcher
from fleetfoot.kernels_hopper.attention.prefill_hopper_scheduler import (
    BOX_IDS,
    FIRST_POSITION,
    FIRST_TILE,
    FIRST_TOKEN,
    KV_END,
    KV_HEAD,
    NUM_FIELDS,
    NUM_TOKENS,
    REQUEST,
    ROWS,
    TILE,
    load_box_ids,
    scheduler_warp,
)  # fmt: skip

STAGES = gl.constexpr(2)  # of K and V
_PASS_BYTES = 24 << 20  # of K and V that all programs read at the same time: about half of the L2 cache
_GROUP_OF_64, _TOKENS_OF_64 = 2, 2048
"""Heads of 64: use this kernel up to this group size, or from this number of tokens on. TFLOP/s on an H100 of this
kernel and of the Triton kernel: 4096 tokens of 16 heads, no groups, 360 and 285; 8192 tokens, groups of 2, 390 and 316;
groups of 4, 398 and 390; 16 x 512, groups of 4, 168 and 198."""


def supports(inputs: AttentionInputs) -> bool:
    """Whether the kernel supports these types and shapes and is faster than the Triton kernel."""
    block_size, head_dim = inputs.kv_cache.shape[3:]
    group = inputs.group
    is_faster = head_dim == 128 or group <= _GROUP_OF_64 or inputs.max_query_len >= _TOKENS_OF_64
    return (
        inputs.query.dtype in (torch.bfloat16, torch.float16)
        and inputs.kv_cache.dtype is inputs.query.dtype
        and head_dim in (64, 128)
        and is_faster
        and group <= 64
        and block_size >= 8
        and block_size & (block_size - 1) == 0
        and inputs.is_block_contiguous
        and inputs.soft_cap is inputs.sinks is None
        and inputs.kv_cache.stride(0) % head_dim == 0
    )


def paged_attention_prefill_hopper(inputs: AttentionInputs, *, counter: torch.Tensor, out: torch.Tensor) -> None:
    """See `fleetfoot.kernels.attention.prefill.paged_attention_prefill`.

    Args:
        counter: ``[1]`` int32, 0 before and after the launch.
    """
    query, kv_cache, query_start_loc, seq_lens, block_tables, scale, window, *_ = inputs
    num_reqs = seq_lens.shape[0]
    num_tokens, num_heads, head_dim = query.shape
    num_blocks, _, num_kv_heads, block_size, _ = kv_cache.shape
    group = num_heads // num_kv_heads
    rows_per_block = kv_cache.stride(0) // head_dim
    num_rows = (num_blocks - 1) * rows_per_block + 2 * num_kv_heads * block_size
    box = (min(block_size, TILE.value), 64)
    cache_desc = tensor_descriptor(kv_cache, (num_rows, head_dim), (head_dim, 1), box)
    tile_tokens = ROWS.value // group
    query_desc = None
    if tile_tokens * group == ROWS.value:
        query_desc = tensor_descriptor(query, query.shape, query.stride(), (tile_tokens // 2, group, 64))
    launcher(_paged_attention_prefill_kernel, (gpu_limits(query.device).num_sms,))(
        query_desc, query, cache_desc, out, query_start_loc, seq_lens, block_tables, counter,
        num_reqs, num_tokens, num_rows, rows_per_block, query.stride(0), block_tables.stride(0),
        scale * math.log2(math.e), window or 0, _PASS_BYTES // (4 * head_dim),
        num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, block_size=block_size,
        has_window=window is not None, num_warps=4,
    )  # fmt: skip


@gluon.jit
def _copy_tile(
    cache_desc, boxes, stage, barrier, blocks, begin, kv_end, kind_and_head, num_rows, rows_per_block,
    parts: gl.constexpr, box_rows: gl.constexpr, block_size: gl.constexpr,
):  # fmt: skip
    """Start the copies of a tile of K or V. Boxes from ``kv_end`` on are out of bounds, and TMA writes 0."""
    num_boxes: gl.constexpr = TILE // box_rows
    for box in gl.static_range(num_boxes):
        position = begin + box * box_rows
        row = blocks[box] * rows_per_block + kind_and_head * block_size + position % block_size
        row = gl.where(position < kv_end, row, num_rows)
        for part in gl.static_range(parts):
            target = boxes.index((stage * parts + part) * num_boxes + box)
            tma.async_copy_global_to_shared(cache_desc, [row, part * 64], barrier, target)


@gluon.jit
def _clear_rows(values, stage, first_row, end_row, head_dim: gl.constexpr):
    """Zero the rows from ``first_row`` to ``end_row``, a multiple of 8, of a tile of V."""
    parts: gl.constexpr = head_dim // 64
    view_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    views = values._reinterpret(values.dtype, [STAGES * parts * (TILE // 8), 8, 64], view_layout)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    for eight in range(first_row // 8, end_row // 8):
        keep = gl.expand_dims(eight * 8 + gl.arange(0, 8, gl.SliceLayout(1, layout)) < first_row, 1)
        for part in gl.static_range(parts):
            view = views.index((stage * parts + part) * (TILE // 8) + eight)
            loaded = view.load(layout)
            view.store(gl.where(keep, loaded, gl.zeros_like(loaded)))


@gluon.jit
def _producer_warp(
    cache_desc, block_tables_ptr, box_ids, slots, key_stages, value_stages, num_rows, rows_per_block, table_stride,
    num_kv_heads: gl.constexpr, head_dim: gl.constexpr, block_size: gl.constexpr,
):  # fmt: skip
    """Fill the stages with the K and V tiles of the work tiles, as they become empty."""
    work, work_full, _, work_empty = slots
    keys, k_full, k_empty = key_stages
    values, v_full, v_empty = value_stages
    box_rows: gl.constexpr = min(block_size, TILE)
    parts: gl.constexpr = head_dim // 64
    tile_boxes: gl.constexpr = TILE // box_rows
    num_boxes: gl.constexpr = STAGES * parts * tile_boxes
    box_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_boxes = keys._reinterpret(keys.dtype, [num_boxes, box_rows, 64], box_layout)
    v_boxes = values._reinterpret(keys.dtype, [num_boxes, box_rows, 64], box_layout)
    lane_layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, BOX_IDS, lane_layout)
    count = 0
    step = 0
    num_ends = 0
    num_tiles = wait_for_work(work, work_full, 0, 2, NUM_FIELDS, 1)
    while num_tiles > 0:
        slot = count % 2
        first_tile = get_field(work, slot, FIRST_TILE, NUM_FIELDS, 1)
        seq_len = get_field(work, slot, FIRST_POSITION, NUM_FIELDS, 1)
        seq_len += get_field(work, slot, NUM_TOKENS, NUM_FIELDS, 1)
        kv_end = get_field(work, slot, KV_END, NUM_FIELDS, 1)
        kv_head = get_field(work, slot, KV_HEAD, NUM_FIELDS, 1)
        request = get_field(work, slot, REQUEST, NUM_FIELDS, 1)
        ids = box_ids.index(slot).load(lane_layout)
        gl.thread_barrier()
        mbarrier.arrive(work_empty.index(slot), count=1)
        table_ptr = block_tables_ptr + request.to(gl.int64) * table_stride
        next_ids = load_box_ids(table_ptr, first_tile * TILE + BOX_IDS * box_rows, kv_end, box_rows, block_size)
        for index in range(num_tiles):
            stage = step % STAGES
            phase = (step // STAGES) & 1
            begin = (first_tile + index) * TILE
            first_lane = index * tile_boxes % BOX_IDS
            if (first_lane == 0) & (index > 0):
                ids = next_ids
                next_ids = load_box_ids(table_ptr, begin + BOX_IDS * box_rows, kv_end, box_rows, block_size)
            blocks = ()
            for box in gl.static_range(tile_boxes):
                block = gl.sum(gl.where(lane == first_lane + box, ids, 0), 0)
                blocks = blocks + (block,)  # type: ignore[assignment]  # noqa: RUF005
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), TILE * head_dim * 2)
            _copy_tile(
                cache_desc, k_boxes, stage, k_full.index(stage), blocks, begin, kv_end, kv_head, num_rows,
                rows_per_block, parts, box_rows, block_size,
            )  # fmt: skip
            # The box that contains kv_end may extend past the sequence, where V may be NaN, and 0 * NaN is NaN. This
            # warp waits for such a tile itself, at an extra barrier after those of the stages, and zeroes these rows.
            box_end = (kv_end + box_rows - 1) // box_rows * box_rows
            is_end = (begin + TILE > kv_end) & (box_end > seq_len)
            barrier = v_full.index(gl.where(is_end, STAGES, stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(barrier, TILE * head_dim * 2)
            _copy_tile(
                cache_desc, v_boxes, stage, barrier, blocks, begin, kv_end, num_kv_heads + kv_head,
                num_rows, rows_per_block, parts, box_rows, block_size,
            )  # fmt: skip
            if is_end:
                mbarrier.wait(barrier, num_ends & 1)
                num_ends += 1
                _clear_rows(values, stage, kv_end - begin, box_end - begin, head_dim)
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(v_full.index(stage), count=1)
            step += 1
        count += 1
        num_tiles = wait_for_work(work, work_full, count, 2, NUM_FIELDS, 1)


@gluon.jit
def _wait_for_stage(full, step, pred):
    """Wait until the tile of a step is loaded."""
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1, pred=pred)


@gluon.jit
def _mask_scores(scores, begin, row_position, first_position, last_position, window, has_window: gl.constexpr):
    """Set the scores of masked positions to -inf. Most tiles need no mask for any row."""
    needs_mask = begin + TILE > first_position + 1
    if has_window:
        needs_mask = needs_mask | (begin <= last_position - window)
    if needs_mask:
        position = gl.expand_dims(begin + gl.arange(0, TILE, gl.SliceLayout(0, scores.type.layout)), 0)
        visible = position <= gl.expand_dims(row_position, 1)
        if has_window:
            visible = visible & (position > gl.expand_dims(row_position, 1) - window)
        scores = gl.where(visible, scores, float("-inf"))
    return scores


@gluon.jit
def _online_softmax(scores, row_max, row_sum, scale_log2):
    """Weights relative to the running maximum, that maximum, the sum of weights, and the factor for previous sums."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    weights = gl.exp2(scores * scale_log2 - gl.expand_dims(new_max, 1))
    rescale = gl.exp2(row_max - new_max)
    return weights, new_max, row_sum * rescale + gl.sum(weights, 1), rescale


@gluon.jit
def _store_rows(
    out_ptr, staging, acc, row_sum, first_token, num_tokens, kv_head,
    warp_group: gl.constexpr, num_kv_heads: gl.constexpr, group: gl.constexpr,
):  # fmt: skip
    """Store ``acc / row_sum``, the 64 rows of a warp group of a work tile, through shared memory of their size."""
    layout: gl.constexpr = acc.type.layout
    head_dim: gl.constexpr = acc.shape[1]
    factor = gl.convert_layout(gl.expand_dims(1.0 / gl.where(row_sum > 0, row_sum, 1.0), 1), layout)
    # A thread has 4 bytes here and there of the products. Through shared memory, a warp stores whole rows.
    staging.store((acc * factor).to(out_ptr.dtype.element_ty))
    gl.thread_barrier()
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // head_dim, head_dim // 8], [4, 1], [1, 0])
    result = staging.load(store_layout)
    row = warp_group * 64 + gl.arange(0, 64, gl.SliceLayout(1, store_layout))
    column = gl.expand_dims(gl.arange(0, head_dim, gl.SliceLayout(0, store_layout)), 0)
    token = row // group
    token_offset = (first_token + token).to(gl.int64) * (num_kv_heads * group * head_dim)
    offset = token_offset + (kv_head * group + row % group) * head_dim
    is_row = (token < num_tokens) & (row < ROWS // group * group)
    gl.store(out_ptr + gl.expand_dims(offset, 1) + column, result, mask=gl.expand_dims(is_row, 1))


@gluon.jit
def _consumer_warps(
    out_ptr, queries, slots, key_stages, value_stages, pingpong, scale_log2, window,
    warp_group: gl.constexpr, num_kv_heads: gl.constexpr, group: gl.constexpr, head_dim: gl.constexpr,
    has_window: gl.constexpr,
):  # fmt: skip
    """Attention of 64 rows of each work tile, from row ``64 * warp_group`` on."""
    work, _, query_full, work_empty = slots
    keys, k_full, k_empty = key_stages
    values, v_full, v_empty = value_stages
    num_groups: gl.constexpr = ROWS // 64
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, head_dim, 16])
    weights_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    zeros = gl.zeros([64, TILE], gl.float32, scores_layout)
    row = warp_group * 64 + gl.arange(0, 64, row_layout)
    count = 0
    step = 0
    pingpong_count = 0
    num_tiles = wait_for_work(work, query_full, 0, 2, NUM_FIELDS, 4)
    while num_tiles > 0:
        slot = count % 2
        tile_position = get_field(work, slot, FIRST_POSITION, NUM_FIELDS, 4)
        row_position = tile_position + row // group
        first_position = tile_position + warp_group * 64 // group  # of this warp group's rows
        last_position = tile_position + (warp_group * 64 + 63) // group
        begin = get_field(work, slot, FIRST_TILE, NUM_FIELDS, 4) * TILE
        first_token = get_field(work, slot, FIRST_TOKEN, NUM_FIELDS, 4)
        num_tokens = get_field(work, slot, NUM_TOKENS, NUM_FIELDS, 4)
        kv_head = get_field(work, slot, KV_HEAD, NUM_FIELDS, 4)
        q = queries.index(slot * num_groups + warp_group)

        stage = step % STAGES
        mbarrier.wait(k_full.index(stage), (step // STAGES) & 1)
        mbarrier.wait(pingpong.index(warp_group), (pingpong_count & 1) ^ (1 - warp_group))
        scores = warpgroup_mma(q, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.arrive(pingpong.index(1 - warp_group), count=1)
        pingpong_count += 1
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_empty.index(stage), count=1)
        scores = _mask_scores(scores, begin, row_position, first_position, last_position, window, has_window)
        row_max = gl.full([64], -1.0e30, gl.float32, row_layout)  # finite, so that differences are not NaN
        row_sum = gl.zeros([64], gl.float32, row_layout)
        acc = gl.zeros([64, head_dim], gl.float32, acc_layout)
        weights, row_max, row_sum, rescale = _online_softmax(scores, row_max, row_sum, scale_log2)
        p = gl.convert_layout(weights.to(keys.dtype), weights_layout)
        _wait_for_stage(k_full, step + 1, num_tiles > 1)
        for index in range(1, num_tiles):
            v_stage = step % STAGES
            v_phase = (step // STAGES) & 1
            step += 1
            stage = step % STAGES
            mbarrier.wait(pingpong.index(warp_group), (pingpong_count & 1) ^ (1 - warp_group))
            next_scores = warpgroup_mma(q, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(v_stage), v_phase)
            next_acc = warpgroup_mma(p, values.index(v_stage), acc, is_async=True)
            mbarrier.arrive(pingpong.index(1 - warp_group), count=1)
            pingpong_count += 1
            scores = warpgroup_mma_wait(1, deps=[next_scores])
            mbarrier.arrive(k_empty.index(stage), count=1)
            begin += TILE
            scores = _mask_scores(scores, begin, row_position, first_position, last_position, window, has_window)
            weights, row_max, row_sum, rescale = _online_softmax(scores, row_max, row_sum, scale_log2)
            next_p = gl.convert_layout(weights.to(keys.dtype), weights_layout)
            # Waiting for the next K here, while the matmul with V runs, also prevents the assembler from moving the
            # softmax after the end of that matmul.
            _wait_for_stage(k_full, step + 1, index + 1 < num_tiles)
            acc, p = warpgroup_mma_wait(0, deps=[next_acc, p])
            mbarrier.arrive(v_empty.index(v_stage), count=1)
            acc = acc * gl.convert_layout(gl.expand_dims(rescale, 1), acc_layout)
            p = next_p
        v_stage = step % STAGES
        mbarrier.wait(v_full.index(v_stage), (step // STAGES) & 1)
        next_acc = warpgroup_mma(p, values.index(v_stage), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, deps=[next_acc, p])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        step += 1

        _store_rows(out_ptr, q, acc, row_sum, first_token, num_tokens, kv_head, warp_group, num_kv_heads, group)
        fence_async_shared()  # the next queries are copied there by TMA
        mbarrier.arrive(work_empty.index(slot), count=1)
        count += 1
        num_tiles = wait_for_work(work, query_full, count, 2, NUM_FIELDS, 4)


# Query and output are checked to be aligned; the other tensors may be slices with any offset.
@compiles_slowly
@gluon.jit(
    do_not_specialize=[
        "query_start_loc_ptr", "seq_lens_ptr", "block_tables_ptr", "counter_ptr",
        "num_reqs", "num_tokens", "num_rows", "rows_per_block", "query_stride", "table_stride",
        "window", "pass_positions",
    ]
)  # fmt: skip
def _paged_attention_prefill_kernel(
    query_desc, query_ptr, cache_desc, out_ptr, query_start_loc_ptr, seq_lens_ptr, block_tables_ptr, counter_ptr,
    num_reqs, num_tokens, num_rows, rows_per_block, query_stride, table_stride,
    scale_log2, window, pass_positions,
    num_kv_heads: gl.constexpr, group: gl.constexpr, head_dim: gl.constexpr, block_size: gl.constexpr,
    has_window: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = cache_desc.dtype
    num_groups: gl.constexpr = ROWS // 64
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    word_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(dtype, [2 * num_groups, 64, head_dim], tile_layout)
    keys = gl.allocate_shared_memory(dtype, [STAGES, TILE, head_dim], tile_layout)
    values = gl.allocate_shared_memory(dtype, [STAGES, TILE, head_dim], tile_layout)
    work = gl.allocate_shared_memory(gl.int32, [2 * NUM_FIELDS, 1], word_layout)
    box_ids = gl.allocate_shared_memory(gl.int32, [2, BOX_IDS], word_layout)  # the first ones of the slots' work tiles
    # Barriers of the two slots: descriptor written, queries loaded as well, slot empty again.
    work_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    query_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    work_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    # Barriers of the stages.
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], barrier_layout)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier_layout)
    pingpong = gl.allocate_shared_memory(gl.int64, [2, 1], barrier_layout)
    for slot in gl.static_range(2):
        mbarrier.init(work_full.index(slot), count=1)
        mbarrier.init(query_full.index(slot), count=1)
        mbarrier.init(work_empty.index(slot), count=num_groups + 1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=num_groups)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=num_groups)
    mbarrier.init(v_full.index(STAGES), count=1)
    for part in gl.static_range(2):
        mbarrier.init(pingpong.index(part), count=1)
    fence_async_shared()

    # The last list is registers per thread: three groups of four warps share 504, and the first group gets the rest.
    slots = (work, work_full, query_full, work_empty)
    keys = (keys, k_full, k_empty)
    values = (values, v_full, v_empty)
    # fmt: off
    gl.warp_specialize([
        (_consumer_warps, (out_ptr, queries, slots, keys, values, pingpong, scale_log2, window, 0, num_kv_heads, group,
                           head_dim, has_window)),
        (_consumer_warps, (out_ptr, queries, slots, keys, values, pingpong, scale_log2, window, 1, num_kv_heads, group,
                           head_dim, has_window)),
        (scheduler_warp, (query_desc, query_ptr, query_start_loc_ptr, seq_lens_ptr, block_tables_ptr, counter_ptr,
                          queries, box_ids, slots, num_reqs, num_tokens, query_stride, table_stride,
                          window, pass_positions, num_kv_heads, group, block_size, has_window)),
        (_producer_warp, (cache_desc, block_tables_ptr, box_ids, slots, keys, values, num_rows, rows_per_block,
                          table_stride, num_kv_heads, head_dim, block_size)),
    ], [4, 1, 1], [232, 40, 40])
    # fmt: on
