"""Sampled tokens, from the last rank of a pipeline to the rows of the ranks before it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from fleetfoot.distributed.groups import PipelineGroup
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner.v1.host_state import HostState, StepInputs
from fleetfoot.sampling.verification import HostSamples


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """A step whose message has not been received."""

    step: int
    query_len: int
    """Number of query tokens of each decode."""
    rows: np.ndarray
    """``[n]`` int64: the rows of the requests that sample, in batch order."""


class SampledTokenSync:
    """Sends what a step has sampled as a message ``[n, 2 + k]`` int32, as Model Runner V2 does: the newest token, the
    number of rejected query tokens (-1 for a request without a new token), and k drafts for the next step.

    An earlier rank counts each query as accepted, and corrects its rows when it receives the message, which is before
    it prepares a step of one of these rows.

    Args:
        device: of the messages.
    """

    def __init__(self, pipeline: PipelineGroup, host: HostState, device: torch.device) -> None:
        self._pipeline = pipeline
        self._host = host
        self._device = device
        self._pending: deque[_PendingStep] = deque()

    def send(self, inputs: StepInputs, samples: HostSamples) -> None:
        """Send the message of a step in which a request sampled, on the last rank."""
        host, rows = self._host, inputs.rows[: len(samples.token_ids)]
        if self._pipeline.size == 1 or not len(rows):
            return
        message = np.empty((len(rows), 2 + host.drafts.shape[1]), dtype=np.int32)
        message[:, 0] = host.token_ids[rows, host.num_tokens[rows] - 1]
        message[:, 1] = np.where([bool(tokens) for tokens in samples.token_ids], samples.num_rejected, -1)
        message[:, 2:] = host.drafts[rows]
        self._pipeline.send_sampled_tokens(torch.from_numpy(message).to(self._device))

    def expect(self, inputs: StepInputs, scheduler_output: SchedulerOutput) -> None:
        """Register a step whose message will be received, on an earlier rank."""
        if scheduler_output.num_sampled and self._pipeline.size > 1:
            rows = inputs.rows[: scheduler_output.num_sampled]
            self._pending.append(_PendingStep(scheduler_output.step, 1 + scheduler_output.num_drafts, rows))

    def receive_for(self, scheduler_output: SchedulerOutput) -> None:
        """Receive and apply the messages that the inputs of a step depend on."""
        while self._pending and self._pending[0].step <= scheduler_output.awaited_step:
            step = self._pending.popleft()
            shape = len(step.rows), 2 + self._host.drafts.shape[1]
            message = torch.empty(shape, dtype=torch.int32, device=self._device)
            self._pipeline.receive_sampled_tokens(message)
            self._apply(step, message.cpu().numpy())

    def _apply(self, step: _PendingStep, message: np.ndarray) -> None:
        host, rows, num_rejected = self._host, step.rows, message[:, 1]
        has_new = num_rejected >= 0
        # the whole query was counted; a request without a new token is a decode that had reached its length
        host.num_computed[rows] -= np.where(has_new, num_rejected, step.query_len)
        newest = host.num_computed[rows][has_new]  # behind the accepted drafts, which `place_drafts` has written
        host.token_ids[rows[has_new], newest] = message[has_new, 0]
        host.num_tokens[rows[has_new]] = newest + 1
        host.drafts[rows] = message[:, 2:]
