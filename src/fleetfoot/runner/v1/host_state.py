"""The state of Model Runner V1 on the host, as numpy arrays; the inputs of a step, and of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from fleetfoot.kernels.recurrent import number_chunks
from fleetfoot.kernels.recurrent.batch import make_state_batch
from fleetfoot.records.forward_context import CHUNK, AttentionMetadata, StateBatch
from fleetfoot.records.kv_layout import ONE_GROUP, KVGroup, num_tables
from fleetfoot.records.step import NewRequest, SchedulerOutput
from fleetfoot.speculative.drafter import DraftBatch


class HostState:
    """A row for each of ``max_num_seqs`` running requests. The scheduler numbers the rows. ``num_drafts``: draft tokens
    of a row; a query may exceed ``max_model_len`` by them; ``groups``, ``group_of_layers``: of `KVLayout`."""

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_drafts: int = 0,
        groups: Sequence[KVGroup] = ONE_GROUP,
        group_of_layers: Sequence[int] = (),
    ) -> None:
        self.block_size, self._groups, self._group_of_layers = block_size, groups, group_of_layers
        longest = max_model_len + num_drafts
        # pages of zeros take memory only when rows are first written
        self.token_ids = np.zeros((max_num_seqs, longest + 1), dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)  # known tokens
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)  # tokens with KV
        self.prefill_lens = np.zeros(max_num_seqs, dtype=np.int64)  # known tokens when the request got its row
        self.limits = np.zeros(max_num_seqs, dtype=np.int64)  # positions from here on are never an input
        self.drafts = np.full((max_num_seqs, num_drafts), -1, dtype=np.int32)  # for the next step; -1: none
        self.temperatures = np.zeros(max_num_seqs, dtype=np.float32)
        self.seeds = np.zeros(max_num_seqs, dtype=np.int64)  # 64-bit patterns
        # entries after a request's last block are stale, but valid block ids
        self.block_tables = np.zeros((num_tables(groups), max_num_seqs, -(-longest // block_size)), dtype=np.int32)
        self.block_table = self.block_tables[0]
        self._num_with_kv = len(groups) - groups[-1].is_state
        self._state_tables = self.block_tables[self._num_with_kv :]  # [num_slots, max_num_seqs, max_blocks]
        self.requests: list[NewRequest | None] = [None] * max_num_seqs

    def update(self, scheduler_output: SchedulerOutput) -> None:
        """Write the rows of new requests, append new blocks."""
        for request in scheduler_output.new_requests:
            row = request.row
            self.requests[row] = request
            self.token_ids[row, : len(request.token_ids)] = request.token_ids
            self.num_tokens[row] = request.num_tokens
            self.prefill_lens[row], self.num_computed[row] = request.num_tokens, request.num_computed_tokens
            self.limits[row] = request.max_total_tokens - 1
            self.drafts[row] = -1
            self.temperatures[row] = request.params.temperature
            self.seeds[row : row + 1].view(np.uint64)[0] = request.seed & 0xFFFFFFFFFFFFFFFF
            for table, block_ids in zip(self.block_tables, (request.block_ids, *request.group_block_ids), strict=True):
                table[row, : len(block_ids)] = block_ids
        for row, begin, block_ids in scheduler_output.new_block_ids:
            self.block_table[row, begin : begin + len(block_ids)] = block_ids
        for group, row, begin, block_ids in scheduler_output.new_group_block_ids:
            self.block_tables[group, row, begin : begin + len(block_ids)] = block_ids

    def slots(self, group: int, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """``[num_tokens]`` int64: where the K and V of tokens go in a group of layers."""
        size = self.block_size
        slots = self.block_tables[group, rows, positions // size] * np.int64(size) + positions % size
        slots[positions // size > (self.limits[rows] - 1) // size] = -1  # their KV is not written
        return slots

    def step_tables(self, group: int, rows: np.ndarray, max_seq_len: int) -> np.ndarray:
        """``[num_reqs, max_blocks]`` int32: the blocks of ``rows``; 0 before what this step reads."""
        last = (self.limits[rows] - 1) // self.block_size  # drafts may lie in blocks after it, which are not its own
        blocks = np.minimum(np.arange(-(-max_seq_len // self.block_size)), last[:, None])
        tables = self.block_tables[group, rows[:, None], blocks]
        if (window := self._groups[group].window) is not None:
            first = np.maximum(self.num_computed[rows] + 1 - window, 0) // self.block_size  # [num_reqs]
            tables[np.arange(tables.shape[1]) < first[:, None]] = 0
        return tables

    def metadata_of_layers(
        self, metadata: AttentionMetadata, rows: np.ndarray, token_rows: np.ndarray, positions: np.ndarray
    ) -> list[AttentionMetadata]:
        """See `ForwardContext.attention_of_layers`. ``metadata``: of the first group."""
        if self._num_with_kv == 1:
            return []
        device, of_groups = metadata.positions.device, [metadata]
        for group in range(1, self._num_with_kv):
            tables = torch.from_numpy(self.step_tables(group, rows, metadata.max_seq_len)).to(device)
            slots = torch.from_numpy(self.slots(group, token_rows, positions)).to(device)
            of_groups.append(replace(metadata, block_tables=tables, slot_mapping=slots))
        of_groups += [metadata] * (len(self._groups) - len(of_groups))  # which recurrent layers do not read
        return [of_groups[group] for group in self._group_of_layers]

    def state_batch(
        self,
        rows: np.ndarray,
        query_lens: np.ndarray,
        snapshots: Sequence[tuple[int, int, int]],
        metadata: AttentionMetadata,
    ) -> StateBatch | None:
        """The states that ``rows [num_reqs]`` read and write; None: the model has none. Of decodes all are kept, of
        other requests the last one."""
        tables, computed = self._state_tables, self.num_computed[rows]  # [num_reqs]
        if not len(tables):
            return None
        before = np.maximum(computed - 1, 0)
        read = np.where(computed > 0, tables[before % len(tables), rows, before // self.block_size], 0)
        columns = np.arange(-len(tables), 0)
        position = (computed + query_lens)[:, None] + columns  # [num_reqs, num_slots]
        is_decode = computed >= self.prefill_lens[rows]
        is_kept = (position >= computed[:, None]) & (position < self.limits[rows, None])
        is_kept &= is_decode[:, None] | (columns == -1)
        position = np.where(is_kept, position, 0)
        slots = tables[position % len(tables), rows[:, None], position // self.block_size]
        device, starts = metadata.positions.device, metadata.query_start_loc
        of_chunks = np.zeros(query_lens.sum() // CHUNK + len(rows), dtype=np.int32)
        for chunk, slot in number_chunks(rows.tolist(), query_lens.tolist(), snapshots):
            of_chunks[chunk] = slot
        arrays = read, np.where(is_kept, slots, -1), of_chunks
        read_slots, write_slots, chunk_slots = (torch.from_numpy(each.astype(np.int32)).to(device) for each in arrays)
        return make_state_batch(
            starts, read_slots, write_slots, metadata.max_query_len, chunk_slots if snapshots else None
        )

    def place_drafts(self, rows: np.ndarray, num_drafts: int) -> None:
        """Write drafts after the known tokens of ``rows [n]``, where the step reads them and accepted ones stay.
        A draft of -1 becomes token 0."""
        index = self.num_tokens[rows, None] + np.arange(num_drafts)  # [n, num_drafts]
        self.token_ids[rows[:, None], index] = self.drafts[rows, :num_drafts].clip(min=0)

    def append_tokens(self, rows: np.ndarray, new_token_ids: list[list[int]]) -> np.ndarray:
        """Append the new tokens of each of ``rows [n]``, which may be none. Returns their numbers ``[n]``."""
        counts = np.array([len(token_ids) for token_ids in new_token_ids])  # [n]
        lengths = self.num_tokens[rows] + counts  # [n]
        # the index of each new token in its row, in the order of their concatenation
        index = np.arange(counts.sum()) + np.repeat(lengths - np.cumsum(counts), counts)
        self.token_ids[np.repeat(rows, counts), index] = list(chain.from_iterable(new_token_ids))
        self.num_tokens[rows] = lengths
        for row, token_ids in zip(rows.tolist(), new_token_ids, strict=True):
            request = self.requests[row]
            assert request is not None, f"row {row} is scheduled, but no request has it"
            request.token_ids.extend(token_ids)
        return counts

    def sampled_token_message(
        self, rows: np.ndarray, new_token_ids: list[list[int]], num_rejected: np.ndarray
    ) -> torch.Tensor:
        """The message of `SampledTokenSync`, after `append_tokens`, for ``rows [n]``."""
        message = np.empty((len(rows), 2 + self.drafts.shape[1]), dtype=np.int32)
        message[:, 0] = self.token_ids[rows, self.num_tokens[rows] - 1]
        message[:, 1] = np.where([*map(bool, new_token_ids)], num_rejected, -1)
        message[:, 2:] = self.drafts[rows]
        return torch.from_numpy(message)

    def apply_sampled_tokens(self, rows: np.ndarray, message: torch.Tensor, query_len: int) -> None:
        """Correct ``rows [n]`` on a rank that has not sampled; see `SampledTokenSync`."""
        values = message.cpu().numpy()
        has_new = values[:, 1] >= 0
        # the whole query was counted; a request without a new token is a decode that had reached its length
        self.num_computed[rows] -= np.where(has_new, values[:, 1], query_len)
        newest = self.num_computed[rows][has_new]  # after the accepted drafts, which `place_drafts` has written
        self.token_ids[rows[has_new], newest] = values[has_new, 0]
        self.num_tokens[rows[has_new]] = newest + 1
        self.drafts[rows] = values[:, 2:]


# --- the inputs of a step --------------------------------------------------------------------------------------------


@dataclass(slots=True)
class StepInputs:
    """The inputs of the model, and the rows that they belong to."""

    rows: np.ndarray
    """``[num_reqs]`` int64: batch order."""
    query_lens: np.ndarray
    """``[num_reqs]`` int64: tokens to compute."""
    query_start_loc: np.ndarray
    """``[num_reqs + 1]`` int64"""
    token_rows: np.ndarray
    """``[num_tokens]`` int64: each token's row."""
    positions: np.ndarray
    """``[num_tokens]`` int64"""
    input_ids: torch.Tensor
    """``[num_tokens]`` int64"""
    num_decodes: int
    metadata: AttentionMetadata
    metadata_of_layers: Sequence[AttentionMetadata]
    states: StateBatch | None


