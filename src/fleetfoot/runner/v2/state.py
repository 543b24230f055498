"""The state of Model Runner V2 on the device: rows, block tables, token pages and sampling parameters."""

from __future__ import annotations

import numpy as np
import torch

from fleetfoot.kernels.prepare.staging import Arena, StagedWriteTensor, StagingBuffer
from fleetfoot.kernels.prepare.tables import NUM_ROW_FIELDS, RowTables
from fleetfoot.kernels.sampling.logits_processors import TokenHistory
from fleetfoot.records.step import NewRequest
from fleetfoot.runner.v2.device import Device
from fleetfoot.sampling import shape
from fleetfoot.sampling.sampler_v2 import SamplingTables

# fields of a row, each contiguous over the rows
_NUM_COMPUTED, _PREFILL_LEN, _PROMPT_LEN, _LIMIT = range(NUM_ROW_FIELDS)
_NO_LIMIT = 2**31 - 1


class RequestState:
    """The rows of the running requests. The scheduler numbers them; a row is written when its request is admitted.

    The device alone writes ``tables.last_sampled`` and ``tables.draft_tokens``. Tokens are kept in pages, one int32 for
    each KV slot, which the block table indexes too: a prefix cache hit includes its tokens, and memory grows with the
    KV cache instead of max_num_seqs * max_model_len.

    Args:
        fields: ``[NUM_ROW_FIELDS, max_num_seqs]``. block_table: ``[max_num_seqs, max_blocks]``.
        pages: ``[num_blocks * block_size]``.
    """

    def __init__(
        self,
        fields: StagedWriteTensor,
        block_table: StagedWriteTensor,
        pages: StagedWriteTensor,
        *,
        block_size: int,
        num_draft: int,
    ) -> None:
        integers = fields.tensor
        max_num_seqs, device = integers.shape[1], integers.device
        self._indices = np.array([fields.index(field) for field in range(NUM_ROW_FIELDS)])  # of row 0, in the arena
        self._pages = pages
        self._offsets = np.arange(block_size)
        self.prompt_lens = integers[_PROMPT_LEN]
        self.tables = RowTables(
            num_computed=integers[_NUM_COMPUTED],
            prefill_lens=integers[_PREFILL_LEN],
            limits=integers[_LIMIT],
            last_sampled=torch.zeros(max_num_seqs, dtype=torch.int32, device=device),
            draft_tokens=torch.full((max_num_seqs + 1, num_draft), -1, dtype=torch.int32, device=device),
            block_table=block_table.tensor,
            token_pages=pages.tensor,
            block_size=block_size,
        )

    def stage(self, request: NewRequest, buffer: StagingBuffer) -> None:
        """Write a request's row."""
        limit = min(request.max_total_tokens - 1, _NO_LIMIT)
        values = [request.num_computed_tokens, request.num_tokens, request.num_prompt_tokens, limit]
        buffer.write(self._indices + request.row, values, NUM_ROW_FIELDS)

    def stage_tokens(self, request: NewRequest, first: int, block_ids: np.ndarray, buffer: StagingBuffer) -> None:
        """Write a request's tokens from index ``first`` on to its pages.

        Args:
            block_ids: ``[num_blocks]``: the request's KV blocks.
        """
        size, end = self.tables.block_size, len(request.token_ids)
        if not end:
            return  # this rank does not read tokens
        begin = first // size * size  # index of the first token of the first block that is written
        # pages have the order of blocks in the KV cache: [num_blocks that are written, block_size]
        places = self._pages.base + (block_ids[begin // size :, np.newaxis] * size + self._offsets)
        tokens = np.frombuffer(request.token_ids, np.int32)[first:]  # [end - first]
        buffer.write(places.reshape(-1)[first - begin : end - begin], tokens, end - first)


class BlockTables:
    """``[max_num_seqs, max_blocks]`` KV block ids; entries behind a request's last block are undefined."""

    def __init__(self, table: StagedWriteTensor) -> None:
        self._table = table
        self.tensor = table.tensor

    def stage(self, row: int, block_ids: np.ndarray, buffer: StagingBuffer) -> None:
        """Write ``block_ids [num_blocks]`` to the first columns of a row."""
        first = self._table.index(row)
        buffer.write(np.arange(first, first + len(block_ids)), block_ids, len(block_ids))

    def stage_appended(self, appended: list[tuple[int, int, list[int]]], buffer: StagingBuffer) -> None:
        """Write (row, first column, block ids), all at once: most entries are one block of a decode."""
        stride, base = self._table.row_stride, self._table.base
        indices = [base + row * stride + start + i for row, start, block_ids in appended for i in range(len(block_ids))]
        values = [block for _, _, block_ids in appended for block in block_ids]
        buffer.write(np.array(indices), values, len(values))


class DeviceState:
    """The state that steps read and write on the device, besides weights and KV.

    Args:
        max_num_seqs: number of rows. max_model_len: maximum number of tokens of a request.
        num_blocks, block_size: of the KV cache.
        max_num_batched_tokens: maximum number of tokens in a step, which bounds the staged writes.
        vocab_size: length of the logits.
        num_draft: draft tokens of a row.
        stages_all_tokens: stage a request's computed tokens too, because a connector may have loaded their KV.
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
            (max_num_seqs, 2),  # seeds; first, because int64 needs an alignment to 8 bytes
            (shape.NUM_FIELDS, max_num_seqs),
            (NUM_ROW_FIELDS, max_num_seqs),
            (max_num_seqs, self.max_blocks),
            (num_blocks * block_size,),
            (max_num_seqs, shape.NUM_PLANES, shape.LIST_CAPACITY),
            (max_num_seqs, shape.mask_size(vocab_size)),
        )
        seeds, parameters, fields, table, pages, lists, masks = self.arena.parts
        self.requests = RequestState(fields, table, pages, block_size=block_size, num_draft=num_draft)
        self.block_tables = BlockTables(table)
        self.tables = self.requests.tables
        history = TokenHistory(table.tensor, pages.tensor, self.requests.prompt_lens, block_size)
        self.sampling = SamplingTables(seeds, parameters, lists, masks, history, vocab_size)
        # enough for most steps, and for every single request; a step with more is staged in several parts
        max_writes = max_num_batched_tokens + max_model_len + max_num_seqs * (shape.NUM_FIELDS + NUM_ROW_FIELDS + 4)
        max_writes += shape.row_size(vocab_size)
        self.staging = StagingBuffer(device, self.arena.flat, max_num_seqs, max_writes)

    def stage_request(self, request: NewRequest) -> None:
        first_token = 0 if self._stages_all_tokens else request.num_computed_tokens
        block_ids = np.array(request.block_ids, np.int64)
        self.requests.stage(request, self.staging)
        self.requests.stage_tokens(request, first_token, block_ids, self.staging)
        self.sampling.stage(request, self.staging)
        self.block_tables.stage(request.row, block_ids, self.staging)
