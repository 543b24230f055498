"""Sampled tokens, from the last rank of a pipeline to the rows of the ranks before it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from fleetfoot.distributed.groups import PipelineGroup
from fleetfoot.kernels.interface import Kernels
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner.v2.input_batch import InputBatch
from fleetfoot.runner.v2.state import DeviceState
from fleetfoot.sampling.verification import DeviceSamples


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """A step whose message has not been received."""

    rows: frozenset[int]
    """The rows of the requests that sample."""
    idx_mapping: torch.Tensor
    """``[n]`` int32: the same rows on the device, in batch order."""
    query_len: int
    """Number of query tokens of each decode."""


class SampledTokenSync:
    """Sends what a step has sampled as a message ``[n, 2 + k]`` int32: the newest token, the number of rejected query
    tokens (-1 for a request without a new token), and k drafts for the next step.

    An earlier rank counts each query as accepted, and corrects its rows when it receives the message, which is before
    it prepares a step of one of these rows.
    """

    def __init__(self, pipeline: PipelineGroup, state: DeviceState, kernels: Kernels) -> None:
        self._pipeline = pipeline
        self._tables = state.tables
        self._post_update = kernels.post_update
        self._width = 2 + state.num_draft
        self._pending: deque[_PendingStep] = deque()

    def pack(self, batch: InputBatch, samples: DeviceSamples) -> torch.Tensor | None:
        """The message of a step on the last rank, after drafting, with rows of padding at its end; None without other
        ranks."""
        if self._pipeline.size == 1:
            return None
        shape = len(samples.token_ids), self._width
        message = torch.empty(shape, dtype=torch.int32, device=samples.token_ids.device)
        last = (samples.num_sampled - 1).clamp(min=0).to(torch.int64)
        message[:, 0] = samples.token_ids.gather(1, last.unsqueeze(1)).squeeze(1)
        message[:, 1] = torch.where(samples.num_sampled > 0, samples.num_rejected, -1)
        # A step without new drafts leaves the old ones in its rows. They may be verified beside new drafts of other
        # requests, so all ranks need the same.
        message[:, 2:] = self._tables.draft_tokens[batch.idx_mapping[: len(message)]]
        return message

    def send(self, message: torch.Tensor | None) -> None:
        """Send a message of `pack` without padding, on the last rank."""
        if message is not None:
            self._pipeline.send_sampled_tokens(message)

    def expect(self, batch: InputBatch) -> None:
        """Register a step whose message will be received, on an earlier rank."""
        count = batch.shape.num_sampled
        if count and self._pipeline.size > 1:
            # a copy, because the next step overwrites the batch's buffers
            rows, query_len = frozenset(batch.rows[:count]), 1 + batch.shape.num_drafts
            self._pending.append(_PendingStep(rows, batch.idx_mapping[:count].clone(), query_len))

    def receive_for(self, scheduler_output: SchedulerOutput) -> None:
        """Receive and apply the messages of all steps that sampled for a row which this step computes or reassigns."""
        if not self._pending:
            return
        rows = {*scheduler_output.rows, *(request.row for request in scheduler_output.new_requests)}
        needed = [index for index, step in enumerate(self._pending) if not rows.isdisjoint(step.rows)]
        for _ in range(needed[-1] + 1 if needed else 0):
            self._receive()

    def receive_all(self) -> None:
        while self._pending:
            self._receive()

    def _receive(self) -> None:
        step = self._pending.popleft()
        idx_mapping = step.idx_mapping
        message = torch.empty((len(idx_mapping), self._width), dtype=torch.int32, device=idx_mapping.device)
        self._pipeline.receive_sampled_tokens(message)
        self._apply(idx_mapping, message, step.query_len)

    def _apply(self, rows: torch.Tensor, message: torch.Tensor, query_len: int) -> None:
        has_new = message[:, 1] >= 0
        # the whole query was counted; a request without a new token is a decode that had reached its length
        num_rejected = torch.where(has_new, message[:, 1], query_len)
        starts = torch.zeros(len(rows) + 1, dtype=torch.int32, device=rows.device)
        self._post_update(
            rows,
            starts,
            self._tables,
            message[:, :1].contiguous(),
            has_new.to(torch.int32),
            num_rejected.contiguous(),
        )
        if self._width > 2:
            self._tables.draft_tokens.index_copy_(0, rows.to(torch.int64), message[:, 2:].contiguous())
