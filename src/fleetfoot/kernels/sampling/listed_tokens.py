"""Biases, bad words and min_tokens: single tokens of each row, from its list."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import triton_kernel
from fleetfoot.kernels.sampling.records import BIASES, PREFIX_ENDS, PREFIX_TOKENS, TOKENS, ListedTokens, TokenHistory

if TYPE_CHECKING:
    import triton.language as tl

_TILE = 128


def edit_listed_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    history: TokenHistory,
    listed: ListedTokens,
) -> None:
    """Add biases to ``logits``, and -inf to the last tokens of bad words whose prefixes the output ends with, and to
    stop tokens while the output has fewer than min_tokens.

    Args:
        logits: ``[n, vocab]`` float32, contiguous; changed.
        rows: ``[n]`` int32: entry ``rows[i]`` of all tables is that of row ``i``; -1: padding.
        seq_lens: ``[n]``: tokens of each sequence so far.
    """
    implementation = edit_listed_tokens_triton if logits.is_cuda else edit_listed_tokens_cpu
    implementation(logits, rows, seq_lens, history, listed)


def edit_listed_tokens_cpu(
    logits: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    history: TokenHistory,
    listed: ListedTokens,
) -> None:
    """The twin of the kernel, for CPU tensors."""
    counts = (listed.num_biases, listed.num_words, listed.num_stops)
    for i, (row, length) in enumerate(zip(rows.numpy().tolist(), seq_lens.numpy().tolist(), strict=True)):
        num_biases, num_words, num_stops = (int(count.numpy()[row]) if row >= 0 else 0 for count in counts)
        if num_biases + num_words + num_stops == 0:
            continue
        values, planes = logits.numpy()[i], listed.planes.numpy()[row]
        token_ids, ends = planes[TOKENS], planes[PREFIX_ENDS]
        values[token_ids[:num_biases]] += planes[BIASES].view(np.float32)[:num_biases]
        num_output = length - int(history.prompt_lens.numpy()[row])
        banned = []
        for entry in range(num_biases, num_biases + num_words):
            prefix = planes[PREFIX_TOKENS][ends[entry - 1] if entry else 0 : ends[entry]]
            if num_output >= len(prefix) and (history.tokens(row, length - len(prefix), length) == prefix).all():
                banned.append(token_ids[entry])
        if num_output < int(listed.min_tokens.numpy()[row]):
            banned += token_ids[num_biases + num_words : num_biases + num_words + num_stops].tolist()
        with np.errstate(invalid="ignore"):  # +inf - inf
            values[np.array(banned, dtype=np.int64)] -= np.inf


def edit_listed_tokens_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    history: TokenHistory,
    listed: ListedTokens,
) -> None:
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    overlap = can_overlap(logits.device)
    _listed_tokens_kernel[(num_rows,)](
        logits,
        rows,
        seq_lens,
        history.block_tables,
        history.token_pages,
        history.prompt_lens,
        listed.planes,
        listed.num_biases,
        listed.num_words,
        listed.num_stops,
        listed.min_tokens,
        vocab_size,
        history.block_tables.stride(0),
        listed.planes.stride(0),
        listed.planes.shape[2],
        block_size=history.block_size,
        tile=_TILE,
        overlap=overlap,
        num_warps=_TILE // 32,
        **launch_options(overlap),
    )


@triton_kernel()
def _listed_tokens_kernel(
    logits_ptr,
    rows_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    token_pages_ptr,
    prompt_lens_ptr,
    planes_ptr,
    num_biases_ptr,
    num_words_ptr,
    num_stops_ptr,
    min_tokens_ptr,
    vocab_size,
    table_stride,
    row_stride,
    capacity,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
):
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request).to(tl.int64)
    if row >= 0:
        logits_ptr += request * vocab_size
        tokens_ptr = planes_ptr + row * row_stride
        num_biases = tl.load(num_biases_ptr + row)
        first = num_biases * 0
        while first < num_biases:
            entry = first + tl.arange(0, tile)
            is_entry = entry < num_biases
            token_id = tl.load(tokens_ptr + entry, mask=is_entry, other=0)
            bias = tl.load(tokens_ptr + capacity + entry, mask=is_entry, other=0).to(tl.float32, bitcast=True)
            logit = tl.load(logits_ptr + token_id, mask=is_entry)
            tl.store(logits_ptr + token_id, logit + bias, mask=is_entry)
            first += tile
        tl.debug_barrier()  # a token with a bias may be banned as well, by another thread
        first_stop = num_biases + tl.load(num_words_ptr + row)
        num_entries = first_stop + tl.load(num_stops_ptr + row)
        length = tl.load(seq_lens_ptr + request).to(tl.int32)
        num_output = length - tl.load(prompt_lens_ptr + row)
        min_tokens = tl.load(min_tokens_ptr + row)
        ends_ptr = tokens_ptr + 2 * capacity
        first = num_biases
        while first < num_entries:
            entry = first + tl.arange(0, tile)
            is_entry = entry < num_entries
            token_id = tl.load(tokens_ptr + entry, mask=is_entry, other=0)
            end = tl.load(ends_ptr + entry, mask=is_entry, other=0)
            prefix_len = end - tl.load(ends_ptr + entry - 1, mask=is_entry & (entry > 0), other=0)
            is_banned = is_entry & tl.where(entry < first_stop, num_output >= prefix_len, num_output < min_tokens)
            longest = tl.max(tl.where(is_banned & (entry < first_stop), prefix_len, 0), axis=0)
            back = longest * 0
            while back < longest:  # from the last token of the prefix to the first
                is_wanted = is_banned & (entry < first_stop) & (back < prefix_len)
                expected = tl.load(tokens_ptr + 3 * capacity + end - 1 - back, mask=is_wanted, other=0)
                position = length - 1 - back
                block = tl.load(block_tables_ptr + row * table_stride + position // block_size).to(tl.int64)
                token = tl.load(token_pages_ptr + block * block_size + position % block_size)
                is_banned = is_banned & ((is_wanted == 0) | (expected == token))
                back += 1
            # an entry that stands there twice adds -inf twice, and finds the same
            logit = tl.load(logits_ptr + token_id, mask=is_banned)
            tl.store(logits_ptr + token_id, logit + float("-inf"), mask=is_banned)
            first += tile
