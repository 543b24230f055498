"""Attention of a few query tokens per request over the paged KV cache for Hopper GPUs: warps with roles, in Gluon.

What `fleetfoot.kernels.attention.decode` computes where rotation and the cache write are done before it, for 16-bit
types and heads of 64 or 128 elements. There, a program that comes to its next pair of request and KV head looks for
its length, its blocks and its query one after the other, and reads no K or V meanwhile; with contexts of a few hundred
tokens that is a third of its time. Here, in a program

- one warp *feeds*: it walks along the program's stretch of the line of tiles and has the tensor memory accelerator
  fetch K and V, some tiles ahead, from one pair into the next; and, as what is old in the cache does not depend on this
  step, it begins before the kernel ahead has ended (see `fleetfoot.kernels.runtime.dependent_launch`);
- four warps *attend*, each to a quarter of the positions of every tile, and merge what they have at a pair's end.

The tensor cores' M is positions, and head elements, and their N the rows of the query, of which 8 are enough. Gluon has
no interpreter: the kernel is held against `fleetfoot.kernels.attention.sdpa_backend.SDPABackend` on a GPU. This module
imports Triton.
"""

from __future__ import annotations

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fleetfoot.kernels.attention.decode_hopper_producer import (
    FIRST_PROGRAM,
    FIRST_TILE,
    KV_HEAD,
    LAST_PROGRAM,
    NUM_FIELDS,
    NUM_TILES,
    PIECE,
    QUERY_BEGIN,
    QUERY_LEN,
    REQUEST,
    SEQ_LEN,
    SLOTS,
    feed,
)
from fleetfoot.kernels.runtime.gluon_support import get_field
from fleetfoot.kernels.attention.split_kv import AttentionWorkspace
from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_options
from fleetfoot.kernels.runtime.gluon_support import launch_dependents, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import launcher, next_power_of_2

MAX_ROWS = 16
"""Most query heads per KV head times query tokens per request."""
PAIR_TILES = 2
"""What a pair costs besides its tiles, as tiles."""
_TILE = 64  # KV positions
_STAGES = 3
_PROGRAMS_PER_SM = 2
_LEAST_COUNTS = 1 << 16
_REQUESTS_STEPS = (64, 256, 1024, 4096)


def serves(query: torch.Tensor, kv_cache: torch.Tensor, max_query_len: int) -> bool:
    """Whether the kernel takes these types and shapes."""
    group = query.shape[1] // kv_cache.shape[2]
    block_size, head_dim = kv_cache.shape[3:]
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and head_dim in (64, 128)
        and group * max_query_len <= MAX_ROWS
        and block_size >= 16
        and block_size & (block_size - 1) == 0
        and kv_cache.stride(0) % head_dim == 0
    )


