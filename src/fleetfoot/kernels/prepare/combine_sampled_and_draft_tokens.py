"""The input ids of decodes: the token sampled last, and the drafts behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fleetfoot.kernels.runtime.triton_support import cdiv, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl


def combine_sampled_and_draft_tokens(
    slots: torch.Tensor,
    positions: torch.Tensor,
    batch_index: torch.Tensor,
    idx_mapping: torch.Tensor,
    prefill_lens: torch.Tensor,
    num_computed: torch.Tensor,
    last_sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    *,
    token_pages: torch.Tensor,
    input_ids: torch.Tensor,
) -> None:
    """Tokens from ``prefill_lens`` on: a query's first is the token sampled last, the others are its drafts.

    They are kept in the pages as well, but for those without a slot. A rejected draft is overwritten there when its
    position is computed again. A draft of -1, which stands for none, is token 0.

    Args:
        slots: ``[T]`` int64: each token's KV slot, which is its place in the pages too; -1: none.
        positions: ``[T]`` int64.
        batch_index: ``[T]``: each token's request; -1: padding.
        idx_mapping: ``[n]``: each request's row.
        prefill_lens: ``[R]``: tokens known when the request joined.
        num_computed: ``[R]``: tokens whose KV is written.
        last_sampled: ``[R]``
        draft_tokens: ``[R, k]``; k may be 0.
        token_pages: written, ``[num_blocks * block_size]``, at the tokens from ``prefill_lens`` on.
        input_ids: written, ``[T]`` int64, at the same tokens.
    """
    implementation = (
        combine_sampled_and_draft_tokens_triton if input_ids.is_cuda else combine_sampled_and_draft_tokens_cpu
    )
    implementation(
        slots,
        positions,
        batch_index,
        idx_mapping,
        prefill_lens,
        num_computed,
        last_sampled,
        draft_tokens,
        token_pages=token_pages,
        input_ids=input_ids,
    )


def combine_sampled_and_draft_tokens_cpu(
    slots: torch.Tensor,
    positions: torch.Tensor,
    batch_index: torch.Tensor,
    idx_mapping: torch.Tensor,
    prefill_lens: torch.Tensor,
    num_computed: torch.Tensor,
    last_sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    *,
    token_pages: torch.Tensor,
    input_ids: torch.Tensor,
) -> None:
    """The twin of the kernel, for CPU tensors."""
    requests, position_of = batch_index.numpy(), positions.numpy()
    rows = idx_mapping.numpy().take(requests, mode="clip")  # [T]
    is_new = (position_of >= prefill_lens.numpy().take(rows, mode="clip")) & (requests >= 0)  # [T]
    new = is_new.nonzero()[0]  # [number of tokens from prefill_lens on], likewise below
    rows = rows[new]
    ids = last_sampled.numpy()[rows]
    if draft_tokens.shape[1]:
        draft = position_of[new] - num_computed.numpy()[rows] - 1
        ids = np.where(draft < 0, ids, draft_tokens.numpy()[rows, draft].clip(min=0))
    input_ids.numpy()[new] = ids
    slots_of_new = slots.numpy()[new]
    has_slot = slots_of_new >= 0
    token_pages.numpy()[slots_of_new[has_slot]] = ids[has_slot]


def combine_sampled_and_draft_tokens_triton(
    slots: torch.Tensor,
    positions: torch.Tensor,
    batch_index: torch.Tensor,
    idx_mapping: torch.Tensor,
    prefill_lens: torch.Tensor,
    num_computed: torch.Tensor,
    last_sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    *,
    token_pages: torch.Tensor,
    input_ids: torch.Tensor,
) -> None:
    num_tokens = input_ids.shape[0]
    tile = 256
    _combine_sampled_and_draft_tokens_kernel[(cdiv(num_tokens, tile),)](
        slots,
        positions,
        batch_index,
        idx_mapping,
        prefill_lens,
        num_computed,
        last_sampled,
        draft_tokens,
        token_pages,
        input_ids,
        num_tokens,
        draft_tokens.stride(0),
        draft_tokens.shape[1],
        tile=tile,
    )


@triton_kernel(specialize=False)
def _combine_sampled_and_draft_tokens_kernel(
    slots_ptr,
    positions_ptr,
    batch_index_ptr,
    idx_mapping_ptr,
    prefill_lens_ptr,
    num_computed_ptr,
    last_sampled_ptr,
    draft_tokens_ptr,
    token_pages_ptr,
    input_ids_ptr,
    num_tokens,
    draft_stride,
    num_drafts,
    tile: tl.constexpr,
):
    token = tl.program_id(0) * tile + tl.arange(0, tile)
    request = tl.load(batch_index_ptr + token, mask=token < num_tokens, other=-1)
    is_token = request >= 0
    row = tl.load(idx_mapping_ptr + request, mask=is_token, other=0)
    position = tl.load(positions_ptr + token, mask=is_token, other=0)
    is_new = is_token & (position >= tl.load(prefill_lens_ptr + row, mask=is_token, other=0))
    offset = position - tl.load(num_computed_ptr + row, mask=is_new, other=0)
    is_draft = is_new & (offset > 0) & (offset <= num_drafts)
    sampled_id = tl.load(last_sampled_ptr + row, mask=is_new, other=0)
    draft_ptr = draft_tokens_ptr + row.to(tl.int64) * draft_stride + offset - 1
    token_id = tl.where(is_draft, tl.maximum(tl.load(draft_ptr, mask=is_draft, other=0), 0), sampled_id)
    slot = tl.load(slots_ptr + token, mask=is_new, other=-1)
    tl.store(input_ids_ptr + token, token_id.to(tl.int64), mask=is_new)
    tl.store(token_pages_ptr + slot, token_id, mask=is_new & (slot >= 0))
