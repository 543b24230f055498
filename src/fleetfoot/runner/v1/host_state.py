"""The rows of running requests, as Model Runner V1 keeps them: numpy arrays on the host."""

from __future__ import annotations

from itertools import chain

import numpy as np

from fleetfoot.records.step import NewRequest, SchedulerOutput


class HostState:
    """One row for each running request. The scheduler owns the numbering.

    Args:
        max_num_seqs: rows.
        max_model_len: tokens in a row.
        block_size: tokens in a KV block.
        num_drafts: draft tokens that a row can hold, and how far a query may reach beyond ``max_model_len``.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, num_drafts: int = 0) -> None:
        self.block_size = block_size
        longest = max_model_len + num_drafts
        # zeros are the operating system's own pages: memory is taken only as rows are first written
        self.token_ids = np.zeros((max_num_seqs, longest + 1), dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)  # known tokens
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)  # tokens whose KV is written
        self.limits = np.zeros(max_num_seqs, dtype=np.int64)  # positions from here on are never an input
        self.drafts = np.full((max_num_seqs, num_drafts), -1, dtype=np.int32)  # for the next step; -1: none
        self.temperatures = np.zeros(max_num_seqs, dtype=np.float32)
        self.seeds = np.zeros(max_num_seqs, dtype=np.int64)  # 64-bit patterns
        # entries past a request's last block are stale, but are ids of blocks
        self.block_table = np.zeros((max_num_seqs, -(-longest // block_size)), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.requests: list[NewRequest | None] = [None] * max_num_seqs

    def apply(self, scheduler_output: SchedulerOutput) -> None:
        """Give back rows, fill new ones, append new blocks."""
        for _, row in scheduler_output.finished:
            self.requests[row] = None
        for request in scheduler_output.new_requests:
            self._fill(request)
        for row, _, block_ids in scheduler_output.new_block_ids:
            self._append_blocks(row, block_ids)

    def _fill(self, request: NewRequest) -> None:
        row = request.row
        self.requests[row] = request
        self.token_ids[row, : len(request.token_ids)] = request.token_ids
        self.num_tokens[row] = request.num_tokens
        self.num_computed[row] = request.num_computed_tokens
        self.limits[row] = request.max_total_tokens - 1
        self.drafts[row] = -1
        self.temperatures[row] = request.params.temperature
        self.seeds[row : row + 1].view(np.uint64)[0] = request.seed & 0xFFFFFFFFFFFFFFFF
        self.num_blocks[row] = 0
        self._append_blocks(row, request.block_ids)

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        begin = self.num_blocks[row]
        self.block_table[row, begin : begin + len(block_ids)] = block_ids
        self.num_blocks[row] = begin + len(block_ids)

    def place_drafts(self, rows: np.ndarray, num_drafts: int) -> None:
        """Put drafts behind the known tokens of ``rows [n]``, where the step reads its inputs and where those that
        turn out right are to stand. One of -1 is token 0."""
        places = self.num_tokens[rows, None] + np.arange(num_drafts)  # [n, num_drafts]
        self.token_ids[rows[:, None], places] = self.drafts[rows, :num_drafts].clip(min=0)

    def append_tokens(self, rows: np.ndarray, new_token_ids: list[list[int]]) -> None:
        """New tokens for each of ``rows [n]``, perhaps none."""
        counts = np.array([len(token_ids) for token_ids in new_token_ids])  # [n]
        behind = self.num_tokens[rows] + counts  # [n]
        # the new tokens of all rows lie one behind the other, and each row's end at its new length
        places = np.arange(counts.sum()) + np.repeat(behind - np.cumsum(counts), counts)
        self.token_ids[np.repeat(rows, counts), places] = list(chain.from_iterable(new_token_ids))
        self.num_tokens[rows] = behind
        for row, token_ids in zip(rows.tolist(), new_token_ids, strict=True):
            self.request(row).token_ids.extend(token_ids)

    def request(self, row: int) -> NewRequest:
        request = self.requests[row]
        if request is None:
            raise RuntimeError(f"row {row} is scheduled, but no request has it")
        return request
