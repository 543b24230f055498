"""The warps that feed `fleetfoot.kernels.attention.prefill_hopper`: one draws its items, one loads K and V.

This module imports Triton.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from fleetfoot.kernels.runtime.gluon_support import block_ids, get_field, put_field

# Fields that describe an item to all roles, in 32-bit words of shared memory.
NUM_TILES = gl.constexpr(0)  # 0: there are no more items
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
    """The last request whose first slot is at most ``slot``; ``num_reqs`` stands for the tokens behind the last one."""
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
def _find_head(place, num_slots, seq_len, pass_positions, num_kv_heads: gl.constexpr):
    """The KV head of a request's item, and which of that head's tiles of tokens it is.

    Heads come in passes, as many at a time as have their K and V in L2 together. In a pass the tokens at the back are
    first for all heads: with the heads one by one, the last head's long items would come near the end.
    """
    pass_heads = gl.minimum(gl.maximum(pass_positions // gl.maximum(seq_len, 1), 1), num_kv_heads)
    num_passes = (num_kv_heads + pass_heads - 1) // pass_heads
    pass_heads = (num_kv_heads + num_passes - 1) // num_passes
    first_head = place // (pass_heads * num_slots) * pass_heads
    place -= first_head * num_slots
    pass_heads = gl.minimum(pass_heads, num_kv_heads - first_head)
    return first_head + place % pass_heads, place // pass_heads


@gluon.jit
def schedule(
    query_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    counter_ptr,
    queries,
    slots,
    num_reqs,
    num_tokens,
    num_items,
    query_stride,
    window,
    pass_positions,
    num_kv_heads: gl.constexpr,
    group: gl.constexpr,
    head_dim: gl.constexpr,
    rows: gl.constexpr,
    tile: gl.constexpr,
    has_window: gl.constexpr,
):
    """Draw items, describe them in one of two slots, and fetch their queries."""
    items, described, filled, free = slots
    tile_tokens: gl.constexpr = rows // group
    parts: gl.constexpr = head_dim // 64
    # 16 rows of 64 columns of a group's queries: they lie together in shared memory.
    piece_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    pieces = queries._reinterpret(queries.dtype, [rows // 8 * parts, 16, 64], piece_layout)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    column = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, layout)), 0)
    query_stride = gl.multiple_of(query_stride, 8)
    first = gl.load(query_start_loc_ptr)
    count = 0
    drawn = gl.program_id(0)  # the first item is everyone's own
    while drawn < num_items:
        # From the back, where a prompt's tiles see the most: long work first leaves a short end.
        item = num_items - 1 - drawn
        request = _find_request(query_start_loc_ptr, num_reqs, item // num_kv_heads, tile_tokens)
        is_request = request < num_reqs
        query_begin = gl.load(query_start_loc_ptr + request)
        query_end = gl.load(query_start_loc_ptr + request + 1, mask=is_request, other=0)
        seq_len = gl.load(seq_lens_ptr + request, mask=is_request, other=0)
        query_end = gl.where(is_request, query_end, num_tokens)
        query_len = query_end - query_begin
        first_slot = (query_begin - first) // tile_tokens + request
        end_slot = (query_end - first) // tile_tokens + request + 1
        num_slots = gl.where(is_request, end_slot, num_items // num_kv_heads) - first_slot
        place = item - first_slot * num_kv_heads
        kv_head, tile_place = _find_head(place, num_slots, seq_len, pass_positions, num_kv_heads)
        first_token = tile_place * tile_tokens
        if first_token < query_len:
            slot = count % 2
            first_position = seq_len - query_len + first_token
            kv_end = gl.maximum(gl.minimum(first_position + tile_tokens, seq_len), 0)
            first_tile = 0
            if has_window:
                first_tile = gl.maximum(first_position + 1 - window, 0) // tile
            mbarrier.wait(free.index(slot), ((count // 2) & 1) ^ 1)
            put_field(items, slot, NUM_TILES, NUM_FIELDS, gl.maximum((kv_end + tile - 1) // tile - first_tile, 1))
            put_field(items, slot, FIRST_TILE, NUM_FIELDS, first_tile)
            put_field(items, slot, FIRST_POSITION, NUM_FIELDS, first_position)
            put_field(items, slot, KV_END, NUM_FIELDS, kv_end)
            put_field(items, slot, FIRST_TOKEN, NUM_FIELDS, query_begin + first_token)
            put_field(items, slot, NUM_TOKENS, NUM_FIELDS, query_len - first_token)
            put_field(items, slot, KV_HEAD, NUM_FIELDS, kv_head)
            put_field(items, slot, REQUEST, NUM_FIELDS, request)
            gl.thread_barrier()
            mbarrier.arrive(described.index(slot), count=1)
            for piece in range(rows // 16):
                row = piece * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
                token = first_token + row // group
                head = kv_head * group + row % group
                offset = (query_begin + token).to(gl.int64) * query_stride + head * head_dim
                is_row = gl.expand_dims((token < query_len) & (row < tile_tokens * group), 1)
                index = slot * (rows // 16) * parts + piece // 4 * 4 * parts + piece % 4
                for part in gl.static_range(parts):
                    pointers = query_ptr + gl.expand_dims(offset + part * 64, 1) + column
                    pointers = gl.multiple_of(pointers, [1, 16])
                    async_copy.async_copy_global_to_shared(pieces.index(index + part * 4), pointers, mask=is_row)
            async_copy.commit_group()
            async_copy.wait_group(0)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(filled.index(slot), count=1)
            count += 1
            # An item is drawn when there is a slot for it, and not before: another program may come to it sooner.
            mbarrier.wait(free.index(count % 2), ((count // 2) & 1) ^ 1)
        drawn = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1, sem="relaxed")
    # One number is drawn for each item. Whoever drew the last leaves the counter as it was found.
    if drawn == gl.num_programs(0) + num_items - 1:
        gl.store(counter_ptr, 0)
    slot = count % 2
    mbarrier.wait(free.index(slot), ((count // 2) & 1) ^ 1)
    put_field(items, slot, NUM_TILES, NUM_FIELDS, 0)
    gl.thread_barrier()
    mbarrier.arrive(described.index(slot), count=1)
    mbarrier.arrive(filled.index(slot), count=1)


@gluon.jit
def _copy_tile(
    rows_of_cache,
    pieces,
    stage,
    barrier,
    blocks,
    begin,
    kv_end,
    kind_and_head,
    num_rows,
    rows_per_block,
    parts: gl.constexpr,
    piece_rows: gl.constexpr,
    tile: gl.constexpr,
    block_size: gl.constexpr,
):
    """Start the copies of a tile of K or V. Pieces from ``kv_end`` on lie behind the cache and are filled with 0."""
    num_pieces: gl.constexpr = tile // piece_rows
    for piece in gl.static_range(num_pieces):
        position = begin + piece * piece_rows
        row = blocks[piece] * rows_per_block + kind_and_head * block_size + position % block_size
        row = gl.where(position < kv_end, row, num_rows)
        for part in gl.static_range(parts):
            target = pieces.index((stage * parts + part) * num_pieces + piece)
            tma.async_copy_global_to_shared(rows_of_cache, [row, part * 64], barrier, target)


@gluon.jit
def _clear_rows(values, stage, first_row, end_row, head_dim: gl.constexpr, tile: gl.constexpr, stages: gl.constexpr):
    """Write 0 over the rows ``first_row`` up to ``end_row``, a multiple of 8, of a tile of V."""
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
def load(
    rows_of_cache,
    block_tables_ptr,
    slots,
    key_stages,
    value_stages,
    num_rows,
    rows_per_block,
    table_stride,
    num_kv_heads: gl.constexpr,
    head_dim: gl.constexpr,
    block_size: gl.constexpr,
    tile: gl.constexpr,
    stages: gl.constexpr,
):
    """Fill the stages with the items' tiles of K and V, as they become free."""
    items, described, _, free = slots
    keys, k_filled, k_free = key_stages
    values, v_filled, v_free = value_stages
    piece_rows: gl.constexpr = min(block_size, tile)
    parts: gl.constexpr = head_dim // 64
    num_pieces: gl.constexpr = stages * parts * (tile // piece_rows)
    piece_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_pieces = keys._reinterpret(keys.dtype, [num_pieces, piece_rows, 64], piece_layout)
    v_pieces = values._reinterpret(keys.dtype, [num_pieces, piece_rows, 64], piece_layout)
    count = 0
    step = 0
    num_ends = 0
    mbarrier.wait(described.index(0), 0)
    num_tiles = get_field(items, 0, NUM_TILES, NUM_FIELDS, 1)
    while num_tiles > 0:
        slot = count % 2
        first_tile = get_field(items, slot, FIRST_TILE, NUM_FIELDS, 1)
        seq_len = get_field(items, slot, FIRST_POSITION, NUM_FIELDS, 1) + get_field(
            items, slot, NUM_TOKENS, NUM_FIELDS, 1
        )
        kv_end = get_field(items, slot, KV_END, NUM_FIELDS, 1)
        kv_head = get_field(items, slot, KV_HEAD, NUM_FIELDS, 1)
        request = get_field(items, slot, REQUEST, NUM_FIELDS, 1)
        gl.thread_barrier()
        mbarrier.arrive(free.index(slot), count=1)
        table_ptr = block_tables_ptr + request.to(gl.int64) * table_stride
        blocks = block_ids(table_ptr, first_tile * tile, kv_end, piece_rows, tile, block_size)
        for index in range(num_tiles):
            stage = step % stages
            phase = (step // stages) & 1
            begin = (first_tile + index) * tile
            next_blocks = block_ids(table_ptr, begin + tile, kv_end, piece_rows, tile, block_size)
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            mbarrier.expect(k_filled.index(stage), tile * head_dim * 2)
            _copy_tile(
                rows_of_cache, k_pieces, stage, k_filled.index(stage), blocks, begin, kv_end, kv_head,
                num_rows, rows_per_block, parts, piece_rows, tile, block_size,
            )  # fmt: skip
            # The piece that holds kv_end may reach past the sequence. What is there may be NaN, which a weight of 0
            # does not hide: this warp waits for such a tile itself, at a barrier behind the stages', and clears it.
            piece_end = (kv_end + piece_rows - 1) // piece_rows * piece_rows
            is_end = (begin + tile > kv_end) & (piece_end > seq_len)
            barrier = v_filled.index(gl.where(is_end, stages, stage))
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            mbarrier.expect(barrier, tile * head_dim * 2)
            _copy_tile(
                rows_of_cache, v_pieces, stage, barrier, blocks, begin, kv_end, num_kv_heads + kv_head,
                num_rows, rows_per_block, parts, piece_rows, tile, block_size,
            )  # fmt: skip
            if is_end:
                mbarrier.wait(barrier, num_ends & 1)
                num_ends += 1
                _clear_rows(values, stage, kv_end - begin, piece_end - begin, head_dim, tile, stages)
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(v_filled.index(stage), count=1)
            blocks = next_blocks
            step += 1
        count += 1
        mbarrier.wait(described.index(count % 2), (count // 2) & 1)
        num_tiles = get_field(items, count % 2, NUM_TILES, NUM_FIELDS, 1)
