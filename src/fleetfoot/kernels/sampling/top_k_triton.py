"""Draws with a top-k of at most `MAX_TOP_K` on a GPU: one program for each row, which reads few of its logits.

A row of logits is divided into groups of `GROUP` consecutive tokens, and the pass that finds a row's best token also
stores the best logit of each group. The ``k``-th best of these is a lower bound of the row's ``k``-th best logit, so
top-k keeps tokens of the groups above this bound alone: about ``k`` groups, unless many are equal. Their tokens above
the bound are the row's candidates, mostly ``k`` and a few more.

A candidate is an integer, its *key*: the depth of its score, and below it the token id. Min-p, top-k and top-p keep the
keys below a cut. With few candidates, each is compared with each; with more (a large ``k``, or many equal logits), the
cut is found by search. The token is that of `fleetfoot.kernels.sampling.sample.sample_torch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.runtime.dependent_launch import launch_options
from fleetfoot.kernels.runtime.triton_support import (
    best_candidate,
    candidate_index,
    candidate_value,
    next_power_of_2,
    pack_candidates,
    triton_kernel,
)
from fleetfoot.kernels.sampling.draws_triton import begin_row, eighths, exact_noise, mass_of, score_depth
from fleetfoot.kernels.sampling.sample import MAX_TOP_K, RandomRows

if TYPE_CHECKING:
    import triton.language as tl

GROUP = 64
"""Tokens in a group. The search for the bound takes longer with smaller groups, and reading tokens with larger ones."""
_CHUNK = 32
"""Groups that a program reads at once."""
_FEW, _SOME = 64, 256
"""Numbers of candidates up to which each is compared with each; above `_FEW` with `_PART` at a time, as the compiler
unrolls a comparison."""
_PART = 32
_MANY = 1024
"""Candidates that a program reads at once in a search."""
_SLACK = 16
"""Groups beyond ``k`` at which the search for the bound ends: reading these costs less than a smaller interval."""


def draw_top_k(
    token_ids: torch.Tensor,
    best: torch.Tensor,
    highest: torch.Tensor,
    groups: torch.Tensor,
    logits: torch.Tensor,
    random: RandomRows,
    *,
    invalid: torch.Tensor | None,
    overlap: bool,
) -> None:
    """Write the token of every row: with such a top-k drawn from candidates, else the best of ``best``.

    Args:
        token_ids: ``[n]`` int64, written.
        best: ``[n, num_tiles]`` int64 (`pack_candidates`): what was drawn in each tile.
        highest: ``[n, num_tiles]`` int64: the best token of each tile.
        groups: ``[n, num_groups]`` float32: the best logit of each group.
        logits: ``[n, vocab]``, rows contiguous.
        random: with filters.
        invalid: see `sample_torch`.
    """
    filters = random.filters
    assert filters is not None
    num_rows, vocab_size = logits.shape
    num_tiles, num_groups = best.shape[1], groups.shape[1]
    above = torch.empty((num_rows, num_groups), dtype=torch.int32, device=logits.device)  # groups above the bound
    # Token ids of candidates; of up to `_SOME`, their depths after them.
    close = torch.empty((num_rows, max(vocab_size, 2 * _SOME)), dtype=torch.int32, device=logits.device)
    _draw_top_k_kernel[(num_rows,)](
        token_ids, token_ids if invalid is None else invalid, best, highest, groups, above, close, logits,
        random.temperatures, random.seeds, random.positions, filters.log_min_p, filters.top_k, filters.top_p,
        token_ids if random.rows is None else random.rows,
        logits.stride(0), close.stride(0), vocab_size, num_groups,
        has_rows=random.rows is not None, has_invalid=invalid is not None, num_tiles=num_tiles,
        tiles_pow2=next_power_of_2(num_tiles), groups_pow2=next_power_of_2(num_groups), max_top_k=MAX_TOP_K,
        group=GROUP, chunk=_CHUNK, slack=_SLACK, few=_FEW, some=_SOME, part=_PART, many=_MANY, overlap=overlap,
        num_warps=8, **launch_options(overlap),
    )  # fmt: skip


@triton_kernel()
def _bound(depth, k, num_groups, slack: tl.constexpr):
    """A depth that ``k`` to ``k + slack`` groups (more if equal) reach, of ``depth [groups_pow2]``."""
    low = k * 0
    high = low + 0x7F800001  # past -inf
    num_upto = low + num_groups
    while (high - low > 1) & (num_upto > k + slack):
        bounds = eighths(low, high)
        above = tl.sum((depth[None, :] < bounds[:, None]).to(tl.int32), 1)  # [8]
        is_passed = above < k
        low = tl.max(tl.where(is_passed, bounds, low), 0)
        high = tl.min(tl.where(is_passed, high, bounds), 0)
        num_upto = tl.min(tl.where(is_passed, num_upto, above), 0)
    return high - 1


@triton_kernel()
def _collect(
    close_ptr, above_ptr, logits_ptr, depth, limit, highest, temperature, vocab_size,
    groups_pow2: tl.constexpr, group: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Store the tokens of depths up to ``limit``, in any order. Returns their number."""
    is_above = depth <= limit
    tl.store(above_ptr + tl.cumsum(is_above.to(tl.int32), 0) - 1, tl.arange(0, groups_pow2), mask=is_above)
    num_above = tl.sum(is_above.to(tl.int32), 0)
    tl.debug_barrier()  # what other threads stored is read
    num_close = limit * 0
    start = limit * 0
    while start < num_above:
        slot = start + tl.arange(0, chunk)
        first = tl.load(above_ptr + slot, mask=slot < num_above, other=0) * group
        index = first[:, None] + tl.arange(0, group)[None, :]  # [chunk, group]
        is_token = (slot < num_above)[:, None] & (index < vocab_size)
        logit = tl.load(logits_ptr + index, mask=is_token, other=float("-inf")).to(tl.float32)
        is_close = is_token & (score_depth(logit, highest, temperature) <= limit)
        is_close = tl.reshape(is_close, [chunk * group]).to(tl.int32)
        slot = num_close + tl.cumsum(is_close, 0) - 1
        tl.store(close_ptr + slot, tl.reshape(index, [chunk * group]), mask=is_close > 0)
        num_close += tl.sum(is_close, 0)
        start += chunk
    tl.debug_barrier()
    return num_close


