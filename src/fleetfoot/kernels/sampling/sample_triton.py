"""Sampling one token per row of logits on a GPU, in two to four launches with grids that depend on shapes alone.

A row is processed in tiles, so that one row occupies the whole GPU. The result of a tile is one candidate
(`pack_candidates`), and a row's token is the maximum of its tiles, in any order.

    row_max   the best logit of each tile
    cuts      min-p, top-k and top-p, if the batch has filters (`filter_cuts_triton`)
    draw      random rows: the best score + noise of each tile, where score = (logit - highest) / temperature
    pick      the best of each row's tiles

Two logarithms for each token of the vocabulary would be most of the time of a draw. They are approximated by short
polynomials, and computed exactly for the tokens close enough to the maximum to be it: mostly one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import (
    candidate_index,
    candidate_value,
    cdiv,
    next_power_of_2,
    pack_candidates,
    triton_kernel,
)
from fleetfoot.kernels.sampling.filter_cuts_triton import filter_cuts_triton, score_depth
from fleetfoot.kernels.sampling.sample import RandomRows

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
    _row_max_kernel[grid](highest, logits, logits.stride(0), vocab_size, tile=tile, overlap=overlap, **options)
    best = highest
    if random is not None:
        cuts = None if random.filters is None else filter_cuts_triton(logits, highest, random, overlap=overlap)
        best = torch.empty_like(highest)
        _draw_kernel[grid](
            best,
            highest,
            logits,
            random.temperatures,
            random.seeds,
            random.positions,
            token_ids if random.rows is None else random.rows,
            token_ids if cuts is None else cuts,
            logits.stride(0),
            vocab_size,
            has_rows=random.rows is not None,
            has_cuts=cuts is not None,
            num_tiles=num_tiles,
            tiles_pow2=width,
            tile=tile,
            overlap=overlap,
            **options,
        )
    _pick_kernel[(num_rows,)](
        token_ids,
        token_ids if invalid is None else invalid,
        best,
        logits,
        logits.stride(0),
        has_invalid=invalid is not None,
        num_tiles=num_tiles,
        tiles_pow2=width,
        overlap=overlap,
        num_warps=1,
        **options,
    )
    return token_ids


@triton_kernel()
def random_words(seed, position, block):
    """The four words of ``block``'s tokens, as `fleetfoot.kernels.sampling.gumbel` defines them."""
    zero = block * 0
    return tl.philox(seed, block, zero + position.to(tl.int32), zero, zero)


@triton_kernel()
def exact_noise(seed, position, index):
    """`fleetfoot.kernels.sampling.gumbel.gumbel_noise_at` of one token."""
    word0, word1, word2, word3 = random_words(seed, position, index // 4)
    lane = index % 4
    word = tl.where(lane < 2, tl.where(lane == 0, word0, word1), tl.where(lane == 2, word2, word3))
    uniform = ((word >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608.0)
    return -tl.log(-tl.log(uniform))


@triton_kernel()
def rough_noise(seed, position, index, tile: tl.constexpr):
    """The noise of ``tile`` tokens from ``index`` (a multiple of 4) on, with an error below 0.01."""
    words = random_words(seed, position, index // 4 + tl.arange(0, tile // 4))
    word = tl.interleave(tl.interleave(words[0], words[2]), tl.interleave(words[1], words[3]))  # [tile]
    step = (word >> 9).to(tl.float32)
    uniform = (step + 0.5) * (1.0 / 8388608.0)
    rest = (8388607.5 - step) * (1.0 / 8388608.0)  # 1 - uniform, exactly
    series = rest * (1.0 + rest * (0.5 + rest * (0.31 + rest * 0.47)))  # -log(1 - rest) for rest up to a half
    exponential = tl.where(rest < 0.5, series, -0.6931472 * rough_log2(uniform))
    return -0.6931472 * rough_log2(exponential)


@triton_kernel()
def rough_log2(x):
    """The binary logarithm of normal positive numbers, with an error below 0.001."""
    bits = x.to(tl.int32, bitcast=True)
    fraction = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    line = bits.to(tl.float32) * (1.0 / 8388608.0) - 127.0  # exponent + fraction
    return line + fraction * (1.0 - fraction) * (0.4427 + fraction * (0.0836 * fraction - 0.2476))


@triton_kernel()
def _row_max_kernel(highest_ptr, logits_ptr, row_stride, vocab_size, tile: tl.constexpr, overlap: tl.constexpr):
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * tile + tl.arange(0, tile)
    # Padding of the vocabulary is below every token: -inf, and the highest index.
    logit = tl.load(logits_ptr + row * row_stride + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
    best = tl.max(pack_candidates(logit, index), axis=0)
    tl.store(highest_ptr + row * tl.num_programs(1) + tl.program_id(1), best)


@triton_kernel()
def _draw_kernel(
    best_ptr,
    highest_ptr,
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    rows_ptr,
    cuts_ptr,
    row_stride,
    vocab_size,
    has_rows: tl.constexpr,
    has_cuts: tl.constexpr,
    num_tiles: tl.constexpr,
    tiles_pow2: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
):
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    request = tl.program_id(0).to(tl.int64)
    tile_id = tl.program_id(1)
    row = request
    if has_rows:
        row = tl.load(rows_ptr + request).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row, mask=row >= 0, other=0.0)

    tile_ids = tl.arange(0, tiles_pow2)
    smallest = -0x7FFFFFFFFFFFFFFF - 1
    candidates = tl.load(highest_ptr + request * num_tiles + tile_ids, mask=tile_ids < num_tiles, other=smallest)
    highest = candidate_value(tl.max(candidates, axis=0))
    best = tl.load(highest_ptr + request * num_tiles + tile_id)
    is_random = (temperature > 0) & (tl.abs(highest) < float("inf"))  # false for NaN
    if is_random:
        score = tl.div_rn(candidate_value(best) - highest, temperature)
        best = pack_candidates(score, candidate_index(best).to(tl.int32))
        # The noise has a range of less than 19.46: a tile whose best score is lower cannot contain the maximum.
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
            best = tl.full((), smallest, tl.int64)
            num_close = tl.sum(is_close.to(tl.int32), axis=0)
            while num_close > 0:
                close = tl.min(tl.where(is_close, index, 0x7FFFFFFF), axis=0)
                score = tl.div_rn(tl.load(logits_ptr + close).to(tl.float32) - highest, temperature)
                exact = score + exact_noise(seed, position, close)
                best = tl.maximum(best, pack_candidates(exact, close))
                is_close = is_close & (index != close)
                num_close -= 1
    tl.store(best_ptr + request * num_tiles + tile_id, best)


@triton_kernel()
def _pick_kernel(
    token_ids_ptr,
    invalid_ptr,
    best_ptr,
    logits_ptr,
    row_stride,
    has_invalid: tl.constexpr,
    num_tiles: tl.constexpr,
    tiles_pow2: tl.constexpr,
    overlap: tl.constexpr,
):
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    row = tl.program_id(0).to(tl.int64)
    tile_ids = tl.arange(0, tiles_pow2)
    smallest = -0x7FFFFFFFFFFFFFFF - 1
    candidates = tl.load(best_ptr + row * num_tiles + tile_ids, mask=tile_ids < num_tiles, other=smallest)
    token_id = candidate_index(tl.max(candidates, axis=0))
    tl.store(token_ids_ptr + row, token_id)
    if has_invalid:
        logit = tl.load(logits_ptr + row * row_stride + token_id).to(tl.float32)
        tl.store(invalid_ptr + row, (tl.abs(logit) < float("inf")) == 0)
