"""The scheduler warp of `prefill_hopper`: fetches work tiles and loads their queries.

This module imports Triton.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from fleetfoot.kernels.runtime.gluon_support import put_field

# Fields of a work tile's descriptor, 32-bit words of shared memory that all warps read. NUM_TILES is 0 if there is no
# more work.
NUM_TILES, FIRST_TILE, FIRST_POSITION, KV_END, FIRST_TOKEN, NUM_TOKENS, KV_HEAD, REQUEST, NUM_FIELDS = map(
    gl.constexpr, range(9)
)
TILE = gl.constexpr(128)  # KV positions
ROWS = gl.constexpr(128)  # query tokens times query heads per KV head: 64 for each of two warp groups
BOX_IDS = gl.constexpr(32)  # block ids that are loaded at once, one for each TMA box of K: one for each thread


@gluon.jit
def _count_requests(query_start_loc_ptr, num_reqs):
    """The number of requests without those at the end that have no query tokens: they pad the batch of a graph."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    width: gl.constexpr = 128
    end_token = gl.load(query_start_loc_ptr + num_reqs)
    count = 0
    for begin in range(0, num_reqs, width):
        request = begin + gl.arange(0, width, layout)
        starts = gl.load(query_start_loc_ptr + request, mask=request < num_reqs, other=end_token)
        count += gl.sum((starts < end_token).to(gl.int32), 0)
    return count


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
def load_box_ids(table_ptr, begin, kv_end, box_rows: gl.constexpr, block_size: gl.constexpr):
    """The blocks of `BOX_IDS` TMA boxes from position ``begin`` on; 0 for boxes from ``kv_end`` on."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    position = begin + gl.arange(0, BOX_IDS, layout) * box_rows
    return gl.load(table_ptr + position // block_size, mask=position < kv_end, other=0)


@gluon.jit
def _copy_queries(query_desc, queries, slot, barrier, first_token, kv_head, group: gl.constexpr):
    """Start the copies of a work tile's queries by TMA. Rows of other requests are computed, but not stored."""
    head_dim: gl.constexpr = queries.shape[2]
    parts: gl.constexpr = head_dim // 64
    tokens: gl.constexpr = 64 // group  # of a warp group
    boxes = queries._reinterpret(queries.dtype, [2 * ROWS // 64 * parts, tokens, group, 64], query_desc.layout)
    mbarrier.expect(barrier, ROWS * head_dim * 2)
    for warp_group in gl.static_range(ROWS // 64):
        for part in gl.static_range(parts):
            index = (slot * (ROWS // 64) + warp_group) * parts + part
            place = [first_token + warp_group * tokens, kv_head * group, part * 64]
            tma.async_copy_global_to_shared(query_desc, place, barrier, boxes.index(index))


@gluon.jit
def _load_queries(
    query_ptr, queries, slot, query_begin, first_token, query_len, kv_head, query_stride,
    tile_tokens: gl.constexpr, group: gl.constexpr,
):  # fmt: skip
    """Load a work tile's queries without TMA, for groups that are no power of two, and wait for them."""
    head_dim: gl.constexpr = queries.shape[2]
    parts: gl.constexpr = head_dim // 64
    # A box is 16 rows by 64 columns of a warp group's queries, contiguous in shared memory.
    box_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    boxes = queries._reinterpret(queries.dtype, [ROWS // 8 * parts, 16, 64], box_layout)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, layout)), 0)
    query_stride = gl.multiple_of(query_stride, 8)
    for box in range(ROWS // 16):
        row = box * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
        token = first_token + row // group
        head = kv_head * group + row % group
        offset = (query_begin + token).to(gl.int64) * query_stride + head * head_dim
        is_row = gl.expand_dims((token < query_len) & (row < tile_tokens * group), 1)
        index = slot * (ROWS // 16) * parts + box // 4 * 4 * parts + box % 4
        for part in gl.static_range(parts):
            pointers = query_ptr + gl.expand_dims(offset + part * 64, 1) + column
            pointers = gl.multiple_of(pointers, [1, 16])
            async_copy.async_copy_global_to_shared(boxes.index(index + part * 4), pointers, mask=is_row)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()


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
    query_desc, query_ptr, query_start_loc_ptr, seq_lens_ptr, block_tables_ptr, counter_ptr, queries, box_ids, slots,
    num_reqs, num_tokens, query_stride, table_stride, window, pass_positions,
    num_kv_heads: gl.constexpr, group: gl.constexpr, block_size: gl.constexpr, has_window: gl.constexpr,
):  # fmt: skip
    """Fetch work tiles from the counter, write their descriptors to one of two slots, and load their queries."""
    work, work_full, query_full, work_empty = slots
    tile_tokens: gl.constexpr = ROWS // group
    box_rows: gl.constexpr = min(block_size, TILE)
    # 250 requests of padding would take 20 us of an H100 for their empty work tiles.
    num_reqs = _count_requests(query_start_loc_ptr, num_reqs)
    num_work_tiles = (num_tokens // tile_tokens + num_reqs + 1) * num_kv_heads
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
                first_tile = gl.maximum(first_position + 1 - window, 0) // TILE
            # Loaded one work tile ahead: the producer would have nothing else to do while it waits for them.
            table_ptr = block_tables_ptr + request.to(gl.int64) * table_stride
            first_ids = load_box_ids(table_ptr, first_tile * TILE, kv_end, box_rows, block_size)
            mbarrier.wait(work_empty.index(slot), ((count // 2) & 1) ^ 1)
            box_ids.index(slot).store(first_ids)
            put_field(work, slot, NUM_TILES, NUM_FIELDS, gl.maximum((kv_end + TILE - 1) // TILE - first_tile, 1))
            put_field(work, slot, FIRST_TILE, NUM_FIELDS, first_tile)
            put_field(work, slot, FIRST_POSITION, NUM_FIELDS, first_position)
            put_field(work, slot, KV_END, NUM_FIELDS, kv_end)
            put_field(work, slot, FIRST_TOKEN, NUM_FIELDS, query_begin + first_token)
            put_field(work, slot, NUM_TOKENS, NUM_FIELDS, query_len - first_token)
            put_field(work, slot, KV_HEAD, NUM_FIELDS, kv_head)
            put_field(work, slot, REQUEST, NUM_FIELDS, request)
            gl.thread_barrier()
            mbarrier.arrive(work_full.index(slot), count=1)
            if query_desc is None:
                _load_queries(
                    query_ptr, queries, slot, query_begin, first_token, query_len, kv_head, query_stride,
                    tile_tokens, group,
                )  # fmt: skip
                gl.thread_barrier()
                mbarrier.arrive(query_full.index(slot), count=1)
            else:
                barrier = query_full.index(slot)
                _copy_queries(query_desc, queries, slot, barrier, query_begin + first_token, kv_head, group)
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
