"""Sampling one token per row of logits on a GPU, in a few launches with grids that depend on shapes alone.

A row is processed in tiles, so that one row occupies the whole GPU. The result of a tile is one candidate
(`pack_candidates`), and a row's token is the maximum of its tiles, in any order.

    row_max   the best logit of each tile; with filters also of each group of tokens
    cuts      filters of rows without top-k, or with a large one (`filter_cuts_triton`)
    draw      the best score + noise of each tile of these, where score = (logit - highest) / temperature
    pick      the best of each row's tiles, or the draw of another row with top-k (`top_k_triton`)

Two logarithms for each token of the vocabulary would be most of the time of a draw. They are approximated by short
polynomials, and computed exactly for the tokens close enough to the maximum to be it: mostly one.
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
from fleetfoot.kernels.sampling.draws_triton import begin_row, exact_noise, rough_noise, score_depth
from fleetfoot.kernels.sampling.filter_cuts_triton import filter_cuts_triton
from fleetfoot.kernels.sampling.sample import MAX_TOP_K, RandomRows
from fleetfoot.kernels.sampling.top_k_triton import GROUP, draw_top_k

if TYPE_CHECKING:
    import triton.language as tl

_TILES = {16: 1024, 1 << 31: 4096}
"""Maximum number of rows -> tokens in a tile. Few rows need small tiles to occupy the whole GPU; for many rows larger
programs are faster (H100, 152,000 tokens, greedy: 8 rows 5.8 us with 1024, 8.0 with 4096; 256 rows 97 and 50)."""


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
    tile = next(tile for max_rows, tile in _TILES.items() if num_rows <= max_rows)
    num_tiles = cdiv(vocab_size, tile)
    highest = torch.empty((num_rows, num_tiles), dtype=torch.int64, device=device)
    overlap = can_overlap(device)
    options = launch_options(overlap)
    grid, width = (num_rows, num_tiles), next_power_of_2(num_tiles)
    filters = None if random is None else random.filters
    groups = cuts = None
    if filters is not None:
        groups = torch.empty((num_rows, cdiv(vocab_size, GROUP)), dtype=torch.float32, device=device)
    _row_max_kernel[grid](
        highest, highest if groups is None else groups, logits, logits.stride(0), vocab_size,
        0 if groups is None else groups.shape[1],
        has_groups=groups is not None, group=GROUP, tile=tile, overlap=overlap, **options,
    )  # fmt: skip
    best = highest
    if random is not None:
        if filters is not None and not filters.top_k_only:
            cuts = filter_cuts_triton(logits, highest, random, overlap=overlap)
        best = torch.empty_like(highest)
        _draw_kernel[grid](
            best, highest, logits, random.temperatures, random.seeds, random.positions,
            token_ids if random.rows is None else random.rows, token_ids if filters is None else filters.top_k,
            token_ids if cuts is None else cuts, logits.stride(0), vocab_size,
            has_rows=random.rows is not None, has_top_k=filters is not None, max_top_k=MAX_TOP_K,
            has_cuts=cuts is not None, num_tiles=num_tiles, tiles_pow2=width, tile=tile, overlap=overlap, **options,
        )  # fmt: skip
        if groups is not None:
            draw_top_k(token_ids, best, highest, groups, logits, random, invalid=invalid, overlap=overlap)
            return token_ids
    _pick_kernel[(num_rows,)](
        token_ids, token_ids if invalid is None else invalid, best, logits, logits.stride(0),
        has_invalid=invalid is not None, num_tiles=num_tiles, tiles_pow2=width, overlap=overlap, num_warps=1, **options,
    )  # fmt: skip
    return token_ids


@triton_kernel()
def _row_max_kernel(
    highest_ptr, groups_ptr, logits_ptr, row_stride, vocab_size, num_groups,
    has_groups: tl.constexpr, group: tl.constexpr, tile: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * tile + tl.arange(0, tile)
    # Padding of the vocabulary is below every token: -inf, and the highest index.
    logit = tl.load(logits_ptr + row * row_stride + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
    best = tl.max(pack_candidates(logit, index), axis=0)
    tl.store(highest_ptr + row * tl.num_programs(1) + tl.program_id(1), best)
    if has_groups:
        group_id = tl.program_id(1) * (tile // group) + tl.arange(0, tile // group)
        values = tl.max(tl.reshape(logit, [tile // group, group]), axis=1)
        tl.store(groups_ptr + row * num_groups + group_id, values, mask=group_id < num_groups)


@triton_kernel()
def _draw_kernel(
    best_ptr, highest_ptr, logits_ptr, temperatures_ptr, seeds_ptr, positions_ptr, rows_ptr, top_k_ptr, cuts_ptr,
    row_stride, vocab_size,
    has_rows: tl.constexpr, has_top_k: tl.constexpr, max_top_k: tl.constexpr, has_cuts: tl.constexpr,
    num_tiles: tl.constexpr, tiles_pow2: tl.constexpr, tile: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    request, row, temperature = begin_row(rows_ptr, temperatures_ptr, has_rows, overlap)
    tile_id = tl.program_id(1)
    highest = candidate_value(best_candidate(highest_ptr + request * num_tiles, num_tiles, tiles_pow2))
    best = tl.load(highest_ptr + request * num_tiles + tile_id)
    is_random = (temperature > 0) & (tl.abs(highest) < float("inf"))  # false for NaN
    if has_top_k:  # most rows with top-k are drawn later
        top_k = tl.load(top_k_ptr + row, mask=row >= 0, other=0)
        is_random = is_random & ((top_k == 0) | (top_k > max_top_k))
    if is_random:
        score = tl.div_rn(candidate_value(best) - highest, temperature)
        best = pack_candidates(score, candidate_index(best).to(tl.int32))
        # The noise has a range of less than 19.46: a tile with a lower best score cannot contain the maximum.
        if score > -19.46:
            logits_ptr += request * row_stride
            seed = tl.load(seeds_ptr + row)
            position = tl.load(positions_ptr + request)
            index = tile_id * tile + tl.arange(0, tile)
            logit = tl.load(logits_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
            inverse = tl.minimum(1.0 / temperature, 3e38)
            rough = (logit - highest) * inverse + rough_noise(seed, position, tile_id * tile, tile)
            if has_cuts:
                depth = score_depth(logit, highest, temperature)
                limit = tl.load(cuts_ptr + request * 2)
                last = tl.load(cuts_ptr + request * 2 + 1)
                is_kept = (index < vocab_size) & ((depth < limit) | ((depth == limit) & (index <= last)))
                rough = tl.where(is_kept, rough, -3e38)
                is_close = is_kept & (rough >= tl.max(rough, axis=0) - 0.0625)
            else:
                is_close = rough >= tl.max(rough, axis=0) - 0.0625
            best = tl.full((), -0x7FFFFFFFFFFFFFFF - 1, tl.int64)
            num_close = tl.sum(is_close.to(tl.int32), axis=0)
            while num_close > 0:
                close = tl.min(tl.where(is_close, index, 0x7FFFFFFF), axis=0)
                score = tl.div_rn(tl.load(logits_ptr + close).to(tl.float32) - highest, temperature)
                exact = score + exact_noise(seed, position, close)
                best = tl.maximum(best, pack_candidates(exact, close))
                is_close = is_close & (index != close)
                num_close -= 1
    tl.store(best_ptr + request * num_tiles + tile_id, best)


@triton_kernel(unspecialized=("invalid_ptr",))
def _pick_kernel(
    token_ids_ptr, invalid_ptr, best_ptr, logits_ptr, row_stride,
    has_invalid: tl.constexpr, num_tiles: tl.constexpr, tiles_pow2: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    row = tl.program_id(0).to(tl.int64)
    token_id = candidate_index(best_candidate(best_ptr + row * num_tiles, num_tiles, tiles_pow2))
    tl.store(token_ids_ptr + row, token_id)
    if has_invalid:
        logit = tl.load(logits_ptr + row * row_stride + token_id).to(tl.float32)
        tl.store(invalid_ptr + row, (tl.abs(logit) < float("inf")) == 0)
