"""Repetition, frequency and presence penalties, on the tokens that a sequence holds and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import triton_kernel
from fleetfoot.kernels.sampling import penalties as sampling_penalties
from fleetfoot.kernels.sampling.records import Penalties, TokenHistory

if TYPE_CHECKING:
    import triton.language as tl

_PIECES = 16
"""Programs that share the tokens of a row."""
_TILE = 512


def penalize(
    logits: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    history: TokenHistory,
    penalties: Penalties,
) -> None:
    """Repetition, which counts the prompt in, then frequency, then presence (`SamplingParams` says what they do).

    Args:
        logits: ``[n, vocab]`` float32, contiguous; changed.
        rows: ``[n]`` int32: entry ``rows[i]`` of all tables is that of row ``i``; -1: padding.
        seq_lens: ``[n]``: tokens of each sequence so far.
    """
    implementation = penalize_triton if logits.is_cuda else penalize_cpu
    implementation(logits, rows, seq_lens, history, penalties)


def penalize_cpu(
    logits: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    history: TokenHistory,
    penalties: Penalties,
) -> None:
    """The twin of the kernel, for CPU tensors."""
    factors = torch.stack((penalties.repetition, penalties.frequency, penalties.presence), 1).numpy()  # [R, 3]
    prompt_lens = history.prompt_lens.numpy()
    chosen, counts = [], []
    for i, (row, length) in enumerate(zip(rows.numpy().tolist(), seq_lens.numpy().tolist(), strict=True)):
        if row < 0 or tuple(factors[row]) == (1.0, 0.0, 0.0):
            continue
        prompt_len = int(prompt_lens[row])
        prompt = np.unique(history.tokens(row, 0, prompt_len)) if factors[row][0] != 1 else None
        chosen.append(i)
        counts.append(sampling_penalties.count_tokens(prompt, history.tokens(row, prompt_len, length)))
    if chosen:
        of_rows = [tuple(factors[row].tolist()) for row in rows.numpy()[chosen]]
        sampling_penalties.Penalties.build(chosen, counts, of_rows, logits.device).apply(logits)


def penalize_triton(
    logits: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    history: TokenHistory,
    penalties: Penalties,
) -> None:
    """Three launches over the tokens of the rows that want it. Of the scratch, ``[n, vocab]`` int32, only the entries
    of these tokens are ever touched: set to 0, then counted up, then exchanged for 0 by all that name the token. Who
    gets the count penalises the token; the others get 0.
    """
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    counts = torch.empty((num_rows, vocab_size), dtype=torch.int32, device=logits.device)
    overlap = can_overlap(logits.device)
    for phase in range(3):
        _penalties_kernel[(num_rows, _PIECES)](
            logits,
            counts,
            rows,
            seq_lens,
            history.block_tables,
            history.token_pages,
            history.prompt_lens,
            penalties.repetition,
            penalties.frequency,
            penalties.presence,
            vocab_size,
            history.block_tables.stride(0),
            block_size=history.block_size,
            phase=phase,
            pieces=_PIECES,
            tile=_TILE,
            overlap=overlap,
            enable_fp_fusion=False,  # frequency * count is rounded before it is subtracted, as everywhere else
            **launch_options(overlap),
        )


@triton_kernel()
def _penalties_kernel(
    logits_ptr,
    counts_ptr,
    rows_ptr,
    seq_lens_ptr,
    block_tables_ptr,
    token_pages_ptr,
    prompt_lens_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    vocab_size,
    table_stride,
    block_size: tl.constexpr,
    phase: tl.constexpr,
    pieces: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
):
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
            elif phase == 1:  # how often the output has it, below a bit that says that the prompt has it
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
            first += pieces * tile
