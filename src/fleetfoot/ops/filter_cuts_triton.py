"""Where min-p, top-k and top-p cut a row of scores, found on a GPU without sorting it.

A row's scores are ``(logit - highest) / temperature``: 0 and below. Read as integers without their sign they are
*depths* that order as the scores do, from 0 for the best token on. What is kept is all tokens above some depth, and of
those at that depth the first few (`fleetfoot.sampling.filters` is the twin, and says why the first).

Top-k and top-p ask the same question: which is the greatest depth whose predecessors weigh less than is wanted? A token
weighs 1 for top-k and its probability, as an integer, for top-p; integers add up to the same sum in any order. Two
passes over the row narrow the answer down to an eighth of an octave, a third one copies the tokens that lie in there,
and among those, few, the depth is found bit by bit.

One program works on one row, and does nothing for a row without filters. There is no loop whose bounds the host would
have to know: a CUDA graph holds the launch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.ops.dependent_launch import launch_dependents, launch_options, wait_for_inputs
from fleetfoot.ops.row_candidates_triton import candidate_value
from fleetfoot.ops.triton_support import next_power_of_2, triton_kernel
from fleetfoot.sampling.filters import RowFilters

if TYPE_CHECKING:
    import triton.language as tl

_TILE = 2048
_NUM_WARPS = 16


def filter_cuts_triton(
    logits: torch.Tensor,
    highest: torch.Tensor,
    temperatures: torch.Tensor,
    rows: torch.Tensor | None,
    filters: RowFilters,
    *,
    overlap: bool,
) -> torch.Tensor:
    """The cut of each row.

    Args:
        logits: ``[n, vocab]``, rows contiguous.
        highest: ``[n, pieces]`` int64, the best candidates of each row's pieces (`row_candidates_triton`).
        temperatures: as in `choose_tokens_torch`, like ``rows`` and ``filters``.

    Returns:
        ``[n, 2]`` int32: the depth of the last score that is kept, and the last index that is kept at that depth.
    """
    num_rows, vocab_size = logits.shape
    cuts = torch.empty((num_rows, 2), dtype=torch.int32, device=logits.device)
    close = torch.empty((num_rows, vocab_size), dtype=torch.int32, device=logits.device)
    _filter_cuts_kernel[(num_rows,)](
        cuts,
        close,
        highest,
        logits,
        temperatures,
        filters.log_min_p,
        filters.top_k,
        filters.top_p,
        cuts if rows is None else rows,
        logits.stride(0),
        vocab_size,
        has_rows=rows is not None,
        pieces=highest.shape[1],
        pieces_tile=next_power_of_2(highest.shape[1]),
        tile=_TILE,
        overlap=overlap,
        num_warps=_NUM_WARPS,
        **launch_options(overlap),
    )
    return cuts


@triton_kernel()
def score_depth(logit, highest, temperature):
    """int32 of a score, 0 for the best: the greater the worse."""
    return tl.div_rn(logit - highest, temperature).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton_kernel()
def _weight(depth, is_mass: tl.constexpr):
    """int64: 1, or the probability in units of 2**-40 of the best token's."""
    if is_mass:
        mass = tl.exp(-depth.to(tl.float32, bitcast=True))
        return (mass * 1099511627776.0).to(tl.int64)
    else:
        return (depth >= 0).to(tl.int64)


