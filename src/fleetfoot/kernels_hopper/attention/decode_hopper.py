"""Attention of a few query tokens per request over the paged KV cache for Hopper GPUs: warp-specialized, in Gluon.

Computes `fleetfoot.kernels.attention.decode` without rotation and cache write, for 16-bit types and heads of 64, 96 or
128 elements. In the Triton kernel a program that starts its next (request, KV head) pair loads its length, block ids
and query one after the other and reads no K or V meanwhile, which is a third of its time for contexts of a few hundred
tokens. Here a program has

- one producer warp: it iterates over the program's range of tiles and loads K and V by TMA (the tensor memory
  accelerator) several tiles ahead, across pairs. The cached context does not depend on the current step, so it starts
  before the previous kernel has finished (see `fleetfoot.kernels.runtime.dependent_launch`);
- four consumer warps: each processes a quarter of the positions of every tile; their results are merged at the end of a
  work tile.

M of the tensor core instructions is positions or head elements, and N is the rows of the query, of which 8 suffice.
Gluon has no interpreter: a GPU test compares the kernel with `fleetfoot.kernels.attention.sdpa_backend.SDPABackend`.
This module imports Triton.
"""

from __future__ import annotations

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from fleetfoot.kernels.attention import AttentionInputs
from fleetfoot.kernels.attention.split_kv import AttentionWorkspace
from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_options
from fleetfoot.kernels.runtime.gluon_support import (
    get_field,
    launch_dependents,
    tensor_descriptor,
    wait_for_inputs,
    wait_for_work,
)
from fleetfoot.kernels.runtime.triton_support import compiles_slowly, launcher, next_power_of_2
from fleetfoot.kernels_hopper.attention.decode_hopper_producer import (
    FIRST_PROGRAM,
    FIRST_TILE,
    KV_HEAD,
    LAST_PROGRAM,
    NUM_FIELDS,
    QUERY_BEGIN,
    QUERY_LEN,
    REQUEST,
    SEQ_LEN,
    SLOTS,
    SPLIT,
    producer_warp,
)  # fmt: skip

MAX_ROWS = 16
"""Maximum query heads per KV head times query tokens per request."""
MIN_REQUESTS_OF_96 = 64
"""Minimum requests with heads of 96: chunks of 64 bytes are slower to copy. With 32 KV heads on an H200, 64
requests of 257 tokens take 56 us, and 70 with the Triton kernel; 16 requests of 2,000 tokens take 106 and 102."""
_TILE = 64  # KV positions
_STAGES = 3
_PROGRAMS_PER_SM = 2
_MIN_COUNTS = 1 << 16
_REQUEST_BUCKETS = (64, 256, 1024, 4096)


def supports(inputs: AttentionInputs) -> bool:
    """Whether the kernel supports these types and shapes, and is the fastest for them."""
    block_size, head_dim = inputs.kv_cache.shape[3:]
    if head_dim == 96 and len(inputs.seq_lens) < MIN_REQUESTS_OF_96:
        return False
    return (
        inputs.query.dtype in (torch.bfloat16, torch.float16)
        and inputs.kv_cache.dtype is inputs.query.dtype
        and head_dim in (64, 96, 128)
        and inputs.group * inputs.max_query_len <= MAX_ROWS
        and block_size >= 16
        and block_size & (block_size - 1) == 0
        and inputs.is_block_contiguous
        and inputs.soft_cap is inputs.sinks is None
        and inputs.kv_cache.stride(0) % head_dim == 0
    )


