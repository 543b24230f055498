"""The cuts of min-p, top-k and top-p in rows without top-k or with a large one, found on a GPU without sorting.

Kept are all tokens below some depth (see `fleetfoot.kernels.sampling.draws_triton`), and the first few of those at that
depth (the reference `fleetfoot.kernels.sampling.sample` explains which).

Top-k and top-p are the same search: the largest depth with predecessors that weigh less than a target. A token weighs 1
for top-k and its probability, as an integer, for top-p. Each takes a few launches. All but the last process a row in
tiles, so that one row occupies the whole GPU:

    weigh     the weight above each of eight bounds, which are octaves
    weigh     the same within the octave that contains the cut; for top-p again within an eighth of it
    collect   the tokens of the remaining interval
    refine    search the cut among these, an eighth of the interval at a time

For top-p the remaining interval may contain thousands of tokens of nearly equal probability.

Programs of other rows return at once. No grid depends on device values, so a CUDA graph can contain the launches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.runtime.dependent_launch import launch_options
from fleetfoot.kernels.runtime.triton_support import (
    best_candidate,
    candidate_value,
    cdiv,
    next_power_of_2,
    triton_kernel,
)
from fleetfoot.kernels.sampling.draws_triton import begin_row, eighths, mass_of, score_depth
from fleetfoot.kernels.sampling.sample import MAX_TOP_K, RandomRows

if TYPE_CHECKING:
    import triton.language as tl

_TILE = 2048
"""Tokens in a tile of a row, and of the collected tokens in one iteration."""
_NUM_SUMS = 32
"""int64 in a row's state: eight sums for each level, the number of collected tokens, and padding so that rows do not
share cache lines."""


def filter_cuts_triton(
    logits: torch.Tensor, highest: torch.Tensor, random: RandomRows, *, overlap: bool
) -> torch.Tensor:
    """The cut of each row.

    Args:
        logits: ``[n, vocab]``, rows contiguous.
        highest: ``[n, num_tiles]`` int64, the best candidate of each tile of a row (`pack_candidates`).
        random: with filters.

    Returns:
        ``[n, 2]`` int32: the depth of the last score that is kept, and the last index that is kept at that depth.
    """
    filters = random.filters
    assert filters is not None
    num_rows, vocab_size = logits.shape
    device, num_tiles = logits.device, cdiv(vocab_size, _TILE)
    sums = torch.zeros((2, num_rows, _NUM_SUMS), dtype=torch.int64, device=device)
    close = torch.empty((num_rows, vocab_size), dtype=torch.int32, device=device)  # indices
    limits = torch.empty(num_rows, dtype=torch.int32, device=device)  # largest depth after min-p, then after top-k
    cuts = torch.empty((num_rows, 2), dtype=torch.int32, device=device)
    for is_mass, levels in ((False, 2), (True, 3)):
        for phase in range(levels + 2):
            is_last = phase == levels + 1
            _cuts_kernel[(num_rows,) if is_last else (num_rows, num_tiles)](
                sums[int(is_mass)], close, limits, cuts, highest, logits,
                random.temperatures, filters.log_min_p, filters.top_k, filters.top_p,
                cuts if random.rows is None else random.rows,
                logits.stride(0), vocab_size,
                phase=phase, levels=levels, is_mass=is_mass, has_rows=random.rows is not None,
                num_tiles=highest.shape[1], tiles_pow2=next_power_of_2(highest.shape[1]),
                index_bits=vocab_size.bit_length(), max_top_k=MAX_TOP_K, tile=_TILE, num_sums=_NUM_SUMS,
                overlap=overlap, num_warps=16 if is_last else 4, **launch_options(overlap),
            )  # fmt: skip
    return cuts


@triton_kernel()
def _weight(depth, is_mass: tl.constexpr):
    """int64: 1, or `mass_of`."""
    if is_mass:
        return mass_of(depth)
    else:
        return (depth >= 0).to(tl.int64)


@triton_kernel()
def _limit_of(request, row, limits_ptr, log_min_p_ptr, is_mass: tl.constexpr):
    """The largest depth that the previous filters keep."""
    if is_mass:
        return tl.load(limits_ptr + request)
    else:
        log_min_p = tl.load(log_min_p_ptr + row, mask=row >= 0, other=float("-inf"))
        return log_min_p.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton_kernel()
def _octaves(limit):
    """``[8]`` depths: of the scores -1/2, -1, -2, -4, -8, -16 and -64, and one after the limit."""
    place = tl.arange(0, 8)
    octave = tl.where(place < 6, 126 + place, 133)
    return tl.where(place < 7, tl.minimum(octave << 23, limit + 1), limit + 1)


@triton_kernel()
def _between(bounds, above, target, low, high):
    """The interval within ``low`` to ``high`` that contains the cut, and the weight above its lower bound."""
    is_passed = above.to(tl.float64) < target
    first = tl.max(tl.where(is_passed, bounds, low), 0)
    stop = tl.min(tl.where(is_passed, high, bounds), 0)
    return first, stop, tl.max(tl.where(is_passed, above, 0), 0)


@triton_kernel()
def _narrowed(row, sums_ptr, limit, top_k_ptr, top_p_ptr, levels: tl.constexpr, is_mass: tl.constexpr):
    """The interval of the cut after one or more levels: depths in ``[low, high)``. Also the weight above ``low``, and
    the target."""
    place = tl.arange(0, 8)
    above = tl.load(sums_ptr + place)
    if is_mass:  # float64: the weight to reach; the last of the sums is the total
        target = tl.max(above, 0).to(tl.float64) * tl.load(top_p_ptr + row).to(tl.float64)
    else:
        target = tl.load(top_k_ptr + row).to(tl.float64)
    low, high, base = _between(_octaves(limit), above, target, limit * 0, limit + 1)
    for level in tl.static_range(1, levels):
        above = base + tl.load(sums_ptr + level * 8 + place)
        low, high, passed = _between(eighths(low, high), above, target, low, high)
        base = tl.maximum(base, passed)
    return low, high, base, target


@triton_kernel(unspecialized=("rows_ptr",))
def _cuts_kernel(
    sums_ptr, close_ptr, limits_ptr, cuts_ptr, highest_ptr, logits_ptr,
    temperatures_ptr, log_min_p_ptr, top_k_ptr, top_p_ptr, rows_ptr,
    row_stride, vocab_size,
    phase: tl.constexpr, levels: tl.constexpr, is_mass: tl.constexpr, has_rows: tl.constexpr, num_tiles: tl.constexpr,
    tiles_pow2: tl.constexpr, index_bits: tl.constexpr, max_top_k: tl.constexpr, tile: tl.constexpr,
    num_sums: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Weigh in the phases before ``levels``, then collect, then refine."""
    request, row, temperature = begin_row(rows_ptr, temperatures_ptr, has_rows, overlap)
    highest = candidate_value(best_candidate(highest_ptr + request * num_tiles, num_tiles, tiles_pow2))
    is_random = (temperature > 0) & (tl.abs(highest) < float("inf"))  # false for NaN
    if phase > levels:
        limit = _limit_of(request, row, limits_ptr, log_min_p_ptr, is_mass)
        last = tl.full((), 0x7FFFFFFF, tl.int32)
    top_k = tl.load(top_k_ptr + row, mask=row >= 0, other=0)
    if is_mass:
        is_on = (tl.load(top_p_ptr + row, mask=row >= 0, other=1.0) < 1.0) & ((top_k == 0) | (top_k > max_top_k))
    else:
        is_on = (top_k > max_top_k) & (top_k < vocab_size)
    if is_random & is_on:
        sums_ptr += request * num_sums
        logits_ptr += request * row_stride
        close_ptr += request * vocab_size
        if phase <= levels:
            limit = _limit_of(request, row, limits_ptr, log_min_p_ptr, is_mass)
            index = tl.program_id(1) * tile + tl.arange(0, tile)
            is_token = index < vocab_size
            logit = tl.load(logits_ptr + index, mask=is_token, other=float("-inf")).to(tl.float32)
            depth = score_depth(logit, highest, temperature)
            if phase == levels:  # the indices of the tokens in the interval of the cut, in any order
                low, high, _, _ = _narrowed(row, sums_ptr, limit, top_k_ptr, top_p_ptr, levels, is_mass)
                is_close = is_token & (depth >= low) & (depth < high)
                num_close = tl.sum(is_close.to(tl.int32), 0)
                if num_close > 0:
                    begin = tl.atomic_add(sums_ptr + levels * 8, num_close.to(tl.int64), sem="relaxed")
                    slot = begin + tl.cumsum(is_close.to(tl.int32), 0) - 1
                    tl.store(close_ptr + slot, index, mask=is_close)
            else:
                first = limit * 0  # depths before it are not counted
                bounds = _octaves(limit)
                if phase > 0:
                    first, high, _, _ = _narrowed(row, sums_ptr, limit, top_k_ptr, top_p_ptr, phase, is_mass)
                    bounds = eighths(first, high)
                is_counted = is_token & (depth >= first) & (depth <= limit)
                weight = tl.where(is_counted, _weight(depth, is_mass), 0)
                sums = tl.sum(tl.where(depth[None, :] < bounds[:, None], weight[None, :], 0), 1)  # [8]
                tl.atomic_add(sums_ptr + phase * 8 + tl.arange(0, 8), sums, mask=sums > 0, sem="relaxed")
        else:
            limit, last = _refined(
                row, sums_ptr, close_ptr, logits_ptr, limit, last, highest, temperature, top_k_ptr, top_p_ptr,
                levels, is_mass, index_bits, tile,
            )  # fmt: skip
    if phase > levels:
        if is_mass:
            tl.store(cuts_ptr + request * 2, limit)
            tl.store(cuts_ptr + request * 2 + 1, last)
        else:
            tl.store(limits_ptr + request, limit)


