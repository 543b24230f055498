"""The state of Model Runner V2 on the device: rows, block tables, token pages and sampling parameters."""

from __future__ import annotations

import numpy as np
import torch

from fleetfoot.kernels.prepare.staging import Arena, StagingBuffer
from fleetfoot.kernels.prepare.tables import NUM_ROW_FIELDS, RowTables
from fleetfoot.kernels.recurrent import number_chunks
from fleetfoot.kernels.sampling.logits_processors import TokenHistory
from fleetfoot.records.forward_context import CHUNK
from fleetfoot.records.kv_layout import ONE_GROUP, KVGroup, num_tables
from fleetfoot.records.step import NewRequest, SchedulerOutput
from fleetfoot.runner.v2.device import Device
from fleetfoot.sampling import shape
from fleetfoot.sampling.sampler_v2 import SamplingTables

_NO_LIMIT = 2**31 - 1


class DeviceState:
    """The state that steps read and write on the device, besides weights and KV.

    The scheduler numbers the rows of running requests; a row is written when its request is admitted. The device alone
    writes ``tables.last_sampled`` and ``tables.draft_tokens``. Tokens are kept in pages, one int32 for each KV slot,
    which the block table of the first group of layers indexes too: a prefix cache hit includes its tokens, and memory
    grows with the KV cache instead of max_num_seqs * max_model_len. Entries of a block table after a request's last
    block are undefined.

    ``max_num_batched_tokens`` bounds the staged writes; ``num_draft``: draft tokens of a row; ``stages_all_tokens``:
    stage a request's computed tokens too, because a connector may have loaded their KV.
    """

    def __init__(
        self,
        device: Device,
        *,
        max_num_seqs: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        max_num_batched_tokens: int,
        vocab_size: int,
        num_draft: int = 0,
        groups: tuple[KVGroup, ...] = ONE_GROUP,
        stages_all_tokens: bool = False,
    ) -> None:
        self._stages_all_tokens = stages_all_tokens
        self.block_size = block_size
        self.max_blocks = -(-(max_model_len + num_draft) // block_size)
        self.num_draft = num_draft
        self.arena = Arena(
            device.torch_device,
            (max_num_seqs, 2),  # seeds; first, because int64 needs an alignment to 8 bytes
            (shape.NUM_FIELDS, max_num_seqs),
            (NUM_ROW_FIELDS, max_num_seqs),
            (max_num_seqs, self.max_blocks),
            (num_blocks * block_size,),
            (max_num_seqs, shape.NUM_PLANES, shape.LIST_CAPACITY),
            (max_num_seqs, shape.mask_size(vocab_size)),
            *[(max_num_seqs, self.max_blocks)] * (num_tables(groups) - 1),
            (max_num_batched_tokens // CHUNK + max_num_seqs,) if groups[-1].is_state else (0,),
        )
        seeds, parameters, fields, block_table, self._pages, lists, masks, *others, chunks = self.arena.parts
        self._block_tables = [block_table, *others]
        with_kv = groups[1 : len(groups) - groups[-1].is_state]
        windows = [_NO_LIMIT if group.window is None else group.window for group in with_kv]
        self.windows = torch.tensor(windows, dtype=torch.int32, device=device.torch_device)
        """``[G]``, see `GroupTables`, as the next one."""
        table_size = max_num_seqs * self.max_blocks
        first = others[0].base if others else 0
        tables = self.arena.flat[first : first + len(others) * table_size]
        tables = tables.view(len(others), max_num_seqs, self.max_blocks)
        self._chunks, self._snapshots = chunks, dict[int, int]()
        self.chunk_slots = chunks.tensor
        """See `StateBatch`."""
        self.group_tables, self.state_tables = tables[: len(windows)], tables[len(windows) :]
        self._field_indices = np.array([fields.index(field) for field in range(NUM_ROW_FIELDS)])  # of row 0
        self._offsets = np.arange(block_size)
        num_computed, prefill_lens, prompt_lens, limits = fields.tensor  # each contiguous over the rows
        pages = self._pages.tensor
        self.tables = RowTables(
            num_computed=num_computed,
            prefill_lens=prefill_lens,
            limits=limits,
            last_sampled=torch.zeros(max_num_seqs, dtype=torch.int32, device=device.torch_device),
            draft_tokens=torch.full((max_num_seqs + 1, num_draft), -1, dtype=torch.int32, device=device.torch_device),
            block_table=block_table.tensor,
            token_pages=pages,
            block_size=block_size,
        )
        history = TokenHistory(block_table.tensor, pages, prompt_lens, block_size)
        self.sampling = SamplingTables(seeds, parameters, lists, masks, history, vocab_size)
        # enough for most steps, and for every single request; a step with more is staged in several parts
        max_writes = max_num_batched_tokens + max_model_len + max_num_seqs * (shape.NUM_FIELDS + NUM_ROW_FIELDS + 4)
        max_writes += shape.row_size(vocab_size)
        self.staging = StagingBuffer(device, self.arena.flat, max_num_seqs, max_writes)

    def stage_request(self, request: NewRequest) -> None:
        """Stage the row of a new request: its fields, tokens, sampling parameters and block ids."""
        block_ids = np.array(request.block_ids, np.int64)
        limit = min(request.max_total_tokens - 1, _NO_LIMIT)
        fields = [request.num_computed_tokens, request.num_tokens, request.num_prompt_tokens, limit]
        self.staging.write(self._field_indices + request.row, fields, NUM_ROW_FIELDS)
        if request.token_ids:  # else this rank does not read tokens
            self._stage_tokens(request, block_ids)
        self.sampling.stage(request, self.staging)
        self._stage_blocks(0, request.row, 0, request.block_ids)
        for group, ids in enumerate(request.group_block_ids, start=1):
            self._stage_blocks(group, request.row, 0, ids)

    def _stage_blocks(self, group: int, row: int, start: int, block_ids: list[int]) -> None:
        first = self._block_tables[group].index(row, start)
        self.staging.write(np.arange(first, first + len(block_ids)), block_ids, len(block_ids))

    def _stage_tokens(self, request: NewRequest, block_ids: np.ndarray) -> None:
        size, end = self.block_size, len(request.token_ids)
        first = 0 if self._stages_all_tokens else request.num_computed_tokens
        begin = first // size * size  # index of the first token of the first block that is written
        # pages have the order of blocks in the KV cache: [num_blocks that are written, block_size]
        places = self._pages.base + (block_ids[begin // size :, np.newaxis] * size + self._offsets)
        tokens = np.frombuffer(request.token_ids, np.int32)[first:]  # [end - first]
        self.staging.write(places.reshape(-1)[first - begin : end - begin], tokens, end - first)

    def stage_new_blocks(self, new_block_ids: list[tuple[int, int, list[int]]]) -> None:
        """Stage `SchedulerOutput.new_block_ids`, all at once: most entries are one block of a decode."""
        stride, base = self._block_tables[0].row_stride, self._block_tables[0].base
        indices = [base + row * stride + start + i for row, start, ids in new_block_ids for i in range(len(ids))]
        values = [block for _, _, block_ids in new_block_ids for block in block_ids]
        self.staging.write(np.array(indices), values, len(values))

    def stage_new_group_blocks(self, new_block_ids: list[tuple[int, int, int, list[int]]]) -> None:
        """Stage `SchedulerOutput.new_group_block_ids`."""
        for group, row, start, ids in new_block_ids:
            self._stage_blocks(group, row, start, ids)

    def stage_snapshots(self, scheduler_output: SchedulerOutput) -> None:
        """Stage the slots of `SchedulerOutput.snapshots`, in place of those of the step before."""
        rows, lengths, base = scheduler_output.rows, scheduler_output.num_scheduled_tokens, self._chunks.base
        slots = {base + chunk: slot for chunk, slot in number_chunks(rows, lengths, scheduler_output.snapshots)}
        if changed := dict.fromkeys(self._snapshots, 0) | slots:
            self.staging.write(np.array([*changed]), [*changed.values()], len(changed))
        self._snapshots = slots