def paged_attention_decode_hopper(inputs: AttentionInputs, *, workspace: AttentionWorkspace, out: torch.Tensor) -> None:
    """See `fleetfoot.kernels.attention.decode.paged_attention_decode`, without ``rotary``."""
    query, kv_cache, query_start_loc, seq_lens, block_tables, scale, window, max_query_len, *_ = inputs
    num_reqs = seq_lens.shape[0]
    num_tokens, num_heads, head_dim = out.shape
    num_blocks, _, num_kv_heads, block_size, _ = kv_cache.shape
    group = num_heads // num_kv_heads
    stored_rows = next_power_of_2(group * max_query_len)
    rows = max(8, stored_rows)
    num_programs = workspace.num_programs(_PROGRAMS_PER_SM)
    padded_dim = next_power_of_2(head_dim)
    max_floats = num_programs * 2 * MAX_ROWS * (padded_dim + 2)
    splits, arrivals = workspace.reserve(max_floats, max(_MIN_COUNTS, num_reqs * num_kv_heads))
    # A row of the cache is one head of one position, in chunks of elements; V follows K. The sizes of a box are powers
    # of 2: with heads of 96, one of 4 chunks is out of bounds, and is not read.
    chunk = 32 if head_dim % 64 else 64
    rows_per_block = kv_cache.stride(0) // head_dim
    num_rows = (num_blocks - 1) * rows_per_block + num_kv_heads * block_size
    cache_shape, cache_strides = (2, head_dim // chunk, num_rows, chunk), (kv_cache.stride(1), chunk, head_dim, 1)
    cache_desc, atom_desc = (
        tensor_descriptor(kv_cache, cache_shape, cache_strides, box, 2 * chunk)
        for box in ((2, padded_dim // chunk, _TILE // 4, chunk), (1, 1, 8, chunk))
    )
    overlap = can_overlap(query.device)
    launcher(_paged_attention_decode_kernel, (num_programs,))(
        query, cache_desc, atom_desc, out, splits, arrivals, query_start_loc, seq_lens, block_tables, num_reqs,
        num_tokens, rows_per_block, query.stride(0), block_tables.stride(0), scale * math.log2(math.e), window or 0,
        128 // head_dim,  # fixed cost of a (request, KV head) pair, in tiles
        num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, chunk=chunk, padded_dim=padded_dim,
        block_size=block_size, max_query_len=max_query_len, rows=rows, stored_rows=stored_rows, tile=_TILE,
        stages=_STAGES,
        requests_tile=next(size for size in (*_REQUEST_BUCKETS, next_power_of_2(num_reqs)) if size >= num_reqs),
        has_window=window is not None, overlap=overlap,
        num_warps=4, maxnreg=65536 // (_PROGRAMS_PER_SM * 256), **launch_options(overlap),
    )  # fmt: skip


@gluon.jit
def _load_query(
    query_ptr, work, slot, query_stride,
    part: gl.constexpr, group: gl.constexpr, head_dim: gl.constexpr, chunk: gl.constexpr, rows: gl.constexpr,
):  # fmt: skip
    """A chunk of the query heads of a work tile, ``[4, chunk, rows]``: the same for each of the four warps."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8, 1], [1, chunk // 8, 256 // chunk], [4, 1, 1], [1, 2, 0])
    query_begin = get_field(work, slot, QUERY_BEGIN, NUM_FIELDS, 4)
    query_len = get_field(work, slot, QUERY_LEN, NUM_FIELDS, 4)
    kv_head = get_field(work, slot, KV_HEAD, NUM_FIELDS, 4)
    warp = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    column = gl.arange(0, chunk, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    row = gl.arange(0, rows, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    token = row // group
    offset = (query_begin + token).to(gl.int64) * query_stride + (kv_head * group + row % group) * head_dim
    offset = gl.expand_dims(gl.expand_dims(offset, 0), 1) + gl.expand_dims(gl.expand_dims(column, 0), 2)
    offset += gl.expand_dims(gl.expand_dims(warp * 0, 1), 2) + part * chunk
    is_row = gl.expand_dims(gl.expand_dims(token < query_len, 0), 1)
    return gl.load(gl.multiple_of(query_ptr + offset, [1, 8, 1]), mask=is_row, other=0.0)


@gluon.jit
def _load_queries(
    query_ptr, work, slot, query_stride,
    group: gl.constexpr, head_dim: gl.constexpr, chunk: gl.constexpr, rows: gl.constexpr,
):  # fmt: skip
    """All elements of the query heads, in chunks."""
    queries = ()
    for part in gl.static_range(head_dim // chunk):
        query = _load_query(query_ptr, work, slot, query_stride, part, group, head_dim, chunk, rows)
        queries = queries + (query,)  # type: ignore[assignment]  # noqa: RUF005
    return queries


@gluon.jit
def _attend_to_work_tile(
    queries, work_tile, kv_stages, step, scale_log2, window,
    group: gl.constexpr, head_dim: gl.constexpr, chunk: gl.constexpr, rows: gl.constexpr, tile: gl.constexpr,
    stages: gl.constexpr, has_window: gl.constexpr,
):  # fmt: skip
    """Partial results of each warp: maximum scores, sums of weights, weighted sums of V in chunks of elements."""
    tiles, full, empty = kv_stages
    parts: gl.constexpr = head_dim // chunk
    first_value: gl.constexpr = tiles.shape[2] // 2  # V is in the second half of a box
    quarter: gl.constexpr = tile // 4
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    num_tiles, first_tile, seq_len, query_len = work_tile
    accs = ()
    for _ in gl.static_range(parts):
        accs = accs + (gl.zeros([4, chunk, rows], gl.float32, mma),)  # type: ignore[assignment]  # noqa: RUF005
    row = gl.arange(0, rows, gl.SliceLayout(0, gl.SliceLayout(1, mma)))
    row_position = gl.expand_dims(gl.expand_dims(seq_len - query_len + row // group, 0), 1)  # [1, 1, rows]
    warp = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, mma))), 1), 2)
    warp_position = gl.arange(0, quarter, gl.SliceLayout(0, gl.SliceLayout(2, mma)))
    tile_position = warp * quarter + gl.expand_dims(gl.expand_dims(warp_position, 0), 2)  # [4, quarter, 1]
    v_warp = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, left))), 1), 2)
    v_warp_position = gl.arange(0, quarter, gl.SliceLayout(0, gl.SliceLayout(1, left)))
    v_tile_position = v_warp * quarter + gl.expand_dims(gl.expand_dims(v_warp_position, 0), 1)  # [4, 1, quarter]
    row_max = gl.full([4, rows], -1.0e30, gl.float32, gl.SliceLayout(1, mma))  # finite, so that differences are not NaN
    weights = gl.zeros([4, quarter, rows], gl.float32, mma)
    zeros = gl.zeros([4, quarter, rows], gl.float32, mma)
    for index in range(num_tiles):
        stage = step % stages
        begin = (first_tile + index) * tile
        keys = tiles.index(stage)
        values = keys.permute((0, 2, 1))
        mbarrier.wait(full.index(stage), (step // stages) & 1)
        scores = zeros
        for part in gl.static_range(parts):
            k = keys.slice(part * quarter, quarter, 1).load(left)  # [4, quarter, chunk]
            scores = mma_v2(k, queries[part], scores)
        position = begin + tile_position
        visible = position <= row_position
        if has_window:
            visible = visible & (position > row_position - window)
        scores = gl.where(visible, scores * scale_log2, float("-inf"))
        new_max = gl.maximum(row_max, gl.max(scores, 1))
        p = gl.exp2(scores - gl.expand_dims(new_max, 1))
        rescale = gl.expand_dims(gl.exp2(row_max - new_max), 1)  # [4, 1, rows]
        weights = weights * rescale + p
        p = gl.convert_layout(p.to(tiles.dtype), right)
        row_max = new_max
        new_accs = ()
        for part in gl.static_range(parts):
            v = values.slice(first_value + part * quarter, quarter, 2).load(left)  # [4, chunk, quarter]
            if begin + tile > seq_len:  # values past the end may be NaN, and 0 * NaN is NaN
                v = gl.where(begin + v_tile_position < seq_len, v, gl.zeros_like(v))
            new_accs = new_accs + (mma_v2(v, p, accs[part] * rescale),)  # type: ignore[assignment]  # noqa: RUF005
        accs = new_accs
        if index + 1 < num_tiles:  # the last stage is reused to merge the warps' results
            gl.thread_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
        step += 1
    return row_max, gl.sum(weights, 1), accs, step


@gluon.jit
def _merge_warps(
    row_max, row_sum, accs, max_mem, sum_mem, sums, barrier,
    chunk: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Merge four warps' ``[4, rows]`` and ``[4, chunk, rows]`` to ``[rows]``, ``[rows]`` and ``[padded_dim, rows]``:
    elements from ``head_dim`` on are undefined.

    ``sums`` is the memory of the work tile's last stage, and ``barrier`` signals that it is empty again.
    """
    merging: gl.constexpr = gl.SliceLayout(1, layout)
    gl.thread_barrier()  # all warps have read the tile in this stage
    max_mem.store(row_max)
    sum_mem.store(row_sum)
    for part in gl.static_range(len(accs)):
        sums.slice(part * chunk, chunk, 1).store(accs[part])
    gl.thread_barrier()
    row_max = max_mem.load(merging)  # [4, rows]
    merged_max = gl.max(row_max, 0)
    scale = gl.exp2(row_max - gl.expand_dims(merged_max, 0))
    row_sum = gl.sum(sum_mem.load(merging) * scale, 0)
    row_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, layout))
    merged_max, row_sum = gl.convert_layout(merged_max, row_layout), gl.convert_layout(row_sum, row_layout)
    merged = gl.sum(sums.load(layout) * gl.expand_dims(scale, 1), 0)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.arrive(barrier, count=1)
    return merged_max, row_sum, merged


@gluon.jit
def _address(base_ptr, row_offset, padded_dim: gl.constexpr, layout: gl.constexpr):
    """Pointers ``[padded_dim, rows]`` from the offset of each row."""
    column = gl.arange(0, padded_dim, gl.SliceLayout(1, layout))
    return base_ptr + gl.expand_dims(row_offset, 0) + gl.expand_dims(column, 1)


@gluon.jit
def _store_split(
    splits_ptr, stats_ptr, split, merged_max, row_sum, sums,
    padded_dim: gl.constexpr, rows: gl.constexpr, stored_rows: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Write the partial result of a pair that is split over programs."""
    row = gl.arange(0, rows, gl.SliceLayout(0, layout))
    is_row = row < stored_rows
    gl.store(stats_ptr + split * (2 * stored_rows) + row, merged_max, mask=is_row)
    gl.store(stats_ptr + split * (2 * stored_rows) + stored_rows + row, row_sum, mask=is_row)
    pointers = _address(splits_ptr, (split * stored_rows + row) * padded_dim, padded_dim, layout)
    gl.store(pointers, sums, mask=gl.expand_dims(is_row, 0))


@gluon.jit
def _merge_splits(
    splits_ptr, stats_ptr, first_program, last_program,
    padded_dim: gl.constexpr, rows: gl.constexpr, stored_rows: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """``row_sum`` and ``sums`` of a pair, from the splits of a range of programs. The index of a program's split is
    2 * program, plus 1 if the split starts the pair."""
    row = gl.arange(0, rows, gl.SliceLayout(0, layout))
    is_row = row < stored_rows
    merged_max = gl.full([rows], -1.0e30, gl.float32, gl.SliceLayout(0, layout))
    row_sum = gl.zeros([rows], gl.float32, gl.SliceLayout(0, layout))
    sums = gl.zeros([padded_dim, rows], gl.float32, layout)
    program = first_program
    while program <= last_program:
        split = program * 2 + (program == first_program).to(gl.int32)
        stats = stats_ptr + split * (2 * stored_rows) + row
        pointers = _address(splits_ptr, (split * stored_rows + row) * padded_dim, padded_dim, layout)
        row_max = gl.load(stats, mask=is_row, other=-1.0e30, cache_modifier=".cg")
        split_sum = gl.load(stats + stored_rows, mask=is_row, other=0.0, cache_modifier=".cg")
        split_acc = gl.load(pointers, mask=gl.expand_dims(is_row, 0), other=0.0, cache_modifier=".cg")
        new_max = gl.maximum(merged_max, row_max)
        rescale, scale = gl.exp2(merged_max - new_max), gl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + split_sum * scale
        sums = sums * gl.expand_dims(rescale, 0) + split_acc * gl.expand_dims(scale, 0)
        merged_max = new_max
        program += 1
    return row_sum, sums


@gluon.jit
def _clear_output(
    out_ptr, query_start_loc_ptr, seq_lens_ptr, seq_len, num_reqs, num_tokens,
    width: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Write zeros for the tokens of padding requests, and for those after the last request's. ``seq_len``: of the
    request with the program's number, 0 if there is none."""
    column = gl.arange(0, 256, layout)
    request = gl.program_id(0)
    while request <= num_reqs:
        if seq_len == 0:
            is_request = request < num_reqs
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
        seq_len = gl.load(seq_lens_ptr + request, mask=request < num_reqs, other=0)


@gluon.jit
def _consumer_warps(
    query_ptr, out_ptr, splits_ptr, arrivals_ptr, query_start_loc_ptr, seq_lens_ptr, slots, kv_stages, max_mem,
    sum_mem, num_reqs, num_tokens, query_stride, scale_log2, window,
    num_kv_heads: gl.constexpr, group: gl.constexpr, head_dim: gl.constexpr, chunk: gl.constexpr,
    padded_dim: gl.constexpr, rows: gl.constexpr, stored_rows: gl.constexpr, tile: gl.constexpr,
    stages: gl.constexpr, has_window: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    """Attention of the program's work tiles, in the order in which the producer describes them."""
    work, work_full, work_empty = slots
    tiles, _, empty = kv_stages
    parts: gl.constexpr = head_dim // chunk
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    merging: gl.constexpr = gl.BlockedLayout([4, 1, rows], [1, 32, 1], [1, 4, 1], [2, 1, 0])
    layout: gl.constexpr = gl.SliceLayout(0, merging)  # of [padded_dim, rows]
    sums_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    sums_of_stages = tiles._reinterpret(gl.float32, [stages * 16 // rows, 4, padded_dim, rows], sums_layout)
    query_stride = gl.multiple_of(query_stride, 8)
    stats_ptr = splits_ptr + gl.num_programs(0) * (2 * stored_rows * padded_dim)
    request = gl.program_id(0)
    seq_len = gl.load(seq_lens_ptr + request, mask=request < num_reqs, other=0)
    wait_for_inputs(overlap)
    _clear_output(
        out_ptr, query_start_loc_ptr, seq_lens_ptr, seq_len, num_reqs, num_tokens, num_kv_heads * group * head_dim,
        gl.BlockedLayout([2], [32], [4], [0]),
    )  # fmt: skip
    count = 0
    step = 0
    num_tiles = wait_for_work(work, work_full, 0, SLOTS, NUM_FIELDS, 4)
    loaded = _load_queries(query_ptr, work, 0, query_stride, group, head_dim, chunk, rows)
    while num_tiles > 0:
        slot = count % SLOTS
        query_begin = get_field(work, slot, QUERY_BEGIN, NUM_FIELDS, 4)
        query_len = get_field(work, slot, QUERY_LEN, NUM_FIELDS, 4)
        kv_head = get_field(work, slot, KV_HEAD, NUM_FIELDS, 4)
        seq_len = get_field(work, slot, SEQ_LEN, NUM_FIELDS, 4)
        first_tile = get_field(work, slot, FIRST_TILE, NUM_FIELDS, 4)
        split_kind = get_field(work, slot, SPLIT, NUM_FIELDS, 4)
        first_program = get_field(work, slot, FIRST_PROGRAM, NUM_FIELDS, 4)
        last_program = get_field(work, slot, LAST_PROGRAM, NUM_FIELDS, 4)
        request = get_field(work, slot, REQUEST, NUM_FIELDS, 4)
        queries = ()
        for part in gl.static_range(parts):
            queries = queries + (gl.convert_layout(loaded[part], gl.DotOperandLayout(1, mma, 2)),)  # type: ignore[assignment]  # noqa: RUF005
        work_tile = (num_tiles, first_tile, seq_len, query_len)
        warp_max, warp_sum, accs, step = _attend_to_work_tile(
            queries, work_tile, kv_stages, step, scale_log2, window, group, head_dim, chunk, rows, tile, stages,
            has_window,
        )  # fmt: skip
        # The next query is loaded while the results of this work tile are merged.
        count += 1
        num_tiles = wait_for_work(work, work_full, count, SLOTS, NUM_FIELDS, 4)
        loaded = _load_queries(query_ptr, work, count % SLOTS, query_stride, group, head_dim, chunk, rows)
        stage = (step - 1) % stages
        merged_max, row_sum, sums = _merge_warps(
            warp_max, warp_sum, accs, max_mem, sum_mem, sums_of_stages.index(stage * (16 // rows)), empty.index(stage),
            chunk, merging,
        )  # fmt: skip
        mbarrier.arrive(work_empty.index(slot), count=1)

        is_last = 1
        if split_kind > 0:
            split = gl.program_id(0) * 2 + split_kind - 1
            _store_split(splits_ptr, stats_ptr, split, merged_max, row_sum, sums, padded_dim, rows, stored_rows, layout)
            arrivals_of_pair = arrivals_ptr + request * num_kv_heads + kv_head
            gl.thread_barrier()  # all threads have written their part of the split before one signals it
            arrived = gl.atomic_add(arrivals_of_pair, 1, sem="acq_rel")
            is_last = (arrived == last_program - first_program).to(gl.int32)
            if is_last > 0:
                gl.store(arrivals_of_pair, 0)
                row_sum, sums = _merge_splits(
                    splits_ptr, stats_ptr, first_program, last_program, padded_dim, rows, stored_rows, layout
                )
        if is_last > 0:
            row = gl.arange(0, rows, gl.SliceLayout(0, layout))
            token = row // group
            offset = (query_begin + token).to(gl.int64) * (num_kv_heads * group * head_dim)
            offset += (kv_head * group + row % group) * head_dim
            result = sums * gl.expand_dims(1.0 / gl.where(row_sum > 0, row_sum, 1.0), 0)
            pointers = _address(out_ptr, offset, padded_dim, layout)
            is_stored = gl.expand_dims(token < query_len, 0)
            if head_dim < padded_dim:
                is_stored &= gl.expand_dims(gl.arange(0, padded_dim, gl.SliceLayout(1, layout)) < head_dim, 1)
            gl.store(pointers, result.to(out_ptr.dtype.element_ty), mask=is_stored)


# Query and output are checked to be aligned; the other tensors may be slices with any offset.
@compiles_slowly
@gluon.jit(
    do_not_specialize=[
        "query_start_loc_ptr", "seq_lens_ptr", "block_tables_ptr", "num_reqs", "num_tokens",
        "rows_per_block", "query_stride", "table_stride", "window", "pair_tiles",
    ]
)  # fmt: skip
def _paged_attention_decode_kernel(
    query_ptr, cache_desc, atom_desc, out_ptr, splits_ptr, arrivals_ptr, query_start_loc_ptr, seq_lens_ptr,
    block_tables_ptr, num_reqs, num_tokens, rows_per_block, query_stride, table_stride, scale_log2, window, pair_tiles,
    num_kv_heads: gl.constexpr, group: gl.constexpr, head_dim: gl.constexpr, chunk: gl.constexpr,
    padded_dim: gl.constexpr, block_size: gl.constexpr, max_query_len: gl.constexpr, rows: gl.constexpr,
    stored_rows: gl.constexpr, tile: gl.constexpr, stages: gl.constexpr, requests_tile: gl.constexpr,
    has_window: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    dtype: gl.constexpr = cache_desc.dtype
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=2 * chunk, element_bitwidth=16, rank=3)
    word_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    # A box is a quarter of a tile's positions: chunks of elements of K, then of V.
    tiles = gl.allocate_shared_memory(dtype, [stages, 4, 2 * (padded_dim // chunk) * (tile // 4), chunk], tile_layout)
    work = gl.allocate_shared_memory(gl.int32, [SLOTS * NUM_FIELDS, 1], word_layout)
    work_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier_layout)
    work_empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier_layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], barrier_layout)
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], barrier_layout)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(work_full.index(slot), count=1)
        mbarrier.init(work_empty.index(slot), count=1)
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=4)  # boxes of a tile
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    max_mem = gl.allocate_shared_memory(gl.float32, [4, rows], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    sum_mem = gl.allocate_shared_memory(gl.float32, [4, rows], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    # fmt: off
    slots, kv_stages, descs = (work, work_full, work_empty), (tiles, full, empty), (cache_desc, atom_desc)
    gl.warp_specialize([
        (_consumer_warps, (query_ptr, out_ptr, splits_ptr, arrivals_ptr, query_start_loc_ptr, seq_lens_ptr, slots,
                           kv_stages, max_mem, sum_mem, num_reqs, num_tokens, query_stride, scale_log2, window,
                           num_kv_heads, group, head_dim, chunk, padded_dim, rows, stored_rows, tile, stages,
                           has_window, overlap)),
        (producer_warp, (descs, query_start_loc_ptr, seq_lens_ptr, block_tables_ptr, slots, kv_stages, num_reqs,
                         rows_per_block, table_stride, window, pair_tiles, num_kv_heads, head_dim, chunk, padded_dim,
                         block_size, max_query_len, tile, stages, requests_tile, has_window, overlap)),
    ], [1], [48])
    # fmt: on
