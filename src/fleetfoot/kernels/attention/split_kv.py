"""Split-KV decoding: the workspace of partial results, their merging, and stores to the output.

A split is the partial result of attention over some positions of a (request, KV head) pair: for each row the maximum
score, the sum of the weights relative to it, and the weighted sum of V (Flash-Decoding, Dao et al., 2023).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from fleetfoot.kernels.runtime.dry_tensors import real_memory
from fleetfoot.kernels.runtime.gpu_limits import gpu_limits
from fleetfoot.kernels.runtime.triton_support import next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl


class DecodeShape(NamedTuple):
    """The constants of a decode kernel: one argument of the kernel and of its device functions."""

    num_kv_heads: int
    group: int
    """Query heads per KV head."""
    head_dim: int
    padded_dim: int
    """``head_dim``, rounded up to a power of 2."""
    block_size: int
    value_offset: int
    """Elements between K and V of a block; ``head_stride``, ``token_stride``: between its heads and its tokens."""
    head_stride: int
    token_stride: int
    rows: int
    """Rows of the query tile: query heads per KV head times query tokens per request, rounded up."""
    stored_rows: int
    """Those of a split; at most ``rows``, which has a minimum."""
    merge_tile: int
    """Splits that a merging program loads at once."""
    tile: int
    """KV positions."""
    has_window: bool
    is_fused: bool
    """The kernel applies norm and rotation, and writes K and V."""
    has_q_norm: bool
    has_k_norm: bool
    norm_offset: float
    """Added to the weights of both norms."""
    new_rows: int
    """Query tokens per request, rounded up to a power of 2."""
    programs_per_sm: int
    requests_tile: int
    """Requests, rounded up."""
    overlap: bool
    soft_cap: float
    """Limit of the scores; 0: none."""
    has_sinks: bool
    most: float
    """The largest number of a cache in FP8; 0: it has the dtype of queries."""

    @property
    def max_query_len(self) -> int:
        return self.rows // self.group


class AttentionWorkspace:
    """Device memory that the kernels share: splits, the number of splits written for each pair, and a counter.

    Kernels expect the counts and the counter to be 0 and reset them to 0, so all layers share one workspace, as long as
    they run one after the other. Outgrown buffers are kept: captured graphs may still use them.
    """

    def __init__(self, device: torch.device, num_programs: int | None = None) -> None:
        """``num_programs``: programs in a launch of the decode kernel; None: its tiling decides."""
        self._num_programs = num_programs
        self._num_sms = gpu_limits(device).num_sms
        with real_memory():
            self._splits = torch.empty(0, dtype=torch.float32, device=device)
            self._arrivals = torch.empty(0, dtype=torch.int32, device=device)
        self._outgrown: list[torch.Tensor] = []
        self.counter = _zeros(1, self._arrivals)
        """``[1]`` int32, the work counter of a persistent kernel."""

    def num_programs(self, programs_per_sm: int) -> int:
        return self._num_programs or self._num_sms * programs_per_sm

    def reserve(self, num_floats: int, num_counts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of the splits, float32, and of the counts, int32, with at least these numbers of elements.

        Raises:
            RuntimeError: a buffer has to grow while a graph is being captured.
        """
        if num_floats > self._splits.numel():
            self._outgrown.append(self._splits)
            self._splits = _zeros(num_floats, self._splits)
        if num_counts > self._arrivals.numel():
            self._outgrown.append(self._arrivals)
            self._arrivals = _zeros(next_power_of_2(num_counts), self._arrivals)
        return self._splits, self._arrivals


def _zeros(size: int, like: torch.Tensor) -> torch.Tensor:
    if like.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"the attention workspace has to grow to {size} elements, but a graph is being captured, and writing zeros "
            "would become part of it: run a step of this shape once before capturing it"
        )
    with real_memory():  # the buffer outlives a dry pass
        return torch.zeros(size, dtype=like.dtype, device=like.device)


@triton_kernel(specialize=False)
def for_kv(q, most: tl.constexpr):
    """The query in the dtype that attention multiplies in: float16 with KV in FP8 (``most`` above 0), which holds it
    exactly, and converts two elements in one instruction; bfloat16 takes four."""
    return q.to(tl.float16) if most > 0 and q.dtype == tl.bfloat16 else q


