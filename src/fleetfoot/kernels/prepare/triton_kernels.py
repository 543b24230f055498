"""The preparation operations as Triton kernels. What each computes is written at its reference in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.prepare.reference import uniform_query_len
from fleetfoot.kernels.prepare.tables import GroupTables, RowTables, StateTables, StepBuffers
from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2, search_steps, triton_kernel, upper_bound

if TYPE_CHECKING:
    import triton.language as tl


def prepare_inputs_triton(step: StepBuffers, rows: RowTables) -> None:
    """See `prepare_inputs_torch`. A program takes one request and one tile of tokens."""
    num_reqs, num_tokens, tile = step.idx_mapping.shape[0], step.positions.shape[0], 256
    _prepare_inputs_kernel[(max(num_reqs, cdiv(num_tokens, tile)),)](
        *_tensors(step, rows), step.query_start_loc, num_reqs, num_tokens, search_steps(num_reqs + 1),
        rows.draft_tokens.shape[1],
        block_size=rows.block_size, tile=tile, block_tile=1024,
    )  # fmt: skip


def prepare_decode_triton(step: StepBuffers, rows: RowTables) -> None:
    """See `prepare_decode_torch`. One launch: within a graph, each costs about a microsecond."""
    query_len = uniform_query_len(step, rows)
    _prepare_decode_kernel[(step.idx_mapping.shape[0],)](
        *_tensors(step, rows),
        query_len=query_len, query_tile=next_power_of_2(query_len), block_size=rows.block_size, tile=1024,
    )  # fmt: skip


def prepare_groups_triton(step: StepBuffers, rows: RowTables, groups: GroupTables) -> None:
    """See `prepare_groups_torch`. A program takes one request and one tile of tokens, in one group."""
    num_reqs, num_tokens, tile = step.idx_mapping.shape[0], step.positions.shape[0], 256
    _prepare_groups_kernel[(max(num_reqs, cdiv(num_tokens, tile)), groups.windows.shape[0])](
        step.idx_mapping, rows.num_computed, rows.limits, step.positions, step.seq_lens, step.batch_index, step.slots,
        groups.windows, groups.block_table, groups.slots, groups.block_tables,
        num_reqs, num_tokens, *groups.block_table.stride()[:2], groups.slots.stride(0),
        *groups.block_tables.stride()[:2],
        block_size=rows.block_size, tile=tile, block_tile=1024,
    )  # fmt: skip


def prepare_states_triton(step: StepBuffers, rows: RowTables, states: StateTables) -> None:
    """See `prepare_states_torch`. A program takes one request."""
    num_slots = states.tables.shape[0]
    _prepare_states_kernel[(step.idx_mapping.shape[0],)](
        step.idx_mapping, step.query_start_loc, rows.num_computed, rows.prefill_lens, rows.limits, states.tables,
        states.read_slots, states.write_slots, *states.tables.stride()[:2],
        num_slots=num_slots, tile=next_power_of_2(num_slots), block_size=rows.block_size,
    )  # fmt: skip


def _tensors(step: StepBuffers, rows: RowTables) -> tuple[torch.Tensor | int, ...]:
    """The first arguments of both kernels that prepare a step."""
    return (
        step.idx_mapping, rows.num_computed, rows.prefill_lens, rows.last_sampled, rows.draft_tokens, rows.limits,
        rows.block_table, rows.token_pages,
        step.positions, step.seq_lens, step.batch_index, step.slots, step.input_ids, step.block_tables,
        rows.draft_tokens.stride(0), rows.block_table.stride(0), step.block_tables.stride(0),
    )  # fmt: skip


def accept_drafts_triton(
    idx_mapping: torch.Tensor, sampled: torch.Tensor, invalid: torch.Tensor, rows: RowTables, counts: torch.Tensor
) -> None:
    """See `accept_drafts_torch`."""
    num_reqs, query_len = sampled.shape
    num_sampled, num_rejected, num_drafted = counts
    _accept_drafts_kernel[(num_reqs,)](
        idx_mapping, sampled, invalid, rows.draft_tokens, rows.num_computed, rows.limits, num_sampled, num_rejected,
        num_drafted, sampled.stride(0), invalid.stride(0), rows.draft_tokens.stride(0),
        query_len=query_len, query_tile=next_power_of_2(query_len),
    )  # fmt: skip


def post_update_triton(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    rows: RowTables,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
) -> None:
    """See `post_update_torch`."""
    num_reqs, tile = idx_mapping.shape[0], 128
    _post_update_kernel[(cdiv(num_reqs, tile),)](
        idx_mapping, query_start_loc, sampled, num_sampled, num_rejected, rows.num_computed, rows.last_sampled,
        num_reqs, num_sampled.shape[0], sampled.stride(0),
        tile=tile,
    )  # fmt: skip


def apply_staged_writes_triton(
    staged: torch.Tensor, front: torch.Tensor, target: torch.Tensor, num_writes: int
) -> None:
    """See `apply_staged_writes_torch`.

    One kernel reads the host's memory. A copy is done by another engine of the GPU: between two captured steps on an
    H100, changing to it and back takes 18 us in which nothing runs.
    """
    tile, size = 256, len(front)
    grid = (cdiv(max(size, num_writes), tile),)
    _apply_staged_writes_kernel[grid](staged, front, target, size, num_writes, tile=tile)


@triton_kernel(specialize=False)
def _prepare_inputs_kernel(
    idx_mapping_ptr, num_computed_ptr, prefill_lens_ptr, last_sampled_ptr, draft_tokens_ptr, limits_ptr,
    block_table_ptr, token_pages_ptr,
    positions_ptr, seq_lens_ptr, batch_index_ptr, slots_ptr, input_ids_ptr, block_tables_ptr,
    draft_stride, row_stride, tables_stride, query_start_loc_ptr, num_reqs, num_tokens, steps, num_drafts,
    block_size: tl.constexpr, tile: tl.constexpr, block_tile: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < num_reqs:
        row = tl.load(idx_mapping_ptr + program).to(tl.int64)
        query_len = tl.load(query_start_loc_ptr + program + 1) - tl.load(query_start_loc_ptr + program)
        seq_len = tl.where(row >= 0, tl.load(num_computed_ptr + row, mask=row >= 0, other=0) + query_len, 0)
        tl.store(seq_lens_ptr + program, seq_len)
        copy_ptr = block_tables_ptr + program.to(tl.int64) * tables_stride
        last_block = (tl.load(limits_ptr + row, mask=row >= 0, other=1) - 1) // block_size
        num_blocks = tl.cdiv(seq_len, block_size)
        _copy_table(num_blocks, last_block, block_table_ptr + row * row_stride, copy_ptr, block_tile)
    if program * tile < num_tokens:
        token = program * tile + tl.arange(0, tile)
        in_batch = token < num_tokens
        # Of several requests that begin at the same token, all but the last are empty.
        request = upper_bound(query_start_loc_ptr, num_reqs + 1, steps, token) - 1
        row = tl.load(idx_mapping_ptr + request, mask=in_batch & (request < num_reqs), other=-1).to(tl.int64)
        is_token = row >= 0
        offset = token - tl.load(query_start_loc_ptr + request, mask=is_token, other=0)
        position = tl.where(is_token, tl.load(num_computed_ptr + row, mask=is_token, other=0) + offset, 0)
        table_ptr = block_table_ptr + row * row_stride
        block_id = tl.load(table_ptr + position // block_size, mask=is_token, other=0).to(tl.int64)
        slot = block_id * block_size + position % block_size
        last_block = (tl.load(limits_ptr + row, mask=is_token, other=1) - 1) // block_size
        has_slot = is_token & (position // block_size <= last_block)
        is_known = position < tl.load(prefill_lens_ptr + row, mask=is_token, other=0)
        is_new = is_token & (is_known == 0)
        known_id = tl.load(token_pages_ptr + slot, mask=is_known, other=0)
        is_draft = is_new & (offset > 0) & (offset <= num_drafts)
        draft_id = tl.load(draft_tokens_ptr + row * draft_stride + offset - 1, mask=is_draft, other=0)
        sampled_id = tl.load(last_sampled_ptr + row, mask=is_new, other=0)
        new_id = tl.where(is_draft, tl.maximum(draft_id, 0), sampled_id)
        tl.store(token_pages_ptr + slot, new_id, mask=is_new & has_slot)
        tl.store(positions_ptr + token, position.to(tl.int64), mask=in_batch)
        tl.store(batch_index_ptr + token, tl.where(is_token, request, -1), mask=in_batch)
        tl.store(slots_ptr + token, tl.where(has_slot, slot, -1), mask=in_batch)
        tl.store(input_ids_ptr + token, tl.where(is_known, known_id, new_id).to(tl.int64), mask=in_batch)


@triton_kernel(specialize=False)
def _copy_table(num_blocks, last_block, table_ptr, copy_ptr, tile: tl.constexpr):
    """Most tables fit one tile, and the launch must not depend on those that do not."""
    begin = 0
    while begin < num_blocks:
        block = begin + tl.arange(0, tile)
        block_id = tl.load(table_ptr + tl.minimum(block, last_block), mask=block < num_blocks)
        tl.store(copy_ptr + block, block_id, mask=block < num_blocks)
        begin += tile


@triton_kernel(specialize=False)
def _prepare_groups_kernel(
    idx_mapping_ptr, num_computed_ptr, limits_ptr, positions_ptr, seq_lens_ptr, batch_index_ptr, anchor_slots_ptr,
    windows_ptr, block_table_ptr, slots_ptr, block_tables_ptr,
    num_reqs, num_tokens, group_stride, row_stride, slots_stride, tables_stride, table_stride,
    block_size: tl.constexpr, tile: tl.constexpr, block_tile: tl.constexpr,
):  # fmt: skip
    program, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    table_ptr = block_table_ptr + group * group_stride
    if program < num_reqs:
        row = tl.load(idx_mapping_ptr + program).to(tl.int64)
        computed = tl.load(num_computed_ptr + row, mask=row >= 0, other=0)
        first = tl.maximum(computed + 1 - tl.load(windows_ptr + group), 0) // block_size
        num_blocks = tl.cdiv(tl.load(seq_lens_ptr + program), block_size)
        last_block = (tl.load(limits_ptr + row, mask=row >= 0, other=1) - 1) // block_size
        copy_ptr = block_tables_ptr + group * tables_stride + program.to(tl.int64) * table_stride
        begin = 0
        while begin < num_blocks:
            block = begin + tl.arange(0, block_tile)
            id_ptrs = table_ptr + row * row_stride + tl.minimum(block, last_block)
            ids = tl.load(id_ptrs, mask=(block >= first) & (block < num_blocks), other=0)
            tl.store(copy_ptr + block, ids, mask=block < num_blocks)
            begin += block_tile
    if program * tile < num_tokens:
        token = program * tile + tl.arange(0, tile)
        in_batch = token < num_tokens
        has_slot = in_batch & (tl.load(anchor_slots_ptr + token, mask=in_batch, other=-1) >= 0)
        request = tl.load(batch_index_ptr + token, mask=has_slot, other=0)
        row = tl.load(idx_mapping_ptr + request, mask=has_slot, other=0).to(tl.int64)
        position = tl.load(positions_ptr + token, mask=has_slot, other=0)
        block_id = tl.load(table_ptr + row * row_stride + position // block_size, mask=has_slot, other=0).to(tl.int64)
        slot = tl.where(has_slot, block_id * block_size + position % block_size, -1)
        tl.store(slots_ptr + group * slots_stride + token, slot, mask=in_batch)


@triton_kernel(specialize=False)
def _prepare_states_kernel(
    idx_mapping_ptr, query_start_ptr, num_computed_ptr, prefill_lens_ptr, limits_ptr, tables_ptr, read_ptr, write_ptr,
    table_stride, row_stride,
    num_slots: tl.constexpr, tile: tl.constexpr, block_size: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    row = tl.load(idx_mapping_ptr + request).to(tl.int64)
    is_request = row >= 0
    count = tl.load(query_start_ptr + request + 1) - tl.load(query_start_ptr + request)
    computed = tl.load(num_computed_ptr + row, mask=is_request, other=0)
    prefill_len = tl.load(prefill_lens_ptr + row, mask=is_request, other=0)
    limit = tl.load(limits_ptr + row, mask=is_request, other=0)
    tables_ptr += row * row_stride
    before = tl.maximum(computed - 1, 0)
    place = (before % num_slots).to(tl.int64) * table_stride + before // block_size
    has_state = is_request & (count > 0) & (computed > 0)
    tl.store(read_ptr + request, tl.load(tables_ptr + place, mask=has_state, other=0))
    column = tl.arange(0, tile)
    position = computed + count - num_slots + column  # [tile]
    is_kept = is_request & (column < num_slots) & (position >= computed) & (position < limit)
    is_kept &= (computed >= prefill_len) | (column == num_slots - 1)
    place = (position % num_slots).to(tl.int64) * table_stride + position // block_size
    slot = tl.load(tables_ptr + place, mask=is_kept, other=-1)
    tl.store(write_ptr + request * num_slots + column, slot, mask=column < num_slots)


@triton_kernel(specialize=False)
def _prepare_decode_kernel(
    idx_mapping_ptr, num_computed_ptr, prefill_lens_ptr, last_sampled_ptr, draft_tokens_ptr, limits_ptr,
    block_table_ptr, token_pages_ptr,
    positions_ptr, seq_lens_ptr, batch_index_ptr, slots_ptr, input_ids_ptr, block_tables_ptr,
    draft_stride, row_stride, tables_stride,
    query_len: tl.constexpr, query_tile: tl.constexpr, block_size: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    # One program for each request; the rows differ, so nothing that it writes is read by another one.
    request = tl.program_id(0)
    row = tl.load(idx_mapping_ptr + request).to(tl.int64)
    is_request = row >= 0
    computed = tl.load(num_computed_ptr + row, mask=is_request, other=0)
    prefill_len = tl.load(prefill_lens_ptr + row, mask=is_request, other=0)
    sampled_id = tl.load(last_sampled_ptr + row, mask=is_request, other=0)
    last_block = (tl.load(limits_ptr + row, mask=is_request, other=1) - 1) // block_size
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

    # while the block ids above are on their way
    copy_ptr = block_tables_ptr + request.to(tl.int64) * tables_stride
    _copy_table(tl.cdiv(seq_len, block_size), last_block, table_ptr, copy_ptr, tile)

    has_slot = is_token & (position // block_size <= last_block)
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


@triton_kernel(specialize=False)
def _accept_drafts_kernel(
    idx_mapping_ptr, sampled_ptr, invalid_ptr, draft_tokens_ptr, num_computed_ptr, limits_ptr, num_sampled_ptr,
    num_rejected_ptr, num_drafted_ptr, sampled_stride, invalid_stride, draft_stride,
    query_len: tl.constexpr, query_tile: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(idx_mapping_ptr + request).to(tl.int64)
    is_request = row >= 0
    offset = tl.arange(0, query_tile)
    is_draft = is_request & (offset < query_len - 1)
    token = tl.load(sampled_ptr + request * sampled_stride + offset, mask=is_draft, other=-1)
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


@triton_kernel(specialize=False)
def _post_update_kernel(
    idx_mapping_ptr, query_start_loc_ptr, sampled_ptr, num_sampled_ptr, num_rejected_ptr, num_computed_ptr,
    last_sampled_ptr, num_reqs, num_sampling, sampled_stride,
    tile: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0) * tile + tl.arange(0, tile)
    row = tl.load(idx_mapping_ptr + request, mask=request < num_reqs, other=-1)
    is_request = row >= 0
    begin = tl.load(query_start_loc_ptr + request, mask=is_request, other=0)
    end = tl.load(query_start_loc_ptr + request + 1, mask=is_request, other=0)
    is_sampling = is_request & (request < num_sampling)
    rejected = tl.load(num_rejected_ptr + request, mask=is_sampling, other=0)
    computed = tl.load(num_computed_ptr + row, mask=is_request, other=0)
    tl.store(num_computed_ptr + row, computed + end - begin - rejected, mask=is_request)

    count = tl.load(num_sampled_ptr + request, mask=is_sampling, other=0)
    last_ptr = sampled_ptr + request.to(tl.int64) * sampled_stride + count - 1
    token_id = tl.load(last_ptr, mask=count > 0, other=0)
    tl.store(last_sampled_ptr + row, token_id.to(tl.int32), mask=count > 0)


@triton_kernel(specialize=False)
def _apply_staged_writes_kernel(buffer_ptr, front_ptr, target_ptr, front_size, num_writes, tile: tl.constexpr):
    index = tl.program_id(0) * tile + tl.arange(0, tile)
    pairs_ptr = buffer_ptr + front_size + 2 * index
    is_write = index < num_writes
    front = tl.load(buffer_ptr + index, mask=index < front_size)
    where = tl.load(pairs_ptr, mask=is_write)
    value = tl.load(pairs_ptr + 1, mask=is_write)
    tl.store(front_ptr + index, front, mask=index < front_size)
    tl.store(target_ptr + where, value, mask=is_write)