def paged_attention_decode_hopper(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int | None,
    max_query_len: int,
    *,
    workspace: AttentionWorkspace,
    out: torch.Tensor,
    pair_tiles: int = PAIR_TILES,
) -> None:
    """See `fleetfoot.kernels.attention.decode.paged_attention_decode`, without ``rotary``."""
    num_reqs = seq_lens.shape[0]
    num_tokens, num_heads, head_dim = out.shape
    num_blocks, _, num_kv_heads, block_size, _ = kv_cache.shape
    group = num_heads // num_kv_heads
    stored_rows = next_power_of_2(group * max_query_len)
    rows = max(8, stored_rows)
    num_programs = workspace.num_programs(_PROGRAMS_PER_SM)
    most_floats = num_programs * 2 * MAX_ROWS * (head_dim + 2)
    pieces, arrivals = workspace.reserve(most_floats, max(_LEAST_COUNTS, num_reqs * num_kv_heads))
    # A row of the cache is a head of a position, as pieces of 64 elements; V's lies behind K's.
    rows_per_block = kv_cache.stride(0) // head_dim
    num_rows = (num_blocks - 1) * rows_per_block + num_kv_heads * block_size
    rows_of_cache = TensorDescriptor(
        kv_cache,
        [2, head_dim // 64, num_rows, 64],
        [kv_cache.stride(1), 64, head_dim, 1],
        [2, head_dim // 64, _TILE // 4, 64],
        gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4),
    )
    overlap = can_overlap(query.device)
    launcher(_paged_attention_decode_kernel, (num_programs,))(
        query,
        rows_of_cache,
        out,
        pieces,
        arrivals,
        query_start_loc,
        seq_lens,
        block_tables,
        num_reqs,
        num_tokens,
        num_rows,
        rows_per_block,
        query.stride(0),
        block_tables.stride(0),
        scale * math.log2(math.e),
        0 if window is None else window,
        pair_tiles,
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        max_query_len=max_query_len,
        rows=rows,
        stored_rows=stored_rows,
        tile=_TILE,
        stages=_STAGES,
        requests_tile=next(step for step in (*_REQUESTS_STEPS, next_power_of_2(num_reqs)) if step >= num_reqs),
        has_window=window is not None,
        overlap=overlap,
        num_warps=4,
        maxnreg=65536 // (_PROGRAMS_PER_SM * 256),
        **launch_options(overlap),
    )


@gluon.jit
def _load_query(
    query_ptr, items, slot, query_stride, part: gl.constexpr, group: gl.constexpr, head_dim: gl.constexpr,
    rows: gl.constexpr,
):  # fmt: skip
    """64 elements of the query heads of an item, ``[4, 64, rows]``: the same for each of the four warps."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8, 1], [1, 8, 4], [4, 1, 1], [1, 2, 0])
    query_begin = get_field(items, slot, QUERY_BEGIN, NUM_FIELDS, 4)
    query_len = get_field(items, slot, QUERY_LEN, NUM_FIELDS, 4)
    kv_head = get_field(items, slot, KV_HEAD, NUM_FIELDS, 4)
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    column = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    row = gl.arange(0, rows, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    token = row // group
    offset = (query_begin + token).to(gl.int64) * query_stride + (kv_head * group + row % group) * head_dim
    offset = gl.expand_dims(gl.expand_dims(offset, 0), 1) + gl.expand_dims(gl.expand_dims(column, 0), 2)
    offset += gl.expand_dims(gl.expand_dims(warp * 0, 1), 2) + part * 64
    is_row = gl.expand_dims(gl.expand_dims(token < query_len, 0), 1)
    return gl.load(gl.multiple_of(query_ptr + offset, [1, 8, 1]), mask=is_row, other=0.0)


@gluon.jit
def _load_queries(
    query_ptr, items, slot, query_stride, group: gl.constexpr, head_dim: gl.constexpr, rows: gl.constexpr
):
    """All of an item's, by 64 elements."""
    queries = ()
    for part in gl.static_range(head_dim // 64):
        query = _load_query(query_ptr, items, slot, query_stride, part, group, head_dim, rows)
        queries = queries + (query,)  # type: ignore[assignment]  # noqa: RUF005
    return queries


@gluon.jit
def _attend_to_item(
    queries, item, tiles, filled, free, step, scale_log2, window, group: gl.constexpr, head_dim: gl.constexpr,
    rows: gl.constexpr, tile: gl.constexpr, stages: gl.constexpr, has_window: gl.constexpr,
):  # fmt: skip
    """What each warp has of an item: top scores, sums of weights, and the weighted sums of V, by 64 elements."""
    parts: gl.constexpr = head_dim // 64
    quarter: gl.constexpr = tile // 4
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    num_tiles, first_tile, seq_len, query_len = item
    accs = ()
    for _ in gl.static_range(parts):
        accs = accs + (gl.zeros([4, 64, rows], gl.float32, mma),)  # type: ignore[assignment]  # noqa: RUF005
    row = gl.arange(0, rows, gl.SliceLayout(0, gl.SliceLayout(1, mma)))
    row_position = gl.expand_dims(gl.expand_dims(seq_len - query_len + row // group, 0), 1)  # [1, 1, rows]
    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, mma))), 1), 2)
    in_warp = gl.arange(0, quarter, gl.SliceLayout(0, gl.SliceLayout(2, mma)))
    in_tile = warp * quarter + gl.expand_dims(gl.expand_dims(in_warp, 0), 2)  # [4, quarter, 1]
    v_warp = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, left))), 1), 2)
    v_in_warp = gl.arange(0, quarter, gl.SliceLayout(0, gl.SliceLayout(1, left)))
    v_in_tile = v_warp * quarter + gl.expand_dims(gl.expand_dims(v_in_warp, 0), 1)  # [4, 1, quarter]
    top = gl.full([4, rows], -1.0e30, gl.float32, gl.SliceLayout(1, mma))  # below any score, and finite
    weights = gl.zeros([4, quarter, rows], gl.float32, mma)
    zeros = gl.zeros([4, quarter, rows], gl.float32, mma)
    for index in range(num_tiles):
        stage = step % stages
        begin = (first_tile + index) * tile
        keys = tiles.index(stage)
        values = keys.permute((0, 2, 1))
        mbarrier.wait(filled.index(stage), (step // stages) & 1)
        scores = zeros
        for part in gl.static_range(parts):
            k = keys.slice(part * quarter, quarter, 1).load(left)  # [4, quarter, 64]
            scores = mma_v2(k, queries[part], scores)
        position = begin + in_tile
        visible = position <= row_position
        if has_window:
            visible = visible & (position > row_position - window)
        scores = gl.where(visible, scores * scale_log2, float("-inf"))
        new_top = gl.maximum(top, gl.max(scores, 1))
        p = gl.exp2(scores - gl.expand_dims(new_top, 1))
        kept = gl.expand_dims(gl.exp2(top - new_top), 1)  # [4, 1, rows]
        weights = weights * kept + p
        p = gl.convert_layout(p.to(tiles.dtype), right)
        top = new_top
        new_accs = ()
        for part in gl.static_range(parts):
            v = values.slice((parts + part) * quarter, quarter, 2).load(left)  # [4, 64, quarter]
            if begin + tile > seq_len:  # what lies behind may be NaN, which a weight of 0 does not hide
                v = gl.where(begin + v_in_tile < seq_len, v, gl.zeros_like(v))
            new_accs = new_accs + (mma_v2(v, p, accs[part] * kept),)  # type: ignore[assignment]  # noqa: RUF005
        accs = new_accs
        if index + 1 < num_tiles:  # the last stage is kept for what the warps exchange
            gl.thread_barrier()
            mbarrier.arrive(free.index(stage), count=1)
        step += 1
    return top, gl.sum(weights, 1), accs, step


@gluon.jit
def _merge_warps(
    top, total, accs, tops, totals, sums, barrier, head_dim: gl.constexpr, rows: gl.constexpr, layout: gl.constexpr
):
    """Of what the four warps have, ``[4, rows]`` and ``[4, 64, rows]`` each, one: ``[rows]``, ``[rows]``, ``[head_dim,
    rows]``. ``sums`` is the item's last stage, which ``barrier`` then says to be free."""
    merging: gl.constexpr = gl.SliceLayout(1, layout)
    gl.thread_barrier()  # everyone has read the tile that was there
    tops.store(top)
    totals.store(total)
    for part in gl.static_range(head_dim // 64):
        sums.slice(part * 64, 64, 1).store(accs[part])
    gl.thread_barrier()
    top = tops.load(merging)  # [4, rows]
    best = gl.max(top, 0)
    taken = gl.exp2(top - gl.expand_dims(best, 0))
    total = gl.sum(totals.load(merging) * taken, 0)
    row_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, layout))
    best, total = gl.convert_layout(best, row_layout), gl.convert_layout(total, row_layout)
    merged = gl.sum(sums.load(layout) * gl.expand_dims(taken, 1), 0)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1)
    return best, total, merged


