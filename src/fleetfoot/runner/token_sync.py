"""Sampled tokens, from the last rank of a pipeline to the rows of the ranks before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from fleetfoot.distributed.groups import PipelineGroup
from fleetfoot.records.step import SchedulerOutput


class SampledTokenSync:
    """Sends what a step has sampled as a message ``[n, 2 + k]`` int32: the newest token, the number of rejected query
    tokens (-1 for a request without a new token), and k drafts for the next step.

    An earlier rank counts each query as accepted, and corrects its rows when it receives the message, which is before
    it prepares a step of one of these rows.

    ``apply`` corrects rows. Its arguments are the rows, their message, and the number of query tokens of each decode.
    """

    def __init__(
        self,
        pipeline: PipelineGroup,
        num_drafts: int,
        device: torch.device,
        apply: Callable[[Any, torch.Tensor, int], None],
    ) -> None:
        self.send = pipeline.send_sampled_tokens
        self._receive = pipeline.receive_sampled_tokens
        self._width = 2 + num_drafts
        self._device = device
        self._apply = apply
        self._pending: deque[tuple[int, Any, int]] = deque()
        """Step, rows and query length of messages that have not been received."""

    def expect(self, scheduler_output: SchedulerOutput, rows: Any) -> None:
        """Register a step that sends a message if a request samples. ``rows``: ``[n]``: of the requests that sample;
        not changed until the message is received."""
        if scheduler_output.num_sampled:
            self._pending.append((scheduler_output.step, rows, 1 + scheduler_output.num_drafts))

    def receive(self, last_step: int) -> None:
        """Receive and apply the messages of all steps up to ``last_step``."""
        while self._pending and self._pending[0][0] <= last_step:
            _, rows, query_len = self._pending.popleft()
            message = torch.empty((len(rows), self._width), dtype=torch.int32, device=self._device)
            self._receive(message)
            self._apply(rows, message, query_len)
