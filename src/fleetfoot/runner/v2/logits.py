"""Which tokens of a batch need logits."""

from __future__ import annotations

from dataclasses import replace

import torch

from fleetfoot.records.attention import WantedTokens
from fleetfoot.runner.v2.input_batch import InputBatch
from fleetfoot.sampling.verification import LogitsBatch


def logits_batch(batch: InputBatch, num_sampled: int) -> LogitsBatch:
    """The rows of logits of a batch whose first ``num_sampled`` requests sample (padding of a graph included)."""
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


def wanted_tokens(batch: InputBatch, logits: LogitsBatch, iota: torch.Tensor) -> WantedTokens | None:
    """The tokens that need logits; None: all of the batch.

    Args:
        iota: ``[>= n + 1]`` int32: 0, 1, ...
    """
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
    )
    return WantedTokens(logits.indices, metadata)
