"""The preparation operations in C. Tensors are contiguous in their last dimension."""

from __future__ import annotations

import torch

from fleetfoot.kernels.prepare.reference import uniform_query_len
from fleetfoot.kernels.prepare.tables import RowTables, StepBuffers
from fleetfoot.native.loading import NativeLibrary


def prepare_decode_native(library: NativeLibrary, step: StepBuffers, rows: RowTables) -> None:
    """See `fleetfoot.kernels.prepare.reference.prepare_decode_torch`."""
    query_len = uniform_query_len(step, rows)
    library.prepare_decode(
        step.idx_mapping.data_ptr(),
        step.idx_mapping.shape[0],
        query_len,
        rows.num_computed.data_ptr(),
        rows.prefill_lens.data_ptr(),
        rows.last_sampled.data_ptr(),
        rows.draft_tokens.data_ptr(),
        rows.draft_tokens.stride(0),
        rows.limits.data_ptr(),
        rows.block_table.data_ptr(),
        rows.block_table.stride(0),
        rows.block_size,
        rows.token_pages.data_ptr(),
        step.positions.data_ptr(),
        step.seq_lens.data_ptr(),
        step.batch_index.data_ptr(),
        step.slots.data_ptr(),
        step.input_ids.data_ptr(),
        step.block_tables.data_ptr(),
        step.block_tables.stride(0),
        step.block_tables.shape[1],
    )


def post_update_native(
    library: NativeLibrary,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    rows: RowTables,
    sampled: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
) -> None:
    """See `fleetfoot.kernels.prepare.reference.post_update_torch`."""
    sampled = sampled.to(torch.int64)
    library.post_update(
        idx_mapping.data_ptr(),
        idx_mapping.shape[0],
        query_start_loc.data_ptr(),
        sampled.data_ptr(),
        sampled.stride(0),
        num_sampled.data_ptr(),
        num_rejected.data_ptr(),
        num_sampled.shape[0],
        rows.num_computed.data_ptr(),
        rows.last_sampled.data_ptr(),
    )
