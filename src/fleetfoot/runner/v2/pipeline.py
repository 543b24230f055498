"""The tokens that the last rank of a pipeline samples, on their way to the rows of the ranks before it."""

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
class _Awaited:
    """A step whose packet has not been received."""

    rows: frozenset[int]
    """Of the requests that sample."""
    idx_mapping: torch.Tensor
    """``[n]`` int32: the same on the device, in batch order."""
    query_len: int
    """Tokens of each decode's query."""


class SampledTokenSync:
    """A packet is ``[n, 2 + k]`` int32: the newest token, the number of rejected tokens of the query or -1 if the
    request got nothing, and k drafts for the next step.

    An earlier rank takes each request's query to be all right, and takes back what was rejected when it receives the
    packet, which is before it prepares a step that wants it.
    """

    def __init__(self, pipeline: PipelineGroup, state: DeviceState, kernels: Kernels) -> None:
        self._pipeline = pipeline
        self._tables = state.tables
        self._post_update = kernels.post_update
        self._width = 2 + state.num_draft
        self._awaited: deque[_Awaited] = deque()

    def pack(self, batch: InputBatch, new: DeviceSamples) -> torch.Tensor | None:
        """The packet of a step in which somebody sampled, on the last rank, after its drafting; None: nobody wants
        one. Padding of a graph makes rows behind."""
        if self._pipeline.size == 1:
            return None
        shape = len(new.token_ids), self._width
        packet = torch.empty(shape, dtype=torch.int32, device=new.token_ids.device)
        last = (new.num_sampled - 1).clamp(min=0).to(torch.int64)
        packet[:, 0] = new.token_ids.gather(1, last.unsqueeze(1)).squeeze(1)
        # nothing got: all of the query was rejected, and no token is new
        packet[:, 1] = torch.where(new.num_sampled > 0, new.num_rejected, -1)
        # The drafts that the rows hold. They are old ones where the step proposed none, and may have to be verified all
        # the same, beside new ones of other requests; then all ranks must have the same.
        packet[:, 2:] = self._tables.draft_tokens[batch.idx_mapping[: len(packet)]]
        return packet

    def send(self, packet: torch.Tensor | None) -> None:
        """On the last rank, what `pack` has made, without padding."""
        if packet is not None:
            self._pipeline.send_sampled_tokens(packet)

    def expect(self, batch: InputBatch) -> None:
        """On an earlier rank, after its part of a step."""
        count = batch.shape.num_sampled
        if count and self._pipeline.size > 1:
            # the batch's buffers are written over by the next step
            rows, query_len = frozenset(batch.rows[:count]), 1 + batch.shape.num_drafts
            self._awaited.append(_Awaited(rows, batch.idx_mapping[:count].clone(), query_len))

    def receive_for(self, scheduler_output: SchedulerOutput) -> None:
        """Receive the packets of all steps that sampled for a row which this step computes, or gives to another
        request, and put what they say into the rows."""
        if not self._awaited:
            return
        wanted = {*scheduler_output.rows, *(request.row for request in scheduler_output.new_requests)}
        behind = [place for place, awaited in enumerate(self._awaited) if not wanted.isdisjoint(awaited.rows)]
        for _ in range(behind[-1] + 1 if behind else 0):
            self._receive()

    def receive_all(self) -> None:
        while self._awaited:
            self._receive()

    def _receive(self) -> None:
        awaited = self._awaited.popleft()
        idx_mapping = awaited.idx_mapping
        packet = torch.empty((len(idx_mapping), self._width), dtype=torch.int32, device=idx_mapping.device)
        self._pipeline.receive_sampled_tokens(packet)
        self._apply(idx_mapping, packet, awaited.query_len)

    def _apply(self, rows: torch.Tensor, packet: torch.Tensor, query_len: int) -> None:
        at = rows.to(torch.int64)
        has_new = packet[:, 1] >= 0
        # the query was counted whole; only a decode, which had ended before, can have got nothing
        num_rejected = torch.where(has_new, packet[:, 1], query_len)
        starts = torch.zeros(len(rows) + 1, dtype=torch.int32, device=rows.device)
        self._post_update(
            rows,
            starts,
            self._tables,
            packet[:, :1].contiguous(),
            has_new.to(torch.int32),
            num_rejected.contiguous(),
        )
        if self._width > 2:
            self._tables.draft_tokens.index_copy_(0, at, packet[:, 2:].contiguous())
