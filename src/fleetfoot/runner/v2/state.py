"""All that Model Runner V2 keeps on the device besides weights and KV."""

from __future__ import annotations

import numpy as np

from fleetfoot.kernels.prepare.staging import Arena, StagingBuffer
from fleetfoot.kernels.prepare.tables import RowTables
from fleetfoot.kernels.sampling.logits_processors import TokenHistory
from fleetfoot.records.step import NewRequest
from fleetfoot.runner.v2.device import Device
from fleetfoot.runner.v2.rows import NUM_FIELDS, BlockTables, RequestState
from fleetfoot.sampling import shape
from fleetfoot.sampling.row_tables import SamplingTables


class DeviceState:
    """Everything that a step reads and writes on the device besides weights and KV.

    Args:
        max_num_seqs: rows. max_model_len: most tokens of a request. num_blocks, block_size: of the KV cache.
        max_num_batched_tokens: most tokens in a step; with max_model_len it bounds what one step can stage.
        vocab_size: length of the logits.
        num_draft: draft tokens that a row can hold.
        stages_all_tokens: a request's computed tokens are put into its pages too: KV may come from elsewhere.
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
        stages_all_tokens: bool = False,
    ) -> None:
        self._stages_all_tokens = stages_all_tokens
        self.block_size = block_size
        self.max_blocks = -(-(max_model_len + num_draft) // block_size)
        self.num_draft = num_draft
        self.arena = Arena(
            device.torch_device,
            (max_num_seqs, 2),  # seeds, first: they are read as int64, which must lie on 8 bytes
            (shape.NUM_FIELDS, max_num_seqs),
            (NUM_FIELDS, max_num_seqs),
            (max_num_seqs, self.max_blocks),
            (num_blocks * block_size,),
            (max_num_seqs, shape.NUM_PLANES, shape.LIST_CAPACITY),
            (max_num_seqs, shape.mask_size(vocab_size)),
        )
        seeds, parameters, fields, table, pages, lists, masks = self.arena.parts
        self.requests = RequestState(fields, pages, block_size=block_size, num_draft=num_draft)
        self.block_tables = BlockTables(table)
        self.tables = RowTables(
            num_computed=self.requests.num_computed,
            prefill_lens=self.requests.prefill_lens,
            limits=self.requests.limits,
            last_sampled=self.requests.last_sampled,
            draft_tokens=self.requests.draft_tokens,
            block_table=table.tensor,
            token_pages=pages.tensor,
            block_size=block_size,
        )
        history = TokenHistory(table.tensor, pages.tensor, self.requests.prompt_lens, block_size)
        self.sampling = SamplingTables(seeds, parameters, lists, masks, history, vocab_size)
        # enough for most steps, and for any single request; a step that says more sends it in several pieces
        max_writes = max_num_batched_tokens + max_model_len + max_num_seqs * (shape.NUM_FIELDS + NUM_FIELDS + 4)
        max_writes += shape.row_size(vocab_size)
        self.staging = StagingBuffer(device, self.arena.flat, max_num_seqs, max_writes)

    def stage_request(self, request: NewRequest) -> None:
        first_token = 0 if self._stages_all_tokens else request.num_computed_tokens
        block_ids = np.array(request.block_ids, np.int64)
        self.requests.stage(request, self.staging)
        self.requests.stage_tokens(request, first_token, block_ids, self.staging)
        self.sampling.stage(request, self.staging)
        self.block_tables.stage(request.row, block_ids, self.staging)
