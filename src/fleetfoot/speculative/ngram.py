"""Prompt lookup decoding (Saxena 2023): propose the tokens that followed an earlier occurrence of the last n-gram.

The longest n-gram at the end of the sequence that also occurs earlier is used, in its latest occurrence. If the tokens
after it reach the end of the sequence, the proposal continues with its own beginning, so that a sequence that repeats
with a short period is continued with that period.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fleetfoot.kernels.runtime.triton_support import next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl

NO_DRAFT = -1
_TILE = 1024
"""Positions that a program of the kernel compares at once."""


def propose_ngrams(token_ids: np.ndarray, num_drafts: int, max_ngram: int, min_ngram: int) -> np.ndarray:
    """Drafts for one sequence.

    Args:
        token_ids: ``[num_tokens]``, any integer type: all known tokens.
        num_drafts: k.
        max_ngram: tokens of the longest n-gram.
        min_ngram: tokens of the shortest n-gram, at least 1.

    Returns ``[k]`` int32; all -1 if no n-gram occurs earlier.
    """
    drafts = np.full(num_drafts, NO_DRAFT, dtype=np.int32)
    last = len(token_ids) - 1
    if last < min_ngram:
        return drafts
    is_match = token_ids[:last] == token_ids[last]  # [last], by the position where an n-gram ends
    lengths = is_match.astype(np.int32)
    for back in range(1, min(max_ngram, last)):
        is_match[back:] &= token_ids[: last - back] == token_ids[last - back]
        is_match[:back] = False
        lengths += is_match
    longest = int(lengths.max())
    if longest < min_ngram:
        return drafts
    end = last - 1 - int(np.argmax(lengths[::-1] == longest))
    drafts[:] = token_ids[end + 1 + np.arange(num_drafts) % (last - end)]
    return drafts


def propose_ngrams_paged(
    idx_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    last_sampled: torch.Tensor,
    token_pages: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    max_ngram: int,
    min_ngram: int,
    *,
    draft_tokens: torch.Tensor,
) -> None:
    """Drafts for a batch, from the token pages of Model Runner V2, without host-device synchronization.

    Args:
        idx_mapping: ``[n]`` int32: each request's row; -1: padding, for which nothing is written.
        seq_lens: ``[n]`` int32: known tokens; all but the last are in the pages.
        last_sampled: ``[R]`` int32: the last known token of each row.
        token_pages: ``[num_slots]`` int32.
        block_table: ``[R, W]`` int32.
        block_size: tokens in a block.
        max_ngram, min_ngram: as for `propose_ngrams`.
        draft_tokens: written, ``[>= R, k]`` int32: by row.
    """
    implementation = propose_ngrams_paged_triton if token_pages.is_cuda else propose_ngrams_paged_cpu
    implementation(
        idx_mapping,
        seq_lens,
        last_sampled,
        token_pages,
        block_table,
        block_size,
        max_ngram,
        min_ngram,
        draft_tokens=draft_tokens,
    )


def propose_ngrams_paged_cpu(
    idx_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    last_sampled: torch.Tensor,
    token_pages: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    max_ngram: int,
    min_ngram: int,
    *,
    draft_tokens: torch.Tensor,
) -> None:
    """The reference of the kernel, for CPU tensors."""
    pages, tables, newest, drafts = (t.numpy() for t in (token_pages, block_table, last_sampled, draft_tokens))
    num_drafts = drafts.shape[1]
    in_pages = pages.reshape(-1, block_size)  # [num_blocks, block_size]
    for row, length in zip(idx_mapping.tolist(), seq_lens.tolist(), strict=True):
        if row < 0:
            continue
        num_blocks = -(-length // block_size)
        token_ids = in_pages[tables[row, :num_blocks]].reshape(-1)[:length]  # a copy
        token_ids[length - 1] = newest[row]
        drafts[row] = propose_ngrams(token_ids, num_drafts, max_ngram, min_ngram)


def propose_ngrams_paged_triton(
    idx_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    last_sampled: torch.Tensor,
    token_pages: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    max_ngram: int,
    min_ngram: int,
    *,
    draft_tokens: torch.Tensor,
) -> None:
    """See `propose_ngrams_paged`."""
    num_drafts = draft_tokens.shape[1]
    _propose_ngrams_kernel[(len(idx_mapping),)](
        idx_mapping,
        seq_lens,
        last_sampled,
        token_pages,
        block_table,
        draft_tokens,
        block_table.stride(0),
        draft_tokens.stride(0),
        block_size=block_size,
        max_ngram=max_ngram,
        min_ngram=min_ngram,
        num_drafts=num_drafts,
        draft_tile=next_power_of_2(num_drafts),
        tile=_TILE,
    )


@triton_kernel(specialize=False)
def _propose_ngrams_kernel(
    idx_mapping_ptr,
    seq_lens_ptr,
    last_sampled_ptr,
    pages_ptr,
    table_ptr,
    draft_tokens_ptr,
    table_stride,
    draft_stride,
    block_size: tl.constexpr,
    max_ngram: tl.constexpr,
    min_ngram: tl.constexpr,
    num_drafts: tl.constexpr,
    draft_tile: tl.constexpr,
    tile: tl.constexpr,
):
    """One program per request; it scans the sequence and keeps the best position where an n-gram ends."""
    request = tl.program_id(0)
    row = tl.load(idx_mapping_ptr + request).to(tl.int64)
    if row < 0:
        return
    last = tl.load(seq_lens_ptr + request) - 1  # position of the newest token
    newest = tl.load(last_sampled_ptr + row)
    table = table_ptr + row * table_stride
    best_length = 0
    best_end = -1
    for start in range(0, last, tile):
        end = start + tl.arange(0, tile)
        matches = end < last
        length = tl.zeros((tile,), dtype=tl.int32)
        for back in tl.static_range(max_ngram):
            position = end - back
            matches = matches & (position >= 0)
            block = tl.load(table + position // block_size, mask=matches, other=0).to(tl.int64)
            token = tl.load(pages_ptr + block * block_size + position % block_size, mask=matches, other=-1)
            target = newest
            if back > 0:  # if the sequence is too short, no position matches
                target_position = tl.maximum(last - back, 0)
                target_block = tl.load(table + target_position // block_size).to(tl.int64)
                target = tl.load(pages_ptr + target_block * block_size + target_position % block_size)
            matches = matches & (token == target)
            length += matches.to(tl.int32)
        longest = tl.max(length, axis=0)
        is_best = (longest >= best_length) & (longest > 0)  # later positions win
        best_end = tl.where(is_best, tl.max(tl.where(length == longest, end, -1), axis=0), best_end)
        best_length = tl.maximum(best_length, longest)
    offset = tl.arange(0, draft_tile)
    draft = tl.full((draft_tile,), -1, dtype=tl.int32)
    if best_length >= min_ngram:
        source = best_end + 1 + offset % (last - best_end)
        block = tl.load(table + source // block_size).to(tl.int64)
        token = tl.load(pages_ptr + block * block_size + source % block_size)
        draft = tl.where(source == last, newest, token)
    tl.store(draft_tokens_ptr + row * draft_stride + offset, draft, mask=offset < num_drafts)
