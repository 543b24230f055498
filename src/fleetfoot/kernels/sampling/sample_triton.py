"""Sampling one token per row of logits on a GPU, in a few launches with grids that depend on shapes alone.

A row is processed in tiles, so that one row occupies the whole GPU. The result of a tile is one candidate
(`pack_candidates`), and a row's token is the maximum of its tiles, in any order.

    row_max   the best logit of each tile; with filters also of each group of tokens; for draws its mass
    cuts      filters of rows without top-k, or with a large one (`filter_cuts_triton`)
    draw      the best score + noise of each tile of these, where score = (logit - highest) / temperature
    pick      the best of each row's tiles, or the draw of another row with top-k (`top_k_triton`)

Two logarithms for each token of the vocabulary would be most of the time of a draw. Without filters most tiles need
none: the best score + noise of a row is distributed like one noise above the logarithm of the sum of exp(score), so
that it is almost never lower than a bound below that, which about ten tokens of a row reach. Whether a token may reach
it costs one exponential. In the other tiles logarithms are approximated by short polynomials, and computed exactly for
the tokens close enough to the maximum to be it: mostly one. If no token of a row reaches the bound, all tiles of the
row are drawn without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import (
    best_candidate,
    candidate_index,
    candidate_value,
    cdiv,
    next_power_of_2,
    pack_candidates,
    triton_kernel,
)
from fleetfoot.kernels.sampling.draws_triton import begin_row, exact_noise, rough_noise, score_depth, words_of_tokens
from fleetfoot.kernels.sampling.filter_cuts_triton import filter_cuts_triton
from fleetfoot.kernels.sampling.sample import MAX_TOP_K, RandomRows
from fleetfoot.kernels.sampling.top_k_triton import GROUP, draw_top_k

if TYPE_CHECKING:
    import triton.language as tl

_FEW_ROWS = 16
"""Few rows need small tiles to occupy the whole GPU, and the bound saves less than it takes: one row 5.3 us without it
and 6.5 with it, 8 rows 11.1 and 10.1 (H200, 152,000 tokens in bfloat16)."""
_FEW_TILING, _TILING = (1024, 4, 1024), (4096, 1, 512)
"""Tokens in a tile, warps of a program that draws, and tokens that it draws at a time. For many rows larger programs
are faster, with a warp each, so that none waits for another: 256 rows 103 us with 4 warps and 88 with one, where draws
without a bound took 176; 64 rows 31.1, 30.1 and 48.3."""
_BELOW = 2.3
"""Distance of a row's bound from the logarithm of its mass, ``b``. About exp(b) = 10 tokens of a row reach the bound,
and with a probability of exp(-exp(b)) = 0.00005 none does."""


def sample_triton(
    logits: torch.Tensor,
    random: RandomRows | None = None,
    *,
    invalid: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `sample_torch`. Launches only: no synchronisation and no launch that depends on a value, as graphs require.

    Raises:
        ValueError: the vocabulary is empty, its stride is not 1, or the number of positions is not that of rows.
    """
    num_rows, vocab_size = logits.shape
    if vocab_size == 0 or (num_rows > 0 and logits.stride(1) != 1):
        raise ValueError(
            f"sample: logits {list(logits.shape)} with strides {logits.stride()} must have a vocabulary, "
            "contiguous in memory"
        )
    if random is not None and len(random.positions) != num_rows:
        raise ValueError(f"sample: {len(random.positions)} positions for {num_rows} rows of logits")
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device) if out is None else out
    if num_rows == 0:
        return token_ids
    has_cuts = random is not None and random.filters is not None and not random.filters.top_k_only
    # the kernels of cuts take longer, and are compiled for one tiling
    tile, num_warps, part = _FEW_TILING if num_rows <= _FEW_ROWS or has_cuts else _TILING
    num_tiles = cdiv(vocab_size, tile)
    highest = torch.empty((num_rows, num_tiles), dtype=torch.int64, device=device)
    overlap = can_overlap(device)
    options = launch_options(overlap)
    grid, width = (num_rows, num_tiles), next_power_of_2(num_tiles)
    unused = token_ids  # what kernels are passed for a tensor that they do not read
    drawing = bounded = (unused,) * 4
    filters = masses = groups = cuts = None
    if random is not None:
        filters = random.filters
        rows = unused if random.rows is None else random.rows
        drawing = (random.temperatures, random.seeds, random.positions, rows)
    has_rows = random is not None and random.rows is not None
    if filters is not None:
        groups = torch.empty((num_rows, cdiv(vocab_size, GROUP)), dtype=torch.float32, device=device)
    elif random is not None and num_rows > _FEW_ROWS:
        masses = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=device)
        bounded = drawing
    bounds = {"has_bound": masses is not None, "below": _BELOW}
    tiles = {"num_tiles": num_tiles, "tiles_pow2": width}
    _row_max_kernel[grid](
        highest, unused if groups is None else groups, unused if masses is None else masses, logits, bounded[0],
        bounded[3], logits.stride(0), vocab_size, 0 if groups is None else groups.shape[1],
        has_groups=groups is not None, group=GROUP, has_masses=masses is not None,
        has_rows=has_rows and masses is not None, tile=tile, overlap=overlap, **options,
    )  # fmt: skip
    best = highest
    if random is not None:
        if has_cuts:
            cuts = filter_cuts_triton(logits, highest, random, overlap=overlap)
        best = torch.empty_like(highest)
        _draw_kernel[grid](
            best, highest, unused if masses is None else masses, logits, *drawing,
            unused if filters is None else filters.top_k, unused if cuts is None else cuts, logits.stride(0),
            vocab_size, has_rows=has_rows, has_top_k=filters is not None, max_top_k=MAX_TOP_K, **bounds,
            has_cuts=cuts is not None, **tiles, tile=tile, part=part, overlap=overlap, num_warps=num_warps, **options,
        )  # fmt: skip
        if groups is not None:
            draw_top_k(token_ids, best, highest, groups, logits, random, invalid=invalid, overlap=overlap)
            return token_ids
    _pick_kernel[(num_rows,)](
        token_ids, unused if invalid is None else invalid, best, highest, unused if masses is None else masses,
        logits, *bounded, logits.stride(0), vocab_size, has_invalid=invalid is not None,
        has_rows=has_rows and masses is not None, **bounds, **tiles, part=part, overlap=overlap,
        num_warps=1 if masses is None else 4, **options,
    )  # fmt: skip
    return token_ids


