"""The inputs of a step: buffers with fixed addresses, filled on the device; and which of its tokens need logits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.prepare.tables import StepBuffers
from fleetfoot.records.forward_context import AttentionMetadata, LogitsMetadata
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
    """Of the same tensors."""

    @property
    def rows_of_logits(self) -> list[int]:
        """``[num_logits]``: the row of each row of logits; rows of decodes with drafts are repeated."""
        shape = self.shape
        if not shape.num_drafts:
            return self.rows[: shape.num_sampled]
        of_decodes = [row for row in self.rows[: shape.num_decodes] for _ in range(1 + shape.num_drafts)]
        return of_decodes + self.rows[shape.num_decodes : shape.num_sampled]


class InputBuffers:
    """Allocated once: a captured graph reads and writes fixed addresses. ``max_num_seqs``,
    ``max_num_tokens``: of a step."""

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
            is_warm_up=is_warm_up,
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


def split_decodes(metadata: AttentionMetadata, iota: torch.Tensor) -> None:
    """Set `AttentionMetadata.split`, on the device. ``iota``: ``[>= num_reqs + 1]`` int32: 0, 1, ..."""
    starts, places = metadata.query_start_loc, iota[: metadata.num_reqs + 1]
    # the requests at the front of the batch with one token each
    is_decode = (starts[:-1] == places[:-1]) & (starts[1:] == places[1:])
    num_decodes = is_decode.sum(dtype=torch.int32)
    lens = metadata.seq_lens.masked_fill(~is_decode, 0)
    decodes = replace(metadata, query_start_loc=places, seq_lens=lens, num_decodes=metadata.num_reqs, max_query_len=1)
    metadata.split = decodes, replace(metadata, query_start_loc=torch.maximum(starts, num_decodes))


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
    metadata = replace(
        batch.metadata,
        query_start_loc=starts,
        seq_lens=batch.seq_lens[:num_reqs],
        block_tables=batch.metadata.block_tables[:num_reqs],
        slot_mapping=batch.metadata.slot_mapping[:0],
        positions=batch.metadata.positions[:0],
        num_decodes=0 if shape.num_drafts else num_reqs,
        max_query_len=1 + shape.num_drafts,
        split=None,
    )
    return LogitsMetadata(logits.indices, metadata)
