"""Attention of a few query tokens per request over the paged KV cache: decodes, and decodes with drafts.

A decode step reads every K and V of the batch once, so it is as fast as memory is, if every multiprocessor reads all the
time. Lengths are ragged and known to the device alone, so the work is cut there: the tiles of all (request, KV head)
pairs stand in one line, each program takes an equal stretch of it (Stream-K, Osama et al., 2023), and where a stretch
ends within a pair, the pieces are merged by their log-sum-exp (Flash-Decoding, Dao et al., 2023). The program that
arrives last merges, so there is one launch, and its grid depends on nothing but the device: a CUDA graph holds it.

The query heads that share a KV head, for all query tokens of the request, are the rows of one matrix: K and V are read
once for all of them.

`fleetfoot.attention.sdpa.SDPABackend` is the twin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fleetfoot.ops.triton_support import next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl

MAX_ROWS = 64
"""Most query heads per KV head times query tokens per request."""
_MIN_ROWS = 16  # the least M of the tensor cores
_MERGED_FLOATS = 4096  # loaded at once by a merging program: 32 registers of a thread
_REQUESTS_STEPS = (16, 256, 4096)


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """How the kernel is compiled and launched; see `choose_decode_tiling`."""

    tile: int
    """KV positions in a tile."""
    min_tiles: int
    """Fewest tiles for a program: merging costs more than so many tiles do."""
    programs_per_sm: int
    num_warps: int
    num_stages: int


def choose_decode_tiling(rows: int, padded_dim: int, element_size: int) -> DecodeTiling:
    """By the bytes of a tile of K: enough of them in flight, in all programs of a multiprocessor, to saturate memory."""
    tile = max(16, min(64, 64 * 256 // (padded_dim * element_size)))
    return DecodeTiling(tile=tile, min_tiles=4, programs_per_sm=2, num_warps=4, num_stages=4)


class DecodeWorkspace:
    """Memory for the pieces of cut pairs, and a count for each pair of how many of its pieces have been written.

    Kernels find every count at 0 and leave it at 0, so one workspace serves all layers, as long as they run one after
    the other. Buffers that were outgrown are kept: captured graphs may still use them.
    """

    def __init__(self, device: torch.device, num_programs: int | None = None) -> None:
        """``num_programs``: programs in a launch; None: as many as the tiling wants on this device."""
        self._num_programs = num_programs
        self._num_sms = 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
        self._pieces = torch.empty(0, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(0, dtype=torch.int32, device=device)
        self._outgrown: list[torch.Tensor] = []

    def num_programs(self, tiling: DecodeTiling) -> int:
        return self._num_programs or self._num_sms * tiling.programs_per_sm

    def reserve(self, num_floats: int, num_counts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The two buffers, with room for so much.

        Raises:
            RuntimeError: they are too small, and a graph is being captured, in which they cannot grow.
        """
        if num_floats > self._pieces.numel():
            self._outgrown.append(self._pieces)
            self._pieces = self._grown(self._pieces, num_floats)
        if num_counts > self._arrivals.numel():
            self._outgrown.append(self._arrivals)
            self._arrivals = self._grown(self._arrivals, num_counts)
        return self._pieces, self._arrivals

    @staticmethod
    def _grown(buffer: torch.Tensor, size: int) -> torch.Tensor:
        if buffer.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the decode kernel's workspace holds {buffer.numel()} elements and this capture wants {size}: "
                "run a step of this shape once before capturing it"
            )
        return torch.zeros(next_power_of_2(size), dtype=buffer.dtype, device=buffer.device)


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
    workspace: DecodeWorkspace,
    out: torch.Tensor,
    tiling: DecodeTiling | None = None,
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
        max_query_len: bound on the query tokens of a request; times num_heads / num_kv_heads at most `MAX_ROWS`.
        out: written, ``[num_tokens, num_heads, head_dim]`` contiguous, for the tokens of all requests; zeros for those
            of padding requests.
    """
    num_reqs = seq_lens.shape[0]
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2:4]
    group = num_heads // num_kv_heads
    stored_rows = next_power_of_2(group * max_query_len)
    rows = max(_MIN_ROWS, stored_rows)
    padded_dim = max(16, next_power_of_2(head_dim))
    if tiling is None:
        tiling = choose_decode_tiling(rows, padded_dim, query.element_size())
    num_programs = workspace.num_programs(tiling)
    pieces, arrivals = workspace.reserve(num_programs * 2 * stored_rows * (padded_dim + 2), num_reqs * num_kv_heads)
    _paged_attention_decode_kernel[(num_programs,)](
        query,
        kv_cache,
        out,
        pieces,
        arrivals,
        query_start_loc,
        seq_lens,
        block_tables,
        num_reqs,
        query.stride(0),
        kv_cache.stride(0),
        block_tables.stride(0),
        scale * math.log2(math.e),
        0 if window is None else window,
        tiling.min_tiles,
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
        requests_tile=next(step for step in (*_REQUESTS_STEPS, next_power_of_2(num_reqs)) if step >= num_reqs),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


@triton_kernel(specialize=False)
def _first_tile(seq_len, window, max_query_len: tl.constexpr, tile: tl.constexpr, has_window: tl.constexpr):
    """The tile of the first position that any of the last ``max_query_len`` tokens sees."""
    if has_window:
        return tl.maximum(seq_len - max_query_len + 1 - window, 0) // tile
    else:
        return seq_len * 0


@triton_kernel(specialize=False)
def _count_tiles(seq_len, first_tile, tile: tl.constexpr):
    """At least one: a padding request has zeros to write."""
    return tl.maximum((seq_len + tile - 1) // tile - first_tile, 1)


@triton_kernel(specialize=False)
def _merge(
    out_ptr,
    pieces_ptr,
    stats_ptr,
    first_program,
    last_program,
    query_begin,
    query_len,
    kv_head,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    stored_rows: tl.constexpr,
    merge_tile: tl.constexpr,
):
    """Merge the pieces of a pair, ``merge_tile`` of them at once, so that their loads are in flight together."""
    row = tl.arange(0, stored_rows)
    column = tl.arange(0, padded_dim)
    token = row // group
    is_row = token < query_len
    m = tl.full([stored_rows], -1.0e30, tl.float32)
    l = tl.zeros([stored_rows], tl.float32)
    acc = tl.zeros([stored_rows, padded_dim], tl.float32)
    for begin in tl.range(first_program, last_program + 1, merge_tile, num_stages=1):
        program = begin + tl.arange(0, merge_tile)
        is_piece = (program <= last_program)[:, None] & is_row[None, :]
        piece_row = (program * 2 + (program == first_program).to(tl.int32))[:, None] * stored_rows + row[None, :]
        stat_row = piece_row + (program * 2 + (program == first_program).to(tl.int32))[:, None] * stored_rows
        piece_m = tl.load(stats_ptr + stat_row, mask=is_piece, other=-1.0e30, cache_modifier=".cg")
        piece_l = tl.load(stats_ptr + stat_row + stored_rows, mask=is_piece, other=0.0, cache_modifier=".cg")
        piece_ptrs = pieces_ptr + piece_row[:, :, None] * padded_dim + column[None, None, :]
        piece_ptrs = tl.multiple_of(piece_ptrs, (1, 1, 16))
        piece_acc = tl.load(piece_ptrs, mask=is_piece[:, :, None], other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(piece_m, 0))
        alpha = tl.exp2(m - m_new)
        beta = tl.exp2(piece_m - m_new[None, :])  # [merge_tile, stored_rows]
        l = l * alpha + tl.sum(piece_l * beta, 0)
        acc = acc * alpha[:, None] + tl.sum(piece_acc * beta[:, :, None], 0)
        m = m_new
    result = acc / tl.where(l > 0, l, 1.0)[:, None]
    head = kv_head * group + row % group
    token_offset = (query_begin + token).to(tl.int64) * (num_kv_heads * group * head_dim)
    out_ptrs = tl.multiple_of(out_ptr + (token_offset + head * head_dim)[:, None] + column[None, :], (1, 16))
    mask = is_row[:, None] & (column < head_dim)[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)


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
    num_reqs,
    query_stride,
    block_stride,
    table_stride,
    scale_log2,
    window,
    min_tiles,
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
    requests_tile: tl.constexpr,
):
    program = tl.program_id(0)
    max_query_len: tl.constexpr = rows // group

    # The line of tiles: request by request, within it head by head. Where each request ends, and this program's stretch.
    index = tl.arange(0, requests_tile)
    lens = tl.load(seq_lens_ptr + index, mask=index < num_reqs, other=0)
    counts = _count_tiles(lens, _first_tile(lens, window, max_query_len, tile, has_window), tile) * num_kv_heads
    counts = tl.where(index < num_reqs, counts, 0)
    ends = tl.cumsum(counts, 0)  # [requests_tile]
    num_tiles = tl.sum(counts, 0)
    stretch = tl.maximum((num_tiles + tl.num_programs(0) - 1) // tl.num_programs(0), min_tiles)
    at = program * stretch
    end = tl.minimum(at + stretch, num_tiles)
    request = tl.sum((ends <= at).to(tl.int32), 0)
    request_begin = tl.max(tl.where(ends <= at, ends, 0), 0)

    row = tl.arange(0, rows)
    column = tl.arange(0, padded_dim)
    is_column = column < head_dim
    position_in_tile = tl.arange(0, tile)
    query_stride = tl.multiple_of(query_stride, 8)
    block_stride = tl.multiple_of(block_stride, 8)

    while at < end:
        seq_len = tl.load(seq_lens_ptr + request)
        query_begin = tl.load(query_start_loc_ptr + request)
        query_len = tl.load(query_start_loc_ptr + request + 1) - query_begin
        first_tile = _first_tile(seq_len, window, max_query_len, tile, has_window)
        count = _count_tiles(seq_len, first_tile, tile)
        kv_head = (at - request_begin) // count
        begin = (at - request_begin) % count
        stop = tl.minimum(begin + end - at, count)

        token = row // group
        is_row = token < query_len
        row_position = seq_len - query_len + token
        head = kv_head * group + row % group
        query_offset = (query_begin + token).to(tl.int64) * query_stride + head * head_dim
        query_ptrs = tl.multiple_of(query_ptr + query_offset[:, None] + column[None, :], (1, 16))
        q = tl.load(query_ptrs, mask=is_row[:, None] & is_column[None, :], other=0.0)  # [rows, padded_dim]

        table_ptr = block_tables_ptr + request.to(tl.int64) * table_stride
        head_ptr = kv_ptr + kv_head * (block_size * head_dim)
        m = tl.full([rows], -1.0e30, tl.float32)
        sums = tl.zeros([rows, tile], tl.float32)  # of the weights, over the tiles; over positions at the end
        acc = tl.zeros([rows, padded_dim], tl.float32)
        position = (first_tile + begin) * tile + position_in_tile
        next_block = tl.load(table_ptr + position // block_size, mask=position < seq_len, other=0)
        for tile_index in tl.range(first_tile + begin, first_tile + stop):
            position = tile_index * tile + position_in_tile
            is_position = position < seq_len
            block_id = next_block
            next_position = position + tile
            next_block = tl.load(table_ptr + next_position // block_size, mask=next_position < seq_len, other=0)
            offset = block_id.to(tl.int64) * block_stride + (position % block_size) * head_dim
            k_ptrs = tl.multiple_of(head_ptr + offset[:, None] + column[None, :], (1, 16))
            mask = is_position[:, None] & is_column[None, :]
            k = tl.load(k_ptrs, mask=mask, other=0.0)  # [tile, padded_dim]
            scores = tl.dot(q, k.T, input_precision="ieee") * scale_log2
            visible = position[None, :] <= row_position[:, None]
            if has_window:
                visible &= position[None, :] > row_position[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))
            m_new = tl.maximum(m, tl.max(scores, 1))
            p = tl.exp2(scores - m_new[:, None])
            alpha = tl.exp2(m - m_new)
            sums = sums * alpha[:, None] + p
            v_ptrs = tl.multiple_of(k_ptrs + num_kv_heads * block_size * head_dim, (1, 16))
            v = tl.load(v_ptrs, mask=mask, other=0.0)
            acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
            m = m_new

        l = tl.sum(sums, 1)

        if (begin == 0) & (stop == count):
            result = acc / tl.where(l > 0, l, 1.0)[:, None]
            token_offset = (query_begin + token).to(tl.int64) * (num_kv_heads * group * head_dim)
            out_ptrs = out_ptr + (token_offset + head * head_dim)[:, None] + column[None, :]
            out_ptrs = tl.multiple_of(out_ptrs, (1, 16))
            tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
        else:
            # A piece of a pair. One that begins a pair is its program's last, any other its program's first.
            piece = program * 2 + (begin == 0).to(tl.int32)
            stats_ptr = pieces_ptr + tl.num_programs(0) * (2 * stored_rows * padded_dim)
            piece_ptrs = pieces_ptr + (piece * stored_rows + row[:, None]) * padded_dim + column[None, :]
            piece_ptrs = tl.multiple_of(piece_ptrs, (1, 16))
            tl.store(piece_ptrs, acc, mask=is_row[:, None])
            tl.store(stats_ptr + piece * (2 * stored_rows) + row, m, mask=is_row)
            tl.store(stats_ptr + piece * (2 * stored_rows) + stored_rows + row, l, mask=is_row)
            pair_begin = request_begin + kv_head * count
            first_program = pair_begin // stretch
            last_program = (pair_begin + count - 1) // stretch
            arrivals_of_pair = arrivals_ptr + request * num_kv_heads + kv_head
            tl.debug_barrier()  # every thread's part of the piece is written before one of them says so
            if tl.atomic_add(arrivals_of_pair, 1, sem="acq_rel") == last_program - first_program:
                tl.store(arrivals_of_pair, 0)
                _merge(
                    out_ptr,
                    pieces_ptr,
                    stats_ptr,
                    first_program,
                    last_program,
                    query_begin,
                    query_len,
                    kv_head,
                    num_kv_heads,
                    group,
                    head_dim,
                    padded_dim,
                    stored_rows,
                    merge_tile,
                )

        at += stop - begin
        if at == request_begin + count * num_kv_heads:
            request_begin = at
            request += 1
