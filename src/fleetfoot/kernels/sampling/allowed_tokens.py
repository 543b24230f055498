"""Logits in float32, to be edited: a copy, in which only allowed tokens are left of rows that have such a list."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import cdiv, triton_kernel
from fleetfoot.kernels.sampling.records import AllowedTokens

if TYPE_CHECKING:
    import triton.language as tl

_TILE = 2048


def keep_allowed_tokens(logits: torch.Tensor, rows: torch.Tensor, allowed: AllowedTokens) -> torch.Tensor:
    """``[n, vocab]`` float32 with -inf added to what is not allowed (NaN and +inf stay visible as NaN).

    Args:
        logits: ``[n, vocab]`` of any float dtype, contiguous within rows; they stay as they are.
        rows: ``[n]`` int32: entry ``rows[i]`` of the tables is that of row ``i``; -1: padding, of which nothing is
            copied.
    """
    implementation = keep_allowed_tokens_triton if logits.is_cuda else keep_allowed_tokens_cpu
    return implementation(logits, rows, allowed)


def keep_allowed_tokens_cpu(logits: torch.Tensor, rows: torch.Tensor, allowed: AllowedTokens) -> torch.Tensor:
    """The twin of the kernel, for CPU tensors."""
    edited = logits.to(torch.float32, copy=True)
    index = torch.arange(logits.shape[1])
    for i, row in enumerate(rows.numpy().tolist()):
        if row >= 0 and allowed.is_limited.numpy()[row]:
            bits = allowed.masks[row][index // 32] >> (index % 32)
            edited[i] = torch.where((bits & 1) > 0, edited[i], edited[i] - torch.inf)
    return edited


def keep_allowed_tokens_triton(logits: torch.Tensor, rows: torch.Tensor, allowed: AllowedTokens) -> torch.Tensor:
    num_rows, vocab_size = logits.shape
    edited = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits.device)
    if num_rows == 0:
        return edited
    overlap = can_overlap(logits.device)
    _keep_allowed_kernel[(num_rows, cdiv(vocab_size, _TILE))](
        edited,
        logits,
        rows,
        allowed.is_limited,
        allowed.masks,
        logits.stride(0),
        vocab_size,
        allowed.masks.stride(0),
        tile=_TILE,
        overlap=overlap,
        **launch_options(overlap),
    )
    return edited


@triton_kernel()
def _keep_allowed_kernel(
    edited_ptr,
    logits_ptr,
    rows_ptr,
    is_limited_ptr,
    masks_ptr,
    row_stride,
    vocab_size,
    mask_stride,
    tile: tl.constexpr,
    overlap: tl.constexpr,
):
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