@triton_kernel(unspecialized=("rows_ptr",))
def _row_max_kernel(
    highest_ptr, groups_ptr, masses_ptr, logits_ptr, temperatures_ptr, rows_ptr, row_stride, vocab_size, num_groups,
    has_groups: tl.constexpr, group: tl.constexpr, has_masses: tl.constexpr, has_rows: tl.constexpr,
    tile: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    temperature = 0.0
    if has_masses:
        request, _, temperature = begin_row(rows_ptr, temperatures_ptr, has_rows, overlap)
    else:
        launch_dependents(overlap)
        wait_for_inputs(overlap)
        request = tl.program_id(0).to(tl.int64)
    tile_id = tl.program_id(1)
    index = tile_id * tile + tl.arange(0, tile)
    # Padding of the vocabulary is below every token: -inf, and the highest index.
    logit = tl.load(logits_ptr + request * row_stride + index, mask=index < vocab_size, other=float("-inf"))
    logit = logit.to(tl.float32)
    best = _best_of_tile(logit, index)
    place = request * tl.num_programs(1) + tile_id
    tl.store(highest_ptr + place, best)
    if has_groups:
        group_id = tile_id * (tile // group) + tl.arange(0, tile // group)
        values = tl.max(tl.reshape(logit, [tile // group, group]), axis=1)
        tl.store(groups_ptr + request * num_groups + group_id, values, mask=group_id < num_groups)
    value = candidate_value(best)
    if (temperature > 0) & (value < float("inf")):  # false for NaN
        value = tl.where(value > float("-inf"), value, 0.0)
        tl.store(masses_ptr + place, tl.sum(tl.exp2((logit - value) * _binary_scale(temperature)), axis=0))


@triton_kernel()
def _best_of_tile(logit, index):
    """The best candidate (`pack_candidates`). Comparing packed candidates would take twice the instructions."""
    value = tl.max(logit, axis=0)  # of the tokens that are not NaN, if there are such
    nan_index = tl.where(logit != logit, index - 0x40000000, index)  # any NaN is better
    best = tl.min(tl.where(logit < value, 0x3FFFFFFF, nan_index), axis=0)
    is_nan = best < 0
    return pack_candidates(tl.where(is_nan, float("nan"), value), tl.where(is_nan, best + 0x40000000, best))


@triton_kernel()
def _binary_scale(temperature):
    """What differences of logits are multiplied by for `tl.exp2`; finite."""
    return tl.minimum(1.4426950408889634 / temperature, 3e38)


@triton_kernel()
def _bound_of_row(
    highest_ptr, masses_ptr, highest, temperature, below: tl.constexpr, num_tiles: tl.constexpr,
    tiles_pow2: tl.constexpr,
):  # fmt: skip
    """What the best score + noise of a row almost always exceeds: the logarithm of its mass less ``below``."""
    slot = tl.arange(0, tiles_pow2)
    mass = tl.load(masses_ptr + slot, mask=slot < num_tiles, other=0.0)
    value = candidate_value(tl.load(highest_ptr + slot, mask=slot < num_tiles, other=0))
    scaled = mass * tl.exp2((value - highest) * _binary_scale(temperature))
    return tl.log(tl.sum(tl.where(mass > 0.0, scaled, 0.0), axis=0)) - below


@triton_kernel()
def _lowest_bound():
    """What the best score + noise of a row always exceeds: the best token has a score of 0, no noise is below -2.82."""
    return tl.full((), -3.0, tl.float32)


@triton_kernel(unspecialized=("rows_ptr", "positions_ptr"))
def _draw_kernel(
    best_ptr, highest_ptr, masses_ptr, logits_ptr, temperatures_ptr, seeds_ptr, positions_ptr, rows_ptr, top_k_ptr,
    cuts_ptr, row_stride, vocab_size,
    has_rows: tl.constexpr, has_top_k: tl.constexpr, max_top_k: tl.constexpr, has_bound: tl.constexpr,
    below: tl.constexpr, has_cuts: tl.constexpr, num_tiles: tl.constexpr, tiles_pow2: tl.constexpr, tile: tl.constexpr,
    part: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    request, row, temperature = begin_row(rows_ptr, temperatures_ptr, has_rows, overlap)
    tile_id = tl.program_id(1)
    highest_ptr += request * num_tiles
    best = tl.load(highest_ptr + tile_id)
    is_random = temperature > 0
    if has_top_k:  # most rows with top-k are drawn later
        top_k = tl.load(top_k_ptr + row, mask=row >= 0, other=0)
        is_random = is_random & ((top_k == 0) | (top_k > max_top_k))
    if is_random:
        highest = candidate_value(best_candidate(highest_ptr, num_tiles, tiles_pow2))
        if tl.abs(highest) < float("inf"):  # false for NaN
            score = tl.div_rn(candidate_value(best) - highest, temperature)
            best = pack_candidates(score, candidate_index(best).to(tl.int32))
            # The noise has a range of less than 19.46: a tile with a lower best score cannot contain the maximum.
            if score > -19.46:
                bound = _lowest_bound()
                if has_bound:
                    masses_ptr += request * num_tiles
                    bound = _bound_of_row(highest_ptr, masses_ptr, highest, temperature, below, num_tiles, tiles_pow2)
                limit = 0
                last = 0
                if has_cuts:
                    limit = tl.load(cuts_ptr + request * 2)
                    last = tl.load(cuts_ptr + request * 2 + 1)
                seed = tl.load(seeds_ptr + row)
                position = tl.load(positions_ptr + request)
                best = _draw_of_tokens(
                    logits_ptr + request * row_stride, tile_id * tile, tile, vocab_size, highest, temperature, seed,
                    position, bound, limit, last, has_cuts, part,
                )  # fmt: skip
    tl.store(best_ptr + request * num_tiles + tile_id, best)


@triton_kernel()
def _draw_of_tokens(
    logits_ptr, first, count, vocab_size, highest, temperature, seed, position, bound, limit, last,
    has_cuts: tl.constexpr, part: tl.constexpr,
):  # fmt: skip
    """The best candidate by score + noise of ``count`` tokens from ``first`` on; -inf if none reaches ``bound``."""
    best = pack_candidates(tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.int32))
    for start in range(first, first + count, part):
        # A thread loads the logits of the four tokens of which it computes words.
        index = tl.max_contiguous(start + tl.arange(0, part), 4)
        logit = tl.load(logits_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
        word = words_of_tokens(seed, position, start, part)
        # noise = -log(-log(1 - rest)) is at most -log(rest), so that a token with score + noise >= bound has
        # rest <= exp(score - bound). 2 - rest, rounded, is ``complement``; 0.01 is more than all other errors.
        scaled = (logit - highest) * _binary_scale(temperature) + (0.01 - bound) * 1.4426950408889634
        complement = ((word >> 9) | 0x3F800000).to(tl.float32, bitcast=True)  # 2 - rest - 2**-24
        if tl.max(complement + tl.exp2(scaled), axis=0) >= 2.0:
            rough = (logit - highest) * tl.minimum(1.0 / temperature, 3e38) + rough_noise(word)
            if has_cuts:
                depth = score_depth(logit, highest, temperature)
                is_kept = (index < vocab_size) & ((depth < limit) | ((depth == limit) & (index <= last)))
                rough = tl.where(is_kept, rough, -3e38)
                is_close = is_kept & (rough >= tl.max(rough, axis=0) - 0.0625)
            else:
                is_close = rough >= tl.max(rough, axis=0) - 0.0625
            num_close = tl.sum(is_close.to(tl.int32), axis=0)
            while num_close > 0:
                close = tl.min(tl.where(is_close, index, 0x7FFFFFFF), axis=0)
                score = tl.div_rn(tl.load(logits_ptr + close).to(tl.float32) - highest, temperature)
                exact = score + exact_noise(seed, position, close)
                best = tl.maximum(best, pack_candidates(exact, close))
                is_close = is_close & (index != close)
                num_close -= 1
            bound = tl.maximum(bound, candidate_value(best))
    return best


@triton_kernel(unspecialized=("invalid_ptr", "rows_ptr", "positions_ptr"))
def _pick_kernel(
    token_ids_ptr, invalid_ptr, best_ptr, highest_ptr, masses_ptr, logits_ptr, temperatures_ptr, seeds_ptr,
    positions_ptr, rows_ptr, row_stride, vocab_size,
    has_invalid: tl.constexpr, has_rows: tl.constexpr, has_bound: tl.constexpr, below: tl.constexpr,
    num_tiles: tl.constexpr, tiles_pow2: tl.constexpr, part: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    request, row, temperature = begin_row(rows_ptr, temperatures_ptr, has_rows, overlap)
    best = best_candidate(best_ptr + request * num_tiles, num_tiles, tiles_pow2)
    logits_ptr += request * row_stride
    if has_bound:
        highest_ptr += request * num_tiles
        highest = candidate_value(best_candidate(highest_ptr, num_tiles, tiles_pow2))
        if (temperature > 0) & (tl.abs(highest) < float("inf")):
            masses_ptr += request * num_tiles
            bound = _bound_of_row(highest_ptr, masses_ptr, highest, temperature, below, num_tiles, tiles_pow2)
            if candidate_value(best) < bound:
                seed = tl.load(seeds_ptr + row)
                position = tl.load(positions_ptr + request)
                best = _draw_of_tokens(
                    logits_ptr, 0, vocab_size, vocab_size, highest, temperature, seed, position, _lowest_bound(), 0, 0,
                    False, part,
                )  # fmt: skip
    token_id = candidate_index(best)
    tl.store(token_ids_ptr + request, token_id)
    if has_invalid:
        logit = tl.load(logits_ptr + token_id).to(tl.float32)
        tl.store(invalid_ptr + request, (tl.abs(logit) < float("inf")) == 0)