@triton_kernel(specialize=False)
def split_fp8(codes, most: tl.constexpr):
    """The numbers of the low and of the high bytes of int16 ``codes`` in float16, those of e4m3 divided by 256."""
    if most < 1024:  # e4m3: the 7 bits after the sign have other places in float16
        low = ((codes & 0x7F) << 7) | ((codes & 0x80) << 8)
        high = ((codes >> 1) & 0x3F80) | (codes & -0x8000)
    else:  # e5m2 is the upper half of float16
        low = codes << 8
        high = codes & -0x100
    return low.to(tl.float16, bitcast=True), high.to(tl.float16, bitcast=True)


@triton_kernel(specialize=False)
def base_2_scores(products, scale_log2, soft_cap: tl.constexpr):
    """Scores times log2(e) of dot products. ``scale_log2``: the scale times log2(e); ``soft_cap``: 0: none."""
    if soft_cap > 0:
        # tanh(x) = 1 - 2 / (e^2x + 1), which is right where e^2x overflows
        powers = tl.exp2(products * (scale_log2 * (2 / soft_cap)))
        return (soft_cap * 1.4426950408889634) * (1.0 - 2.0 / (powers + 1.0))
    else:
        return products * scale_log2


@triton_kernel(specialize=False)
def add_sinks(row_max, row_sum, acc, sinks_ptr, head, has_sink):
    """The results of rows with one more score each, without a value. ``head``, ``has_sink``: of each row."""
    sink = tl.load(sinks_ptr + head, mask=has_sink, other=-1.0e30) * 1.4426950408889634
    new_max = tl.maximum(row_max, sink)
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.where(has_sink, tl.exp2(sink - new_max), 0.0)
    return new_max, row_sum, acc * rescale[:, None]


@triton_kernel(specialize=False)
def store_pair(
    out_ptr, splits_ptr, arrivals_of_pair, row_max, row_sum, acc, query_begin, query_len, kv_head, begin, stop, count,
    pair_begin, program_tiles, is_row, shape: tl.constexpr,
):  # fmt: skip
    """Write the result of tiles ``begin`` to ``stop`` of ``count``: to the output if these are all, otherwise as a
    split; the program that writes the last one merges them. ``pair_begin``: the pair's first tile in the index space.
    """
    if (begin == 0) & (stop == count):
        result = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        _store_rows(out_ptr, result, query_begin, query_len, kv_head, shape.rows, shape)
    else:
        # If a split starts the pair it is the program's last split, otherwise its first.
        stats_ptr = splits_ptr + tl.num_programs(0) * (2 * shape.stored_rows * shape.padded_dim)
        split = tl.program_id(0) * 2 + (begin == 0).to(tl.int32)
        _store_split(splits_ptr, stats_ptr, split, row_max, row_sum, acc, is_row, shape)
        first_program = pair_begin // program_tiles
        last_program = (pair_begin + count - 1) // program_tiles
        tl.debug_barrier()  # all threads have written their part of the split before one signals it
        if tl.atomic_add(arrivals_of_pair, 1, sem="acq_rel") == last_program - first_program:
            tl.store(arrivals_of_pair, 0)
            is_stored_row = tl.arange(0, shape.stored_rows) // shape.group < query_len
            result = _merge_splits(splits_ptr, stats_ptr, first_program, last_program, is_stored_row, shape)
            _store_rows(out_ptr, result, query_begin, query_len, kv_head, shape.stored_rows, shape)


@triton_kernel(specialize=False)
def _store_split(splits_ptr, stats_ptr, split, row_max, row_sum, acc, is_row, shape: tl.constexpr):
    """Write ``row_max``, ``row_sum [rows]`` and ``acc [rows, padded_dim]``; at most ``stored_rows`` rows are valid."""
    row = tl.arange(0, shape.rows)
    column = tl.arange(0, shape.padded_dim)
    split_ptrs = splits_ptr + (split * shape.stored_rows + row[:, None]) * shape.padded_dim + column[None, :]
    tl.store(tl.multiple_of(split_ptrs, (1, 16)), acc, mask=is_row[:, None])
    tl.store(stats_ptr + split * (2 * shape.stored_rows) + row, row_max, mask=is_row)
    tl.store(stats_ptr + split * (2 * shape.stored_rows) + shape.stored_rows + row, row_sum, mask=is_row)


