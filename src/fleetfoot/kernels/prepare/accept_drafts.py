"""Which drafts hold: those that the target itself would have chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fleetfoot.kernels.runtime.triton_support import next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl


def accept_drafts(
    idx_mapping: torch.Tensor,
    chosen: torch.Tensor,
    invalid: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_computed: torch.Tensor,
    limits: torch.Tensor,
    *,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    num_drafted: torch.Tensor,
) -> None:
    """Count the tokens that each request gets: its accepted drafts, and the target's choice behind them.

    A draft is accepted if the target chose the same token there and all drafts before it are accepted. So a request
    gets what it would have got token by token. Behind a choice that means nothing, nothing is accepted.

    Args:
        idx_mapping: ``[n]``: each request's row; -1: padding, which gets nothing.
        chosen: ``[n, d + 1]`` int64: the target's choices behind each token of the query.
        invalid: ``[n, d + 1]`` bool, or 0 and 1: choices that mean nothing.
        draft_tokens: ``[R, k]``, k >= d; -1: no draft.
        num_computed: ``[R]``: position of the query's first token.
        limits: ``[R]``: positions from here on are never an input, so a request that has got all its tokens gets none.
        num_sampled: written, ``[n]`` int32: 0 to d + 1.
        num_rejected: written, ``[n]`` int32: ``d + 1 - num_sampled``; 0 for padding.
        num_drafted: written, ``[n]`` int32: how many of the d were proposed at all; 0 for padding.
    """
    implementation = accept_drafts_triton if chosen.is_cuda else accept_drafts_cpu
    implementation(
        idx_mapping,
        chosen,
        invalid,
        draft_tokens,
        num_computed,
        limits,
        num_sampled=num_sampled,
        num_rejected=num_rejected,
        num_drafted=num_drafted,
    )


def accept_drafts_cpu(
    idx_mapping: torch.Tensor,
    chosen: torch.Tensor,
    invalid: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_computed: torch.Tensor,
    limits: torch.Tensor,
    *,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    num_drafted: torch.Tensor,
) -> None:
    """The twin of the kernel, for CPU tensors."""
    rows, query_len = idx_mapping.numpy(), chosen.shape[1]
    drafts = draft_tokens.numpy()[rows, : query_len - 1]  # [n, d]
    is_same = chosen.numpy()[:, :-1] == drafts
    holds = np.logical_and.accumulate(is_same & (invalid.numpy()[:, :-1] == 0), axis=1)
    room = (limits.numpy()[rows] - num_computed.numpy()[rows]).clip(min=0)  # [n]
    counts = np.minimum(holds.sum(axis=1) + 1, room)
    is_request = rows >= 0
    num_sampled.numpy()[:] = np.where(is_request, counts, 0)
    num_rejected.numpy()[:] = np.where(is_request, query_len - counts, 0)
    num_drafted.numpy()[:] = np.where(is_request, (drafts >= 0).sum(axis=1), 0)


def accept_drafts_triton(
    idx_mapping: torch.Tensor,
    chosen: torch.Tensor,
    invalid: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_computed: torch.Tensor,
    limits: torch.Tensor,
    *,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    num_drafted: torch.Tensor,
) -> None:
    num_reqs, query_len = chosen.shape
    _accept_drafts_kernel[(num_reqs,)](
        idx_mapping,
        chosen,
        invalid,
        draft_tokens,
        num_computed,
        limits,
        num_sampled,
        num_rejected,
        num_drafted,
        chosen.stride(0),
        invalid.stride(0),
        draft_tokens.stride(0),
        query_len=query_len,
        query_tile=next_power_of_2(query_len),
    )


@triton_kernel(specialize=False)
def _accept_drafts_kernel(
    idx_mapping_ptr,
    chosen_ptr,
    invalid_ptr,
    draft_tokens_ptr,
    num_computed_ptr,
    limits_ptr,
    num_sampled_ptr,
    num_rejected_ptr,
    num_drafted_ptr,
    chosen_stride,
    invalid_stride,
    draft_stride,
    query_len: tl.constexpr,
    query_tile: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + request).to(tl.int64)
    is_request = row >= 0
    offset = tl.arange(0, query_tile)
    is_draft = is_request & (offset < query_len - 1)
    token = tl.load(chosen_ptr + request * chosen_stride + offset, mask=is_draft, other=-1)
    draft = tl.load(draft_tokens_ptr + row * draft_stride + offset, mask=is_draft, other=-1)
    is_invalid = tl.load(invalid_ptr + request * invalid_stride + offset, mask=is_draft, other=0) != 0
    # The first draft that does not hold ends the run: its offset is the number of those that do.
    fails = (token != draft) | is_invalid | (offset >= query_len - 1)
    accepted = tl.min(tl.where(fails, offset, query_len - 1), axis=0)
    computed = tl.load(num_computed_ptr + row, mask=is_request, other=0)
    limit = tl.load(limits_ptr + row, mask=is_request, other=0)
    count = tl.minimum(accepted + 1, tl.maximum(limit - computed, 0))
    tl.store(num_sampled_ptr + request, tl.where(is_request, count, 0))
    tl.store(num_rejected_ptr + request, tl.where(is_request, query_len - count, 0))
    drafted = tl.sum((is_draft & (draft >= 0)).to(tl.int32), axis=0)
    tl.store(num_drafted_ptr + request, drafted)
