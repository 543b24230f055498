"""The tensors that the operations of step preparation read and write.

`reference` has the operations in torch and what they mean, `triton_kernels` the faster implementations. Outputs are
written in place, because graphs need fixed addresses; counts are read from shapes and from device memory, never by the
host. There are R rows of state, n requests in the batch and T tokens (both may be padded to the size of a captured
graph), B blocks per row and k draft tokens. All tensors are int32 unless stated otherwise, and contiguous in their last
dimension. A padding request has ``idx_mapping[b] == -1``; a padding token has ``batch_index[t] == -1``, position 0,
slot -1 and input id 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fleetfoot.records.forward_context import CHUNK

if TYPE_CHECKING:
    import torch


NUM_ROW_FIELDS = 4
"""int32 fields of a row that the host writes: `RowTables`' first three, and the length of the prompt."""
_INT32, _INT64 = 4, 8


@dataclass(frozen=True, slots=True)
class RowTables:
    """The state of all rows that steps read and write."""

    num_computed: torch.Tensor
    """``[R]``: tokens with KV in the cache."""
    prefill_lens: torch.Tensor
    """``[R]``: tokens that were known when the request was admitted."""
    limits: torch.Tensor
    """``[R]``, from 1 on: positions from here on are never an input of the request. Drafts may have them: their K and
    V are written in the block of the last input, so that nothing is read that others have left there, and those in
    later blocks, which are not the request's, are not."""
    last_sampled: torch.Tensor
    """``[R]``: the newest sampled token."""
    draft_tokens: torch.Tensor
    """``[R + 1, k]``, k may be 0: drafts for the next step, -1 for none. Padding requests write the last row."""
    block_table: torch.Tensor
    """``[R, B]``: block ids. Rows may lie further apart than B."""
    token_pages: torch.Tensor
    """``[num_blocks * block_size]``: the token of each KV slot."""
    block_size: int
    """Tokens in a block."""


@dataclass(slots=True)
class StepBuffers:
    """A batch, and the buffers that `Kernels.prepare_inputs` fills for it."""

    idx_mapping: torch.Tensor
    """``[n]``: each request's row; -1: padding. No row stands there twice."""
    query_start_loc: torch.Tensor
    """``[n + 1]``, ascending from 0, at most T: where each request's tokens begin."""
    positions: torch.Tensor
    """``[T]`` int64: ``num_computed`` + offset in the query; 0 for padding."""
    seq_lens: torch.Tensor
    """``[n]``: ``num_computed`` + query length; 0 for padding."""
    batch_index: torch.Tensor
    """``[T]``: each token's request; -1 for tokens after ``query_start_loc[n]`` and tokens of padding requests."""
    slots: torch.Tensor
    """``[T]`` int64: block id * block_size + offset in the block; -1 for padding, and after the last block of
    `RowTables.limits`."""
    input_ids: torch.Tensor
    """``[T]`` int64: a known token before ``prefill_lens``; then the token sampled last, followed by the row's drafts,
    where -1 becomes 0; 0 for padding."""
    block_tables: torch.Tensor
    """``[n, W]``, W <= B, W * block_size >= each of ``seq_lens``: the blocks of each request, in batch order. Those
    after the last block of `RowTables.limits` are that again. Entries from ``ceil(seq_len / block_size)`` on are
    undefined."""


@dataclass(frozen=True, slots=True)
class GroupTables:
    """Block tables and buffers of the groups of layers after the first, G of them, for `Kernels.prepare_groups`."""

    windows: torch.Tensor
    """``[G]``: positions that the layers of a group read, the current one included; at most 2^31 - 1: all."""
    block_table: torch.Tensor
    """``[G, R, B]``: as that of `RowTables`; entries before a request's window are undefined."""
    slots: torch.Tensor
    """``[G, T]`` int64: as those of `StepBuffers`, in the group's blocks."""
    block_tables: torch.Tensor
    """``[G, n, W]``: as those of `StepBuffers`; 0 for blocks wholly before what the first token of a query reads."""


@dataclass(frozen=True, slots=True)
class StateTables:
    """Tables and buffers of recurrent states, S for each running request, for `Kernels.prepare_states`."""

    tables: torch.Tensor
    """``[S, R, B]``: the slot of the state after the token at a position is ``[position % S, row, position //
    block_size]``. Only entries that a step reads are defined: before its tokens, after each token of a decode, and
    after the last one of others."""
    read_slots: torch.Tensor
    """``[n]``: the slot before each request's tokens; 0 if there is none, and for padding."""
    write_slots: torch.Tensor
    """``[n, S]``, contiguous: those after its last S tokens, the last one's last; -1 where no state is kept."""


def group_buffer_bytes(max_num_seqs: int, max_num_tokens: int, max_blocks: int) -> int:
    """Bytes of `GroupTables` for each group."""
    return _INT32 * (1 + 2 * max_num_seqs * max_blocks) + _INT64 * max_num_tokens


def state_table_bytes(max_num_seqs: int, max_num_tokens: int, max_blocks: int, num_slots: int) -> int:
    """Bytes of `StateTables` of V2, and of the numbers and slots of chunks."""
    chunks = 2 * max_num_seqs + 1 + max_num_tokens // CHUNK
    return _INT32 * (max_num_seqs * (num_slots * max_blocks + 1 + num_slots) + chunks)


def row_table_bytes(max_num_seqs: int, max_blocks: int, num_drafts: int) -> int:
    """Bytes of `RowTables` and the prompts' lengths, without the token pages."""
    fields = max_num_seqs * (NUM_ROW_FIELDS + 1)  # and the last sampled token
    return _INT32 * (fields + (max_num_seqs + 1) * num_drafts + max_num_seqs * max_blocks)


def token_page_bytes(block_size: int) -> int:
    """Bytes of the token pages for each KV block."""
    return _INT32 * block_size


def step_buffer_bytes(max_num_seqs: int, max_num_tokens: int, max_blocks: int) -> int:
    """Bytes of `StepBuffers` without ``idx_mapping`` and ``query_start_loc``."""
    of_tokens = max_num_tokens * (3 * _INT64 + _INT32)  # positions, slots, input ids; batch index
    return of_tokens + max_num_seqs * (1 + max_blocks) * _INT32


def staging_bytes(max_num_seqs: int) -> int:
    """Bytes on the device of a `StagingBuffer`: ``idx_mapping`` and ``query_start_loc``."""
    return (2 * max_num_seqs + 1) * _INT32
