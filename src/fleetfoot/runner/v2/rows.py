"""A row on the device for each running request, its block table, and its tokens in pages."""

from __future__ import annotations

import numpy as np
import torch

from fleetfoot.kernels.prepare.staging import StagedWriteTensor, StagingBuffer
from fleetfoot.records.step import NewRequest

# fields of a request, each contiguous over the rows
NUM_COMPUTED, PREFILL_LEN, PROMPT_LEN, LIMIT = range(4)
NUM_FIELDS = 4
_NO_LIMIT = 2**31 - 1


class RequestState:
    """The rows. The scheduler owns the numbering: a row is filled when a request is admitted, and needs no clearing.

    Each field is ``[max_num_seqs]`` int32. ``last_sampled`` and ``draft_tokens`` are written by the device alone.
    Tokens are kept in pages, one int32 for each KV slot, so that the block table is their index too: a prefix cache hit
    brings its tokens along, and the memory grows with the KV cache, not with max_num_seqs * max_model_len.
    """

    def __init__(self, fields: StagedWriteTensor, pages: StagedWriteTensor, *, block_size: int, num_draft: int) -> None:
        integers = fields.tensor  # [NUM_FIELDS, max_num_seqs]
        max_num_seqs, device = integers.shape[1], integers.device
        self._indices = np.array([fields.index(field) for field in range(NUM_FIELDS)])  # of row 0, in the arena
        self._pages = pages
        self._block_size = block_size
        self._offsets = np.arange(block_size)
        self.num_computed = integers[NUM_COMPUTED]
        self.prefill_lens = integers[PREFILL_LEN]
        self.prompt_lens = integers[PROMPT_LEN]
        self.limits = integers[LIMIT]
        """Positions from here on are never an input: the last token's, and what drafts would reach behind it."""
        self.token_pages = pages.tensor  # [num_blocks * block_size]
        self.last_sampled = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        # one row more than there are, for what padding requests write
        self.draft_tokens = torch.full((max_num_seqs + 1, num_draft), -1, dtype=torch.int32, device=device)

    def stage(self, request: NewRequest, buffer: StagingBuffer) -> None:
        """Fill a request's row."""
        limit = min(request.max_total_tokens - 1, _NO_LIMIT)
        values = [request.num_computed_tokens, request.num_tokens, request.num_prompt_tokens, limit]
        buffer.write(self._indices + request.row, values, NUM_FIELDS)

    def stage_tokens(self, request: NewRequest, first: int, block_ids: np.ndarray, buffer: StagingBuffer) -> None:
        """Fill the pages of a request's tokens from place ``first`` on; those before are there.

        Args:
            block_ids: ``[num_blocks]``, those of the request.
        """
        size, end = self._block_size, len(request.token_ids)
        if not end:
            return  # this rank does not read tokens
        begin = first // size * size  # of the first block that is written to
        # pages lie in the arena as blocks do in the KV cache: [num_blocks that are written to, block_size]
        places = self._pages.base + (block_ids[begin // size :, np.newaxis] * size + self._offsets)
        tokens = np.frombuffer(request.token_ids, np.int32)[first:]  # [end - first]
        buffer.write(places.reshape(-1)[first - begin : end - begin], tokens, end - first)


class BlockTables:
    """``[max_num_seqs, max_blocks]`` KV block ids, row by row; entries past a request's last block mean nothing."""

    def __init__(self, table: StagedWriteTensor) -> None:
        self._table = table
        self.tensor = table.tensor

    def stage(self, row: int, block_ids: np.ndarray, buffer: StagingBuffer) -> None:
        """Put ``block_ids [num_blocks]`` into a row from its first column on."""
        first = self._table.index(row)
        buffer.write(np.arange(first, first + len(block_ids)), block_ids, len(block_ids))

    def stage_appended(self, appended: list[tuple[int, int, list[int]]], buffer: StagingBuffer) -> None:
        """Put (row, first column, block ids) into the rows; together, because decodes bring one block each."""
        stride, base = self._table.row_stride, self._table.base
        indices = [base + row * stride + start + i for row, start, block_ids in appended for i in range(len(block_ids))]
        values = [block for _, _, block_ids in appended for block in block_ids]
        buffer.write(np.array(indices), values, len(values))
