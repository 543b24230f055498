"""Logits processors on a GPU, in five launches with grids that depend on shapes alone.

`process_logits_triton` implements `fleetfoot.kernels.sampling.logits_processors.process_logits_torch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import cdiv, triton_kernel
from fleetfoot.kernels.sampling.logits_processors import NO_LONG_LISTS, ListedTokens, LogitsProcessorTables

if TYPE_CHECKING:
    import triton.language as tl

_ALLOWED_TILE = 2048
_LISTED_TILE = 128
_PENALTY_TILE = 512
_PENALTY_PROGRAMS = 16
"""Programs that share the tokens of a row."""
_OF_LISTS = (
    *("rows_ptr", "seq_lens_ptr"),
    *("planes_ptr", "num_biases_ptr", "num_words_ptr", "num_stops_ptr", "row_stride", "capacity"),
)
"""Arguments of one kernel for the tables and for a long list, which has a tensor of another size and place."""


def process_logits_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    tables: LogitsProcessorTables,
    long_lists: Mapping[int, ListedTokens] = NO_LONG_LISTS,
) -> torch.Tensor:
    """See `process_logits_torch`.

    Penalties take three launches over the tokens of the penalized rows. Of the scratch, ``[n, vocab]`` int32, only the
    entries of these tokens are accessed: set to 0, then incremented, then exchanged for 0 by every program that has the
    token. The program that receives the count penalizes the token; the others receive 0.
    """
    num_rows, vocab_size = logits.shape
    processed = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return processed
    overlap = can_overlap(logits.device)
    launch = {"overlap": overlap, **launch_options(overlap)}
    history, masks = tables.history, tables.allowed_masks
    _keep_allowed_kernel[(num_rows, cdiv(vocab_size, _ALLOWED_TILE))](
        processed, logits, rows, tables.is_limited, masks, logits.stride(0), vocab_size, masks.stride(0),
        tile=_ALLOWED_TILE, **launch,
    )  # fmt: skip
    pages = (history.block_tables, history.token_pages, history.prompt_lens)
    strides = (vocab_size, history.block_tables.stride(0))
    lists = [(rows, tables.listed)]
    lists += [(torch.where(rows == row, rows, -1), listed) for row, listed in long_lists.items()]
    for listed_rows, listed in lists:
        _listed_tokens_kernel[(num_rows,)](
            processed, listed_rows, seq_lens, *pages, listed.planes, listed.num_biases, listed.num_words,
            listed.num_stops, listed.min_tokens, *strides, listed.planes.stride(0), listed.planes.shape[2],
            block_size=history.block_size, tile=_LISTED_TILE, num_warps=_LISTED_TILE // 32, **launch,
        )  # fmt: skip
    counts = torch.empty((num_rows, vocab_size), dtype=torch.int32, device=logits.device)
    penalties = (tables.repetition, tables.frequency, tables.presence)
    for phase in range(3):
        _penalties_kernel[(num_rows, _PENALTY_PROGRAMS)](
            processed, counts, rows, seq_lens, *pages, *penalties, *strides,
            block_size=history.block_size, phase=phase, num_programs=_PENALTY_PROGRAMS, tile=_PENALTY_TILE,
            enable_fp_fusion=False,  # frequency * count is rounded before the subtraction, as on a CPU
            **launch,
        )  # fmt: skip
    return processed


@triton_kernel(unspecialized=("rows_ptr",))
def _keep_allowed_kernel(
    edited_ptr, logits_ptr, rows_ptr, is_limited_ptr, masks_ptr, row_stride, vocab_size, mask_stride,
    tile: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request).to(tl.int64)
    if row >= 0:
        index = tl.program_id(1) * tile + tl.arange(0, tile)
        is_token = index < vocab_size
        logit = tl.load(logits_ptr + request * row_stride + index, mask=is_token).to(tl.float32)
        if tl.load(is_limited_ptr + row) != 0:
            words = tl.load(masks_ptr + row * mask_stride + index // 32, mask=is_token, other=0)
            is_allowed = ((words >> (index % 32)) & 1) != 0
            logit = tl.where(is_allowed, logit, logit + float("-inf"))
        tl.store(edited_ptr + request * vocab_size + index, logit, mask=is_token)


@triton_kernel(unspecialized=_OF_LISTS)
def _listed_tokens_kernel(
    logits_ptr, rows_ptr, seq_lens_ptr, block_tables_ptr, token_pages_ptr, prompt_lens_ptr, planes_ptr, num_biases_ptr,
    num_words_ptr, num_stops_ptr, min_tokens_ptr, vocab_size, table_stride, row_stride, capacity,
    block_size: tl.constexpr, tile: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
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
                is_checked = is_banned & (entry < first_stop) & (back < prefix_len)
                expected = tl.load(tokens_ptr + 3 * capacity + end - 1 - back, mask=is_checked, other=0)
                position = length - 1 - back
                block = tl.load(block_tables_ptr + row * table_stride + position // block_size).to(tl.int64)
                token = tl.load(token_pages_ptr + block * block_size + position % block_size)
                is_banned = is_banned & ((is_checked == 0) | (expected == token))
                back += 1
            # a duplicate entry adds -inf twice, with the same result
            logit = tl.load(logits_ptr + token_id, mask=is_banned)
            tl.store(logits_ptr + token_id, logit + float("-inf"), mask=is_banned)
            first += tile


@triton_kernel(unspecialized=("rows_ptr", "seq_lens_ptr"))
def _penalties_kernel(
    logits_ptr, counts_ptr, rows_ptr, seq_lens_ptr, block_tables_ptr, token_pages_ptr, prompt_lens_ptr, repetition_ptr,
    frequency_ptr, presence_ptr, vocab_size, table_stride,
    block_size: tl.constexpr, phase: tl.constexpr, num_programs: tl.constexpr, tile: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request).to(tl.int64)
    repetition = tl.load(repetition_ptr + row, mask=row >= 0, other=1.0)
    frequency = tl.load(frequency_ptr + row, mask=row >= 0, other=0.0)
    presence = tl.load(presence_ptr + row, mask=row >= 0, other=0.0)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        logits_ptr += request * vocab_size
        counts_ptr += request * vocab_size
        length = tl.load(seq_lens_ptr + request).to(tl.int32)
        prompt_len = tl.load(prompt_lens_ptr + row)
        first = tl.where(repetition != 1.0, 0, prompt_len) + tl.program_id(1) * tile
        while first < length:
            position = first + tl.arange(0, tile)
            is_known = position < length
            block = tl.load(block_tables_ptr + row * table_stride + position // block_size, mask=is_known, other=0)
            slot = block.to(tl.int64) * block_size + position % block_size
            token_id = tl.load(token_pages_ptr + slot, mask=is_known, other=0)
            if phase == 0:
                tl.store(counts_ptr + token_id, 0, mask=is_known)
            elif phase == 1:  # occurrences in the output, below a bit for the prompt
                in_prompt = is_known & (position < prompt_len)
                tl.atomic_or(counts_ptr + token_id, 1 << 30, mask=in_prompt, sem="relaxed")
                tl.atomic_add(counts_ptr + token_id, 1, mask=is_known & (position >= prompt_len), sem="relaxed")
            else:
                found = tl.atomic_xchg(counts_ptr + token_id, 0, mask=is_known, sem="relaxed")
                is_mine = is_known & (found != 0)
                count = (found & 0x3FFFFFFF).to(tl.float32)
                logit = tl.load(logits_ptr + token_id, mask=is_mine, other=0.0)
                logit = tl.where(logit > 0, tl.div_rn(logit, repetition), logit * repetition)
                logit = logit - frequency * count
                logit = logit - presence * (count > 0).to(tl.float32)
                tl.store(logits_ptr + token_id, logit, mask=is_mine)
            first += num_programs * tile
