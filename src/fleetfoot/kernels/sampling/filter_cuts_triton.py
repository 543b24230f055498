"""Where min-p, top-k and top-p cut a row of scores, found on a GPU without sorting it.

A row's scores are ``(logit - highest) / temperature``: 0 and below. Read as integers without their sign they are
*depths* that order as the scores do, from 0 for the best token on. What is kept is all tokens above some depth, and of
those at that depth the first few (`fleetfoot.kernels.sampling.filters` is the twin, and says why the first).

Top-k and top-p ask the same question: which is the greatest depth whose predecessors weigh less than is wanted? A token
weighs 1 for top-k and its probability, as an integer, for top-p; integers add up to the same sum in any order. Each
filter takes a few launches, all but the last of which cut the row in pieces, so that one row keeps the whole chip busy:

    weigh     what lies above each of eight bounds, which are octaves
    weigh     the same within the octave that this leaves; for top-p once more within the eighth that this leaves
    collect   the tokens of what this leaves
    settle    among those, few, the cut is found bit by bit

Top-p may cut where tokens are many and alike, thousands of them in an eighth of an octave.

Rows without filters leave at once. No grid and no loop depends on what the host would have to know: a CUDA graph holds
the launches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.runtime.dependent_launch import launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2, triton_kernel
from fleetfoot.kernels.sampling.candidates_triton import candidate_value
from fleetfoot.kernels.sampling.sample import RandomRows

if TYPE_CHECKING:
    import triton.language as tl

_TILE = 2048
"""Tokens in a piece, and of those that were collected looked at at once."""
_SETTLING_WARPS = 16
_NUM_LEVELS = {False: 2, True: 3}
"""Launches of ``weigh`` for top-k, and for top-p."""
_NUM_COLLECTED = 24
"""Where a row's state has how many tokens were collected; before it, eight sums for each level."""
_NUM_SUMS = 32
"""int64 of a row's state; the rest keeps rows apart."""


def filter_cuts_triton(
    logits: torch.Tensor, highest: torch.Tensor, random: RandomRows, *, overlap: bool
) -> torch.Tensor:
    """The cut of each row.

    Args:
        logits: ``[n, vocab]``, rows contiguous.
        highest: ``[n, pieces]`` int64, the best candidates of each row's pieces (`candidates_triton`).
        random: with filters.

    Returns:
        ``[n, 2]`` int32: the depth of the last score that is kept, and the last index that is kept at that depth.
    """
    filters = random.filters
    assert filters is not None
    num_rows, vocab_size = logits.shape
    device, num_pieces = logits.device, cdiv(vocab_size, _TILE)
    sums = torch.zeros((2, num_rows, _NUM_SUMS), dtype=torch.int64, device=device)
    close = torch.empty((num_rows, vocab_size), dtype=torch.int32, device=device)  # indices
    limits = torch.empty(num_rows, dtype=torch.int32, device=device)  # what min-p leaves, then what top-k does
    cuts = torch.empty((num_rows, 2), dtype=torch.int32, device=device)
    arguments = (
        highest,
        logits,
        random.temperatures,
        filters.log_min_p,
        filters.top_k,
        filters.top_p,
        cuts if random.rows is None else random.rows,
        logits.stride(0),
        vocab_size,
    )
    constants = {
        "has_rows": random.rows is not None,
        "pieces": highest.shape[1],
        "pieces_tile": next_power_of_2(highest.shape[1]),
        "tile": _TILE,
        "num_sums": _NUM_SUMS,
        "overlap": overlap,
        **launch_options(overlap),
    }
    for is_mass in (False, True):
        own = sums[int(is_mass)]
        levels = _NUM_LEVELS[is_mass]
        for level in range(levels):
            _weigh_kernel[(num_rows, num_pieces)](own, limits, *arguments, level=level, is_mass=is_mass, **constants)
        of_collected = {"collected": _NUM_COLLECTED, "levels": levels, "is_mass": is_mass, **constants}
        _collect_kernel[(num_rows, num_pieces)](own, close, limits, *arguments, **of_collected)
        _settle_kernel[(num_rows,)](
            own,
            close,
            limits,
            cuts,
            *arguments,
            index_bits=vocab_size.bit_length(),
            num_warps=_SETTLING_WARPS,
            **of_collected,
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
def _row_of(
    request,
    highest_ptr,
    temperatures_ptr,
    rows_ptr,
    has_rows: tl.constexpr,
    pieces: tl.constexpr,
    pieces_tile: tl.constexpr,
):
    """The row of a request's parameters, its temperature, its highest logit, and whether it draws at all."""
    row = request
    if has_rows:
        row = tl.load(rows_ptr + request).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row, mask=row >= 0, other=0.0)
    of_row = tl.arange(0, pieces_tile)
    smallest = -0x7FFFFFFFFFFFFFFF - 1
    candidates = tl.load(highest_ptr + request * pieces + of_row, mask=of_row < pieces, other=smallest)
    highest = candidate_value(tl.max(candidates, axis=0))
    return row, temperature, highest, (temperature > 0) & (tl.abs(highest) < float("inf"))  # not of NaN either


