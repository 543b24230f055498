"""A step's inputs, made on the device: buffers that keep their addresses, and the kernels that fill them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.prepare.tables import StepBuffers
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
class InputBatch(StepBuffers):
    """Views of the buffers, as long as the padded step, and what the host knows of it."""

    shape: BatchShape
    rows: list[int]
    """Batch order."""
    metadata: AttentionMetadata
    """Of the same tensors."""

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

    def __init__(
        self, state: DeviceState, kernels: Kernels, max_num_seqs: int, max_num_tokens: int, max_model_len: int
    ) -> None:
        device = state.arena.flat.device
        self._state = state
        self._prepare_inputs, self._prepare_decode = kernels.prepare_inputs, kernels.prepare_decode
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
            # a bound: the lengths themselves are on the device
            max_seq_len=self._max_model_len + self._state.num_draft,
        )
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
        )

    def fill(self, batch: InputBatch) -> None:
        """Queue the preparation of the step's inputs."""
        prepare = self._prepare_decode if batch.shape.is_decode else self._prepare_inputs
        prepare(batch, self._state.tables)
