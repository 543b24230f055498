"""Attention of a few query tokens per request over the paged KV cache: decodes, and decodes with drafts.

A decode step reads the K and V of the whole batch once, so it is bound by memory bandwidth as long as every
multiprocessor keeps reading. Lengths are ragged and known on the device only, so the work is partitioned there: the KV
tiles of all (request, KV head) pairs form one linear index space, and each program processes an equal contiguous range
of it (Stream-K, Osama et al., 2023). If a range boundary falls within a pair, the partial results (splits) are merged
by their log-sum-exp (Flash-Decoding, Dao et al., 2023). The last program to arrive merges, so a single launch is
enough, and its grid depends on the device only: a CUDA graph can hold it.

The query heads that share a KV head, for all query tokens of the request, are the rows of one matrix, so K and V are
read once for all of them.

With `RotaryInputs` the kernel takes q, k and v from the linear layer: it applies norm and rotation to q, and the
program that processes the tile of a new token normalizes, rotates and writes the K and V of that token before it reads
the tile. This saves one launch per layer.

Lengths and block tables are the same for all layers of a step and complete before its first layer starts (see
`fleetfoot.kernels.runtime.dependent_launch`), so programs find their work and prefetch their first tiles before they
wait for the query.

`fleetfoot.kernels.attention.sdpa_backend.SDPABackend` is the reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.attention import MAX_ROWS, AttentionInputs
from fleetfoot.kernels.attention.rope_and_cache import largest_value, load_cos_sin, norm_and_rotate, to_cache
from fleetfoot.kernels.attention.split_kv import (
    AttentionWorkspace,
    DecodeShape,
    add_sinks,
    base_2_scores,
    clear_output,
    for_kv,
    split_fp8,
    store_pair,
)
from fleetfoot.kernels.runtime.dependent_launch import (
    can_overlap,
    launch_dependents,
    launch_options,
    prefetch,
    prefetch_rows,
    wait_for_inputs,
)
from fleetfoot.kernels.runtime.gpu_limits import fit_tile, gpu_limits
from fleetfoot.kernels.runtime.triton_support import cdiv, compiles_slowly, next_power_of_2, triton_kernel
from fleetfoot.records.forward_context import RotaryInputs

if TYPE_CHECKING:
    import triton.language as tl

MIN_ROWS = 16
"""Rows are padded to this number, the minimum of the tensor cores."""
PAIR_TILES = 4
"""The fixed cost of a (request, KV head) pair, in tiles: loading its query and waiting for it. On an H100 a step of 256
requests of 3 to 300 tokens takes 1.80 ms with 4, 1.85 with 2, 2.04 with 1 and 2.76 with none."""
_PREFETCH_BYTES = 32 << 20
"""Maximum bytes of a weight that are prefetched. Prefetching all 32 MB of Llama-3.1-8B's output projection reduces a
step of 8 requests on an H100 by 1.1%, and a step of one request by 0.6%; half of them nearly as much, a quarter 0.3%.
"""
_MERGED_FLOATS = 4096  # loaded at once by a merging program: 32 registers per thread
_MIN_COUNTS = 1 << 16
_REQUEST_BUCKETS = (16, 256, 4096)


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """Compile and launch options of the kernel; see `choose_decode_tiling`."""

    tile: int
    """KV positions in a tile."""
    min_tiles: int
    """Minimum tiles per program: merging costs more than processing this many tiles."""
    full_tiles: int
    """Tiles per program before a multiprocessor gets another program: the cost of merging grows with their number."""
    pair_tiles: int
    """Fixed cost of a pair in tiles, applied if programs process several pairs."""
    programs_per_sm: int
    """Programs per multiprocessor. All of them are resident at once, so that all get the same share."""
    num_warps: int
    num_stages: int


def choose_decode_tiling(
    rows: int, padded_dim: int, element_size: int, shared_bytes: int, *, is_fused: bool = False, is_fp8: bool = False
) -> DecodeTiling:
    """Small tiles and many resident programs, which hide each other's latency.

    On an H100, four programs with tiles of 8 KB are 20% faster for 64 or 256 short requests, and 4 to 12% faster for 8
    or 64 long ones, than three with tiles of 16 KB. One warp, more programs or fewer stages are slower. Four warps are
    up to 4% faster than two, but spill registers if the kernel applies norm and rotation. With those and heads of 256,
    none are spilled by two programs of four warps.

    Args:
        rows: rows of the query tile. padded_dim: head_dim, rounded up to a power of 2.
        shared_bytes: maximum shared memory of a program.
        is_fused: the kernel applies norm and rotation and writes K and V itself.
        is_fp8: K and V are in FP8. With 64 rows and heads of 64, four warps would multiply halves of 32 columns by the
            instructions of a warp group, which Triton 3.6 compiles to wrong addresses on an H200.
    """
    row_bytes = padded_dim * element_size
    # More rows need all the registers of a thread.
    is_small = rows == MIN_ROWS
    tile_bytes, num_warps, max_programs = (8192, 2 if is_fused else 4, 4) if is_small else (16384, 4, 2)
    tile, num_stages = fit_tile(rows, max(16, min(128, tile_bytes // row_bytes)), row_bytes, shared_bytes)
    if is_fused and padded_dim > 128:
        num_warps, max_programs = 4, 2
    if is_fp8 and rows >= 64 and padded_dim <= 64:
        num_warps = 2
    programs_per_sm = max(1, min(max_programs, shared_bytes // ((rows + 4 * tile) * row_bytes)))
    return DecodeTiling(tile, 1, 4 if is_small else 8, PAIR_TILES, programs_per_sm, num_warps, num_stages)


def paged_attention_decode(
    inputs: AttentionInputs,
    *,
    workspace: AttentionWorkspace,
    out: torch.Tensor,
    tiling: DecodeTiling | None = None,
    rotary: RotaryInputs | None = None,
    slot_mapping: torch.Tensor | None = None,
    prefetch_weight: torch.Tensor | None = None,
) -> None:
    """Causal attention of the last tokens of each request.

    Args:
        inputs: with at most `max_rows` query heads per KV head times query tokens per request.
        out: written, ``[num_tokens, num_heads, head_dim]`` contiguous, from the first request's first token to the end;
            zeros for tokens of padding requests and for those after the last request's.
        rotary: if given, the query is ``[num_tokens, num_heads + 2 * num_kv_heads, head_dim]``: q, k and v before norm
            and rotation; K and V of the tokens are written to the cache.
        slot_mapping: ``[num_tokens]`` int64, required with ``rotary``; a negative slot writes nothing.
        prefetch_weight: ``[rows, columns]`` contiguous, read by the next kernel. Programs that have read their K and V
            prefetch it to L2, since memory is idle while they merge.
    """
    query, kv_cache, query_start_loc, seq_lens, block_tables, scale, window, max_query_len, soft_cap, sinks, scales = (
        inputs
    )
    num_reqs = seq_lens.shape[0]
    num_tokens, num_heads, head_dim = out.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    stored_rows = next_power_of_2(group * max_query_len)
    rows = max(MIN_ROWS, stored_rows)
    padded_dim = max(16, next_power_of_2(head_dim))
    if tiling is None:
        shared_bytes = gpu_limits(query.device).shared_bytes
        size = query.element_size()
        kind = {"is_fused": rotary is not None, "is_fp8": scales is not None}
        tiling = choose_decode_tiling(rows, padded_dim, size, shared_bytes, **kind)
    num_programs = workspace.num_programs(tiling.programs_per_sm)
    # Sized for the maximum number of rows, so that no later shape needs more.
    max_floats = num_programs * 2 * MAX_ROWS * (padded_dim + 2)
    splits, arrivals = workspace.reserve(max_floats, max(_MIN_COUNTS, num_reqs * num_kv_heads))
    # Such that the programs of a multiprocessor fit in its 65,536 registers.
    max_registers = 65536 // (tiling.programs_per_sm * tiling.num_warps * 32) // 8 * 8
    limit = {"maxnreg": max_registers} if torch.version.hip is None and max_registers < 255 else {}
    rope = rotary or RotaryInputs(query, None, None, 0.0)
    shape = DecodeShape(
        num_kv_heads=num_kv_heads, group=group, head_dim=head_dim, padded_dim=padded_dim, block_size=block_size,
        **inputs.kv_strides, rows=rows, stored_rows=stored_rows,
        merge_tile=max(1, min(32, _MERGED_FLOATS // (stored_rows * padded_dim))),
        tile=tiling.tile, has_window=window is not None, is_fused=rotary is not None,
        has_q_norm=rope.q_norm is not None, has_k_norm=rope.k_norm is not None,
        norm_offset=rope.norm_offset, new_rows=next_power_of_2(max_query_len), programs_per_sm=tiling.programs_per_sm,
        requests_tile=next(size for size in (*_REQUEST_BUCKETS, next_power_of_2(num_reqs)) if size >= num_reqs),
        overlap=can_overlap(query.device), soft_cap=soft_cap or 0.0,
        has_sinks=sinks is not None, most=0.0 if scales is None else largest_value(kv_cache.dtype),
    )  # fmt: skip
    _paged_attention_decode_kernel[(num_programs,)](
        query, kv_cache, out, splits, arrivals, query_start_loc, seq_lens, block_tables,
        rope.cos_sin, query if slot_mapping is None else slot_mapping, query if rope.q_norm is None else rope.q_norm,
        query if rope.k_norm is None else rope.k_norm, rope.eps, query if sinks is None else sinks,
        query if scales is None else scales,
        num_reqs, num_tokens, query.stride(0), kv_cache.stride(0), block_tables.stride(0),
        scale * math.log2(math.e), window or 0,
        tiling.min_tiles, tiling.full_tiles, tiling.pair_tiles,
        query if prefetch_weight is None else prefetch_weight, *_prefetch_arguments(prefetch_weight, num_programs),
        shape=shape, num_warps=tiling.num_warps, num_stages=tiling.num_stages, **limit, **launch_options(shape.overlap),
    )  # fmt: skip


def _prefetch_arguments(prefetch_weight: torch.Tensor | None, num_programs: int) -> tuple[int, int, int, int]:
    """Rows of the weight, rows per program, bytes of a row, and how many bytes of each row are prefetched."""
    if prefetch_weight is None:
        return 0, 0, 0, 0
    num_rows, row_bytes = prefetch_weight.shape[0], prefetch_weight.shape[1] * prefetch_weight.element_size()
    num_bytes = min(row_bytes, _PREFETCH_BYTES // num_rows) // 16 * 16
    if not num_bytes or row_bytes % 16:
        return 0, 0, 0, 0
    return num_rows, cdiv(num_rows, num_programs), row_bytes, num_bytes


@triton_kernel(specialize=False)
def _first_tile(seq_len, window, shape: tl.constexpr):
    """The tile of the first position that any of the last ``max_query_len`` tokens attends to."""
    if shape.has_window:
        return tl.maximum(seq_len - shape.max_query_len + 1 - window, 0) // shape.tile
    else:
        return seq_len * 0


@triton_kernel(specialize=False)
def _count_tiles(seq_len, first_tile, shape: tl.constexpr):
    """The number of tiles from ``first_tile`` on; 0 for a padding request."""
    return (seq_len + shape.tile - 1) // shape.tile - first_tile


@triton_kernel(specialize=False)
def _find_range(seq_lens_ptr, num_reqs, window, min_tiles, full_tiles, pair_tiles, shape: tl.constexpr):
    """This program's range of the linear tile index space, which is ordered by request, then by KV head, and where the
    requests and pairs in it begin."""
    index = tl.arange(0, shape.requests_tile)
    lens = tl.load(seq_lens_ptr + index, mask=index < num_reqs, other=0)
    counts = _count_tiles(lens, _first_tile(lens, window, shape), shape)
    # [requests_tile], per head; a padding request has none, wherever it is in the batch
    num_tiles = tl.sum(counts, 0) * shape.num_kv_heads
    # With enough programs, no program works on two pairs: each pair is padded to a multiple of the range size.
    aligned_tiles = tl.maximum((num_tiles + tl.num_programs(0) - 1) // tl.num_programs(0), min_tiles)
    if tl.sum((counts + aligned_tiles - 1) // aligned_tiles, 0) * shape.num_kv_heads > tl.num_programs(0):
        aligned_tiles *= 2
    is_aligned = tl.sum((counts + aligned_tiles - 1) // aligned_tiles, 0) * shape.num_kv_heads <= tl.num_programs(0)
    alignment = tl.where(is_aligned, aligned_tiles, 1)
    # Otherwise `pair_cost` slots before each pair's tiles account for its fixed cost, so that ranges take equally long.
    pair_cost = tl.where(is_aligned, 0, pair_tiles)
    widths = tl.where(counts > 0, (counts + pair_cost + alignment - 1) // alignment * alignment, 0)  # of one pair
    ends = tl.cumsum(widths * shape.num_kv_heads, 0)
    total_width = tl.max(ends, 0)
    num_sms = tl.maximum(tl.num_programs(0) // shape.programs_per_sm, 1)
    num_waves = (total_width + num_sms * full_tiles - 1) // (num_sms * full_tiles)
    num_active = tl.minimum(num_sms * tl.maximum(num_waves, 1), tl.num_programs(0))
    balanced_tiles = tl.maximum((total_width + num_active - 1) // num_active, min_tiles)
    program_tiles = tl.where(is_aligned, aligned_tiles, balanced_tiles)
    cursor = tl.program_id(0) * program_tiles
    end = tl.minimum(cursor + program_tiles, total_width)
    request = tl.sum((ends <= cursor).to(tl.int32), 0)
    request_begin = tl.max(tl.where(ends <= cursor, ends, 0), 0)
    # A range that would end within the cost slots of a pair ends before them.
    last_width = tl.max(tl.where((ends >= end) & (ends - widths * shape.num_kv_heads < end), widths, 0), 0)
    last_offset = (end - tl.max(tl.where(ends < end, ends, 0), 0)) % tl.maximum(last_width, 1)
    end = tl.where(last_offset <= pair_cost, end - last_offset, end)
    return cursor, end, program_tiles, alignment, pair_cost, request, request_begin


@triton_kernel(specialize=False)
def _rotate_and_cache(
    query_ptr, query_offset, query_stride, head_ptr, block_stride, cos_sin_ptr, slot_mapping_ptr,
    q_norm_ptr, k_norm_ptr, eps, query_begin, query_len, seq_len, kv_head, first_tile, begin, stop, is_row,
    row_position, k_scale, v_scale, shape: tl.constexpr,
):  # fmt: skip
    """The query of a pair after norm and rotation; K and V of the new tokens in the program's tiles are written."""
    head_dim: tl.constexpr = shape.head_dim
    column = tl.arange(0, shape.padded_dim)
    new = tl.arange(0, shape.new_rows)
    new_position = seq_len - query_len + new
    new_cos, new_sin = load_cos_sin(cos_sin_ptr, new_position, new < query_len, head_dim, shape.padded_dim)
    slot = tl.load(slot_mapping_ptr + query_begin + new, mask=new < query_len, other=-1)
    new_tile = new_position // shape.tile - first_tile
    is_new = (new < query_len) & (new_tile >= begin) & (new_tile < stop) & (slot >= 0)
    if shape.new_rows == 1:
        cos, sin = new_cos, new_sin
    else:
        cos, sin = load_cos_sin(cos_sin_ptr, row_position, is_row, head_dim, shape.padded_dim)
    wait_for_inputs(shape.overlap)
    query_ptrs = query_ptr + query_offset
    q = norm_and_rotate(
        query_ptrs, is_row, q_norm_ptr, eps, cos, sin, head_dim, shape.padded_dim, shape.has_q_norm, shape.norm_offset
    )
    q = q.to(query_ptr.dtype.element_ty)
    if tl.max(is_new.to(tl.int32), 0) > 0:
        source = (query_begin + new).to(tl.int64) * query_stride
        source += (shape.num_kv_heads * shape.group + kv_head) * head_dim
        new_k = norm_and_rotate(
            query_ptr + source, is_new, k_norm_ptr, eps, new_cos, new_sin, head_dim, shape.padded_dim, shape.has_k_norm,
            shape.norm_offset,
        )  # fmt: skip
        mask = is_new[:, None] & (column < head_dim)[None, :]
        source_ptrs = query_ptr + source[:, None] + shape.num_kv_heads * head_dim + column[None, :]
        new_v = tl.load(source_ptrs, mask=mask, other=0.0)
        target = (slot // shape.block_size) * block_stride + (slot % shape.block_size) * shape.token_stride
        target_ptrs = head_ptr + target[:, None] + column[None, :]
        new_k = to_cache(new_k.to(query_ptr.dtype.element_ty), k_scale, head_ptr, shape.most)
        tl.store(target_ptrs, new_k, mask=mask)
        tl.store(target_ptrs + shape.value_offset, to_cache(new_v, v_scale, head_ptr, shape.most), mask=mask)
        tl.debug_barrier()  # other threads of this program read them
    return q


@triton_kernel(specialize=False)
def _attend(
    q, head_ptr, table_ptr, next_block, block_stride, first_tile, end_tile, seq_len, row_position,
    scale_log2, window, shape: tl.constexpr,
):  # fmt: skip
    """Maximum scores and sums of weights ``[rows]``, and weighted sums of V ``[rows, padded_dim]``, over some tiles."""
    rows: tl.constexpr = shape.rows
    tile: tl.constexpr = shape.tile
    padded_dim: tl.constexpr = shape.padded_dim
    q = for_kv(q, shape.most)
    column = tl.arange(0, padded_dim)
    position_in_tile = tl.arange(0, tile)
    row_max = tl.full([rows], -1.0e30, tl.float32)  # finite, so that differences are not NaN
    weights = tl.zeros([rows, tile], tl.float32)  # summed over tiles here, over positions at the end
    acc = tl.zeros([rows, padded_dim], tl.float32)
    if shape.most > 0:
        # V in FP8 is read as pairs of columns: the tensor cores take its columns from memory in 16 bits alone.
        pair = tl.arange(0, padded_dim // 2)
        pairs_ptr = (head_ptr + shape.value_offset).to(tl.pointer_type(tl.int16))
        acc_low = tl.zeros([rows, padded_dim // 2], tl.float32)
        acc_high = tl.zeros([rows, padded_dim // 2], tl.float32)
    for tile_index in tl.range(first_tile, end_tile):
        position = tile_index * tile + position_in_tile
        is_position = position < seq_len
        block = next_block
        next_position = position + tile
        next_block = tl.load(table_ptr + next_position // shape.block_size, mask=next_position < seq_len, other=0)
        offset = block.to(tl.int64) * block_stride + (position % shape.block_size) * shape.token_stride
        k_ptrs = tl.multiple_of(head_ptr + offset[:, None] + column[None, :], (1, 16))
        # Positions past the end must be zeroed, not only masked: they may be NaN, and 0 * NaN is NaN.
        mask = is_position[:, None] & (column < shape.head_dim)[None, :]
        k = tl.load(k_ptrs, mask=mask, other=0.0).to(q.dtype)  # [tile, padded_dim]
        scores = base_2_scores(tl.dot(q, k.T, input_precision="ieee"), scale_log2, shape.soft_cap)
        visible = position[None, :] <= row_position[:, None]
        if shape.has_window:
            visible &= position[None, :] > row_position[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        p = tl.exp2(scores - new_max[:, None])
        rescale = tl.exp2(row_max - new_max)
        weights = weights * rescale[:, None] + p
        if shape.most > 0:
            pair_ptrs = tl.multiple_of(pairs_ptr + (offset // 2)[:, None] + pair[None, :], (1, 16))
            pair_mask = is_position[:, None] & (pair < shape.head_dim // 2)[None, :]
            low, high = split_fp8(tl.load(pair_ptrs, mask=pair_mask, other=0), shape.most)
            p = p.to(q.dtype)
            acc_low = tl.dot(p, low.to(q.dtype), acc_low * rescale[:, None], input_precision="ieee")
            acc_high = tl.dot(p, high.to(q.dtype), acc_high * rescale[:, None], input_precision="ieee")
        else:
            v_ptrs = tl.multiple_of(k_ptrs + shape.value_offset, (1, 16))
            v = tl.load(v_ptrs, mask=mask, other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max
    if shape.most > 0:
        acc = tl.join(acc_low, acc_high).reshape(rows, padded_dim) * (256.0 if shape.most < 1024 else 1.0)
    return row_max, tl.sum(weights, 1), acc


@compiles_slowly
@triton_kernel(specialize=False)
def _paged_attention_decode_kernel(
    query_ptr, kv_ptr, out_ptr, splits_ptr, arrivals_ptr, query_start_loc_ptr, seq_lens_ptr, block_tables_ptr,
    cos_sin_ptr, slot_mapping_ptr, q_norm_ptr, k_norm_ptr, eps, sinks_ptr, kv_scales_ptr,
    num_reqs, num_tokens, query_stride, block_stride, table_stride, scale_log2, window,
    min_tiles, full_tiles, pair_tiles,
    prefetch_ptr, num_prefetch_rows, prefetch_rows_per_program, prefetch_row_bytes, num_prefetch_bytes,
    shape: tl.constexpr,
):  # fmt: skip
    launch_dependents(shape.overlap)
    program = tl.program_id(0)
    head_dim: tl.constexpr = shape.head_dim
    row_bytes: tl.constexpr = head_dim * (kv_ptr.dtype.element_ty.primitive_bitwidth // 8)
    tail_token = tl.load(query_start_loc_ptr + num_reqs) + program  # the first token without a request is program 0's
    cursor, end, program_tiles, alignment, pair_cost, request, request_begin = _find_range(
        seq_lens_ptr, num_reqs, window, min_tiles, full_tiles, pair_tiles, shape
    )
    k_scale = tl.load(kv_scales_ptr) if shape.most > 0 else 1.0
    v_scale = tl.load(kv_scales_ptr + 1) if shape.most > 0 else 1.0
    row = tl.arange(0, shape.rows)
    column = tl.arange(0, shape.padded_dim)
    query_stride = tl.multiple_of(query_stride, 8)
    block_stride = tl.multiple_of(block_stride, 16 if shape.most > 0 else 8)

    while cursor < end:
        seq_len = tl.load(seq_lens_ptr + request)
        while seq_len == 0:  # padding
            request += 1
            seq_len = tl.load(seq_lens_ptr + request)
        query_begin = tl.load(query_start_loc_ptr + request)
        query_len = tl.load(query_start_loc_ptr + request + 1) - query_begin
        first_tile = _first_tile(seq_len, window, shape)
        count = _count_tiles(seq_len, first_tile, shape)
        width = (count + pair_cost + alignment - 1) // alignment * alignment
        kv_head = (cursor - request_begin) // width
        pair_offset = (cursor - request_begin) % width
        num_taken = tl.minimum(width - pair_offset, end - cursor)
        begin = tl.maximum(pair_offset - pair_cost, 0)
        stop = tl.minimum(pair_offset + num_taken - pair_cost, count)  # > begin: no range ends in cost slots
        token = row // shape.group
        is_row = token < query_len
        row_position = seq_len - query_len + token
        query_offset = (query_begin + token).to(tl.int64) * query_stride
        query_offset += (kv_head * shape.group + row % shape.group) * head_dim
        table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
        head_ptr = kv_ptr + kv_head * shape.head_stride
        # Block ids are loaded one tile ahead, so that the address of K does not wait for them.
        position = (first_tile + begin) * shape.tile + tl.arange(0, shape.tile)
        next_block = tl.load(table_ptr + position // shape.block_size, mask=position < seq_len, other=0)
        if shape.overlap:
            row_ptrs = head_ptr + next_block.to(tl.int64) * block_stride
            row_ptrs += (position % shape.block_size) * shape.token_stride
            prefetch(row_ptrs, position < seq_len, row_bytes)
            prefetch(row_ptrs + shape.value_offset, position < seq_len, row_bytes)
        if shape.is_fused:
            q = _rotate_and_cache(
                query_ptr, query_offset, query_stride, head_ptr, block_stride, cos_sin_ptr,
                slot_mapping_ptr, q_norm_ptr, k_norm_ptr, eps, query_begin, query_len, seq_len, kv_head, first_tile,
                begin, stop, is_row, row_position, k_scale, v_scale, shape,
            )  # fmt: skip
        else:
            wait_for_inputs(shape.overlap)
            query_ptrs = tl.multiple_of(query_ptr + query_offset[:, None] + column[None, :], (1, 16))
            q = tl.load(query_ptrs, mask=is_row[:, None] & (column < head_dim)[None, :], other=0.0)
        row_max, row_sum, acc = _attend(
            q, head_ptr, table_ptr, next_block, block_stride, first_tile + begin, first_tile + stop,
            seq_len, row_position, scale_log2 * k_scale, window, shape,
        )  # fmt: skip
        acc *= v_scale
        if shape.has_sinks:
            head = kv_head * shape.group + row % shape.group
            row_max, row_sum, acc = add_sinks(row_max, row_sum, acc, sinks_ptr, head, is_row & (begin == 0))
        if cursor == program * program_tiles:  # once for each program
            first_row = program * prefetch_rows_per_program
            first_prefetch_ptr = prefetch_ptr.to(tl.pointer_type(tl.int8)) + first_row.to(tl.int64) * prefetch_row_bytes
            num_rows = tl.minimum(num_prefetch_rows - first_row, prefetch_rows_per_program)
            prefetch_rows(first_prefetch_ptr, prefetch_row_bytes, num_rows, num_prefetch_bytes, shape.overlap)
        arrivals_of_pair = arrivals_ptr + request * shape.num_kv_heads + kv_head
        store_pair(
            out_ptr, splits_ptr, arrivals_of_pair, row_max, row_sum, acc, query_begin, query_len, kv_head, begin, stop,
            count, request_begin + kv_head * width + pair_cost, program_tiles, is_row, shape,
        )  # fmt: skip
        cursor += num_taken
        if cursor == request_begin + width * shape.num_kv_heads:
            request_begin = cursor
            request += 1

    wait_for_inputs(shape.overlap)  # also in programs without work
    clear_output(out_ptr, query_start_loc_ptr, seq_lens_ptr, num_reqs, tail_token, num_tokens, shape)