@triton_kernel()
def _is_wanted(row, top_k_ptr, top_p_ptr, vocab_size, is_mass: tl.constexpr):
    """Whether the filter is on."""
    if is_mass:
        return tl.load(top_p_ptr + row, mask=row >= 0, other=1.0) < 1.0
    else:
        top_k = tl.load(top_k_ptr + row, mask=row >= 0, other=0)
        return (top_k > 0) & (top_k < vocab_size)


@triton_kernel()
def _limit_of(request, row, limits_ptr, log_min_p_ptr, is_mass: tl.constexpr):
    """The depth behind which nothing is kept, as the filters before leave it."""
    if is_mass:
        return tl.load(limits_ptr + request)
    else:
        log_min_p = tl.load(log_min_p_ptr + row, mask=row >= 0, other=float("-inf"))
        return log_min_p.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton_kernel()
def _octaves(limit):
    """``[8]`` depths: of the scores -1/2, -1, -2, -4, -8, -16 and -64, and behind all that count."""
    place = tl.arange(0, 8)
    octave = tl.where(place < 6, 126 + place, 133)
    return tl.where(place < 7, tl.minimum(octave << 23, limit + 1), limit + 1)


@triton_kernel()
def _eighths(low, high):
    """``[8]`` bounds from ``low`` to ``high``, the latter included."""
    step = tl.maximum((high - low + 7) // 8, 1)
    return tl.minimum(low + (tl.arange(0, 8) + 1) * step, high)


@triton_kernel()
def _wanted(row, above, top_k_ptr, top_p_ptr, is_mass: tl.constexpr):
    """float64: what is to be reached; ``above`` are the sums of the octaves, the last of which is all."""
    if is_mass:
        return tl.max(above, 0).to(tl.float64) * tl.load(top_p_ptr + row).to(tl.float64)
    else:
        return tl.load(top_k_ptr + row).to(tl.float64)


@triton_kernel()
def _between(bounds, above, wanted, low, high):
    """The part of ``low`` to ``high`` whose bounds the cut lies between, and the most that weighs above one it has
    passed."""
    is_passed = above.to(tl.float64) < wanted
    first = tl.max(tl.where(is_passed, bounds, low), 0)
    behind = tl.min(tl.where(is_passed, high, bounds), 0)
    return first, behind, tl.max(tl.where(is_passed, above, 0), 0)


@triton_kernel()
def _load_piece(logits_ptr, vocab_size, highest, temperature, tile: tl.constexpr):
    """The program's piece of a row, ``[tile]`` each: indices, which of them are tokens, and depths."""
    index = tl.program_id(1) * tile + tl.arange(0, tile)
    is_token = index < vocab_size
    logit = tl.load(logits_ptr + index, mask=is_token, other=float("-inf")).to(tl.float32)
    return index, is_token, score_depth(logit, highest, temperature)


@triton_kernel()
def _narrowed(row, sums_ptr, limit, top_k_ptr, top_p_ptr, levels: tl.constexpr, is_mass: tl.constexpr):
    """Where the cut is after one or more levels: depths from ``low`` on and above ``high``. Also what weighs above
    ``low``, and what is wanted."""
    place = tl.arange(0, 8)
    above = tl.load(sums_ptr + place)
    wanted = _wanted(row, above, top_k_ptr, top_p_ptr, is_mass)
    low, high, base = _between(_octaves(limit), above, wanted, limit * 0, limit + 1)
    for level in tl.static_range(1, levels):
        above = base + tl.load(sums_ptr + level * 8 + place)
        low, high, passed = _between(_eighths(low, high), above, wanted, low, high)
        base = tl.maximum(base, passed)
    return low, high, base, wanted


@triton_kernel()
def _weigh_kernel(
    sums_ptr,
    limits_ptr,
    highest_ptr,
    logits_ptr,
    temperatures_ptr,
    log_min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    rows_ptr,
    row_stride,
    vocab_size,
    level: tl.constexpr,
    is_mass: tl.constexpr,
    has_rows: tl.constexpr,
    pieces: tl.constexpr,
    pieces_tile: tl.constexpr,
    tile: tl.constexpr,
    num_sums: tl.constexpr,
    overlap: tl.constexpr,
):
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    request = tl.program_id(0).to(tl.int64)
    row, temperature, highest, is_random = _row_of(
        request, highest_ptr, temperatures_ptr, rows_ptr, has_rows, pieces, pieces_tile
    )
    if is_random & _is_wanted(row, top_k_ptr, top_p_ptr, vocab_size, is_mass):
        sums_ptr += request * num_sums
        limit = _limit_of(request, row, limits_ptr, log_min_p_ptr, is_mass)
        first = limit * 0  # depths before it are not counted
        bounds = _octaves(limit)
        if level > 0:
            first, high, _, _ = _narrowed(row, sums_ptr, limit, top_k_ptr, top_p_ptr, level, is_mass)
            bounds = _eighths(first, high)
        _, is_token, depth = _load_piece(logits_ptr + request * row_stride, vocab_size, highest, temperature, tile)
        is_counted = is_token & (depth >= first) & (depth <= limit)
        weight = tl.where(is_counted, _weight(depth, is_mass), 0)
        sums = tl.sum(tl.where(depth[None, :] < bounds[:, None], weight[None, :], 0), 1)  # [8]
        tl.atomic_add(sums_ptr + level * 8 + tl.arange(0, 8), sums, mask=sums > 0, sem="relaxed")


@triton_kernel()
def _collect_kernel(
    sums_ptr,
    close_ptr,
    limits_ptr,
    highest_ptr,
    logits_ptr,
    temperatures_ptr,
    log_min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    rows_ptr,
    row_stride,
    vocab_size,
    collected: tl.constexpr,
    levels: tl.constexpr,
    is_mass: tl.constexpr,
    has_rows: tl.constexpr,
    pieces: tl.constexpr,
    pieces_tile: tl.constexpr,
    tile: tl.constexpr,
    num_sums: tl.constexpr,
    overlap: tl.constexpr,
):
    """The indices of tokens near the cut, in any order."""
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    request = tl.program_id(0).to(tl.int64)
    row, temperature, highest, is_random = _row_of(
        request, highest_ptr, temperatures_ptr, rows_ptr, has_rows, pieces, pieces_tile
    )
    if is_random & _is_wanted(row, top_k_ptr, top_p_ptr, vocab_size, is_mass):
        sums_ptr += request * num_sums
        limit = _limit_of(request, row, limits_ptr, log_min_p_ptr, is_mass)
        low, high, _, _ = _narrowed(row, sums_ptr, limit, top_k_ptr, top_p_ptr, levels, is_mass)
        index, is_token, depth = _load_piece(logits_ptr + request * row_stride, vocab_size, highest, temperature, tile)
        is_close = is_token & (depth >= low) & (depth < high)
        num_close = tl.sum(is_close.to(tl.int32), 0)
        if num_close > 0:
            begin = tl.atomic_add(sums_ptr + collected, num_close.to(tl.int64), sem="relaxed")
            slot = begin + tl.cumsum(is_close.to(tl.int32), 0) - 1
            tl.store(close_ptr + request * vocab_size + slot, index, mask=is_close)


@triton_kernel()
def _settle_kernel(
    sums_ptr,
    close_ptr,
    limits_ptr,
    cuts_ptr,
    highest_ptr,
    logits_ptr,
    temperatures_ptr,
    log_min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    rows_ptr,
    row_stride,
    vocab_size,
    index_bits: tl.constexpr,
    collected: tl.constexpr,
    levels: tl.constexpr,
    is_mass: tl.constexpr,
    has_rows: tl.constexpr,
    pieces: tl.constexpr,
    pieces_tile: tl.constexpr,
    tile: tl.constexpr,
    num_sums: tl.constexpr,
    overlap: tl.constexpr,
):
    """The greatest key whose predecessors weigh less than is wanted; of a row without the filter, what was before."""
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    request = tl.program_id(0).to(tl.int64)
    row, temperature, highest, is_random = _row_of(
        request, highest_ptr, temperatures_ptr, rows_ptr, has_rows, pieces, pieces_tile
    )
    limit = _limit_of(request, row, limits_ptr, log_min_p_ptr, is_mass)
    last = tl.full((), 0x7FFFFFFF, tl.int32)
    if is_random & _is_wanted(row, top_k_ptr, top_p_ptr, vocab_size, is_mass):
        sums_ptr += request * num_sums
        low, high, base, wanted = _narrowed(row, sums_ptr, limit, top_k_ptr, top_p_ptr, levels, is_mass)
        num_close = tl.load(sums_ptr + collected).to(tl.int32)
        # Of tokens at the same depth top-k keeps all; top-p goes on to their indices.
        first, behind = low.to(tl.int64), high.to(tl.int64)
        if is_mass:
            first, behind = first << index_bits, behind << index_bits
        while behind - first > 1:
            bounds = _eighths(first, behind)
            above = tl.zeros([8, tile], tl.int64)
            for start in tl.range(0, num_close, tile):
                slot = start + tl.arange(0, tile)
                index = tl.load(close_ptr + request * vocab_size + slot, mask=slot < num_close, other=0)
                logit = tl.load(logits_ptr + request * row_stride + index).to(tl.float32)
                depth = score_depth(logit, highest, temperature)
                weight = tl.where(slot < num_close, _weight(depth, is_mass), 0)
                key = depth.to(tl.int64)
                if is_mass:
                    key = (key << index_bits) | index
                above += tl.where(key[None, :] < bounds[:, None], weight[None, :], 0)
            first, behind, _ = _between(bounds, base + tl.sum(above, 1), wanted, first, behind)
        if low < high:
            if is_mass:
                limit = (first >> index_bits).to(tl.int32)
                last = (first & ((1 << index_bits) - 1)).to(tl.int32)
            else:
                limit = first.to(tl.int32)
    if is_mass:
        tl.store(cuts_ptr + request * 2, limit)
        tl.store(cuts_ptr + request * 2 + 1, last)
    else:
        tl.store(limits_ptr + request, limit)
