"""Prompt lookup decoding (Saxena 2023): propose the tokens that followed an earlier occurrence of the last n-gram.

The longest n-gram at the end of the sequence that also occurs earlier is used, in its latest occurrence. If the tokens
after it reach the end of the sequence, the proposal continues with its own beginning, so that a sequence that repeats
with a short period is continued with that period.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fleetfoot.kernels.prepare.tables import RowTables
from fleetfoot.kernels.runtime.triton_support import next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl

NO_DRAFT = -1
_TILE = 1024
"""Positions that a program of the kernel compares at once."""


def prompt_lookup(token_ids: np.ndarray, num_drafts: int, max_ngram: int, min_ngram: int) -> np.ndarray:
    """Drafts for one sequence.

    Args:
        token_ids: ``[num_tokens]``, any integer type: all known tokens.
        num_drafts: k. max_ngram, min_ngram: tokens of the longest and of the shortest n-gram, at least 1.

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


def propose_ngrams_torch(
    idx_mapping: torch.Tensor, seq_lens: torch.Tensor, rows: RowTables, max_ngram: int, min_ngram: int
) -> None:
    """Drafts for a batch, from the token pages of Model Runner V2.

    Args:
        idx_mapping: ``[n]``: each request's row; -1: padding.
        seq_lens: ``[n]``: known tokens; all but the last, which is in ``last_sampled``, are in the pages.
        rows: ``draft_tokens`` is written.
        max_ngram, min_ngram: as for `prompt_lookup`.
    """
    row = idx_mapping.clamp(min=0).to(torch.int64)
    token_ids = rows.token_pages.view(-1, rows.block_size)[rows.block_table[row]].flatten(1)  # [n, B * block_size]
    position = torch.arange(token_ids.shape[1], device=token_ids.device)
    last = (seq_lens.to(torch.int64) - 1).clamp(min=0).unsqueeze(1)  # [n, 1]: position of the newest token
    token_ids = torch.where(position == last, rows.last_sampled[row].unsqueeze(1), token_ids)
    is_match = position < last  # [n, B * block_size], by the position where an n-gram ends
    lengths = torch.zeros_like(token_ids)
    for back in range(max_ngram):
        target = token_ids.gather(1, (last - back).clamp(min=0))
        is_match = is_match & (position >= back) & (token_ids.roll(back, 1) == target)
        lengths += is_match
    longest = lengths.amax(1, keepdim=True)
    end = torch.where(lengths == longest, position, -1).amax(1, keepdim=True)  # later positions win
    offset = torch.arange(rows.draft_tokens.shape[1], device=token_ids.device)
    source = end + 1 + offset % (last - end).clamp(min=1)  # [n, k]; without a match, any position
    drafts = token_ids.gather(1, source.clamp(max=len(position) - 1))
    target_row = torch.where(idx_mapping < 0, len(rows.draft_tokens) - 1, row)
    rows.draft_tokens.index_copy_(0, target_row, torch.where(longest >= min_ngram, drafts, NO_DRAFT).to(torch.int32))


def propose_ngrams_numpy(
    idx_mapping: torch.Tensor, seq_lens: torch.Tensor, rows: RowTables, max_ngram: int, min_ngram: int
) -> None:
    """See `propose_ngrams_torch`."""
    tensors = rows.token_pages, rows.block_table, rows.last_sampled, rows.draft_tokens
    pages, tables, newest, drafts = (tensor.numpy() for tensor in tensors)
    in_pages = pages.reshape(-1, rows.block_size)  # [num_blocks, block_size]
    for row, length in zip(idx_mapping.tolist(), seq_lens.tolist(), strict=True):
        if row < 0:
            continue
        num_blocks = -(-length // rows.block_size)
        token_ids = in_pages[tables[row, :num_blocks]].reshape(-1)[:length]  # a copy
        token_ids[length - 1] = newest[row]
        drafts[row] = prompt_lookup(token_ids, drafts.shape[1], max_ngram, min_ngram)


def propose_ngrams_triton(
    idx_mapping: torch.Tensor, seq_lens: torch.Tensor, rows: RowTables, max_ngram: int, min_ngram: int
) -> None:
    """See `propose_ngrams_torch`."""
    num_drafts = rows.draft_tokens.shape[1]
    _propose_ngrams_kernel[(len(idx_mapping),)](
        idx_mapping, seq_lens, rows.last_sampled, rows.token_pages, rows.block_table, rows.draft_tokens,
        rows.block_table.stride(0), rows.draft_tokens.stride(0),
        block_size=rows.block_size, max_ngram=max_ngram, min_ngram=min_ngram, num_drafts=num_drafts,
        draft_tile=next_power_of_2(num_drafts), tile=_TILE,
    )  # fmt: skip


@triton_kernel(specialize=False)
def _propose_ngrams_kernel(
    idx_mapping_ptr, seq_lens_ptr, last_sampled_ptr, pages_ptr, table_ptr, draft_tokens_ptr, table_stride, draft_stride,
    block_size: tl.constexpr, max_ngram: tl.constexpr, min_ngram: tl.constexpr, num_drafts: tl.constexpr,
    draft_tile: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
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
