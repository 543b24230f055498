"""The preparation operations in torch, which run on every device, and on CUDA without host synchronisation; and in C.

An index of -1 reads the last element, so padding needs no clamping where its result is replaced. Writes of selected
elements are additions of a difference that is 0 elsewhere, because a boolean index would wait for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.prepare.tables import GroupTables, RowTables, StateTables, StepBuffers

if TYPE_CHECKING:
    from fleetfoot.native.loading import NativeLibrary


def prepare_inputs_torch(step: StepBuffers, rows: RowTables) -> None:
    """Fill all buffers of ``step`` but the first two, which are its inputs, from the rows.

    ``rows.token_pages`` is written as well, at tokens from ``prefill_lens`` on that have a slot: a token that a step
    computes stands in the pages afterwards. A rejected draft is overwritten when its position is computed again.
    """
    idx_mapping, starts = step.idx_mapping, step.query_start_loc
    is_request = idx_mapping >= 0
    computed = rows.num_computed[idx_mapping]  # [n]
    step.seq_lens.copy_(torch.where(is_request, computed + starts.diff(), 0))

    index = torch.arange(len(step.positions), dtype=torch.int32, device=starts.device)
    request = torch.searchsorted(starts[1:], index, right=True)  # [T]; n after the last request
    request.clamp_(max=len(idx_mapping) - 1)
    is_token = (index < starts[-1]) & is_request[request]
    step.batch_index.copy_(torch.where(is_token, request, -1))
    offset = index - starts[request]  # in the query
    position = torch.where(is_token, computed[request] + offset, 0)
    step.positions.copy_(position)

    row = idx_mapping[request]  # [T]
    block_id = rows.block_table[row, position // rows.block_size].to(torch.int64)
    slot = block_id * rows.block_size + position % rows.block_size
    last_block = (rows.limits - 1).div(rows.block_size, rounding_mode="floor")  # [R]
    step.slots.copy_(torch.where(is_token & (position // rows.block_size <= last_block[row]), slot, -1))

    is_known = is_token & (position < rows.prefill_lens[row])
    is_new = is_token & ~is_known
    known_ids = rows.token_pages[torch.where(is_known, slot, 0)]
    new_ids = rows.last_sampled[row]
    num_drafts = rows.draft_tokens.shape[1]
    if num_drafts:
        drafts = rows.draft_tokens[row, (offset - 1).clamp(0, num_drafts - 1)].clamp(min=0)
        new_ids = torch.where(offset > 0, drafts, new_ids)
    step.input_ids.copy_(torch.where(is_known, known_ids, torch.where(is_new, new_ids, 0)))
    is_written = is_new & (step.slots >= 0)
    place = torch.where(is_written, slot, 0)
    rows.token_pages.index_add_(0, place, torch.where(is_written, new_ids - rows.token_pages[place], 0))

    blocks = torch.arange(step.block_tables.shape[1], device=starts.device)
    blocks = torch.minimum(blocks, last_block[idx_mapping, None].clamp(min=0))  # [n, W]
    step.block_tables.copy_(rows.block_table[idx_mapping].gather(1, blocks.to(torch.int64)))


def prepare_decode_torch(step: StepBuffers, rows: RowTables) -> None:
    """`prepare_inputs_torch` for a batch with queries of the same length, ``T / n``, at most 1 + k.

    Raises:
        ValueError: T is not a multiple of n between n and n * (1 + k).
    """
    uniform_query_len(step, rows)
    prepare_inputs_torch(step, rows)


def prepare_groups_torch(step: StepBuffers, rows: RowTables, groups: GroupTables) -> None:
    """Fill ``groups.slots`` and ``groups.block_tables`` of a step, after `prepare_inputs_torch`."""
    size, width = rows.block_size, groups.block_tables.shape[2]
    computed = rows.num_computed[step.idx_mapping]  # [n]
    first = (computed + 1 - groups.windows[:, None]).clamp_(min=0) // size  # [G, n]
    blocks = torch.arange(width, device=first.device)
    is_read = blocks >= first[..., None]  # [G, n, W]
    last_block = (rows.limits[step.idx_mapping] - 1).div(size, rounding_mode="floor").clamp(min=0)  # [n]
    blocks = torch.minimum(blocks, last_block[:, None]).to(torch.int64)  # [n, W]
    tables = groups.block_table[:, step.idx_mapping].gather(2, blocks.expand(len(groups.windows), -1, -1))
    groups.block_tables.copy_(tables * is_read)
    row = step.idx_mapping[step.batch_index]  # [T]
    block_id = groups.block_table[:, row, step.positions // size].to(torch.int64)  # [G, T]
    slots = block_id * size + step.positions % size
    groups.slots.copy_(torch.where(step.slots >= 0, slots, -1))


def prepare_states_torch(step: StepBuffers, rows: RowTables, states: StateTables) -> None:
    """Fill ``states.read_slots`` and ``states.write_slots`` of a step. Decodes are the requests with all tokens of the
    prompt computed; of others the state after the last token is kept. From the row's limit on none is."""
    num_slots, row, size = states.tables.shape[0], step.idx_mapping, rows.block_size
    starts, count = step.query_start_loc[:-1], step.query_start_loc.diff()  # [n]
    computed = rows.num_computed[row]  # [n]
    before = (computed - 1).clamp(min=0)
    found = states.tables[before % num_slots, row, before // size]
    states.read_slots.copy_(torch.where((row >= 0) & (count > 0) & (computed > 0), found, 0))
    place = torch.arange(-num_slots, 0, dtype=torch.int32, device=starts.device)
    position = (computed + count)[:, None] + place  # [n, S]
    is_kept = (position >= computed[:, None]) & (position < rows.limits[row, None]) & (row >= 0)[:, None]
    is_kept &= (computed >= rows.prefill_lens[row])[:, None] | (place == -1)
    position.clamp_(min=0)
    found = states.tables[position % num_slots, row[:, None], (position // size).clamp(max=states.tables.shape[2] - 1)]
    states.write_slots.copy_(torch.where(is_kept, found, -1))


def uniform_query_len(step: StepBuffers, rows: RowTables) -> int:
    """``T / n`` of a batch for `prepare_decode_torch`; raises what that raises."""
    num_reqs, num_tokens, num_drafts = len(step.idx_mapping), len(step.positions), rows.draft_tokens.shape[1]
    if num_reqs == 0 or num_tokens % num_reqs or not num_reqs <= num_tokens <= num_reqs * (1 + num_drafts):
        raise ValueError(
            f"prepare_decode: {num_tokens} tokens for {num_reqs} requests with up to {num_drafts} drafts: "
            f"each request must have the same number of tokens, from 1 to {1 + num_drafts}"
        )
    return num_tokens // num_reqs


def accept_drafts_torch(
    idx_mapping: torch.Tensor, sampled: torch.Tensor, invalid: torch.Tensor, rows: RowTables, counts: torch.Tensor
) -> None:
    """Count the tokens that each request gets: its accepted drafts, and the target's token after them.

    A draft is accepted if the target sampled the same token there and all drafts before it are accepted, so a request
    gets what it would have got token by token. After an invalid token nothing is accepted.

    Args:
        idx_mapping: ``[n]``: each request's row; -1: padding, which gets nothing.
        sampled: ``[n, d + 1]`` int64, d <= k: the target's tokens after each token of the query.
        invalid: ``[n, d + 1]`` bool, or 0 and 1: tokens of rows with NaN or infinite logits.
        counts: written, ``[3, n]`` int32: tokens that the request gets, 0 to d + 1 (0 from its limit on); the tokens of
            the query that are rejected; and how many of the d drafts were proposed at all. All 0 for padding.
    """
    num_drafts = sampled.shape[1] - 1
    drafts = rows.draft_tokens[idx_mapping, :num_drafts]  # [n, d]
    is_accepted = ((sampled[:, :-1] == drafts) & (invalid[:, :-1] == 0)).cumprod(1)  # [n, d]
    room = (rows.limits[idx_mapping] - rows.num_computed[idx_mapping]).clamp(min=0)
    num_sampled = torch.minimum(is_accepted.sum(1) + 1, room)
    found = torch.stack((num_sampled, 1 + num_drafts - num_sampled, (drafts >= 0).sum(1)))
    counts.copy_(torch.where(idx_mapping >= 0, found, 0))


def post_update_torch(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    rows: RowTables,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
) -> None:
    """Advance each request by its query, less the drafts that were rejected. The batch's first m requests sampled.

    Args:
        idx_mapping: ``[n]``: each request's row, no row twice; -1: padding, its values are not read.
        query_start_loc: ``[n + 1]``
        rows: ``num_computed`` and ``last_sampled`` are updated.
        sampled: ``[m, d + 1]``, int32 or int64, m <= n: new tokens.
        num_sampled: ``[m]``: how many of them count; 0 leaves ``last_sampled`` as it is.
        num_rejected: ``[m]``: tokens of the query that are not part of the sequence.
    """
    is_request, row = idx_mapping >= 0, idx_mapping.clamp(min=0)
    advance = query_start_loc.diff()
    advance[: len(num_rejected)] -= num_rejected
    rows.num_computed.index_add_(0, row, torch.where(is_request, advance, 0))
    row, is_request = row[: len(num_sampled)], is_request[: len(num_sampled)]
    last = (num_sampled - 1).clamp(min=0).to(torch.int64)
    newest = sampled.gather(1, last.unsqueeze(1)).squeeze(1).to(torch.int32)
    change = torch.where(is_request & (num_sampled > 0), newest - rows.last_sampled[row], 0)
    rows.last_sampled.index_add_(0, row, change)


def apply_staged_writes_torch(staged: torch.Tensor, front: torch.Tensor, target: torch.Tensor, num_writes: int) -> None:
    """``front`` becomes the front of ``staged``; pairs of index and value follow there: ``target[index] = value``.

    Args:
        staged: ``[>= len(front) + 2 * num_writes]`` int32 in host memory, pinned if the others are on a GPU. It must
            not change until the device has read it.
        front: written, int32.
        target: written, ``[N]`` int32, N < 2^31: the arena of all of the runner's state, floats by their bits.
        num_writes: pairs of index and value. No index stands there twice.
    """
    size = len(front)
    moved = staged[: size + 2 * num_writes].to(front.device, non_blocking=True)
    front.copy_(moved[:size])
    target[moved[size::2]] = moved[size + 1 :: 2]


def apply_staged_writes_numpy(staged: torch.Tensor, front: torch.Tensor, target: torch.Tensor, num_writes: int) -> None:
    """See `apply_staged_writes_torch`. For CPU tensors, where a call of numpy takes a third of one of torch."""
    source, size = staged.numpy(), len(front)
    front.numpy()[:] = source[:size]
    pairs = source[size : size + 2 * num_writes]
    target.numpy()[pairs[::2]] = pairs[1::2]


def prepare_decode_native(library: NativeLibrary, step: StepBuffers, rows: RowTables) -> None:
    """See `prepare_decode_torch`."""
    query_len = uniform_query_len(step, rows)
    library.prepare_decode(
        step.idx_mapping.data_ptr(), step.idx_mapping.shape[0], query_len, rows.num_computed.data_ptr(),
        rows.prefill_lens.data_ptr(), rows.last_sampled.data_ptr(), rows.draft_tokens.data_ptr(),
        rows.draft_tokens.stride(0), rows.limits.data_ptr(), rows.block_table.data_ptr(), rows.block_table.stride(0),
        rows.block_size, rows.token_pages.data_ptr(), step.positions.data_ptr(), step.seq_lens.data_ptr(),
        step.batch_index.data_ptr(), step.slots.data_ptr(), step.input_ids.data_ptr(), step.block_tables.data_ptr(),
        step.block_tables.stride(0), step.block_tables.shape[1],
    )  # fmt: skip


def post_update_native(
    library: NativeLibrary,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    rows: RowTables,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
) -> None:
    """See `post_update_torch`."""
    sampled = sampled.to(torch.int64)
    library.post_update(
        idx_mapping.data_ptr(), idx_mapping.shape[0], query_start_loc.data_ptr(), sampled.data_ptr(), sampled.stride(0),
        num_sampled.data_ptr(), num_rejected.data_ptr(), num_sampled.shape[0], rows.num_computed.data_ptr(),
        rows.last_sampled.data_ptr(),
    )  # fmt: skip
