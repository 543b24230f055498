"""Log-probabilities on a GPU in two launches, with grids that depend on shapes alone.

    tile_stats   of each tile of a row: the best token, the sum of exponentials, and the number of logits at least that
                 of the sampled token
    select       of each row: the normalizer, the rank, and the most probable tokens

The most probable tokens are selected one by one: the next one is the best of a row's tiles, and its tile is searched
for the token that follows. A row takes as many iterations over one tile as it has top logprobs; rows are independent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2, triton_kernel
from fleetfoot.kernels.sampling.candidates_triton import candidate_index, candidate_value, pack_candidates
from fleetfoot.kernels.sampling.token_logprobs import MAX_SELECTED, logprobs_by_sorting

if TYPE_CHECKING:
    import triton.language as tl

_TILE = 2048
"""Tokens in a tile."""


def token_logprobs_triton(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num: int,
    *,
    sizes: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `token_logprobs_torch`."""
    if num <= MAX_SELECTED:
        return select_logprobs(logits, token_ids, num, sizes=sizes, rows=rows)[0]
    return logprobs_by_sorting(logits, token_ids, num, select_logprobs(logits, token_ids, 0)[1])


def select_logprobs(
    logits: torch.Tensor,
    token_ids: torch.Tensor,
    num: int,
    *,
    sizes: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logprobs_torch` for ``num`` up to `MAX_SELECTED`.

    Returns, in addition: ``[n, 2]`` float32, the normalizers of each row, to be subtracted from its logits one after
    the other: the maximum, and the logarithm of the sum of the exponentials after it.
    """
    num_rows, vocab_size = logits.shape
    device, num_tiles = logits.device, cdiv(vocab_size, _TILE)
    packed = torch.empty((num_rows, 2 * num + 3), dtype=torch.int32, device=device)
    normalizers = torch.empty((num_rows, 2), dtype=torch.float32, device=device)
    if num_rows == 0:
        return packed, normalizers
    best = torch.empty((num_rows, num_tiles), dtype=torch.int64, device=device)
    sums = torch.empty((num_rows, num_tiles), dtype=torch.float32, device=device)
    at_least = torch.empty((num_rows, num_tiles), dtype=torch.int32, device=device)
    overlap = can_overlap(device)
    row_sizes = (token_ids if rows is None else rows, token_ids if sizes is None else sizes)
    tile_stats = (best, sums, at_least, logits, token_ids, *row_sizes, logits.stride(0), vocab_size)
    constants = {"has_sizes": sizes is not None, "tile": _TILE, "overlap": overlap, **launch_options(overlap)}
    _tile_stats_kernel[(num_rows, num_tiles)](*tile_stats, **constants)
    _select_kernel[(num_rows,)](
        packed,
        normalizers,
        *tile_stats,
        num=num,
        num_tiles=num_tiles,
        tiles_pow2=next_power_of_2(num_tiles),
        **constants,
    )
    return packed, normalizers


@triton_kernel()
def _num_top(request, rows_ptr, sizes_ptr, num, has_sizes: tl.constexpr):
    """Number of top tokens; -1: the row has no logprobs."""
    count = num
    if has_sizes:
        row = tl.load(rows_ptr + request).to(tl.int64)
        count = tl.load(sizes_ptr + row, mask=row >= 0, other=0) - 1
    return count


@triton_kernel()
def _tile_stats_kernel(
    best_ptr,
    sums_ptr,
    at_least_ptr,
    logits_ptr,
    token_ids_ptr,
    rows_ptr,
    sizes_ptr,
    row_stride,
    vocab_size,
    has_sizes: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
):
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    request = tl.program_id(0).to(tl.int64)
    if _num_top(request, rows_ptr, sizes_ptr, 0, has_sizes) >= 0:
        logits_ptr += request * row_stride
        index = tl.program_id(1) * tile + tl.arange(0, tile)
        is_token = index < vocab_size
        logit = tl.load(logits_ptr + index, mask=is_token, other=float("-inf")).to(tl.float32)
        best = tl.max(pack_candidates(logit, index), axis=0)
        highest = candidate_value(best)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        sampled = tl.load(logits_ptr + tl.load(token_ids_ptr + request)).to(tl.float32)
        place = request * tl.num_programs(1) + tl.program_id(1)
        tl.store(best_ptr + place, best)
        tl.store(sums_ptr + place, tl.sum(tl.exp(logit - shift), axis=0))
        tl.store(at_least_ptr + place, tl.sum((is_token & (logit >= sampled)).to(tl.int32), axis=0))


@triton_kernel()
def _select_kernel(
    packed_ptr,
    normalizers_ptr,
    best_ptr,
    sums_ptr,
    at_least_ptr,
    logits_ptr,
    token_ids_ptr,
    rows_ptr,
    sizes_ptr,
    row_stride,
    vocab_size,
    num: tl.constexpr,
    num_tiles: tl.constexpr,
    tiles_pow2: tl.constexpr,
    has_sizes: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
):
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    request = tl.program_id(0).to(tl.int64)
    count = _num_top(request, rows_ptr, sizes_ptr, num, has_sizes)
    if count >= 0:
        logits_ptr += request * row_stride
        ids_ptr = packed_ptr + request * (2 * num + 3)
        logprobs_ptr = ids_ptr + num + 1
        tile_ids = tl.arange(0, tiles_pow2)
        is_tile = tile_ids < num_tiles
        smallest = -0x7FFFFFFFFFFFFFFF - 1
        candidates = tl.load(best_ptr + request * num_tiles + tile_ids, mask=is_tile, other=smallest)
        highest = candidate_value(tl.max(candidates, axis=0))
        sums = tl.load(sums_ptr + request * num_tiles + tile_ids, mask=is_tile, other=0.0)
        parts = tl.where(is_tile, sums * tl.exp(candidate_value(candidates) - highest), 0.0)
        rest = tl.log(tl.sum(parts, axis=0))
        tl.store(normalizers_ptr + request * 2, highest)
        tl.store(normalizers_ptr + request * 2 + 1, rest)
        at_least = tl.load(at_least_ptr + request * num_tiles + tile_ids, mask=is_tile, other=0)
        tl.store(logprobs_ptr + num + 1, tl.sum(at_least, axis=0))
        token_id = tl.load(token_ids_ptr + request)
        sampled = tl.load(logits_ptr + token_id).to(tl.float32)
        tl.store(ids_ptr, token_id.to(tl.int32))
        tl.store(logprobs_ptr, (sampled - highest - rest).to(tl.int32, bitcast=True))
        if num > 0:
            _store_most_probable(
                ids_ptr, logprobs_ptr, logits_ptr, candidates, tl.minimum(count, num), highest, rest, vocab_size,
                tiles_pow2, tile,
            )  # fmt: skip


@triton_kernel()
def _store_most_probable(
    ids_ptr,
    logprobs_ptr,
    logits_ptr,
    candidates,
    count,
    highest,
    rest,
    vocab_size,
    tiles_pow2: tl.constexpr,
    tile: tl.constexpr,
):
    """Write the ``count`` best tokens of a row, and their logprobs, after the sampled token's."""
    tile_ids = tl.arange(0, tiles_pow2)
    smallest = -0x7FFFFFFFFFFFFFFF - 1
    place = tl.full((), 1, tl.int32)
    while place <= count:
        winner = tl.max(candidates, axis=0)
        token = candidate_index(winner).to(tl.int32)
        tl.store(ids_ptr + place, token)
        tl.store(logprobs_ptr + place, (candidate_value(winner) - highest - rest).to(tl.int32, bitcast=True))
        tile_id = token // tile
        index = tile_id * tile + tl.arange(0, tile)
        logit = tl.load(logits_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
        others = pack_candidates(logit, index)
        following = tl.max(tl.where(others < winner, others, smallest), axis=0)
        candidates = tl.where(tile_ids == tile_id, following, candidates)
        place += 1
