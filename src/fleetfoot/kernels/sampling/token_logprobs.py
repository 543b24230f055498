"""Log-probabilities of sampled tokens and of the most probable tokens, from the model's logits.

On a GPU they take two launches, with grids that depend on shapes alone:

    tile_stats   of each tile of a row: the best token, the sum of exponentials, and the number of logits at least that
                 of the sampled token
    select       of each row: the normalizer, the rank, and the most probable tokens

The most probable tokens are selected one by one: the next one is the best of a row's tiles, and its tile is searched
for the token that follows. A row takes as many iterations over one tile as it has top logprobs; rows are independent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
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
from fleetfoot.kernels.sampling import rows_per_chunk

if TYPE_CHECKING:
    import triton.language as tl

MAX_SELECTED = 256
"""Up to this many top tokens are selected one by one on a GPU; more are sorted."""
_TILE = 2048
"""Tokens in a tile."""


class LogprobRows(NamedTuple):
    """Numbers of top tokens that differ between rows."""

    sizes: torch.Tensor
    """``[R]`` int32: 1 + number of top tokens, up to ``num``; 0: no logprobs. Entries beyond it are undefined."""
    indices: torch.Tensor
    """``[n]`` int32: row ``i`` of the logits has entry ``indices[i]``; -1: padding."""

    def selected(self) -> torch.Tensor:
        """``[n]`` bool: the rows with logprobs."""
        return (self.indices >= 0) & (self.sizes[self.indices] > 0)


def token_logprobs_torch(
    logits: torch.Tensor, token_ids: torch.Tensor, num: int, rows: LogprobRows | None = None
) -> torch.Tensor:
    """The sampled token of each row, then the ``num`` most probable tokens; equal logits are in order of token ids.

    The entries of a row do not depend on ``num``, nor on other rows.

    Args:
        logits: ``[n, vocab]`` of any float dtype, contiguous within rows.
        token_ids: ``[n]`` int64, the sampled tokens.
        num: 0 to vocab; with ``rows`` at most `MAX_SELECTED`, and no launch or copy depends on a value.
        rows: None: ``num`` top tokens for every row.

    Returns:
        ``[n, 2 * (num + 1) + 1]`` int32, one tensor for one copy: token ids, log-probabilities (the bits of float32),
        and the number of tokens with a logit at least that of the sampled token.
    """
    packed = logprobs_by_sorting(logits, token_ids, num)
    return packed if rows is None else torch.where(rows.selected()[:, None], packed, 0)


def token_logprobs_cpu(
    logits: torch.Tensor, token_ids: torch.Tensor, num: int, rows: LogprobRows | None = None
) -> torch.Tensor:
    """`token_logprobs_torch` for CPU tensors: sorts only the rows with logprobs."""
    if rows is None:
        return logprobs_by_sorting(logits, token_ids, num)
    selected = torch.from_numpy(np.flatnonzero(rows.selected().numpy()))
    packed = torch.zeros((len(logits), 2 * num + 3), dtype=torch.int32)
    packed[selected] = logprobs_by_sorting(logits[selected], token_ids[selected], num)
    return packed


def logprobs_by_sorting(
    logits: torch.Tensor, token_ids: torch.Tensor, num: int, normalizers: torch.Tensor | None = None
) -> torch.Tensor:
    """`token_logprobs_torch` for a few rows at a time, so that temporaries do not grow with ``n``.

    Args:
        normalizers: ``[n, 2]`` float32, subtracted from a row's logits one after the other; None: log_softmax.
    """
    packed = torch.empty((len(logits), 2 * num + 3), dtype=torch.int32, device=logits.device)
    step = rows_per_chunk(logits.shape[1], logits.device)
    for number in range(cdiv(len(logits), step)):
        chunk = slice(number * step, (number + 1) * step)
        values, sampled = logits[chunk].to(torch.float32), token_ids[chunk].unsqueeze(1)
        ids = torch.cat((sampled, _top_token_ids(values, num)), dim=1)  # [step, num + 1]
        if normalizers is None:
            logprobs = values.log_softmax(dim=-1).gather(1, ids)
        else:
            logprobs = values.gather(1, ids) - normalizers[chunk, :1] - normalizers[chunk, 1:]
        packed[chunk, : num + 1] = ids
        packed[chunk, num + 1 : -1] = logprobs.view(torch.int32)
        packed[chunk, -1] = (values >= values.gather(1, sampled)).sum(dim=-1)
    return packed


def _top_token_ids(values: torch.Tensor, num: int) -> torch.Tensor:
    """Ids of the ``num`` highest of ``values [n, vocab]`` float32, descending, the lower id first among equals.

    The order of equal values in topk is undefined. It runs on distinct integers instead: the value's bits, mapped to
    integers of the same order, above the complement of the id.
    """
    if num == 0:
        return torch.empty((len(values), 0), dtype=torch.int64, device=values.device)
    values = values + 0.0  # -0.0 equals 0.0
    bits = values.contiguous().view(torch.int32)
    # The bits of negative floats have the reverse order: flip all but the sign.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = values.shape[1] - 1
    complement = torch.arange(last, -1, -1, device=values.device)
    keys = (ordered.to(torch.int64) << 32) | complement  # [n, vocab]
    return last - (keys.topk(num).values & 0xFFFFFFFF)


def token_logprobs_triton(
    logits: torch.Tensor, token_ids: torch.Tensor, num: int, rows: LogprobRows | None = None
) -> torch.Tensor:
    """See `token_logprobs_torch`."""
    if num <= MAX_SELECTED:
        return select_logprobs(logits, token_ids, num, rows)[0]
    return logprobs_by_sorting(logits, token_ids, num, select_logprobs(logits, token_ids, 0)[1])


def select_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num: int, rows: LogprobRows | None = None
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
    dtypes = (torch.int64, torch.float32, torch.int32)
    tile_stats = [torch.empty((num_rows, num_tiles), dtype=dtype, device=device) for dtype in dtypes]
    sizes, indices = (token_ids, token_ids) if rows is None else rows
    arguments = (*tile_stats, logits, token_ids, indices, sizes, logits.stride(0), vocab_size)
    overlap = can_overlap(device)
    constants = {"has_sizes": rows is not None, "tile": _TILE, "overlap": overlap, **launch_options(overlap)}
    _tile_stats_kernel[(num_rows, num_tiles)](*arguments, **constants)
    tiles = {"num_tiles": num_tiles, "tiles_pow2": next_power_of_2(num_tiles)}
    _select_kernel[(num_rows,)](packed, normalizers, *arguments, num, **tiles, **constants)
    return packed, normalizers


@triton_kernel()
def _num_top(request, rows_ptr, sizes_ptr, num, has_sizes: tl.constexpr):
    """Number of top tokens; -1: the row has no logprobs."""
    count = num
    if has_sizes:
        row = tl.load(rows_ptr + request).to(tl.int64)
        count = tl.load(sizes_ptr + row, mask=row >= 0, other=0) - 1
    return count


# a token of a chunk of rows is not aligned; one kernel serves every number of logprobs
@triton_kernel(unspecialized=("token_ids_ptr", "rows_ptr", "sizes_ptr"))
def _tile_stats_kernel(
    best_ptr, sums_ptr, at_least_ptr, logits_ptr, token_ids_ptr, rows_ptr, sizes_ptr, row_stride, vocab_size,
    has_sizes: tl.constexpr, tile: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
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


@triton_kernel(unspecialized=("token_ids_ptr", "rows_ptr", "sizes_ptr", "num"))
def _select_kernel(
    packed_ptr, normalizers_ptr, best_ptr, sums_ptr, at_least_ptr, logits_ptr, token_ids_ptr, rows_ptr, sizes_ptr,
    row_stride, vocab_size, num,
    num_tiles: tl.constexpr, tiles_pow2: tl.constexpr, has_sizes: tl.constexpr, tile: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
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
        place = tl.full((), 1, tl.int32)
        while place <= tl.minimum(count, num):
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