@triton_kernel()
def _keys(close_ptr, logits_ptr, start, num_close, highest, temperature, size: tl.constexpr):
    """``[size]`` int64 keys of the candidates from ``start`` on; past the last, the largest integer."""
    slot = start + tl.arange(0, size)
    index = tl.load(close_ptr + slot, mask=slot < num_close, other=0)
    depth = score_depth(tl.load(logits_ptr + index).to(tl.float32), highest, temperature)
    return tl.where(slot < num_close, (depth.to(tl.int64) << 32) | index, 0x7FFFFFFFFFFFFFFF)


@triton_kernel()
def _mass(key, cut):
    """int64 mass of the keys below ``cut``, 0 of others."""
    return tl.where(key < cut, mass_of(tl.where(key < cut, key >> 32, 0).to(tl.int32)), 0)


@triton_kernel()
def _drawn(key, cut, seed, position):
    """The best candidate for the argmax (`pack_candidates`) of the keys below ``cut``."""
    index = (key & 0x7FFFFFFF).to(tl.int32)
    score = -(key >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    noisy = pack_candidates(score + exact_noise(seed, position, index), index)
    return tl.max(tl.where(key < cut, noisy, -0x7FFFFFFFFFFFFFFF - 1), axis=0)


@triton_kernel()
def _draw_few(key, top_k, top_p, seed, position):
    """The token drawn from ``key [n]``, each of which is compared with each."""
    past = 0x7FFFFFFFFFFFFFFF
    depth = key >> 32
    num_before = tl.sum((depth[None, :] < depth[:, None]).to(tl.int32), 1)
    cut = tl.min(tl.where(num_before < top_k, past, depth << 32), 0)
    if top_p < 1.0:
        mass = _mass(key, cut)
        target = tl.sum(mass, 0).to(tl.float64) * top_p.to(tl.float64)
        mass_before = tl.sum(tl.where(key[None, :] < key[:, None], mass[None, :], 0), 1)
        cut = tl.minimum(cut, tl.min(tl.where(mass_before.to(tl.float64) < target, past, key), 0))
    return candidate_index(_drawn(key, cut, seed, position))


@triton_kernel()
def _part_of_keys(close_ptr, start, num_close, some: tl.constexpr, part: tl.constexpr):
    """``[part]`` of the keys that `_draw_some` has stored."""
    slot = start + tl.arange(0, part)
    depth = tl.load(close_ptr + some + slot)
    index = tl.load(close_ptr + slot, mask=slot < num_close, other=0)
    return tl.where(slot < num_close, (depth.to(tl.int64) << 32) | index, 0x7FFFFFFFFFFFFFFF)


@triton_kernel()
def _draw_some(key, close_ptr, num_close, top_k, top_p, seed, position, some: tl.constexpr, part: tl.constexpr):
    """`_draw_few` with a part of ``key [some]`` at a time."""
    past = 0x7FFFFFFFFFFFFFFF
    depth = key >> 32
    tl.store(close_ptr + some + tl.arange(0, some), depth.to(tl.int32))
    tl.debug_barrier()  # other threads read them
    num_before = tl.zeros([some], tl.int32)
    start = num_close * 0
    while start < num_close:
        other = _part_of_keys(close_ptr, start, num_close, some, part) >> 32
        num_before += tl.sum((other[None, :] < depth[:, None]).to(tl.int32), 1)
        start += part
    cut = tl.min(tl.where(num_before < top_k, past, depth << 32), 0)
    if top_p < 1.0:
        target = tl.sum(_mass(key, cut), 0).to(tl.float64) * top_p.to(tl.float64)
        mass_before = tl.zeros([some], tl.int64)
        start = num_close * 0
        while start < num_close:
            other = _part_of_keys(close_ptr, start, num_close, some, part)
            mass = _mass(other, cut)
            mass_before += tl.sum(tl.where(other[None, :] < key[:, None], mass[None, :], 0), 1)
            start += part
        cut = tl.minimum(cut, tl.min(tl.where(mass_before.to(tl.float64) < target, past, key), 0))
    return candidate_index(_drawn(key, cut, seed, position))


@triton_kernel()
def _weight_before(
    bounds, cut, close_ptr, logits_ptr, num_close, highest, temperature, is_mass: tl.constexpr, size: tl.constexpr
):
    """int64: how many keys below ``cut`` are below each of ``bounds [8]``, or their mass."""
    weights = tl.zeros([8], tl.int64)
    start = num_close * 0
    while start < num_close:
        key = _keys(close_ptr, logits_ptr, start, num_close, highest, temperature, size)
        weight = (key < cut).to(tl.int64)
        if is_mass:
            weight = _mass(key, cut)
        weights += tl.sum(tl.where(key[None, :] < bounds[:, None], weight[None, :], 0), 1)
        start += size
    return weights


@triton_kernel()
def _search(
    target, cut, close_ptr, logits_ptr, num_close, highest, temperature, is_mass: tl.constexpr, size: tl.constexpr
):
    """The largest key below ``cut`` with predecessors that weigh less than ``target`` (float64)."""
    first, stop = cut * 0, cut
    while stop - first > 1:
        bounds = eighths(first, stop)
        weights = _weight_before(bounds, cut, close_ptr, logits_ptr, num_close, highest, temperature, is_mass, size)
        is_passed = weights.to(tl.float64) < target
        first = tl.max(tl.where(is_passed, bounds, first), 0)
        stop = tl.min(tl.where(is_passed, stop, bounds), 0)
    return first


@triton_kernel()
def _draw_many(
    close_ptr, logits_ptr, num_close, highest, temperature, limit, top_k, top_p, seed, position, size: tl.constexpr
):
    """The token drawn from any number of candidates: their cut is found by search."""
    cut = (limit.to(tl.int64) + 1) << 32
    target = top_k.to(tl.float64)
    last = _search(target, cut, close_ptr, logits_ptr, num_close, highest, temperature, False, size)
    cut = tl.minimum(cut, ((last >> 32) + 1) << 32)
    if top_p < 1.0:
        bounds = cut + tl.zeros([8], tl.int64)
        masses = _weight_before(bounds, cut, close_ptr, logits_ptr, num_close, highest, temperature, True, size)
        target = tl.max(masses, 0).to(tl.float64) * top_p.to(tl.float64)
        last = _search(target, cut, close_ptr, logits_ptr, num_close, highest, temperature, True, size)
        cut = tl.minimum(cut, last + 1)
    best = cut * 0 - 0x7FFFFFFFFFFFFFFF - 1
    start = num_close * 0
    while start < num_close:
        key = _keys(close_ptr, logits_ptr, start, num_close, highest, temperature, size)
        best = tl.maximum(best, _drawn(key, cut, seed, position))
        start += size
    return candidate_index(best)


@triton_kernel(unspecialized=("invalid_ptr", "rows_ptr", "positions_ptr"))
def _draw_top_k_kernel(
    token_ids_ptr, invalid_ptr, best_ptr, highest_ptr, groups_ptr, above_ptr, close_ptr, logits_ptr,
    temperatures_ptr, seeds_ptr, positions_ptr, log_min_p_ptr, top_k_ptr, top_p_ptr, rows_ptr,
    row_stride, close_stride, vocab_size, num_groups,
    has_rows: tl.constexpr, has_invalid: tl.constexpr, num_tiles: tl.constexpr, tiles_pow2: tl.constexpr,
    groups_pow2: tl.constexpr, max_top_k: tl.constexpr, group: tl.constexpr, chunk: tl.constexpr, slack: tl.constexpr,
    few: tl.constexpr, some: tl.constexpr, part: tl.constexpr, many: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    request, row, temperature = begin_row(rows_ptr, temperatures_ptr, has_rows, overlap)
    top_k = tl.load(top_k_ptr + row, mask=row >= 0, other=0)
    logits_ptr += request * row_stride
    token_id = candidate_index(best_candidate(best_ptr + request * num_tiles, num_tiles, tiles_pow2))
    highest = candidate_value(best_candidate(highest_ptr + request * num_tiles, num_tiles, tiles_pow2))
    if (temperature > 0) & (top_k > 0) & (top_k <= max_top_k) & (tl.abs(highest) < float("inf")):  # false for NaN
        top_p, seed = tl.load(top_p_ptr + row), tl.load(seeds_ptr + row)
        position = tl.load(positions_ptr + request)
        group_ids = tl.arange(0, groups_pow2)
        is_group = group_ids < num_groups
        logit = tl.load(groups_ptr + request * num_groups + group_ids, mask=is_group, other=float("-inf"))
        depth = tl.where(is_group, score_depth(logit, highest, temperature), 0x7FFFFFFF)
        limit = tl.load(log_min_p_ptr + row).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        limit = tl.minimum(limit, _bound(depth, tl.minimum(top_k, num_groups), num_groups, slack))
        limit = tl.minimum(limit, 0x7F7FFFFF)  # not -inf: a mask excludes most of a row, and none of that is drawn
        close_ptr += request * close_stride
        above_ptr += request * num_groups
        num_close = _collect(
            close_ptr, above_ptr, logits_ptr, depth, limit, highest, temperature, vocab_size, groups_pow2, group, chunk
        )
        if num_close <= few:
            key = _keys(close_ptr, logits_ptr, 0, num_close, highest, temperature, few)
            token_id = _draw_few(key, top_k, top_p, seed, position)
        elif num_close <= some:
            key = _keys(close_ptr, logits_ptr, 0, num_close, highest, temperature, some)
            token_id = _draw_some(key, close_ptr, num_close, top_k, top_p, seed, position, some, part)
        else:
            token_id = _draw_many(
                close_ptr, logits_ptr, num_close, highest, temperature, limit, top_k, top_p, seed, position, many
            )
    tl.store(token_ids_ptr + request, token_id)
    if has_invalid:
        logit = tl.load(logits_ptr + token_id).to(tl.float32)
        tl.store(invalid_ptr + request, (tl.abs(logit) < float("inf")) == 0)
