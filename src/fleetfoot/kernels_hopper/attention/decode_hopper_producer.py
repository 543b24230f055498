"""The producer warp of `decode_hopper`: finds the program's work and loads K and V by TMA.

This module imports Triton.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from fleetfoot.kernels.runtime.gluon_support import block_ids, put_field, wait_for_inputs

SLOTS = gl.constexpr(4)
"""Work tiles that may be described in advance."""
# A work tile is a program's part of a (request, KV head) pair: a range of KV tiles. Its descriptor has these fields,
# 32-bit words of shared memory. NUM_TILES and QUERY_LEN are 0 if there is no more work. SPLIT is 0 for a whole pair, 1
# for a split of it, 2 for its first split. The programs with splits of the pair are FIRST_PROGRAM to LAST_PROGRAM.
NUM_TILES, FIRST_TILE, SEQ_LEN, QUERY_BEGIN, QUERY_LEN = map(gl.constexpr, range(5))
KV_HEAD, REQUEST, SPLIT, FIRST_PROGRAM, LAST_PROGRAM, NUM_FIELDS = map(gl.constexpr, range(5, 11))


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _first_tile(seq_len, window, max_query_len: gl.constexpr, tile: gl.constexpr, has_window: gl.constexpr):
    """The tile of the first position that any of the last ``max_query_len`` tokens attends to."""
    if has_window:
        return gl.maximum(seq_len - max_query_len + 1 - window, 0) // tile
    else:
        return seq_len * 0


@gluon.jit
def _find_range(
    seq_lens_ptr, num_reqs, window, pair_tiles,
    num_kv_heads: gl.constexpr, max_query_len: gl.constexpr, tile: gl.constexpr, requests_tile: gl.constexpr,
    has_window: gl.constexpr,
):  # fmt: skip
    """This program's range of the linear tile index space: see `fleetfoot.kernels.attention.decode`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    num_programs = gl.num_programs(0)
    index = gl.arange(0, requests_tile, layout)
    lens = gl.load(seq_lens_ptr + index, mask=index < num_reqs, other=0)
    counts = (lens + tile - 1) // tile - _first_tile(lens, window, max_query_len, tile, has_window)
    num_tiles = gl.sum(counts, 0) * num_kv_heads
    # With enough programs, no program works on two pairs: each pair is padded to a multiple of the range size.
    aligned_tiles = gl.maximum((num_tiles + num_programs - 1) // num_programs, 1)
    if gl.sum((counts + aligned_tiles - 1) // aligned_tiles, 0) * num_kv_heads > num_programs:
        aligned_tiles *= 2
    is_aligned = gl.sum((counts + aligned_tiles - 1) // aligned_tiles, 0) * num_kv_heads <= num_programs
    alignment = gl.where(is_aligned, aligned_tiles, 1)
    # Otherwise `pair_cost` slots before each pair's tiles account for its fixed cost, so that ranges take equally long.
    pair_cost = gl.where(is_aligned, 0, pair_tiles)
    widths = gl.where(counts > 0, (counts + pair_cost + alignment - 1) // alignment * alignment, 0)  # of one pair
    ends = gl.associative_scan(widths * num_kv_heads, 0, _add)
    total_width = gl.max(ends, 0)
    program_tiles = gl.where(is_aligned, aligned_tiles, gl.maximum((total_width + num_programs - 1) // num_programs, 1))
    cursor = gl.program_id(0) * program_tiles
    end = gl.minimum(cursor + program_tiles, total_width)
    request = gl.sum((ends <= cursor).to(gl.int32), 0)
    request_begin = gl.max(gl.where(ends <= cursor, ends, 0), 0)
    # A range that would end within the cost slots of a pair ends before them.
    last_width = gl.max(gl.where((ends >= end) & (ends - widths * num_kv_heads < end), widths, 0), 0)
    last_begin = gl.max(gl.where(ends < end, ends, 0), 0)
    last_offset = (end - last_begin) % gl.maximum(last_width, 1)
    end = gl.where(last_offset <= pair_cost, end - last_offset, end)
    last_offset = gl.where(last_offset <= pair_cost, 0, last_offset)
    last_request = gl.sum((ends < end).to(gl.int32), 0)
    last = (end - last_offset, last_request, last_begin)
    return cursor, end, program_tiles, alignment, pair_cost, request, request_begin, last


@gluon.jit
def _copy_tile(
    descs, boxes, atoms, stage, barrier, blocks, begin, seq_len, kv_head, rows_per_block,
    parts: gl.constexpr, padded_parts: gl.constexpr, tile: gl.constexpr, block_size: gl.constexpr,
    atom_bytes: gl.constexpr,
):  # fmt: skip
    """Start the copies of a tile of K and V. What is past the sequence is not copied, and keeps what it had: in steps
    of 8 positions, which are the rows of an atom of the swizzle."""
    cache_desc, atom_desc = descs
    whole_bytes: gl.constexpr = 4 * padded_parts * atom_bytes
    half_bytes: gl.constexpr = 2 * parts * atom_bytes
    for box in gl.static_range(4):
        position = begin + box * (tile // 4)
        row = blocks[box] * rows_per_block + kv_head * block_size + position % block_size
        is_whole = position + 8 < seq_len
        mbarrier.expect(barrier, whole_bytes, pred=is_whole)
        tma.async_copy_global_to_shared(
            cache_desc, [0, 0, row, 0], barrier, boxes.index(stage * 4 + box), pred=is_whole
        )
        if position + 8 >= seq_len:
            is_cached = position < seq_len
            mbarrier.expect(barrier, half_bytes, pred=is_cached)
            mbarrier.arrive(barrier, count=1, pred=position >= seq_len)
            for kind in gl.static_range(2):
                for part in gl.static_range(parts):
                    place = atoms.index((((stage * 4 + box) * 2 + kind) * padded_parts + part) * 2)
                    tma.async_copy_global_to_shared(atom_desc, [kind, part, row, 0], barrier, place, pred=is_cached)


@gluon.jit
def _describe(work, slot, work_full, num_tiles, place, split, programs):
    """Write a descriptor. ``place``: values of the fields FIRST_TILE to REQUEST; ``programs``: of the last two."""
    put_field(work, slot, NUM_TILES, NUM_FIELDS, num_tiles)
    for field in gl.static_range(6):
        put_field(work, slot, FIRST_TILE + field, NUM_FIELDS, place[field])
    put_field(work, slot, SPLIT, NUM_FIELDS, split)
    put_field(work, slot, FIRST_PROGRAM, NUM_FIELDS, programs[0])
    put_field(work, slot, LAST_PROGRAM, NUM_FIELDS, programs[1])
    gl.thread_barrier()
    mbarrier.arrive(work_full.index(slot), count=1)


@gluon.jit
def producer_warp(
    descs, query_start_loc_ptr, seq_lens_ptr, block_tables_ptr, slots, kv_stages,
    num_reqs, rows_per_block, table_stride, window, pair_tiles,
    num_kv_heads: gl.constexpr, head_dim: gl.constexpr, chunk: gl.constexpr, padded_dim: gl.constexpr,
    block_size: gl.constexpr, max_query_len: gl.constexpr, tile: gl.constexpr, stages: gl.constexpr,
    requests_tile: gl.constexpr, has_window: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    """Describe the program's work tiles, and fill the stages with their tiles of K and V as they become empty."""
    work, work_full, work_empty = slots
    tiles, full, empty = kv_stages
    parts: gl.constexpr = padded_dim // chunk
    box_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * chunk, element_bitwidth=16, rank=4)
    boxes = tiles._reinterpret(tiles.dtype, [stages * 4, 2, parts, tile // 4, chunk], box_layout)
    atoms = tiles._reinterpret(tiles.dtype, [stages * 4 * 2 * parts * 2, 1, 1, 8, chunk], box_layout)
    cursor, end, program_tiles, alignment, pair_cost, request, request_begin, last = _find_range(
        seq_lens_ptr, num_reqs, window, pair_tiles, num_kv_heads, max_query_len, tile, requests_tile, has_window
    )
    # If the range ends within a pair, that split comes first: splits are then merged while there is other work.
    first_cursor, first_request, first_begin = cursor, request, request_begin
    last_cursor, last_request, last_begin = last
    is_reordered = (last_cursor > cursor) & (last_cursor < end)
    cursor = gl.where(is_reordered, last_cursor, cursor)
    request = gl.where(is_reordered, last_request, request)
    request_begin = gl.where(is_reordered, last_begin, request_begin)
    count = 0
    step = 0
    while cursor < end:
        seq_len = gl.load(seq_lens_ptr + request)
        while seq_len == 0:  # padding
            request += 1
            seq_len = gl.load(seq_lens_ptr + request)
        query_begin = gl.load(query_start_loc_ptr + request)
        query_len = gl.load(query_start_loc_ptr + request + 1) - query_begin
        first_tile = _first_tile(seq_len, window, max_query_len, tile, has_window)
        num_tiles = (seq_len + tile - 1) // tile - first_tile
        width = (num_tiles + pair_cost + alignment - 1) // alignment * alignment
        kv_head = (cursor - request_begin) // width
        pair_offset = (cursor - request_begin) % width
        num_taken = gl.minimum(width - pair_offset, end - cursor)
        begin = gl.maximum(pair_offset - pair_cost, 0)
        stop = gl.minimum(pair_offset + num_taken - pair_cost, num_tiles)  # > begin: no range ends in cost slots

        # Block ids are loaded one tile ahead, so that the copies do not wait for them.
        table_ptr = block_tables_ptr + request.to(gl.int64) * table_stride
        blocks = block_ids(table_ptr, (first_tile + begin) * tile, seq_len, tile // 4, tile, block_size)

        slot = count % SLOTS
        mbarrier.wait(work_empty.index(slot), ((count // SLOTS) & 1) ^ 1)
        split = gl.where((begin > 0) | (stop < num_tiles), gl.where(begin == 0, 2, 1), 0)
        pair_begin = request_begin + kv_head * width + pair_cost
        programs = pair_begin // program_tiles, (pair_begin + num_tiles - 1) // program_tiles
        place = first_tile + begin, seq_len, query_begin, query_len, kv_head, request
        _describe(work, slot, work_full, stop - begin, place, split, programs)

        for index in range(first_tile + begin, first_tile + stop):
            stage = step % stages
            position = index * tile
            next_blocks = block_ids(table_ptr, position + tile, seq_len, tile // 4, tile, block_size)
            if position + tile > seq_len - query_len:  # contains what the previous kernel writes
                wait_for_inputs(overlap)
            mbarrier.wait(empty.index(stage), ((step // stages) & 1) ^ 1)
            barrier = full.index(stage)
            _copy_tile(
                descs, boxes, atoms, stage, barrier, blocks, position, seq_len, kv_head, rows_per_block,
                head_dim // chunk, parts, tile, block_size, 8 * chunk * 2,
            )  # fmt: skip
            blocks = next_blocks
            step += 1
        count += 1
        cursor += num_taken
        if cursor == request_begin + width * num_kv_heads:
            request_begin = cursor
            request += 1
        if is_reordered & (cursor == end):
            cursor, end, request, request_begin = first_cursor, last_cursor, first_request, first_begin
            is_reordered = cursor > end  # no more
    slot = count % SLOTS
    mbarrier.wait(work_empty.index(slot), ((count // SLOTS) & 1) ^ 1)
    put_field(work, slot, NUM_TILES, NUM_FIELDS, 0)
    put_field(work, slot, QUERY_LEN, NUM_FIELDS, 0)  # there is no query to prefetch
    gl.thread_barrier()
    mbarrier.arrive(work_full.index(slot), count=1)
    wait_for_inputs(overlap)