@triton_kernel()
def _refined(
    row, sums_ptr, close_ptr, logits_ptr, limit, last, highest, temperature, top_k_ptr, top_p_ptr,
    levels: tl.constexpr, is_mass: tl.constexpr, index_bits: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """The largest key with predecessors that weigh less than the target."""
    low, high, base, target = _narrowed(row, sums_ptr, limit, top_k_ptr, top_p_ptr, levels, is_mass)
    num_close = tl.load(sums_ptr + levels * 8).to(tl.int32)
    # Of tokens at the same depth top-k keeps all; top-p continues with their indices.
    first, stop = low.to(tl.int64), high.to(tl.int64)
    if is_mass:
        first, stop = first << index_bits, stop << index_bits
    while stop - first > 1:
        bounds = eighths(first, stop)
        above = tl.zeros([8, tile], tl.int64)
        for start in tl.range(0, num_close, tile):
            slot = start + tl.arange(0, tile)
            index = tl.load(close_ptr + slot, mask=slot < num_close, other=0)
            depth = score_depth(tl.load(logits_ptr + index).to(tl.float32), highest, temperature)
            weight = tl.where(slot < num_close, _weight(depth, is_mass), 0)
            key = depth.to(tl.int64)
            if is_mass:
                key = (key << index_bits) | index
            above += tl.where(key[None, :] < bounds[:, None], weight[None, :], 0)
        first, stop, _ = _between(bounds, base + tl.sum(above, 1), target, first, stop)
    if low < high:
        if is_mass:
            limit = (first >> index_bits).to(tl.int32)
            last = (first & ((1 << index_bits) - 1)).to(tl.int32)
        else:
            limit = first.to(tl.int32)
    return limit, last
