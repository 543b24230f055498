"""A step's inputs, made on the host from the rows: plain numpy, then one tensor each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fleetfoot.records.attention import AttentionMetadata
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner.v1.host_state import HostState


@dataclass(slots=True)
class StepInputs:
    """What the model is called with, and whose it is."""

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
    metadata: AttentionMetadata


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
    block_size, max_seq_len = state.block_size, int(seq_lens.max())
    slots = state.block_table[token_rows, positions // block_size] * np.int64(block_size) + positions % block_size
    slots[positions >= state.limits[token_rows]] = -1  # computed for nothing, and kept nowhere

    def on_device(array: np.ndarray, dtype: type | None = None) -> torch.Tensor:
        return torch.from_numpy(array if dtype is None else array.astype(dtype)).to(device)

    metadata = AttentionMetadata(
        query_start_loc=on_device(query_start_loc, np.int32),
        seq_lens=on_device(seq_lens, np.int32),
        block_tables=on_device(state.block_table[rows, : -(-max_seq_len // block_size)]),
        slot_mapping=on_device(slots),
        positions=on_device(positions),
        num_decodes=0 if num_drafts else num_decodes,  # for attention, a decode is a query of one token
        max_query_len=int(query_lens.max()),
        max_seq_len=max_seq_len,
    )
    input_ids = on_device(state.token_ids[token_rows, positions])
    return StepInputs(rows, query_lens, query_start_loc, token_rows, positions, input_ids, metadata)


def logits_indices(inputs: StepInputs, scheduler_output: SchedulerOutput) -> np.ndarray:
    """``[num_logits]`` int64: tokens that need logits: all of each decode, and the last of a prefill that ends."""
    num_decodes = scheduler_output.num_decodes
    last_tokens = inputs.query_start_loc[num_decodes + 1 : scheduler_output.num_sampled + 1] - 1
    return np.concatenate((np.arange(num_decodes * (1 + scheduler_output.num_drafts)), last_tokens))
