"""The tokens that the last rank of a pipeline samples, on their way to the rows of the ranks before it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from fleetfoot.distributed.groups import PipelineGroup
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner.v1.host_state import HostState
from fleetfoot.runner.v1.inputs import StepInputs
from fleetfoot.sampling.verification import HostSamples


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A step whose packet has not been received."""

    step: int
    query_len: int
    """Tokens of each decode's query."""
    rows: np.ndarray
    """``[n]`` int64: of the requests that sample, in batch order."""


class SampledTokenSync:
    """A packet is ``[n, 2 + k]`` int32: the newest token, the number of rejected tokens of the query or -1 if the
    request got nothing, and k drafts for the next step. Model Runner V2 has the same.

    An earlier rank takes each request's query to be all right, and takes back what was rejected when it receives the
    packet, which is before it prepares a step that wants it.

    Args:
        device: where packets are sent from and received.
    """

    def __init__(self, pipeline: PipelineGroup, host: HostState, device: torch.device) -> None:
        self._pipeline = pipeline
        self._host = host
        self._device = device
        self._awaited: deque[_Awaited] = deque()

    def send(self, inputs: StepInputs, new: HostSamples) -> None:
        """On the last rank, after a step; if nobody sampled in it there is no packet."""
        host, rows = self._host, inputs.rows[: len(new.token_ids)]
        if self._pipeline.size == 1 or not len(rows):
            return
        packet = np.empty((len(rows), 2 + host.drafts.shape[1]), dtype=np.int32)
        packet[:, 0] = host.token_ids[rows, host.num_tokens[rows] - 1]
        packet[:, 1] = np.where([bool(got) for got in new.token_ids], new.num_rejected, -1)
        packet[:, 2:] = host.drafts[rows]
        self._pipeline.send_sampled_tokens(torch.from_numpy(packet).to(self._device))

    def expect(self, inputs: StepInputs, scheduler_output: SchedulerOutput) -> None:
        """On an earlier rank, after its part of a step."""
        if scheduler_output.num_sampled and self._pipeline.size > 1:
            rows = inputs.rows[: scheduler_output.num_sampled]
            self._awaited.append(_Awaited(scheduler_output.step, 1 + scheduler_output.num_drafts, rows))

    def receive_for(self, scheduler_output: SchedulerOutput) -> None:
        """Receive what this step's inputs depend on, and put it into the rows."""
        while self._awaited and self._awaited[0].step <= scheduler_output.awaited_step:
            awaited = self._awaited.popleft()
            shape = len(awaited.rows), 2 + self._host.drafts.shape[1]
            packet = torch.empty(shape, dtype=torch.int32, device=self._device)
            self._pipeline.receive_sampled_tokens(packet)
            self._apply(awaited, packet.cpu().numpy())

    def _apply(self, awaited: _Awaited, packet: np.ndarray) -> None:
        host, rows, num_rejected = self._host, awaited.rows, packet[:, 1]
        has_new = num_rejected >= 0
        # the query was counted whole; only a decode, which had ended before, can have got nothing
        host.num_computed[rows] -= np.where(has_new, num_rejected, awaited.query_len)
        newest = host.num_computed[rows][has_new]  # what was accepted stands before it, as `place_drafts` put it there
        host.token_ids[rows[has_new], newest] = packet[has_new, 0]
        host.num_tokens[rows[has_new]] = newest + 1
        host.drafts[rows] = packet[:, 2:]
