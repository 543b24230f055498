"""Log-probabilities on a GPU in two launches, whose grids depend on shapes alone.

    pieces   of each piece of a row: the best token, the sum of exponentials, and how many reach the chosen one's logit
    select   of each row: the normalizer, the rank, and the most probable tokens

The most probable tokens are found one by one: the best of a row's pieces is the next one, and its piece is looked
through for what comes behind it. A row costs as many looks at one piece as it wants tokens, and all rows look at once.
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
"""Tokens in a piece."""


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
    device, pieces = logits.device, cdiv(vocab_size, _TILE)
    packed = torch.empty((num_rows, 2 * num + 3), dtype=torch.int32, device=device)
    normalizers = torch.empty((num_rows, 2), dtype=torch.float32, device=device)
    if num_rows == 0:
        return packed, normalizers
    best = torch.empty((num_rows, pieces), dtype=torch.int64, device=device)
    sums = torch.empty((num_rows, pieces), dtype=torch.float32, device=device)
    at_least = torch.empty((num_rows, pieces), dtype=torch.int32, device=device)
    overlap = can_overlap(device)
    whose = (token_ids if rows is None else rows, token_ids if sizes is None else sizes)
    of_pieces = (best, sums, at_least, logits, token_ids, *whose, logits.stride(0), vocab_size)
    constants = {"has_sizes": sizes is not None, "tile": _TILE, "overlap": overlap, **launch_options(overlap)}
    _pieces_kernel[(num_rows, pieces)](*of_pieces, **constants)
    _select_kernel[(num_rows,)](
        packed,
        normalizers,
        *of_pieces,
        num=num,
        pieces=pieces,
        pieces_tile=next_power_of_2(pieces),
        **constants,
    )
    return packed, normalizers


@triton_kernel()
def _num_wanted(request, rows_ptr, sizes_ptr, num, has_sizes: tl.constexpr):
    """How many most probable tokens; -1: nothing at all."""
    count = num
    if has_sizes:
        row = tl.load(rows_ptr + request).to(tl.int64)
        count = tl.load(sizes_ptr + row, mask=row >= 0, other=0) - 1
    return count


@triton_kernel()
def _pieces_kernel(
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
    if _num_wanted(request, rows_ptr, sizes_ptr, 0, has_sizes) >= 0:
        logits_ptr += request * row_stride
        index = tl.program_id(1) * tile + tl.arange(0, tile)
        is_token = index < vocab_size
        logit = tl.load(logits_ptr + index, mask=is_token, other=float("-inf")).to(tl.float32)
        best = tl.max(pack_candidates(logit, index), axis=0)
        highest = candidate_value(best)
        shift = tl.where(highest == float("-inf"), 0.0, highest)
        chosen = tl.load(logits_ptr + tl.load(token_ids_ptr + request)).to(tl.float32)
        place = request * tl.num_programs(1) + tl.program_id(1)
        tl.store(best_ptr + place, best)
        tl.store(sums_ptr + place, tl.sum(tl.exp(logit - shift), axis=0))
        tl.store(at_least_ptr + place, tl.sum((is_token & (logit >= chosen)).to(tl.int32), axis=0))


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
    pieces: tl.constexpr,
    pieces_tile: tl.constexpr,
    has_sizes: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
):
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    request = tl.program_id(0).to(tl.int64)
    count = _num_wanted(request, rows_ptr, sizes_ptr, num, has_sizes)
    if count >= 0:
        logits_ptr += request * row_stride
        ids_ptr = packed_ptr + request * (2 * num + 3)
        logprobs_ptr = ids_ptr + num + 1
        of_row = tl.arange(0, pieces_tile)
        is_piece = of_row < pieces
        smallest = -0x7FFFFFFFFFFFFFFF - 1
        candidates = tl.load(best_ptr + request * pieces + of_row, mask=is_piece, other=smallest)
        highest = candidate_value(tl.max(candidates, axis=0))
        sums = tl.load(sums_ptr + request * pieces + of_row, mask=is_piece, other=0.0)
        parts = tl.where(is_piece, sums * tl.exp(candidate_value(candidates) - highest), 0.0)
        rest = tl.log(tl.sum(parts, axis=0))
        tl.store(normalizers_ptr + request * 2, highest)
        tl.store(normalizers_ptr + request * 2 + 1, rest)
        at_least = tl.load(at_least_ptr + request * pieces + of_row, mask=is_piece, other=0)
        tl.store(logprobs_ptr + num + 1, tl.sum(at_least, axis=0))
        token_id = tl.load(token_ids_ptr + request)
        chosen = tl.load(logits_ptr + token_id).to(tl.float32)
        tl.store(ids_ptr, token_id.to(tl.int32))
        tl.store(logprobs_ptr, (chosen - highest - rest).to(tl.int32, bitcast=True))
        if num > 0:
            _store_most_probable(
                ids_ptr, logprobs_ptr, logits_ptr, candidates, tl.minimum(count, num), highest, rest, vocab_size,
                pieces_tile, tile,
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
    pieces_tile: tl.constexpr,
    tile: tl.constexpr,
):
    """Write the ``count`` best tokens of a row, and their logprobs, behind the chosen one's."""
    of_row = tl.arange(0, pieces_tile)
    smallest = -0x7FFFFFFFFFFFFFFF - 1
    place = tl.full((), 1, tl.int32)
    while place <= count:
        winner = tl.max(candidates, axis=0)
        token = candidate_index(winner).to(tl.int32)
        tl.store(ids_ptr + place, token)
        tl.store(logprobs_ptr + place, (candidate_value(winner) - highest - rest).to(tl.int32, bitcast=True))
        piece = token // tile
        index = piece * tile + tl.arange(0, tile)
        logit = tl.load(logits_ptr + index, mask=index < vocab_size, other=float("-inf")).to(tl.float32)
        others = pack_candidates(logit, index)
        following = tl.max(tl.where(others < winner, others, smallest), axis=0)
        candidates = tl.where(of_row == piece, following, candidates)
        place += 1