@gluon.jit
def _address(base_ptr, row_offset, head_dim: gl.constexpr, layout: gl.constexpr):
    """Pointers ``[head_dim, rows]``, from where each row begins."""
    column = gl.arange(0, head_dim, gl.SliceLayout(1, layout))
    return base_ptr + gl.expand_dims(row_offset, 0) + gl.expand_dims(column, 1)


@gluon.jit
def _store_piece(
    pieces_ptr, stats_ptr, piece, best, total, sums, head_dim: gl.constexpr, rows: gl.constexpr,
    stored_rows: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Write what a program has of a pair where others have some of it, too."""
    row = gl.arange(0, rows, gl.SliceLayout(0, layout))
    is_row = row < stored_rows
    gl.store(stats_ptr + piece * (2 * stored_rows) + row, best, mask=is_row)
    gl.store(stats_ptr + piece * (2 * stored_rows) + stored_rows + row, total, mask=is_row)
    pointers = _address(pieces_ptr, (piece * stored_rows + row) * head_dim, head_dim, layout)
    gl.store(pointers, sums, mask=gl.expand_dims(is_row, 0))


@gluon.jit
def _merge_pieces(
    pieces_ptr, stats_ptr, first_program, last_program, head_dim: gl.constexpr, rows: gl.constexpr,
    stored_rows: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """``total`` and ``sums`` of a pair, from the pieces of some programs: a program's piece stands at 2 * program, or
    behind it if the piece begins the pair."""
    row = gl.arange(0, rows, gl.SliceLayout(0, layout))
    is_row = row < stored_rows
    best = gl.full([rows], -1.0e30, gl.float32, gl.SliceLayout(0, layout))
    total = gl.zeros([rows], gl.float32, gl.SliceLayout(0, layout))
    sums = gl.zeros([head_dim, rows], gl.float32, layout)
    program = first_program
    while program <= last_program:
        piece = program * 2 + (program == first_program).to(gl.int32)
        stats = stats_ptr + piece * (2 * stored_rows) + row
        pointers = _address(pieces_ptr, (piece * stored_rows + row) * head_dim, head_dim, layout)
        top = gl.load(stats, mask=is_row, other=-1.0e30, cache_modifier=".cg")
        piece_total = gl.load(stats + stored_rows, mask=is_row, other=0.0, cache_modifier=".cg")
        piece_sums = gl.load(pointers, mask=gl.expand_dims(is_row, 0), other=0.0, cache_modifier=".cg")
        new_best = gl.maximum(best, top)
        kept, taken = gl.exp2(best - new_best), gl.exp2(top - new_best)
        total = total * kept + piece_total * taken
        sums = sums * gl.expand_dims(kept, 0) + piece_sums * gl.expand_dims(taken, 0)
        best = new_best
        program += 1
    return total, sums


@gluon.jit
def _clear_output(
    out_ptr, query_start_loc_ptr, seq_lens_ptr, num_reqs, num_tokens, width: gl.constexpr, layout: gl.constexpr
):
    """Write zeros for the tokens of padding requests, and for those behind the last request's."""
    column = gl.arange(0, 256, layout)
    request = gl.program_id(0)
    while request <= num_reqs:
        is_request = request < num_reqs
        seq_len = gl.load(seq_lens_ptr + request, mask=is_request, other=0)
        if seq_len == 0:
            token = gl.load(query_start_loc_ptr + request)
            end = gl.load(query_start_loc_ptr + request + 1, mask=is_request, other=0)
            end = gl.where(is_request, end, num_tokens)
            while token < end:
                for begin in range(0, width, 256):
                    pointers = out_ptr + token.to(gl.int64) * width + begin + column
                    zeros = gl.zeros([256], out_ptr.dtype.element_ty, layout)
                    gl.store(pointers, zeros, mask=begin + column < width)
                token += 1
        request += gl.num_programs(0)


@gluon.jit
def _attend(
    query_ptr, out_ptr, pieces_ptr, arrivals_ptr, query_start_loc_ptr, seq_lens_ptr, items, described, released,
    tiles, filled, free, tops, totals, num_reqs, num_tokens, query_stride, scale_log2, window,
    num_kv_heads: gl.constexpr, group: gl.constexpr, head_dim: gl.constexpr, rows: gl.constexpr,
    stored_rows: gl.constexpr, tile: gl.constexpr, stages: gl.constexpr, has_window: gl.constexpr,
    overlap: gl.constexpr,
):  # fmt: skip
    """Attention of the program's items, as they are described."""
    parts: gl.constexpr = head_dim // 64
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    merging: gl.constexpr = gl.BlockedLayout([4, 1, rows], [1, 32, 1], [1, 4, 1], [2, 1, 0])
    layout: gl.constexpr = gl.SliceLayout(0, merging)  # of [head_dim, rows]
    sums_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    sums_of_stages = tiles._reinterpret(gl.float32, [stages * 16 // rows, 4, head_dim, rows], sums_layout)
    query_stride = gl.multiple_of(query_stride, 8)
    stats_ptr = pieces_ptr + gl.num_programs(0) * (2 * stored_rows * head_dim)
    wait_for_inputs(overlap)
    count = 0
    step = 0
    mbarrier.wait(described.index(0), 0)
    num_tiles = get_field(items, 0, NUM_TILES, NUM_FIELDS, 4)
    loaded = _load_queries(query_ptr, items, 0, query_stride, group, head_dim, rows)
    while num_tiles > 0:
        slot = count % SLOTS
        query_begin = get_field(items, slot, QUERY_BEGIN, NUM_FIELDS, 4)
        query_len = get_field(items, slot, QUERY_LEN, NUM_FIELDS, 4)
        kv_head = get_field(items, slot, KV_HEAD, NUM_FIELDS, 4)
        seq_len = get_field(items, slot, SEQ_LEN, NUM_FIELDS, 4)
        first_tile = get_field(items, slot, FIRST_TILE, NUM_FIELDS, 4)
        kind = get_field(items, slot, PIECE, NUM_FIELDS, 4)
        first_program = get_field(items, slot, FIRST_PROGRAM, NUM_FIELDS, 4)
        last_program = get_field(items, slot, LAST_PROGRAM, NUM_FIELDS, 4)
        request = get_field(items, slot, REQUEST, NUM_FIELDS, 4)
        queries = ()
        for part in gl.static_range(parts):
            queries = queries + (gl.convert_layout(loaded[part], gl.DotOperandLayout(1, mma, 2)),)  # type: ignore[assignment]  # noqa: RUF005
        item = (num_tiles, first_tile, seq_len, query_len)
        warp_tops, warp_totals, accs, step = _attend_to_item(
            queries, item, tiles, filled, free, step, scale_log2, window, group, head_dim, rows, tile, stages,
            has_window,
        )  # fmt: skip
        # The next item's query is on its way while this one's results are put together.
        count += 1
        next_slot = count % SLOTS
        mbarrier.wait(described.index(next_slot), (count // SLOTS) & 1)
        num_tiles = get_field(items, next_slot, NUM_TILES, NUM_FIELDS, 4)
        loaded = _load_queries(query_ptr, items, next_slot, query_stride, group, head_dim, rows)
        stage = (step - 1) % stages
        best, total, sums = _merge_warps(
            warp_tops, warp_totals, accs, tops, totals, sums_of_stages.index(stage * (16 // rows)), free.index(stage),
            head_dim, rows, merging,
        )  # fmt: skip
        mbarrier.arrive(released.index(slot), count=1)

        is_last = 1
        if kind > 0:
            piece = gl.program_id(0) * 2 + kind - 1
            _store_piece(pieces_ptr, stats_ptr, piece, best, total, sums, head_dim, rows, stored_rows, layout)
            arrivals_of_pair = arrivals_ptr + request * num_kv_heads + kv_head
            gl.thread_barrier()  # every thread's part of the piece is written before one of them says so
            arrived = gl.atomic_add(arrivals_of_pair, 1, sem="acq_rel")
            is_last = (arrived == last_program - first_program).to(gl.int32)
            if is_last > 0:
                gl.store(arrivals_of_pair, 0)
                total, sums = _merge_pieces(
                    pieces_ptr, stats_ptr, first_program, last_program, head_dim, rows, stored_rows, layout
                )
        if is_last > 0:
            row = gl.arange(0, rows, gl.SliceLayout(0, layout))
            token = row // group
            offset = (query_begin + token).to(gl.int64) * (num_kv_heads * group * head_dim)
            offset += (kv_head * group + row % group) * head_dim
            result = sums * gl.expand_dims(1.0 / gl.where(total > 0, total, 1.0), 0)
            pointers = _address(out_ptr, offset, head_dim, layout)
            gl.store(pointers, result.to(out_ptr.dtype.element_ty), mask=gl.expand_dims(token < query_len, 0))
    _clear_output(
        out_ptr, query_start_loc_ptr, seq_lens_ptr, num_reqs, num_tokens, num_kv_heads * group * head_dim,
        gl.BlockedLayout([2], [32], [4], [0]),
    )  # fmt: skip


# Query and output are aligned, which is checked; the others may be slices that begin anywhere.
@gluon.jit(
    do_not_specialize=[
        "query_start_loc_ptr", "seq_lens_ptr", "block_tables_ptr", "num_reqs", "num_tokens",
        "num_rows", "rows_per_block", "query_stride", "table_stride", "window", "pair_tiles",
    ]
)  # fmt: skip
def _paged_attention_decode_kernel(
    query_ptr,
    rows_of_cache,
    out_ptr,
    pieces_ptr,
    arrivals_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    num_reqs,
    num_tokens,
    num_rows,
    rows_per_block,
    query_stride,
    table_stride,
    scale_log2,
    window,
    pair_tiles,
    num_kv_heads: gl.constexpr,
    group: gl.constexpr,
    head_dim: gl.constexpr,
    block_size: gl.constexpr,
    max_query_len: gl.constexpr,
    rows: gl.constexpr,
    stored_rows: gl.constexpr,
    tile: gl.constexpr,
    stages: gl.constexpr,
    requests_tile: gl.constexpr,
    has_window: gl.constexpr,
    overlap: gl.constexpr,
):
    launch_dependents(overlap)
    dtype: gl.constexpr = rows_of_cache.dtype
    parts: gl.constexpr = head_dim // 64
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    word_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    # A quarter of a tile's positions is a piece: 64 elements of K, the next of K, then V's.
    tiles = gl.allocate_shared_memory(dtype, [stages, 4, 2 * parts * (tile // 4), 64], tile_layout)
    items = gl.allocate_shared_memory(gl.int32, [SLOTS * NUM_FIELDS, 1], word_layout)
    described = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier_layout)
    released = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier_layout)
    filled = gl.allocate_shared_memory(gl.int64, [stages, 1], barrier_layout)
    free = gl.allocate_shared_memory(gl.int64, [stages, 1], barrier_layout)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(described.index(slot), count=1)
        mbarrier.init(released.index(slot), count=1)
    for stage in gl.static_range(stages):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    tops = gl.allocate_shared_memory(gl.float32, [4, rows], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    totals = gl.allocate_shared_memory(gl.float32, [4, rows], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    # fmt: off
    gl.warp_specialize([
        (_attend, (query_ptr, out_ptr, pieces_ptr, arrivals_ptr, query_start_loc_ptr, seq_lens_ptr, items, described,
                   released, tiles, filled, free, tops, totals, num_reqs, num_tokens, query_stride, scale_log2, window,
                   num_kv_heads, group, head_dim, rows, stored_rows, tile, stages, has_window, overlap)),
        (feed, (rows_of_cache, query_start_loc_ptr, seq_lens_ptr, block_tables_ptr, items, described, released, tiles,
                filled, free, num_reqs, num_rows, rows_per_block, table_stride, window, pair_tiles, num_kv_heads,
                head_dim, block_size, max_query_len, tile, stages, requests_tile, has_window, overlap)),
    ], [1], [48])
    # fmt: on
