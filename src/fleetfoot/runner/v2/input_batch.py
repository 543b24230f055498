"""The inputs of a step: buffers with fixed addresses, filled on the device; and which of its tokens need logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.prepare.tables import GroupTables, StateTables, StepBuffers
from fleetfoot.kernels.recurrent.batch import count_chunks
from fleetfoot.records.forward_context import AttentionMetadata, LogitsMetadata, StateBatch
from fleetfoot.runner.graphs import BatchShape
from fleetfoot.runner.v2.state import DeviceState
from fleetfoot.sampling.verification import LogitsBatch


@dataclass(slots=True)
class InputBatch(StepBuffers):
    """Views of the buffers with the lengths of the padded step, and its sizes and rows on the host."""

    shape: BatchShape
    rows: list[int]
    """Batch order."""
    metadata: AttentionMetadata
    """Metadata of the same tensors."""
    groups: GroupTables
    """What is of the groups of layers after the first."""
    metadata_of_layers: Sequence[AttentionMetadata] = ()
    """See `ForwardContext.attention_of_layers`."""
    states: StateBatch | None = None
    """See `ForwardContext.states`."""

    @property
    def last_metadata(self) -> AttentionMetadata:
        """Metadata of the last layer."""
        return self.metadata_of_layers[-1] if self.metadata_of_layers else self.metadata

    @property
    def rows_of_logits(self) -> list[int]:
        """``[num_logits]``: the row of each row of logits; rows of decodes with drafts are repeated."""
        shape = self.shape
        if not shape.num_drafts:
            return self.rows[: shape.num_sampled]
        of_decodes = [row for row in self.rows[: shape.num_decodes] for _ in range(1 + shape.num_drafts)]
        return of_decodes + self.rows[shape.num_decodes : shape.num_sampled]


class InputBuffers:
    """Allocated once: a captured graph reads and writes fixed addresses. ``max_num_seqs``, ``max_num_tokens``: of a
    step; ``group_of_layers``: the group of each layer of the model."""

    def __init__(
        self,
        state: DeviceState,
        kernels: Kernels,
        max_num_seqs: int,
        max_num_tokens: int,
        max_model_len: int,
        group_of_layers: Sequence[int] = (),
    ) -> None:
        device = state.arena.flat.device
        self._state = state
        self._prepare_inputs, self._prepare_decode = kernels.prepare_inputs, kernels.prepare_decode
        self._prepare_groups, self._group_of_layers = kernels.prepare_groups, group_of_layers
        self._prepare_states = kernels.prepare_states
        self._max_model_len = max_model_len
        self._input_ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._batch_index = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(max_num_seqs, state.max_blocks, dtype=torch.int32, device=device)
        num_others = len(state.windows)
        self._group_slots = torch.zeros(num_others, max_num_tokens, dtype=torch.int64, device=device)
        tables = num_others, max_num_seqs, state.max_blocks
        self._group_block_tables = torch.zeros(tables, dtype=torch.int32, device=device)
        num_slots = len(state.state_tables)
        num_rows = max_num_seqs * bool(num_slots)
        self._read_slots = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self._write_slots = torch.zeros(max_num_seqs, num_slots, dtype=torch.int32, device=device)
        self._chunk_starts = torch.zeros(num_rows + bool(num_slots), dtype=torch.int32, device=device)
        # query_start_loc of a pure decode, without drafts and with them
        self._iota = np.arange(max_num_seqs + 1, dtype=np.int32)
        self._starts = self._iota * (1 + state.num_draft)

    def query_start_loc(self, shape: BatchShape, query_lens: list[int]) -> np.ndarray:
        """``[padded_reqs + 1]`` int32 on the host, for the staging buffer."""
        if shape.is_decode:
            return (self._starts if shape.num_drafts else self._iota)[: shape.padded_reqs + 1]
        starts = np.empty(shape.padded_reqs + 1, dtype=np.int32)
        starts[0] = 0
        np.cumsum(query_lens, out=starts[1 : shape.num_reqs + 1])
        starts[shape.num_reqs + 1 :] = starts[shape.num_reqs]
        return starts

    def batch(self, shape: BatchShape, rows: list[int], *, is_warm_up: bool = False) -> InputBatch:
        """The buffers' views for a step, to be filled by `fill`. ``rows``: the requests' rows in batch order."""
        staging = self._state.staging
        reqs, tokens = slice(0, shape.padded_reqs), slice(0, shape.padded_tokens)
        query_start_loc = staging.query_start_loc[: shape.padded_reqs + 1]
        is_padded = shape.padded_tokens != shape.num_tokens or shape.padded_reqs != shape.num_reqs
        has_long_queries = shape.num_drafts > 0 or (is_padded and not shape.is_decode)
        positions, slots = self._positions[tokens], self._slots[tokens]
        seq_lens, block_tables = self._seq_lens[reqs], self._block_tables[reqs]
        metadata = AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_tables=block_tables,
            slot_mapping=slots,
            positions=positions,
            num_decodes=0 if has_long_queries else shape.padded_reqs if shape.is_decode else shape.num_decodes,
            max_query_len=shape.max_query_len,
            # an upper bound: the lengths are on the device
            max_seq_len=shape.max_context or self._max_model_len + self._state.num_draft,
            has_prompts=not shape.is_decode,
            is_warm_up=is_warm_up,
        )
        state = self._state
        group_slots, group_tables = self._group_slots[:, tokens], self._group_block_tables[:, reqs]
        of_layers: list[AttentionMetadata] = []
        if len(group_slots):
            others = zip(group_slots, group_tables, strict=True)
            of_groups = [metadata, *(replace(metadata, slot_mapping=s, block_tables=t) for s, t in others)]
            of_groups.append(metadata)  # recurrent layers do not read it
            of_layers = [of_groups[group] for group in self._group_of_layers]
        states = None
        if len(state.state_tables):
            slots_of_states = self._read_slots[reqs], self._write_slots[reqs]
            chunk_starts = self._chunk_starts[: shape.padded_reqs + 1]
            of_chunks = chunk_starts, state.chunk_slots
            states = StateBatch(query_start_loc, *slots_of_states, shape.max_query_len, *of_chunks)
        return InputBatch(
            staging.idx_mapping[reqs],
            query_start_loc,
            positions,
            seq_lens,
            self._batch_index[tokens],
            slots,
            self._input_ids[tokens],
            block_tables,
            shape,
            rows,
            metadata,
            GroupTables(state.windows, state.group_tables, group_slots, group_tables),
            of_layers,
            states,
        )

    def fill(self, batch: InputBatch) -> None:
        """Queue the preparation of the step's inputs."""
        prepare = self._prepare_decode if batch.shape.is_decode else self._prepare_inputs
        prepare(batch, self._state.tables)
        if batch.metadata_of_layers:
            self._prepare_groups(batch, self._state.tables, batch.groups)
        if (states := batch.states) is not None:
            tables = StateTables(self._state.state_tables, states.read_slots, states.write_slots)
            self._prepare_states(batch, self._state.tables, tables)
            if not batch.shape.is_decode:
                count_chunks(states)


