"""The input ids of tokens that are known: prompts, and outputs that are computed again after a preemption."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.runtime.triton_support import cdiv, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl


def prepare_prefill_inputs(
    slots: torch.Tensor,
    positions: torch.Tensor,
    batch_index: torch.Tensor,
    idx_mapping: torch.Tensor,
    prefill_lens: torch.Tensor,
    token_pages: torch.Tensor,
    *,
    input_ids: torch.Tensor,
) -> None:
    """Tokens before ``prefill_lens`` are read from the pages, where they were put when their request joined.

    Args:
        slots: ``[T]`` int64: each token's KV slot, which is its place in the pages too.
        positions: ``[T]`` int64.
        batch_index: ``[T]``: each token's request; -1: padding.
        idx_mapping: ``[n]``: each request's row.
        prefill_lens: ``[R]``: tokens known when the request joined.
        token_pages: ``[num_blocks * block_size]``.
        input_ids: written, ``[T]`` int64, at the tokens before ``prefill_lens`` and at padding, which gets 0.
    """
    implementation = prepare_prefill_inputs_triton if input_ids.is_cuda else prepare_prefill_inputs_cpu
    implementation(slots, positions, batch_index, idx_mapping, prefill_lens, token_pages, input_ids=input_ids)


def prepare_prefill_inputs_cpu(
    slots: torch.Tensor,
    positions: torch.Tensor,
    batch_index: torch.Tensor,
    idx_mapping: torch.Tensor,
    prefill_lens: torch.Tensor,
    token_pages: torch.Tensor,
    *,
    input_ids: torch.Tensor,
) -> None:
    """The twin of the kernel, for CPU tensors."""
    requests, ids = batch_index.numpy(), input_ids.numpy()
    rows = idx_mapping.numpy().take(requests, mode="clip")  # [T]; padding's id is replaced below
    is_known = positions.numpy() < prefill_lens.numpy().take(rows, mode="clip")  # [T]
    if is_known.any():
        ids[is_known] = token_pages.numpy().take(slots.numpy()[is_known], mode="clip")
    ids[requests < 0] = 0


def prepare_prefill_inputs_triton(
    slots: torch.Tensor,
    positions: torch.Tensor,
    batch_index: torch.Tensor,
    idx_mapping: torch.Tensor,
    prefill_lens: torch.Tensor,
    token_pages: torch.Tensor,
    *,
    input_ids: torch.Tensor,
) -> None:
    num_tokens = input_ids.shape[0]
    tile = 256
    _prepare_prefill_inputs_kernel[(cdiv(num_tokens, tile),)](
        slots, positions, batch_index, idx_mapping, prefill_lens, token_pages, input_ids, num_tokens, tile=tile
    )


@triton_kernel(specialize=False)
def _prepare_prefill_inputs_kernel(
    slots_ptr,
    positions_ptr,
    batch_index_ptr,
    idx_mapping_ptr,
    prefill_lens_ptr,
    token_pages_ptr,
    input_ids_ptr,
    num_tokens,
    tile: tl.constexpr,
):
    token = tl.program_id(0) * tile + tl.arange(0, tile)
    in_batch = token < num_tokens
    request = tl.load(batch_index_ptr + token, mask=in_batch, other=-1)
    is_token = request >= 0
    row = tl.load(idx_mapping_ptr + request, mask=is_token, other=0)
    prefill_len = tl.load(prefill_lens_ptr + row, mask=is_token, other=0)
    position = tl.load(positions_ptr + token, mask=is_token, other=0)
    slot = tl.load(slots_ptr + token, mask=is_token, other=0)
    is_known = is_token & (position < prefill_len)
    token_id = tl.load(token_pages_ptr + slot, mask=is_known, other=0)
    is_padding = in_batch & (request < 0)
    tl.store(input_ids_ptr + token, token_id.to(tl.int64), mask=is_known | is_padding)
