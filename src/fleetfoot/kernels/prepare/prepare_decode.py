"""All inputs of a decode step in one launch: within a graph, each launch costs about a microsecond."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fleetfoot.kernels.prepare.gather_block_tables import gather_block_tables_cpu
from fleetfoot.kernels.runtime.triton_support import next_power_of_2, triton_kernel
from fleetfoot.native.library import load_kernels, native_available

if TYPE_CHECKING:
    import triton.language as tl


def prepare_decode(
    idx_mapping: torch.Tensor,
    num_computed: torch.Tensor,
    prefill_lens: torch.Tensor,
    last_sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    limits: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    *,
    token_pages: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_index: torch.Tensor,
    slots: torch.Tensor,
    input_ids: torch.Tensor,
    block_tables: torch.Tensor,
) -> None:
    """`positions_and_seq_lens`, `slot_mapping`, `prepare_prefill_inputs`, `combine_sampled_and_draft_tokens` and
    `gather_block_tables` for a batch whose queries all have the same length ``T / n``, at most 1 + k.

    Args:
        idx_mapping: ``[n]``, n >= 1: each request's row; -1: padding.
        num_computed: ``[R]``: tokens whose KV is written.
        prefill_lens: ``[R]``: tokens known when the request joined.
        last_sampled: ``[R]``
        draft_tokens: ``[R, k]``; k may be 0; -1, which stands for none, is token 0.
        limits: ``[R]``: see `slot_mapping`.
        block_table: ``[R, B]``: block ids; rows may lie further apart than B.
        block_size: tokens in a block.
        token_pages: written, ``[num_blocks * block_size]``, at the tokens from ``prefill_lens`` on.
        positions: written, ``[T]`` int64.
        seq_lens: written, ``[n]``.
        batch_index: written, ``[T]``.
        slots: written, ``[T]`` int64.
        input_ids: written, ``[T]`` int64.
        block_tables: written, ``[n, W]``: see `gather_block_tables`.

    Raises:
        ValueError: T is not a multiple of n between n and n * (1 + k).
    """
    num_reqs, num_tokens, num_drafts = idx_mapping.shape[0], positions.shape[0], draft_tokens.shape[1]
    if num_reqs == 0 or num_tokens % num_reqs or not num_reqs <= num_tokens <= num_reqs * (1 + num_drafts):
        raise ValueError(
            f"prepare_decode: {num_tokens} tokens for {num_reqs} requests with up to {num_drafts} drafts: "
            f"each request must have the same number of tokens, from 1 to {1 + num_drafts}"
        )
    if positions.is_cuda:
        implementation = prepare_decode_triton
    else:
        implementation = prepare_decode_native if native_available()[0] else prepare_decode_cpu
    implementation(
        idx_mapping,
        num_computed,
        prefill_lens,
        last_sampled,
        draft_tokens,
        limits,
        block_table,
        block_size,
        token_pages=token_pages,
        positions=positions,
        seq_lens=seq_lens,
        batch_index=batch_index,
        slots=slots,
        input_ids=input_ids,
        block_tables=block_tables,
    )


def prepare_decode_cpu(
    idx_mapping: torch.Tensor,
    num_computed: torch.Tensor,
    prefill_lens: torch.Tensor,
    last_sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    limits: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    *,
    token_pages: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_index: torch.Tensor,
    slots: torch.Tensor,
    input_ids: torch.Tensor,
    block_tables: torch.Tensor,
) -> None:
    """The twin of the kernel, for CPU tensors: what the five ops yield, at half their price."""
    num_reqs, query_len = idx_mapping.shape[0], positions.shape[0] // idx_mapping.shape[0]
    rows, pages = idx_mapping.numpy(), token_pages.numpy()
    request_of = batch_index.numpy().reshape(num_reqs, query_len)
    position_of = positions.numpy().reshape(num_reqs, query_len)
    slot_of = slots.numpy().reshape(num_reqs, query_len)
    ids = input_ids.numpy().reshape(num_reqs, query_len)

    is_padding = rows < 0
    is_padded = is_padding.any()
    computed = num_computed.numpy().take(rows, mode="clip")  # [n]
    if is_padded:
        computed[is_padding] = 0  # so that it reads its table (whatever stands there) within bounds
    np.add(computed, query_len, out=seq_lens.numpy())
    request_of[:] = np.arange(num_reqs)[:, None]
    np.add(computed[:, None], np.arange(query_len), out=position_of)
    blocks, offsets = np.divmod(position_of, block_size)
    np.multiply(block_table.numpy()[rows[:, None], blocks], block_size, out=slot_of, dtype=np.int64)
    np.add(slot_of, offsets, out=slot_of)
    gather_block_tables_cpu(block_table, idx_mapping, seq_lens, block_size, out=block_tables)

    ids[:, 0] = last_sampled.numpy().take(rows, mode="clip")
    if query_len > 1:
        ids[:, 1:] = draft_tokens.numpy()[rows, : query_len - 1].clip(min=0)
    is_dead = position_of >= limits.numpy().take(rows, mode="clip")[:, None]  # [n, query_len]
    is_known = position_of < prefill_lens.numpy().take(rows, mode="clip")[:, None]  # [n, query_len]
    slot_of[is_dead] = -1
    if is_padded:
        is_known[is_padding] = False
        request_of[is_padding] = slot_of[is_padding] = -1
        seq_lens.numpy()[is_padding] = position_of[is_padding] = ids[is_padding] = 0
    if is_known.any():
        ids[is_known] = pages[slot_of[is_known]]
    if is_padded or is_dead.any():
        has_slot = slot_of >= 0
        slot_of, ids = slot_of[has_slot], ids[has_slot]
    pages[slot_of] = ids


def prepare_decode_native(
    idx_mapping: torch.Tensor,
    num_computed: torch.Tensor,
    prefill_lens: torch.Tensor,
    last_sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    limits: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    *,
    token_pages: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_index: torch.Tensor,
    slots: torch.Tensor,
    input_ids: torch.Tensor,
    block_tables: torch.Tensor,
) -> None:
    """The kernel in C, for CPU tensors whose last dimension is contiguous."""
    num_reqs = idx_mapping.shape[0]
    load_kernels().prepare_decode(
        idx_mapping.data_ptr(),
        num_reqs,
        positions.shape[0] // num_reqs,
        num_computed.data_ptr(),
        prefill_lens.data_ptr(),
        last_sampled.data_ptr(),
        draft_tokens.data_ptr(),
        draft_tokens.stride(0),
        limits.data_ptr(),
        block_table.data_ptr(),
        block_table.stride(0),
        block_size,
        token_pages.data_ptr(),
        positions.data_ptr(),
        seq_lens.data_ptr(),
        batch_index.data_ptr(),
        slots.data_ptr(),
        input_ids.data_ptr(),
        block_tables.data_ptr(),
        block_tables.stride(0),
        block_tables.shape[1],
    )


def prepare_decode_triton(
    idx_mapping: torch.Tensor,
    num_computed: torch.Tensor,
    prefill_lens: torch.Tensor,
    last_sampled: torch.Tensor,
    draft_tokens: torch.Tensor,
    limits: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    *,
    token_pages: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_index: torch.Tensor,
    slots: torch.Tensor,
    input_ids: torch.Tensor,
    block_tables: torch.Tensor,
) -> None:
    num_reqs = idx_mapping.shape[0]
    query_len = positions.shape[0] // num_reqs
    _prepare_decode_kernel[(num_reqs,)](
        idx_mapping,
        num_computed,
        prefill_lens,
        last_sampled,
        draft_tokens,
        limits,
        block_table,
        token_pages,
        positions,
        seq_lens,
        batch_index,
        slots,
        input_ids,
        block_tables,
        draft_tokens.stride(0),
        block_table.stride(0),
        block_tables.stride(0),
        query_len=query_len,
        query_tile=next_power_of_2(query_len),
        block_size=block_size,
        tile=1024,
    )


@triton_kernel(specialize=False)
def _prepare_decode_kernel(
    idx_mapping_ptr,
    num_computed_ptr,
    prefill_lens_ptr,
    last_sampled_ptr,
    draft_tokens_ptr,
    limits_ptr,
    block_table_ptr,
    token_pages_ptr,
    positions_ptr,
    seq_lens_ptr,
    batch_index_ptr,
    slots_ptr,
    input_ids_ptr,
    block_tables_ptr,
    draft_stride,
    row_stride,
    tables_stride,
    query_len: tl.constexpr,
    query_tile: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
):
    # One program for each request; the rows differ, so nothing that it writes is read by another one.
    request = tl.program_id(0)
    row = tl.load(idx_mapping_ptr + request).to(tl.int64)
    is_request = row >= 0
    computed = tl.load(num_computed_ptr + row, mask=is_request, other=0)
    prefill_len = tl.load(prefill_lens_ptr + row, mask=is_request, other=0)
    sampled_id = tl.load(last_sampled_ptr + row, mask=is_request, other=0)
    limit = tl.load(limits_ptr + row, mask=is_request, other=0)
    seq_len = tl.where(is_request, computed + query_len, 0)

    offset = tl.arange(0, query_tile)
    in_query = offset < query_len
    is_token = in_query & is_request
    position = computed + offset
    is_known = is_token & (position < prefill_len)
    is_new = is_token & (position >= prefill_len)
    table_ptr = block_table_ptr + row * row_stride
    block_id = tl.load(table_ptr + position // block_size, mask=is_token, other=0).to(tl.int64)
    draft_ptr = draft_tokens_ptr + row * draft_stride + offset - 1
    draft_id = tl.maximum(tl.load(draft_ptr, mask=is_new & (offset > 0), other=0), 0)

    # The table is copied while the block ids above are on their way. Most tables fit one tile, and the launch must not
    # depend on those that do not.
    num_blocks = tl.cdiv(seq_len, block_size)
    copy_ptr = block_tables_ptr + request.to(tl.int64) * tables_stride
    begin = 0
    while begin < num_blocks:
        block = begin + tl.arange(0, tile)
        tl.store(copy_ptr + block, tl.load(table_ptr + block, mask=block < num_blocks), mask=block < num_blocks)
        begin += tile

    has_slot = is_token & (position < limit)
    slot = block_id * block_size + position % block_size
    known_id = tl.load(token_pages_ptr + slot, mask=is_known, other=0)
    token_id = tl.where(is_known, known_id, tl.where(offset == 0, sampled_id, draft_id))
    tl.store(token_pages_ptr + slot, token_id, mask=is_new & has_slot)

    token = request * query_len + offset
    tl.store(seq_lens_ptr + request, seq_len)
    tl.store(positions_ptr + token, tl.where(is_token, position, 0).to(tl.int64), mask=in_query)
    tl.store(batch_index_ptr + token, tl.where(is_token, request, -1), mask=in_query)
    tl.store(slots_ptr + token, tl.where(has_slot, slot, -1), mask=in_query)
    tl.store(input_ids_ptr + token, tl.where(is_token, token_id, 0).to(tl.int64), mask=in_query)