@triton_kernel(specialize=False)
def _merge_splits(splits_ptr, stats_ptr, first_program, last_program, is_row, shape: tl.constexpr):
    """``[stored_rows, padded_dim]``: attention over all positions of a pair, from the splits of a range of programs.

    Reads ``merge_tile`` splits at once, so that their loads are in flight together. The index of a program's split is
    2 * program, plus 1 if the split starts the pair.
    """
    stored_rows: tl.constexpr = shape.stored_rows
    padded_dim: tl.constexpr = shape.padded_dim
    row = tl.arange(0, stored_rows)
    column = tl.arange(0, padded_dim)
    row_max = tl.full([stored_rows], -1.0e30, tl.float32)
    row_sum = tl.zeros([stored_rows], tl.float32)
    acc = tl.zeros([stored_rows, padded_dim], tl.float32)
    for begin in tl.range(first_program, last_program + 1, shape.merge_tile, num_stages=1):
        # Rows come first: warps are distributed over the first dimension, and one thread should hold a row's splits.
        program = begin + tl.arange(0, shape.merge_tile)
        is_split = is_row[:, None] & (program <= last_program)[None, :]
        split = (program * 2 + (program == first_program).to(tl.int32))[None, :]
        stat_ptrs = stats_ptr + split * (2 * stored_rows) + row[:, None]
        split_max = tl.load(stat_ptrs, mask=is_split, other=-1.0e30, cache_modifier=".cg")
        split_sum = tl.load(stat_ptrs + stored_rows, mask=is_split, other=0.0, cache_modifier=".cg")
        split_row = split * stored_rows + row[:, None]  # [stored_rows, merge_tile]
        split_ptrs = splits_ptr + split_row[:, :, None] * padded_dim + column[None, None, :]
        split_ptrs = tl.multiple_of(split_ptrs, (1, 1, 16))
        split_acc = tl.load(split_ptrs, mask=is_split[:, :, None], other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(row_max, tl.max(split_max, 1))
        rescale = tl.exp2(row_max - new_max)
        split_scale = tl.exp2(split_max - new_max[:, None])
        row_sum = row_sum * rescale + tl.sum(split_sum * split_scale, 1)
        acc = acc * rescale[:, None] + tl.sum(split_acc * split_scale[:, :, None], 1)
        row_max = new_max
    return acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]


@triton_kernel(specialize=False)
def _store_rows(out_ptr, result, query_begin, query_len, kv_head, num_rows: tl.constexpr, shape: tl.constexpr):
    """Write ``result [num_rows, padded_dim]``; row ``i`` is head ``i % group`` of query token ``i // group``."""
    row = tl.arange(0, num_rows)
    column = tl.arange(0, shape.padded_dim)
    token = row // shape.group
    token_offset = (query_begin + token).to(tl.int64) * (shape.num_kv_heads * shape.group * shape.head_dim)
    head_offset = (kv_head * shape.group + row % shape.group) * shape.head_dim
    out_ptrs = tl.multiple_of(out_ptr + (token_offset + head_offset)[:, None] + column[None, :], (1, 16))
    mask = (token < query_len)[:, None] & (column < shape.head_dim)[None, :]
    tl.store(out_ptrs, result.to(out_ptr.dtype.element_ty), mask=mask)


@triton_kernel(specialize=False)
def clear_output(out_ptr, query_start_loc_ptr, seq_lens_ptr, num_reqs, tail_token, num_tokens, shape: tl.constexpr):
    """Write zeros for the tokens of padding requests, and for those from ``tail_token`` on."""
    padding = tl.program_id(0)
    while padding < num_reqs:
        if tl.load(seq_lens_ptr + padding) == 0:
            token = tl.load(query_start_loc_ptr + padding)
            end_token = tl.load(query_start_loc_ptr + padding + 1)
            while token < end_token:
                _store_zeros(out_ptr, token, shape)
                token += 1
        padding += tl.num_programs(0)
    while tail_token < num_tokens:
        _store_zeros(out_ptr, tail_token, shape)
        tail_token += tl.num_programs(0)


@triton_kernel(specialize=False)
def _store_zeros(out_ptr, token, shape: tl.constexpr):
    """Write zeros to all heads of a token that belongs to no request."""
    stored_rows: tl.constexpr = shape.stored_rows
    padded_dim: tl.constexpr = shape.padded_dim
    row = tl.arange(0, stored_rows)
    column = tl.arange(0, padded_dim)
    mask = (row < shape.group)[:, None] & (column < shape.head_dim)[None, :]
    for kv_head in tl.range(0, shape.num_kv_heads, num_stages=1):
        head_offset = (kv_head * shape.group + row)[:, None] * shape.head_dim + column[None, :]
        out_ptrs = out_ptr + token.to(tl.int64) * (shape.num_kv_heads * shape.group * shape.head_dim) + head_offset
        zeros = tl.zeros([stored_rows, padded_dim], out_ptr.dtype.element_ty)
        tl.store(tl.multiple_of(out_ptrs, (1, 16)), zeros, mask=mask)