@triton_kernel()
def _load_depth(row_ptr, index, vocab_size, highest, temperature):
    """Of tokens ``index [tile]``; behind the vocabulary as deep as can be."""
    logit = tl.load(row_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
    return score_depth(logit, highest, temperature)


@triton_kernel()
def _weights_above(row_ptr, vocab_size, highest, temperature, limit, bounds, is_mass: tl.constexpr, tile: tl.constexpr):
    """``[8]`` int64: what the tokens weigh that are above each of ``bounds [8]`` and not below ``limit``."""
    sums = tl.zeros([8, tile], tl.int64)
    for start in tl.range(0, vocab_size, tile):
        depth = _load_depth(row_ptr, start + tl.arange(0, tile), vocab_size, highest, temperature)
        weight = tl.where(depth <= limit, _weight(depth, is_mass), 0)
        sums += tl.where(depth[None, :] < bounds[:, None], weight[None, :], 0)
    return tl.sum(sums, 1)


@triton_kernel()
def _find_cut(
    row_ptr,
    close_ptr,
    vocab_size,
    highest,
    temperature,
    limit,
    top_k,
    top_p,
    is_mass: tl.constexpr,
    tile: tl.constexpr,
):
    """The greatest depth of all up to ``limit`` whose predecessors weigh less than ``top_k``, or than ``top_p`` of all.

    Returns it with what is above it, how many tokens are at it, and what was wanted.
    """
    place = tl.arange(0, 8)
    # depths of the scores -1/2, -1, -2, -4, -8, -16, -64, and of all that count
    octave = tl.where(place < 6, 126 + place, 133)
    bounds = tl.where(place < 7, tl.minimum(octave << 23, limit + 1), limit + 1)
    above = _weights_above(row_ptr, vocab_size, highest, temperature, limit, bounds, is_mass, tile)
    if is_mass:
        wanted = tl.max(above, 0).to(tl.float64) * top_p.to(tl.float64)
    else:
        wanted = top_k.to(tl.float64)
    is_passed = above.to(tl.float64) < wanted
    low = tl.max(tl.where(is_passed, bounds, 0), 0)
    high = tl.min(tl.where(is_passed, limit + 1, bounds), 0)
    base = tl.max(tl.where(is_passed, above, 0), 0)

    step = tl.maximum((high - low + 7) // 8, 1)
    bounds = tl.minimum(low + (place + 1) * step, high)
    above = _weights_above(row_ptr, vocab_size, highest, temperature, limit, bounds, is_mass, tile)
    is_passed = above.to(tl.float64) < wanted
    high = tl.min(tl.where(is_passed, high, bounds), 0)
    low = tl.max(tl.where(is_passed, bounds, low), 0)
    base = tl.maximum(tl.max(tl.where(is_passed, above, 0), 0), base)

    num_close = limit * 0
    for start in tl.range(0, vocab_size, tile):
        depth = _load_depth(row_ptr, start + tl.arange(0, tile), vocab_size, highest, temperature)
        is_close = (depth >= low) & (depth < high)
        slot = num_close + tl.cumsum(is_close.to(tl.int32), 0) - 1
        tl.store(close_ptr + slot, depth, mask=is_close)
        num_close += tl.sum(is_close.to(tl.int32), 0)
    tl.debug_barrier()  # written by some threads, read by others

    num_above, num_at = base, num_close * 0
    while high - low > 1:
        middle = low + (high - low) // 2
        weight_above = tl.zeros([tile], tl.int64)
        for start in tl.range(0, num_close, tile):
            index = start + tl.arange(0, tile)
            depth = tl.load(close_ptr + index, mask=index < num_close, other=0x7F800000)
            weight_above += tl.where(depth < middle, _weight(depth, is_mass), 0)
        weight = base + tl.sum(weight_above, 0)
        is_below = weight.to(tl.float64) < wanted
        low = tl.where(is_below, middle, low)
        high = tl.where(is_below, high, middle)
        num_above = tl.where(is_below, weight, num_above)
    for start in tl.range(0, num_close, tile):
        index = start + tl.arange(0, tile)
        depth = tl.load(close_ptr + index, mask=index < num_close, other=0x7F800000)
        num_at += tl.sum(((depth == low) & (index < num_close)).to(tl.int32), 0)
    return tl.minimum(low, limit), num_above, num_at, wanted


@triton_kernel()
def _filter_cuts_kernel(
    cuts_ptr,
    close_ptr,
    highest_ptr,
    logits_ptr,
    temperatures_ptr,
    log_min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    rows_ptr,
    row_stride,
    vocab_size,
    has_rows: tl.constexpr,
    pieces: tl.constexpr,
    pieces_tile: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
):
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    request = tl.program_id(0).to(tl.int64)
    row = request
    if has_rows:
        row = tl.load(rows_ptr + request).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row, mask=row >= 0, other=0.0)
    log_min_p = tl.load(log_min_p_ptr + row, mask=row >= 0, other=float("-inf"))
    top_k = tl.load(top_k_ptr + row, mask=row >= 0, other=0)
    top_p = tl.load(top_p_ptr + row, mask=row >= 0, other=1.0)

    of_row = tl.arange(0, pieces_tile)
    smallest = -0x7FFFFFFFFFFFFFFF - 1
    candidates = tl.load(highest_ptr + request * pieces + of_row, mask=of_row < pieces, other=smallest)
    highest = candidate_value(tl.max(candidates, axis=0))
    row_ptr = logits_ptr + request * row_stride
    close_ptr += request * vocab_size

    limit = log_min_p.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    last = tl.full((), 0x7FFFFFFF, tl.int32)
    is_random = (temperature > 0) & (tl.abs(highest) < float("inf"))  # not of NaN either
    if is_random & (top_k > 0) & (top_k < vocab_size):
        limit, _, _, _ = _find_cut(
            row_ptr, close_ptr, vocab_size, highest, temperature, limit, top_k, top_p, False, tile
        )
        tl.debug_barrier()  # `close` has been read
    if is_random & (top_p < 1.0):
        limit, above, num_at, wanted = _find_cut(
            row_ptr, close_ptr, vocab_size, highest, temperature, limit, top_k, top_p, True, tile
        )
        mass = _weight(limit, True)
        if (num_at > 1) & (mass > 0):
            num_kept = tl.ceil((wanted - above.to(tl.float64)) / mass.to(tl.float64)).to(tl.int64)
            while (num_kept > 1) & ((above + (num_kept - 1) * mass).to(tl.float64) >= wanted):
                num_kept -= 1
            while (above + num_kept * mass).to(tl.float64) < wanted:
                num_kept += 1
            num_seen = num_kept * 0
            start = num_at * 0
            while (num_kept < num_at) & (num_seen < num_kept):
                index = start + tl.arange(0, tile)
                depth = _load_depth(row_ptr, index, vocab_size, highest, temperature)
                is_at = depth == limit
                rank = num_seen + tl.cumsum(is_at.to(tl.int64), 0)
                last = tl.minimum(last, tl.min(tl.where(is_at & (rank == num_kept), index, 0x7FFFFFFF), 0))
                num_seen += tl.sum(is_at.to(tl.int64), 0)
                start += tile
    tl.store(cuts_ptr + request * 2, limit)
    tl.store(cuts_ptr + request * 2 + 1, last)