def prepare_inputs(state: HostState, scheduler_output: SchedulerOutput, device: torch.device) -> StepInputs:
    """Gather tokens, positions and cache slots of every token in the step, in batch order."""
    rows = np.array(scheduler_output.rows, dtype=np.int64)  # [num_reqs]
    query_lens = np.array(scheduler_output.num_scheduled_tokens, dtype=np.int64)  # [num_reqs]
    query_start_loc = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum(query_lens, out=query_start_loc[1:])
    num_computed = state.num_computed[rows]  # [num_reqs]
    seq_lens = num_computed + query_lens  # [num_reqs]
    num_drafts, num_decodes = scheduler_output.num_drafts, scheduler_output.num_decodes
    if num_drafts:
        state.place_drafts(rows[:num_decodes], num_drafts)
    if num_decodes == len(rows) and not num_drafts:
        token_rows, positions = rows, num_computed
    else:
        token_rows = np.repeat(rows, query_lens)  # [num_tokens]
        positions = np.arange(query_start_loc[-1]) + np.repeat(num_computed - query_start_loc[:-1], query_lens)
    max_seq_len = int(seq_lens.max())

    def on_device(array: np.ndarray, dtype: type | None = None) -> torch.Tensor:
        return torch.from_numpy(array if dtype is None else array.astype(dtype)).to(device)

    metadata = AttentionMetadata(
        query_start_loc=on_device(query_start_loc, np.int32),
        seq_lens=on_device(seq_lens, np.int32),
        block_tables=on_device(state.step_tables(0, rows, max_seq_len)),
        slot_mapping=on_device(state.slots(0, token_rows, positions)),
        positions=on_device(positions),
        num_decodes=0 if num_drafts else num_decodes,  # for attention, a decode is a query of one token
        max_query_len=int(query_lens.max()),
        max_seq_len=max_seq_len,
    )
    input_ids = on_device(state.token_ids[token_rows, positions])
    of_layers = state.metadata_of_layers(metadata, rows, token_rows, positions)
    of_requests = rows, query_lens, query_start_loc, token_rows, positions
    states = state.state_batch(rows, query_lens, scheduler_output.snapshots, metadata)
    return StepInputs(*of_requests, input_ids, num_decodes, metadata, of_layers, states)


