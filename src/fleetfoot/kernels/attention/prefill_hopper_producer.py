"""The scheduler warp and the producer warp of `fleetfoot.kernels.attention.prefill_hopper`.

This module imports Triton.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from fleetfoot.kernels.runtime.gluon_support import block_ids, get_field, put_field

# Fields of a work tile's descriptor, 32-bit words of shared memory that all warps read.
NUM_TILES = gl.constexpr(0)  # 0: there is no more work
FIRST_TILE = gl.constexpr(1)
FIRST_POSITION = gl.constexpr(2)
KV_END = gl.constexpr(3)
FIRST_TOKEN = gl.constexpr(4)
NUM_TOKENS = gl.constexpr(5)
KV_HEAD = gl.constexpr(6)
REQUEST = gl.constexpr(7)
NUM_FIELDS = gl.constexpr(8)


@gluon.jit
def _find_request(query_start_loc_ptr, num_reqs, slot, tile_tokens: gl.constexpr):
    """The last request with a first slot <= ``slot``; ``num_reqs`` represents the tokens after the last request."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    width: gl.constexpr = 128
    first = gl.load(query_start_loc_ptr)
    count = 0
    begin = 0
    while begin <= num_reqs:
        request = begin + gl.arange(0, width, layout)
        starts = gl.load(query_start_loc_ptr + request, mask=request <= num_reqs, other=0)
        first_slot = (starts - first) // tile_tokens + request
        count += gl.sum(((first_slot <= slot) & (request <= num_reqs)).to(gl.int32), 0)
        begin += width
    return count - 1


