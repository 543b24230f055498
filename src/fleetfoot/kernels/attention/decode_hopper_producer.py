"""The warp that feeds `fleetfoot.kernels.attention.decode_hopper`: it finds the program's work and fetches K and V.

This module imports Triton.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from fleetfoot.kernels.runtime.gluon_support import block_ids, put_field
from fleetfoot.kernels.runtime.gluon_support import wait_for_inputs

SLOTS = gl.constexpr(4)
"""Items that may be described ahead."""
# An item is what a program has of a pair of request and KV head. Its fields, in 32-bit words of shared memory:
NUM_TILES = gl.constexpr(0)  # 0: there are no more items, and QUERY_LEN is 0 as well
FIRST_TILE = gl.constexpr(1)
SEQ_LEN = gl.constexpr(2)
QUERY_BEGIN = gl.constexpr(3)
QUERY_LEN = gl.constexpr(4)
KV_HEAD = gl.constexpr(5)
REQUEST = gl.constexpr(6)
PIECE = gl.constexpr(7)  # 0: the whole pair; 1: a piece of it; 2: the one that it begins with
FIRST_PROGRAM = gl.constexpr(8)  # of those that have pieces of the pair
LAST_PROGRAM = gl.constexpr(9)
NUM_FIELDS = gl.constexpr(10)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _first_tile(seq_len, window, max_query_len: gl.constexpr, tile: gl.constexpr, has_window: gl.constexpr):
    """The tile of the first position that any of the last ``max_query_len`` tokens sees."""
    if has_window:
        return gl.maximum(seq_len - max_query_len + 1 - window, 0) // tile
    else:
        return seq_len * 0


@gluon.jit
def _find_stretch(
    seq_lens_ptr, num_reqs, window, pair_tiles, num_kv_heads: gl.constexpr, max_query_len: gl.constexpr,
    tile: gl.constexpr, requests_tile: gl.constexpr, has_window: gl.constexpr,
):  # fmt: skip
    """This program's stretch of the line of tiles: see `fleetfoot.kernels.attention.decode`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    num_programs = gl.num_programs(0)
    index = gl.arange(0, requests_tile, layout)
    lens = gl.load(seq_lens_ptr + index, mask=index < num_reqs, other=0)
    counts = (lens + tile - 1) // tile - _first_tile(lens, window, max_query_len, tile, has_window)
    num_tiles = gl.sum(counts, 0) * num_kv_heads
    # Where there are programs enough, none works on two pairs: each pair takes a whole number of stretches.
    aligned = gl.maximum((num_tiles + num_programs - 1) // num_programs, 1)
    if gl.sum((counts + aligned - 1) // aligned, 0) * num_kv_heads > num_programs:
        aligned *= 2
    is_aligned = gl.sum((counts + aligned - 1) // aligned, 0) * num_kv_heads <= num_programs
    unit = gl.where(is_aligned, aligned, 1)
    # Else a gap before each pair's tiles stands for what the pair costs, so that stretches take equally long.
    gap = gl.where(is_aligned, 0, pair_tiles)
    widths = gl.where(counts > 0, (counts + gap + unit - 1) // unit * unit, 0)  # of a pair in the line
    ends = gl.associative_scan(widths * num_kv_heads, 0, _add)
    length = gl.max(ends, 0)
    stretch = gl.where(is_aligned, aligned, gl.maximum((length + num_programs - 1) // num_programs, 1))
    at = gl.program_id(0) * stretch
    end = gl.minimum(at + stretch, length)
    request = gl.sum((ends <= at).to(gl.int32), 0)
    request_begin = gl.max(gl.where(ends <= at, ends, 0), 0)
    # A stretch that would end in a gap ends before it.
    last_width = gl.max(gl.where((ends >= end) & (ends - widths * num_kv_heads < end), widths, 0), 0)
    last_place = (end - gl.max(gl.where(ends < end, ends, 0), 0)) % gl.maximum(last_width, 1)
    end = gl.where(last_place <= gap, end - last_place, end)
    return at, end, stretch, unit, gap, request, request_begin


@gluon.jit
def _copy_tile(
    rows_of_cache, pieces, stage, barrier, blocks, begin, seq_len, kv_head, num_rows, rows_per_block,
    tile: gl.constexpr, block_size: gl.constexpr,
):  # fmt: skip
    """Start the copies of a tile of K and V. Pieces behind the sequence lie behind the cache and are filled with 0."""
    for piece in gl.static_range(4):
        position = begin + piece * (tile // 4)
        row = blocks[piece] * rows_per_block + kv_head * block_size + position % block_size
        row = gl.where(position < seq_len, row, num_rows)
        tma.async_copy_global_to_shared(rows_of_cache, [0, 0, row, 0], barrier, pieces.index(stage * 4 + piece))


@gluon.jit
def feed(
    rows_of_cache, query_start_loc_ptr, seq_lens_ptr, block_tables_ptr, items, described, released, tiles, filled,
    free, num_reqs, num_rows, rows_per_block, table_stride, window, pair_tiles, num_kv_heads: gl.constexpr,
    head_dim: gl.constexpr, block_size: gl.constexpr, max_query_len: gl.constexpr, tile: gl.constexpr,
    stages: gl.constexpr, requests_tile: gl.constexpr, has_window: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    """Describe the program's items, and fill the stages with their tiles of K and V as they become free."""
    parts: gl.constexpr = head_dim // 64
    piece_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    pieces = tiles._reinterpret(tiles.dtype, [stages * 4, 2, parts, tile // 4, 64], piece_layout)
    at, end, stretch, unit, gap, request, request_begin = _find_stretch(
        seq_lens_ptr, num_reqs, window, pair_tiles, num_kv_heads, max_query_len, tile, requests_tile, has_window
    )
    count = 0
    step = 0
    while at < end:
        seq_len = gl.load(seq_lens_ptr + request)
        while seq_len == 0:  # padding
            request += 1
            seq_len = gl.load(seq_lens_ptr + request)
        query_begin = gl.load(query_start_loc_ptr + request)
        query_len = gl.load(query_start_loc_ptr + request + 1) - query_begin
        first_tile = _first_tile(seq_len, window, max_query_len, tile, has_window)
        num_tiles = (seq_len + tile - 1) // tile - first_tile
        width = (num_tiles + gap + unit - 1) // unit * unit
        kv_head = (at - request_begin) // width
        place = (at - request_begin) % width
        taken = gl.minimum(width - place, end - at)
        begin = gl.maximum(place - gap, 0)
        stop = gl.minimum(place + taken - gap, num_tiles)  # above begin: no stretch ends in a gap
        pair_begin = request_begin + kv_head * width + gap
        is_piece = (begin > 0) | (stop < num_tiles)

        # Blocks are looked up a tile ahead: the copies must not wait for them.
        table_ptr = block_tables_ptr + request.to(gl.int64) * table_stride
        blocks = block_ids(table_ptr, (first_tile + begin) * tile, seq_len, tile // 4, tile, block_size)

        slot = count % SLOTS
        mbarrier.wait(released.index(slot), ((count // SLOTS) & 1) ^ 1)
        put_field(items, slot, NUM_TILES, NUM_FIELDS, stop - begin)
        put_field(items, slot, FIRST_TILE, NUM_FIELDS, first_tile + begin)
        put_field(items, slot, SEQ_LEN, NUM_FIELDS, seq_len)
        put_field(items, slot, QUERY_BEGIN, NUM_FIELDS, query_begin)
        put_field(items, slot, QUERY_LEN, NUM_FIELDS, query_len)
        put_field(items, slot, KV_HEAD, NUM_FIELDS, kv_head)
        put_field(items, slot, REQUEST, NUM_FIELDS, request)
        put_field(items, slot, PIECE, NUM_FIELDS, gl.where(is_piece, gl.where(begin == 0, 2, 1), 0))
        put_field(items, slot, FIRST_PROGRAM, NUM_FIELDS, pair_begin // stretch)
        put_field(items, slot, LAST_PROGRAM, NUM_FIELDS, (pair_begin + num_tiles - 1) // stretch)
        gl.thread_barrier()
        mbarrier.arrive(described.index(slot), count=1)

        for index in range(first_tile + begin, first_tile + stop):
            stage = step % stages
            position = index * tile
            next_blocks = block_ids(table_ptr, position + tile, seq_len, tile // 4, tile, block_size)
            if position + tile > seq_len - query_len:  # it has what the kernel ahead writes
                wait_for_inputs(overlap)
            mbarrier.wait(free.index(stage), ((step // stages) & 1) ^ 1)
            barrier = filled.index(stage)
            mbarrier.expect(barrier, 2 * tile * head_dim * 2)
            _copy_tile(
                rows_of_cache, pieces, stage, barrier, blocks, position, seq_len, kv_head, num_rows, rows_per_block,
                tile, block_size,
            )  # fmt: skip
            blocks = next_blocks
            step += 1
        count += 1
        at += taken
        if at == request_begin + width * num_kv_heads:
            request_begin = at
            request += 1
    slot = count % SLOTS
    mbarrier.wait(released.index(slot), ((count // SLOTS) & 1) ^ 1)
    put_field(items, slot, NUM_TILES, NUM_FIELDS, 0)
    put_field(items, slot, QUERY_LEN, NUM_FIELDS, 0)  # there is no query to fetch ahead
    gl.thread_barrier()
    mbarrier.arrive(described.index(slot), count=1)
    wait_for_inputs(overlap)
