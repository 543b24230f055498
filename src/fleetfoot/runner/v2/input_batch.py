"""A step's inputs, made on the device: buffers that keep their addresses, and the ops that fill them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fleetfoot.kernels.prepare.combine_sampled_and_draft_tokens import combine_sampled_and_draft_tokens
from fleetfoot.kernels.prepare.gather_block_tables import gather_block_tables
from fleetfoot.kernels.prepare.positions_and_seq_lens import positions_and_seq_lens
from fleetfoot.kernels.prepare.prepare_decode import prepare_decode
from fleetfoot.kernels.prepare.prepare_prefill_inputs import prepare_prefill_inputs
from fleetfoot.kernels.prepare.slot_mapping import slot_mapping
from fleetfoot.records.attention import AttentionMetadata
from fleetfoot.runner.v2.state import DeviceState


@dataclass(slots=True)
class BatchShape:
    """What the host knows of a step; everything else is on the device."""

    num_reqs: int
    num_tokens: int
    num_decodes: int
    num_sampled: int
    max_query_len: int
    padded_reqs: int
    """Requests as a captured graph wants them; the same as ``num_reqs`` where nothing is replayed."""
    padded_tokens: int
    num_drafts: int = 0
    """Drafts that each decode verifies: it has so many tokens besides the one sampled last."""

    @property
    def is_decode(self) -> bool:
        """Whether every request is a decode, so that all have the same number of tokens."""
        return self.num_decodes == self.num_reqs

    @property
    def num_logits(self) -> int:
        """Rows of logits: of every token of a decode, and of the last one of a prefill that ends."""
        return self.num_sampled + self.num_decodes * self.num_drafts


@dataclass(slots=True)
class InputBatch:
    """Views of the buffers, as long as the step."""

    shape: BatchShape
    rows: list[int]
    """Batch order, as the host gave it."""
    idx_mapping: torch.Tensor
    """``[padded_reqs]`` int32: rows; -1: padding."""
    query_start_loc: torch.Tensor
    """``[padded_reqs + 1]`` int32"""
    input_ids: torch.Tensor
    """``[padded_tokens]`` int64"""
    metadata: AttentionMetadata
    batch_index: torch.Tensor
    """``[padded_tokens]`` int32: each token's request; -1: padding."""

    @property
    def seq_lens(self) -> torch.Tensor:
        """``[padded_reqs]`` int32; for a request that samples, also the position of its new token."""
        return self.metadata.seq_lens

    @property
    def rows_of_logits(self) -> list[int]:
        """``num_logits`` rows, as the host knows them: those of decodes with drafts stand there several times."""
        shape = self.shape
        if not shape.num_drafts:
            return self.rows[: shape.num_sampled]
        of_decodes = [row for row in self.rows[: shape.num_decodes] for _ in range(1 + shape.num_drafts)]
        return of_decodes + self.rows[shape.num_decodes : shape.num_sampled]


class InputBuffers:
    """Allocated once: a captured graph reads and writes fixed addresses.

    Args:
        max_num_seqs: most requests in a step. max_num_tokens: most tokens in a step.
    """

    def __init__(self, state: DeviceState, max_num_seqs: int, max_num_tokens: int, max_model_len: int) -> None:
        device = state.arena.flat.device
        self._state = state
        self._max_model_len = max_model_len
        self._input_ids = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._slots = torch.zeros(max_num_tokens, dtype=torch.int64, device=device)
        self._batch_index = torch.zeros(max_num_tokens, dtype=torch.int32, device=device)
        self._seq_lens = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._block_tables = torch.zeros(max_num_seqs, state.max_blocks, dtype=torch.int32, device=device)
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

    def batch(self, shape: BatchShape, rows: list[int]) -> InputBatch:
        """The buffers' views for a step; `fill` gives them their values.

        Args:
            rows: batch order, as the host knows it.
        """
        staging = self._state.staging
        reqs, tokens = slice(0, shape.padded_reqs), slice(0, shape.padded_tokens)
        query_start_loc = staging.query_start_loc[: shape.padded_reqs + 1]
        is_padded = shape.padded_tokens != shape.num_tokens or shape.padded_reqs != shape.num_reqs
        has_long_queries = shape.num_drafts > 0 or (is_padded and not shape.is_decode)
        metadata = AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=self._seq_lens[reqs],
            block_tables=self._block_tables[reqs],
            slot_mapping=self._slots[tokens],
            positions=self._positions[tokens],
            num_decodes=0 if has_long_queries else shape.padded_reqs if shape.is_decode else shape.num_decodes,
            max_query_len=shape.max_query_len,
            # a bound: the lengths themselves are on the device
            max_seq_len=self._max_model_len + self._state.num_draft,
        )
        return InputBatch(
            shape,
            rows,
            staging.idx_mapping[reqs],
            query_start_loc,
            self._input_ids[tokens],
            metadata,
            self._batch_index[tokens],
        )

    def fill(self, batch: InputBatch) -> None:
        """Queue the gathering of the step's inputs."""
        if batch.shape.is_decode:
            self._fill_decode(batch)
        else:
            self._fill_mixed(batch)

    def _fill_decode(self, batch: InputBatch) -> None:
        state, requests, metadata = self._state, self._state.requests, batch.metadata
        prepare_decode(
            batch.idx_mapping,
            requests.num_computed,
            requests.prefill_lens,
            requests.last_sampled,
            requests.draft_tokens,
            requests.limits,
            state.block_tables.tensor,
            state.block_size,
            token_pages=requests.token_pages,
            positions=metadata.positions,
            seq_lens=metadata.seq_lens,
            batch_index=batch.batch_index,
            slots=metadata.slot_mapping,
            input_ids=batch.input_ids,
            block_tables=metadata.block_tables,
        )

    def _fill_mixed(self, batch: InputBatch) -> None:
        state, requests, metadata = self._state, self._state.requests, batch.metadata
        table, block_size = state.block_tables.tensor, state.block_size
        positions, slots, idx_mapping = metadata.positions, metadata.slot_mapping, batch.idx_mapping
        batch_index = batch.batch_index
        positions_and_seq_lens(
            idx_mapping,
            batch.query_start_loc,
            requests.num_computed,
            positions=positions,
            seq_lens=metadata.seq_lens,
            batch_index=batch_index,
        )
        slot_mapping(positions, batch_index, idx_mapping, requests.limits, table, block_size, slots=slots)
        prepare_prefill_inputs(
            slots,
            positions,
            batch_index,
            idx_mapping,
            requests.prefill_lens,
            requests.token_pages,
            input_ids=batch.input_ids,
        )
        combine_sampled_and_draft_tokens(
            slots,
            positions,
            batch_index,
            idx_mapping,
            requests.prefill_lens,
            requests.num_computed,
            requests.last_sampled,
            requests.draft_tokens,
            token_pages=requests.token_pages,
            input_ids=batch.input_ids,
        )
        gather_block_tables(table, idx_mapping, metadata.seq_lens, block_size, out=metadata.block_tables)