def logits_indices(inputs: StepInputs, scheduler_output: SchedulerOutput) -> np.ndarray:
    """``[num_logits]`` int64: tokens that need logits: all of each decode, and the last of a prefill that ends."""
    num_decodes = scheduler_output.num_decodes
    last_tokens = inputs.query_start_loc[num_decodes + 1 : scheduler_output.num_sampled + 1] - 1
    return np.concatenate((np.arange(num_decodes * (1 + scheduler_output.num_drafts)), last_tokens))


def draft_batch(
    state: HostState, inputs: StepInputs, hidden_states: torch.Tensor, num_rejected: np.ndarray, max_seq_len: int
) -> DraftBatch:
    """The step for a drafter, after the new tokens were appended. ``hidden_states``: ``[num_tokens, hidden_size]``, in
    batch order; ``num_rejected``: ``[num_sampled]``, query tokens that are not part of the sequence; ``max_seq_len``:
    maximum number of tokens of a request, and of its drafts."""
    num_sampled = len(num_rejected)
    rows = inputs.rows[:num_sampled]
    starts, ends = inputs.query_start_loc[:num_sampled], inputs.query_start_loc[1 : num_sampled + 1]
    last_index = np.maximum(ends - 1 - num_rejected, starts)  # [num_sampled]
    # entries after the known tokens of a row are undefined, but valid token ids
    next_position = (inputs.positions + 1).clip(max=state.token_ids.shape[1] - 1)  # [num_tokens]

    def on_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(hidden_states.device)

    return DraftBatch(
        input_ids=inputs.input_ids,
        metadata=inputs.metadata,
        hidden=hidden_states,
        next_ids=on_device(state.token_ids[inputs.token_rows, next_position]),
        last_index=on_device(last_index),
        newest=on_device(state.token_ids[rows, state.num_tokens[rows] - 1]),
        positions=on_device(inputs.positions[last_index] + 1),
        limits=on_device(state.limits[rows]),
        block_tables=on_device(state.block_table[rows]),
        rows=on_device(rows),
        temperatures=on_device(state.temperatures),
        seeds=on_device(state.seeds),
        is_decode=inputs.num_decodes == len(inputs.rows),
        max_seq_len=max_seq_len,
    )