def split_decodes(batch: InputBatch, iota: torch.Tensor) -> None:
    """Set `AttentionMetadata.split` of all layers, on the device. ``iota``: ``[>= num_reqs + 1]`` int32: 0, 1, ..."""
    metadata = batch.metadata
    starts, places = metadata.query_start_loc, iota[: metadata.num_reqs + 1]
    # the requests at the front of the batch with one token each
    is_decode = (starts[:-1] == places[:-1]) & (starts[1:] == places[1:])
    num_decodes = is_decode.sum(dtype=torch.int32)
    lens = metadata.seq_lens.masked_fill(~is_decode, 0)
    of_decodes: dict[str, Any] = {"query_start_loc": places, "seq_lens": lens, "num_decodes": metadata.num_reqs}
    of_decodes |= {"max_query_len": 1, "has_prompts": False}
    other_starts = torch.maximum(starts, num_decodes)
    for each in {id(each): each for each in (metadata, *batch.metadata_of_layers)}.values():
        each.split = replace(each, **of_decodes), replace(each, query_start_loc=other_starts)


# --- logits indices --------------------------------------------------------------------------------------------------


def logits_batch(batch: InputBatch, num_sampled: int) -> LogitsBatch:
    """The rows of logits of a batch; its first ``num_sampled`` requests sample (padding of a graph included)."""
    shape = batch.shape
    request_rows = batch.idx_mapping[:num_sampled]
    num_decodes = num_sampled if shape.is_decode else shape.num_decodes
    counts = (request_rows, num_decodes, shape.num_drafts)
    if not shape.num_drafts:
        indices, seq_lens = None, batch.seq_lens[:num_sampled]
        if not shape.is_decode:
            indices = (batch.query_start_loc[1 : num_sampled + 1] - 1).clamp_(min=0)
        return LogitsBatch(indices, request_rows, seq_lens, *counts)
    num_verified = num_decodes * (1 + shape.num_drafts)
    if shape.is_decode:
        # padding is of request -1, which is the last row of idx_mapping: padding too
        rows = batch.idx_mapping[batch.batch_index[:num_verified]]
        return LogitsBatch(None, rows, batch.metadata.positions[:num_verified] + 1, *counts)
    # decodes come first, with logits for all their tokens; then the last token of each prefill that ends
    of_decodes = torch.arange(num_verified, device=batch.idx_mapping.device)
    last_tokens = batch.query_start_loc[shape.num_decodes + 1 : num_sampled + 1] - 1
    indices = torch.cat((of_decodes, last_tokens))
    rows = batch.idx_mapping[batch.batch_index[indices]]
    return LogitsBatch(indices, rows, batch.metadata.positions[indices] + 1, *counts)


def logits_metadata(batch: InputBatch, logits: LogitsBatch, iota: torch.Tensor) -> LogitsMetadata | None:
    """The tokens that need logits; None: all of the batch. ``iota``: ``[>= n + 1]`` int32: 0, 1, ..."""
    if logits.indices is None:
        return None
    shape, num_reqs = batch.shape, len(logits.request_rows)
    starts = iota[: num_reqs + 1]
    if shape.num_drafts:  # decodes have 1 + num_drafts tokens each
        starts = starts + starts.clamp(max=shape.num_decodes) * shape.num_drafts
    last = batch.last_metadata
    metadata = replace(
        last,
        query_start_loc=starts,
        seq_lens=batch.seq_lens[:num_reqs],
        block_tables=last.block_tables[:num_reqs],
        slot_mapping=last.slot_mapping[:0],
        positions=last.positions[:0],
        num_decodes=0 if shape.num_drafts else num_reqs,
        max_query_len=1 + shape.num_drafts,
        has_prompts=False,
        split=None,
    )
    return LogitsMetadata(logits.indices, metadata)