@gluon.jit
def _find_head(index_in_request, num_slots, seq_len, pass_positions, num_kv_heads: gl.constexpr):
    """The KV head of a request's work tile, and the index of its tile of query tokens.

    Heads are processed in passes of as many heads as fit L2 with their K and V. Within a pass the last tokens of all
    heads come first: one head after the other would leave the last head's long work tiles to the end.
    """
    pass_heads = gl.minimum(gl.maximum(pass_positions // gl.maximum(seq_len, 1), 1), num_kv_heads)
    num_passes = (num_kv_heads + pass_heads - 1) // pass_heads
    pass_heads = (num_kv_heads + num_passes - 1) // num_passes
    first_head = index_in_request // (pass_heads * num_slots) * pass_heads
    index_in_request -= first_head * num_slots
    pass_heads = gl.minimum(pass_heads, num_kv_heads - first_head)
    return first_head + index_in_request % pass_heads, index_in_request // pass_heads


@gluon.jit
def scheduler_warp(
    query_ptr, query_start_loc_ptr, seq_lens_ptr, counter_ptr, queries, slots, num_reqs, num_tokens, num_work_tiles,
    query_stride, window, pass_positions,
    num_kv_heads: gl.constexpr, group: gl.constexpr, head_dim: gl.constexpr, rows: gl.constexpr, tile: gl.constexpr,
    has_window: gl.constexpr,
):  # fmt: skip
    """Fetch work tiles from the counter, write their descriptors to one of two slots, and load their queries."""
    work, work_full, query_full, work_empty = slots
    tile_tokens: gl.constexpr = rows // group
    parts: gl.constexpr = head_dim // 64
    # A box is 16 rows by 64 columns of a warp group's queries, contiguous in shared memory.
    box_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    boxes = queries._reinterpret(queries.dtype, [rows // 8 * parts, 16, 64], box_layout)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, layout)), 0)
    query_stride = gl.multiple_of(query_stride, 8)
    first = gl.load(query_start_loc_ptr)
    count = 0
    work_index = gl.program_id(0)  # the first work tile is static
    while work_index < num_work_tiles:
        # From the back, where a prompt's tiles attend to the most positions: longest work first.
        work_tile = num_work_tiles - 1 - work_index
        request = _find_request(query_start_loc_ptr, num_reqs, work_tile // num_kv_heads, tile_tokens)
        is_request = request < num_reqs
        query_begin = gl.load(query_start_loc_ptr + request)
        query_end = gl.load(query_start_loc_ptr + request + 1, mask=is_request, other=0)
        seq_len = gl.load(seq_lens_ptr + request, mask=is_request, other=0)
        query_end = gl.where(is_request, query_end, num_tokens)
        query_len = query_end - query_begin
        first_slot = (query_begin - first) // tile_tokens + request
        end_slot = (query_end - first) // tile_tokens + request + 1
        num_slots = gl.where(is_request, end_slot, num_work_tiles // num_kv_heads) - first_slot
        index_in_request = work_tile - first_slot * num_kv_heads
        kv_head, query_tile = _find_head(index_in_request, num_slots, seq_len, pass_positions, num_kv_heads)
        first_token = query_tile * tile_tokens
        if first_token < query_len:
            slot = count % 2
            first_position = seq_len - query_len + first_token
            kv_end = gl.maximum(gl.minimum(first_position + tile_tokens, seq_len), 0)
            first_tile = 0
            if has_window:
                first_tile = gl.maximum(first_position + 1 - window, 0) // tile
            mbarrier.wait(work_empty.index(slot), ((count // 2) & 1) ^ 1)
            put_field(work, slot, NUM_TILES, NUM_FIELDS, gl.maximum((kv_end + tile - 1) // tile - first_tile, 1))
            put_field(work, slot, FIRST_TILE, NUM_FIELDS, first_tile)
            put_field(work, slot, FIRST_POSITION, NUM_FIELDS, first_position)
            put_field(work, slot, KV_END, NUM_FIELDS, kv_end)
            put_field(work, slot, FIRST_TOKEN, NUM_FIELDS, query_begin + first_token)
            put_field(work, slot, NUM_TOKENS, NUM_FIELDS, query_len - first_token)
            put_field(work, slot, KV_HEAD, NUM_FIELDS, kv_head)
            put_field(work, slot, REQUEST, NUM_FIELDS, request)
            gl.thread_barrier()
            mbarrier.arrive(work_full.index(slot), count=1)
            for box in range(rows // 16):
                row = box * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
                token = first_token + row // group
                head = kv_head * group + row % group
                offset = (query_begin + token).to(gl.int64) * query_stride + head * head_dim
                is_row = gl.expand_dims((token < query_len) & (row < tile_tokens * group), 1)
                index = slot * (rows // 16) * parts + box // 4 * 4 * parts + box % 4
                for part in gl.static_range(parts):
                    pointers = query_ptr + gl.expand_dims(offset + part * 64, 1) + column
                    pointers = gl.multiple_of(pointers, [1, 16])
                    async_copy.async_copy_global_to_shared(boxes.index(index + part * 4), pointers, mask=is_row)
            async_copy.commit_group()
            async_copy.wait_group(0)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(query_full.index(slot), count=1)
            count += 1
            # Fetch the next work tile only if a slot is empty: another program may process it sooner.
            mbarrier.wait(work_empty.index(count % 2), ((count // 2) & 1) ^ 1)
        work_index = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
    # Each work tile increments the counter once. The program that gets the last value resets it.
    if work_index == gl.num_programs(0) + num_work_tiles - 1:
        gl.store(counter_ptr, 0)
    slot = count % 2
    mbarrier.wait(work_empty.index(slot), ((count // 2) & 1) ^ 1)
    put_field(work, slot, NUM_TILES, NUM_FIELDS, 0)
    gl.thread_barrier()
    mbarrier.arrive(work_full.index(slot), count=1)
    mbarrier.arrive(query_full.index(slot), count=1)


@gluon.jit
def _copy_tile(
    cache_desc, boxes, stage, barrier, blocks, begin, kv_end, kind_and_head, num_rows, rows_per_block,
    parts: gl.constexpr, box_rows: gl.constexpr, tile: gl.constexpr, block_size: gl.constexpr,
):  # fmt: skip
    """Start the copies of a tile of K or V. Boxes from ``kv_end`` on are out of bounds, and TMA writes 0."""
    num_boxes: gl.constexpr = tile // box_rows
    for box in gl.static_range(num_boxes):
        position = begin + box * box_rows
        row = blocks[box] * rows_per_block + kind_and_head * block_size + position % block_size
        row = gl.where(position < kv_end, row, num_rows)
        for part in gl.static_range(parts):
            target = boxes.index((stage * parts + part) * num_boxes + box)
            tma.async_copy_global_to_shared(cache_desc, [row, part * 64], barrier, target)


@gluon.jit
def _clear_rows(values, stage, first_row, end_row, head_dim: gl.constexpr, tile: gl.constexpr, stages: gl.constexpr):
    """Zero the rows from ``first_row`` to ``end_row``, a multiple of 8, of a tile of V."""
    parts: gl.constexpr = head_dim // 64
    view_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    views = values._reinterpret(values.dtype, [stages * parts * (tile // 8), 8, 64], view_layout)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    for eight in range(first_row // 8, end_row // 8):
        keep = gl.expand_dims(eight * 8 + gl.arange(0, 8, gl.SliceLayout(1, layout)) < first_row, 1)
        for part in gl.static_range(parts):
            view = views.index((stage * parts + part) * (tile // 8) + eight)
            rows = view.load(layout)
            view.store(gl.where(keep, rows, gl.zeros_like(rows)))


@gluon.jit
def producer_warp(
    cache_desc, block_tables_ptr, slots, key_stages, value_stages, num_rows, rows_per_block, table_stride,
    num_kv_heads: gl.constexpr, head_dim: gl.constexpr, block_size: gl.constexpr, tile: gl.constexpr,
    stages: gl.constexpr,
):  # fmt: skip
    """Fill the stages with the K and V tiles of the work tiles, as they become empty."""
    work, work_full, _, work_empty = slots
    keys, k_full, k_empty = key_stages
    values, v_full, v_empty = value_stages
    box_rows: gl.constexpr = min(block_size, tile)
    parts: gl.constexpr = head_dim // 64
    num_boxes: gl.constexpr = stages * parts * (tile // box_rows)
    box_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_boxes = keys._reinterpret(keys.dtype, [num_boxes, box_rows, 64], box_layout)
    v_boxes = values._reinterpret(keys.dtype, [num_boxes, box_rows, 64], box_layout)
    count = 0
    step = 0
    num_ends = 0
    mbarrier.wait(work_full.index(0), 0)
    num_tiles = get_field(work, 0, NUM_TILES, NUM_FIELDS, 1)
    while num_tiles > 0:
        slot = count % 2
        first_tile = get_field(work, slot, FIRST_TILE, NUM_FIELDS, 1)
        seq_len = get_field(work, slot, FIRST_POSITION, NUM_FIELDS, 1) + get_field(
            work, slot, NUM_TOKENS, NUM_FIELDS, 1
        )
        kv_end = get_field(work, slot, KV_END, NUM_FIELDS, 1)
        kv_head = get_field(work, slot, KV_HEAD, NUM_FIELDS, 1)
        request = get_field(work, slot, REQUEST, NUM_FIELDS, 1)
        gl.thread_barrier()
        mbarrier.arrive(work_empty.index(slot), count=1)
        table_ptr = block_tables_ptr + request.to(gl.int64) * table_stride
        blocks = block_ids(table_ptr, first_tile * tile, kv_end, box_rows, tile, block_size)
        for index in range(num_tiles):
            stage = step % stages
            phase = (step // stages) & 1
            begin = (first_tile + index) * tile
            next_blocks = block_ids(table_ptr, begin + tile, kv_end, box_rows, tile, block_size)
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), tile * head_dim * 2)
            _copy_tile(
                cache_desc, k_boxes, stage, k_full.index(stage), blocks, begin, kv_end, kv_head,
                num_rows, rows_per_block, parts, box_rows, tile, block_size,
            )  # fmt: skip
            # The box that contains kv_end may extend past the sequence, where V may be NaN, and 0 * NaN is NaN. This
            # warp waits for such a tile itself, at an extra barrier after those of the stages, and zeroes these rows.
            box_end = (kv_end + box_rows - 1) // box_rows * box_rows
            is_end = (begin + tile > kv_end) & (box_end > seq_len)
            barrier = v_full.index(gl.where(is_end, stages, stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(barrier, tile * head_dim * 2)
            _copy_tile(
                cache_desc, v_boxes, stage, barrier, blocks, begin, kv_end, num_kv_heads + kv_head,
                num_rows, rows_per_block, parts, box_rows, tile, block_size,
            )  # fmt: skip
            if is_end:
                mbarrier.wait(barrier, num_ends & 1)
                num_ends += 1
                _clear_rows(values, stage, kv_end - begin, box_end - begin, head_dim, tile, stages)
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(v_full.index(stage), count=1)
            blocks = next_blocks
            step += 1
        count += 1
        mbarrier.wait(work_full.index(count % 2), (count // 2) & 1)
        num_tiles = get_field(work, count % 2, NUM_TILES, NUM_FIELDS, 1)
