"""Attention of a few query tokens per request over the paged KV cache: decodes, and decodes with drafts.

A decode step reads every K and V of the batch once: it is as fast as memory is, if every multiprocessor reads all the
time. Lengths are ragged and known to the device alone, so the work is cut there: the tiles of all (request, KV head)
pairs stand in one line, each program takes an equal stretch of it (Stream-K, Osama et al., 2023), and where a stretch
ends within a pair, the pieces are merged by their log-sum-exp (Flash-Decoding, Dao et al., 2023). The program that
arrives last merges, so there is one launch, and its grid depends on nothing but the device: a CUDA graph holds it.

The query heads that share a KV head, for all query tokens of the request, are the rows of one matrix: K and V are read
once for all of them.

With `RotaryInputs` the kernel takes q, k and v as the linear layer gives them: it norms and rotates q for itself, and
whoever works on the tile that a new token falls into norms, rotates and writes that token's K and V before reading the
tile. That spares a launch in every layer, and its wait.

Lengths and block tables are the same for all layers of a step, and are complete before its first layer begins (see
`fleetfoot.kernels.runtime.dependent_launch`), so programs find their work, and ask for their first tiles, before they
wait for the query.

`fleetfoot.kernels.attention.sdpa_backend.SDPABackend` is the twin.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.attention.decode_tiling import MAX_ROWS, MIN_ROWS, DecodeTiling, choose_decode_tiling
from fleetfoot.kernels.attention.rotary import angles, norm_and_rotate
from fleetfoot.kernels.attention.split_kv import (
    AttentionWorkspace,
    merge_pieces,
    store_piece,
    store_rows,
    store_zeros,
)
from fleetfoot.kernels.runtime.dependent_launch import (
    can_overlap,
    launch_dependents,
    launch_options,
    prefetch,
    prefetch_rows,
    wait_for_inputs,
)
from fleetfoot.kernels.runtime.gpu_limits import gpu_limits
from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2, triton_kernel
from fleetfoot.records.attention import RotaryInputs

if TYPE_CHECKING:
    import triton.language as tl

_AHEAD_BYTES = 32 << 20
"""Most of a weight that is asked for ahead. All 32 MB of Llama-3.1-8B's output projection take 1.1% off a step of 8
requests on an H100, and 0.6% off one of a single request; half of them nearly as much, a quarter 0.3%."""
_MERGED_FLOATS = 4096  # loaded at once by a merging program: 32 registers of a thread
_LEAST_COUNTS = 1 << 16
_REQUESTS_STEPS = (16, 256, 4096)


def paged_attention_decode(
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
    tiling: DecodeTiling | None = None,
    rotary: RotaryInputs | None = None,
    slot_mapping: torch.Tensor | None = None,
    prefetch_weight: torch.Tensor | None = None,
) -> None:
    """Causal attention of the last tokens of each request.

    Args:
        query: ``[num_tokens, num_heads, head_dim]``; the tokens may lie further apart.
        kv_cache: ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``; the blocks may lie further apart.
        query_start_loc: ``[num_reqs + 1]`` int32: where each request's query tokens begin in ``query``.
        seq_lens: ``[num_reqs]`` int32: context + query; 0 for a request that pads the batch.
        block_tables: ``[num_reqs, max_blocks]`` int32.
        scale: factor on the dot products, > 0.
        window: how many of the last positions a token sees, itself included; None: all.
        max_query_len: bound on the query tokens of a request; times num_heads / num_kv_heads at most
            `fleetfoot.kernels.attention.decode_tiling.most_rows`.
        out: written, ``[num_tokens, num_heads, head_dim]`` contiguous, from the first request's first token to the end;
            zeros for tokens of padding requests and for those behind the last request's.
        rotary: with it, ``query`` is ``[num_tokens, num_heads + 2 * num_kv_heads, head_dim]``: q, k and v before norm
            and rotation; K and V of the tokens are written to the cache.
        slot_mapping: ``[num_tokens]`` int64, wanted with ``rotary``; a negative slot writes nothing.
        prefetch_weight: ``[rows, columns]`` contiguous, read by the next kernel: programs that have read
            their K and V ask for it to be brought to L2, since memory is idle while they merge what they have.
    """
    num_reqs = seq_lens.shape[0]
    num_tokens, num_heads, head_dim = out.shape
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    stored_rows = next_power_of_2(group * max_query_len)
    rows = max(MIN_ROWS, stored_rows)
    padded_dim = max(16, next_power_of_2(head_dim))
    if tiling is None:
        shared_bytes = gpu_limits(query.device).shared_bytes
        tiling = choose_decode_tiling(rows, padded_dim, query.element_size(), shared_bytes, is_fused=rotary is not None)
    num_programs = workspace.num_programs(tiling.programs_per_sm)
    # Room for the most rows at once, so that no later shape outgrows it.
    most_floats = num_programs * 2 * MAX_ROWS * (padded_dim + 2)
    pieces, arrivals = workspace.reserve(most_floats, max(_LEAST_COUNTS, num_reqs * num_kv_heads))
    overlap = can_overlap(query.device)
    q_norm = query if rotary is None or rotary.q_norm is None else rotary.q_norm
    k_norm = query if rotary is None or rotary.k_norm is None else rotary.k_norm
    _paged_attention_decode_kernel[(num_programs,)](
        query,
        kv_cache,
        out,
        pieces,
        arrivals,
        query_start_loc,
        seq_lens,
        block_tables,
        query if rotary is None else rotary.cos_sin,
        query if slot_mapping is None else slot_mapping,
        q_norm,
        k_norm,
        0.0 if rotary is None else rotary.eps,
        num_reqs,
        num_tokens,
        query.stride(0),
        kv_cache.stride(0),
        block_tables.stride(0),
        scale * math.log2(math.e),
        0 if window is None else window,
        tiling.min_tiles,
        tiling.full_tiles,
        tiling.pair_tiles,
        query if prefetch_weight is None else prefetch_weight,
        *_prefetch_arguments(prefetch_weight, num_programs),
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        padded_dim=padded_dim,
        block_size=block_size,
        rows=rows,
        stored_rows=stored_rows,
        merge_tile=max(1, min(32, _MERGED_FLOATS // (stored_rows * padded_dim))),
        tile=tiling.tile,
        has_window=window is not None,
        is_fused=rotary is not None,
        has_q_norm=rotary is not None and rotary.q_norm is not None,
        has_k_norm=rotary is not None and rotary.k_norm is not None,
        new_rows=next_power_of_2(max_query_len),
        programs_per_sm=tiling.programs_per_sm,
        requests_tile=next(step for step in (*_REQUESTS_STEPS, next_power_of_2(num_reqs)) if step >= num_reqs),
        overlap=overlap,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        **_register_limit(tiling),
        **launch_options(overlap),
    )


def _prefetch_arguments(prefetch_weight: torch.Tensor | None, num_programs: int) -> tuple[int, int, int, int]:
    """Rows of ``prefetch_weight``, its rows for each program, bytes of a row, and how many of those are asked for."""
    if prefetch_weight is None:
        return 0, 0, 0, 0
    num_rows, row_bytes = prefetch_weight.shape[0], prefetch_weight.shape[1] * prefetch_weight.element_size()
    num_bytes = min(row_bytes, _AHEAD_BYTES // num_rows) // 16 * 16
    if not num_bytes or row_bytes % 16:
        return 0, 0, 0, 0
    return num_rows, cdiv(num_rows, num_programs), row_bytes, num_bytes


def _register_limit(tiling: DecodeTiling) -> dict[str, int]:
    return {"maxnreg": tiling.max_registers} if torch.version.hip is None and tiling.max_registers < 255 else {}


@triton_kernel(specialize=False)
def _first_tile(seq_len, window, max_query_len: tl.constexpr, tile: tl.constexpr, has_window: tl.constexpr):
    """The tile of the first position that any of the last ``max_query_len`` tokens sees."""
    if has_window:
        return tl.maximum(seq_len - max_query_len + 1 - window, 0) // tile
    else:
        return seq_len * 0


@triton_kernel(specialize=False)
def _count_tiles(seq_len, first_tile, tile: tl.constexpr):
    """None for a padding request."""
    return (seq_len + tile - 1) // tile - first_tile


@triton_kernel(specialize=False)
def _paged_attention_decode_kernel(
    query_ptr,
    kv_ptr,
    out_ptr,
    pieces_ptr,
    arrivals_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    cos_sin_ptr,
    slot_mapping_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    num_reqs,
    num_tokens,
    query_stride,
    block_stride,
    table_stride,
    scale_log2,
    window,
    min_tiles,
    full_tiles,
    pair_tiles,
    prefetch_ptr,
    num_prefetch_rows,
    prefetch_rows_each,
    prefetch_row_bytes,
    num_prefetch_bytes,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    block_size: tl.constexpr,
    rows: tl.constexpr,
    stored_rows: tl.constexpr,
    merge_tile: tl.constexpr,
    tile: tl.constexpr,
    has_window: tl.constexpr,
    is_fused: tl.constexpr,
    has_q_norm: tl.constexpr,
    has_k_norm: tl.constexpr,
    new_rows: tl.constexpr,
    programs_per_sm: tl.constexpr,
    requests_tile: tl.constexpr,
    overlap: tl.constexpr,
):
    launch_dependents(overlap)
    program = tl.program_id(0)
    max_query_len: tl.constexpr = rows // group
    row_bytes: tl.constexpr = head_dim * (kv_ptr.dtype.element_ty.primitive_bitwidth // 8)

    # The line of tiles: request by request, and within it head by head. Where requests end; this program's stretch.
    index = tl.arange(0, requests_tile)
    behind = tl.load(query_start_loc_ptr + num_reqs) + program  # the first token without a request is program 0's
    lens = tl.load(seq_lens_ptr + index, mask=index < num_reqs, other=0)
    counts = _count_tiles(lens, _first_tile(lens, window, max_query_len, tile, has_window), tile)
    # [requests_tile], of each head; a padding request has none, whatever comes before or behind it
    num_tiles = tl.sum(counts, 0) * num_kv_heads
    # Where there are programs enough, none works on two pairs: each pair takes a whole number of stretches.
    aligned = tl.maximum((num_tiles + tl.num_programs(0) - 1) // tl.num_programs(0), min_tiles)
    if tl.sum((counts + aligned - 1) // aligned, 0) * num_kv_heads > tl.num_programs(0):
        aligned *= 2
    is_aligned = tl.sum((counts + aligned - 1) // aligned, 0) * num_kv_heads <= tl.num_programs(0)
    unit = tl.where(is_aligned, aligned, 1)
    # Else a gap before each pair's tiles stands for what the pair costs, so that stretches take equally long.
    gap = tl.where(is_aligned, 0, pair_tiles)
    widths = tl.where(counts > 0, (counts + gap + unit - 1) // unit * unit, 0)  # of a pair in the line
    ends = tl.cumsum(widths * num_kv_heads, 0)
    length = tl.max(ends, 0)
    num_sms = tl.maximum(tl.num_programs(0) // programs_per_sm, 1)
    wanted = (length + num_sms * full_tiles - 1) // (num_sms * full_tiles)
    num_used = tl.minimum(num_sms * tl.maximum(wanted, 1), tl.num_programs(0))
    stretch = tl.where(is_aligned, aligned, tl.maximum((length + num_used - 1) // num_used, min_tiles))
    at = program * stretch
    end = tl.minimum(at + stretch, length)
    request = tl.sum((ends <= at).to(tl.int32), 0)
    request_begin = tl.max(tl.where(ends <= at, ends, 0), 0)
    # A stretch that would end in a gap ends before it.
    last_width = tl.max(tl.where((ends >= end) & (ends - widths * num_kv_heads < end), widths, 0), 0)
    last_place = (end - tl.max(tl.where(ends < end, ends, 0), 0)) % tl.maximum(last_width, 1)
    end = tl.where(last_place <= gap, end - last_place, end)

    row = tl.arange(0, rows)
    column = tl.arange(0, padded_dim)
    is_column = column < head_dim
    position_in_tile = tl.arange(0, tile)
    query_stride = tl.multiple_of(query_stride, 8)
    block_stride = tl.multiple_of(block_stride, 8)

    while at < end:
        seq_len = tl.load(seq_lens_ptr + request)
        while seq_len == 0:  # padding
            request += 1
            seq_len = tl.load(seq_lens_ptr + request)
        query_begin = tl.load(query_start_loc_ptr + request)
        query_len = tl.load(query_start_loc_ptr + request + 1) - query_begin
        first_tile = _first_tile(seq_len, window, max_query_len, tile, has_window)
        count = _count_tiles(seq_len, first_tile, tile)
        width = (count + gap + unit - 1) // unit * unit
        kv_head = (at - request_begin) // width
        place = (at - request_begin) % width
        taken = tl.minimum(width - place, end - at)
        begin = tl.maximum(place - gap, 0)
        stop = tl.minimum(place + taken - gap, count)  # above begin: no stretch ends in a gap

        token = row // group
        is_row = token < query_len
        row_position = seq_len - query_len + token
        head = kv_head * group + row % group
        query_offset = (query_begin + token).to(tl.int64) * query_stride + head * head_dim
        table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
        head_ptr = kv_ptr + kv_head * (block_size * head_dim)
        value_offset = num_kv_heads * block_size * head_dim
        # Block ids are read one tile ahead: the address of K must not wait for them.
        position = (first_tile + begin) * tile + position_in_tile
        next_block = tl.load(table_ptr + position // block_size, mask=position < seq_len, other=0)
        if overlap:
            row_ptrs = head_ptr + next_block.to(tl.int64) * block_stride + (position % block_size) * head_dim
            prefetch(row_ptrs, position < seq_len, row_bytes)
            prefetch(row_ptrs + value_offset, position < seq_len, row_bytes)
        if is_fused:
            new = tl.arange(0, new_rows)
            new_position = seq_len - query_len + new
            new_cos, new_sin = angles(cos_sin_ptr, new_position, new < query_len, head_dim, padded_dim)
            slot = tl.load(slot_mapping_ptr + query_begin + new, mask=new < query_len, other=-1)
            in_stretch = new_position // tile - first_tile
            is_new = (new < query_len) & (in_stretch >= begin) & (in_stretch < stop) & (slot >= 0)
            if new_rows == 1:
                wait_for_inputs(overlap)
                q = norm_and_rotate(
                    query_ptr + query_offset,
                    is_row,
                    q_norm_ptr,
                    eps,
                    new_cos,
                    new_sin,
                    head_dim,
                    padded_dim,
                    has_q_norm,
                )
            else:
                cos, sin = angles(cos_sin_ptr, row_position, is_row, head_dim, padded_dim)
                wait_for_inputs(overlap)
                q = norm_and_rotate(
                    query_ptr + query_offset, is_row, q_norm_ptr, eps, cos, sin, head_dim, padded_dim, has_q_norm
                )
            q = q.to(query_ptr.dtype.element_ty)
            if tl.max(is_new.to(tl.int32), 0) > 0:
                source = (query_begin + new).to(tl.int64) * query_stride + (num_kv_heads * group + kv_head) * head_dim
                new_k = norm_and_rotate(
                    query_ptr + source, is_new, k_norm_ptr, eps, new_cos, new_sin, head_dim, padded_dim, has_k_norm
                )
                mask = is_new[:, None] & is_column[None, :]
                source_ptrs = query_ptr + source[:, None] + num_kv_heads * head_dim + column[None, :]
                new_v = tl.load(source_ptrs, mask=mask, other=0.0)
                target = (slot // block_size) * block_stride + (slot % block_size) * head_dim
                target_ptrs = head_ptr + target[:, None] + column[None, :]
                tl.store(target_ptrs, new_k.to(kv_ptr.dtype.element_ty), mask=mask)
                tl.store(target_ptrs + value_offset, new_v.to(kv_ptr.dtype.element_ty), mask=mask)
                tl.debug_barrier()  # other threads of this program read them below
        else:
            wait_for_inputs(overlap)
            query_ptrs = tl.multiple_of(query_ptr + query_offset[:, None] + column[None, :], (1, 16))
            q = tl.load(query_ptrs, mask=is_row[:, None] & is_column[None, :], other=0.0)  # [rows, padded_dim]

        top = tl.full([rows], -1.0e30, tl.float32)  # below any score, and finite: the difference of two is not NaN
        weights = tl.zeros([rows, tile], tl.float32)  # summed over tiles here, over a tile's positions at the end
        acc = tl.zeros([rows, padded_dim], tl.float32)
        for tile_index in tl.range(first_tile + begin, first_tile + stop):
            position = tile_index * tile + position_in_tile
            is_position = position < seq_len
            block = next_block
            next_position = position + tile
            next_block = tl.load(table_ptr + next_position // block_size, mask=next_position < seq_len, other=0)
            offset = block.to(tl.int64) * block_stride + (position % block_size) * head_dim
            k_ptrs = tl.multiple_of(head_ptr + offset[:, None] + column[None, :], (1, 16))
            # What no row sees must be cleared, not only hidden: it may be NaN, and 0 * NaN is NaN.
            mask = is_position[:, None] & is_column[None, :]
            k = tl.load(k_ptrs, mask=mask, other=0.0)  # [tile, padded_dim]
            scores = tl.dot(q, k.T, input_precision="ieee") * scale_log2
            visible = position[None, :] <= row_position[:, None]
            if has_window:
                visible &= position[None, :] > row_position[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            p = tl.exp2(scores - new_top[:, None])
            kept = tl.exp2(top - new_top)
            weights = weights * kept[:, None] + p
            v_ptrs = tl.multiple_of(k_ptrs + value_offset, (1, 16))
            v = tl.load(v_ptrs, mask=mask, other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
            top = new_top
        if at == program * stretch:  # once for each program
            first_row = program * prefetch_rows_each
            first_prefetch_ptr = prefetch_ptr.to(tl.pointer_type(tl.int8)) + first_row.to(tl.int64) * prefetch_row_bytes
            num_rows = tl.minimum(num_prefetch_rows - first_row, prefetch_rows_each)
            prefetch_rows(first_prefetch_ptr, prefetch_row_bytes, num_rows, num_prefetch_bytes, overlap)
        total = tl.sum(weights, 1)

        if (begin == 0) & (stop == count):
            result = acc / tl.where(total > 0, total, 1.0)[:, None]
            store_rows(
                out_ptr, result, query_begin, query_len, kv_head, num_kv_heads, group, head_dim, rows, padded_dim
            )
        else:
            # A piece of the pair. One that begins a pair is its program's last, any other its program's first.
            stats_ptr = pieces_ptr + tl.num_programs(0) * (2 * stored_rows * padded_dim)
            piece = program * 2 + (begin == 0).to(tl.int32)
            store_piece(pieces_ptr, stats_ptr, piece, top, total, acc, is_row, rows, padded_dim, stored_rows)
            pair_begin = request_begin + kv_head * width
            first_program = (pair_begin + gap) // stretch
            last_program = (pair_begin + gap + count - 1) // stretch
            arrivals_of_pair = arrivals_ptr + request * num_kv_heads + kv_head
            tl.debug_barrier()  # every thread's part of the piece is written before one of them says so
            if tl.atomic_add(arrivals_of_pair, 1, sem="acq_rel") == last_program - first_program:
                tl.store(arrivals_of_pair, 0)
                is_stored_row = tl.arange(0, stored_rows) // group < query_len
                result = merge_pieces(
                    pieces_ptr,
                    stats_ptr,
                    first_program,
                    last_program,
                    is_stored_row,
                    padded_dim,
                    stored_rows,
                    merge_tile,
                )
                store_rows(
                    out_ptr,
                    result,
                    query_begin,
                    query_len,
                    kv_head,
                    num_kv_heads,
                    group,
                    head_dim,
                    stored_rows,
                    padded_dim,
                )

        at += taken
        if at == request_begin + width * num_kv_heads:
            request_begin = at
            request += 1

    wait_for_inputs(overlap)  # programs without work too
    padding = program
    while padding < num_reqs:
        if tl.load(seq_lens_ptr + padding) == 0:
            token = tl.load(query_start_loc_ptr + padding)
            end_token = tl.load(query_start_loc_ptr + padding + 1)
            while token < end_token:
                store_zeros(out_ptr, token, num_kv_heads, group, head_dim, stored_rows, padded_dim)
                token += 1
        padding += tl.num_programs(0)
    while behind < num_tokens:
        store_zeros(out_ptr, behind, num_kv_heads, group, head_dim, stored_rows, padded_dim)
        behind += tl.num_programs(0)
