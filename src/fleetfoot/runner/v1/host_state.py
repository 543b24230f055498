"""The rows of running requests, as Model Runner V1 keeps them: numpy arrays on the host."""

from __future__ import annotations

import numpy as np

from fleetfoot.scheduler.output import NewRequest, SchedulerOutput


class HostState:
    """One row for each running request. The scheduler owns the numbering.

    Args:
        max_num_seqs: rows.
        max_model_len: tokens in a row.
        block_size: tokens in a KV block.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        # zeros are the operating system's own pages: memory is taken only as rows are first written
        self.token_ids = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int64)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)  # known tokens
        self.num_computed = np.zeros(max_num_seqs, dtype=np.int64)  # tokens whose KV is written
        self.block_table = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        self.requests: list[NewRequest | None] = [None] * max_num_seqs

    def apply(self, scheduler_output: SchedulerOutput) -> None:
        """Give back rows, fill new ones, append new blocks."""
        for _, row in scheduler_output.finished:
            self.requests[row] = None
        for request in scheduler_output.new_requests:
            row = request.row
            self.requests[row] = request
            self.token_ids[row, : len(request.token_ids)] = request.token_ids
            self.num_tokens[row] = len(request.token_ids)
            self.num_computed[row] = request.num_computed_tokens
            self.num_blocks[row] = 0
            self._append_blocks(row, request.block_ids)
        for row, _, block_ids in scheduler_output.new_block_ids:
            self._append_blocks(row, block_ids)

    def _append_blocks(self, row: int, block_ids: list[int]) -> None:
        begin = self.num_blocks[row]
        self.block_table[row, begin : begin + len(block_ids)] = block_ids
        self.num_blocks[row] = begin + len(block_ids)

    def append_tokens(self, rows: np.ndarray, token_ids: list[int]) -> None:
        """One new token for each of ``rows [n]``."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1
        for row, token_id in zip(rows.tolist(), token_ids, strict=True):
            self.request(row).token_ids.append(token_id)

    def request(self, row: int) -> NewRequest:
        request = self.requests[row]
        if request is None:
            raise RuntimeError(f"row {row} is scheduled, but no request has it")
        return request
