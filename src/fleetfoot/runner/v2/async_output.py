"""A step's output on its way to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fleetfoot.runner.contract import INVALID_MESSAGE
from fleetfoot.runner.v2.device import Device, Event
from fleetfoot.sampling.logprobs import LogprobsTensors
from fleetfoot.scheduler.output import ModelRunnerOutput


@dataclass(slots=True)
class _PendingLogprobs:
    """Entries whose tensors are being copied: which batch index each belongs to, and how many each one wants."""

    tensors: LogprobsTensors
    indices: Sequence[int]
    counts: Sequence[int]


@dataclass(slots=True)
class AsyncOutput:
    """Copies that were queued behind a step. `get` waits for them; nothing before it does.

    The tokens and the flags of invalid rows are one copy; logprobs, where somebody asked for them, are more.
    """

    device: Device
    _tokens: torch.Tensor | None = None
    _event: Event | None = None
    _logprobs: _PendingLogprobs | None = None
    _prompt_logprobs: list[tuple[int, int, LogprobsTensors]] = field(default_factory=list)

    def send_tokens(self, chosen: torch.Tensor) -> None:
        """``[2, num_sampled]``: token ids, and whether each means nothing. Queues their copy."""
        self._tokens, self._event = self.device.copy_out(chosen)

    def send_logprobs(self, tensors: LogprobsTensors, indices: Sequence[int], counts: Sequence[int]) -> None:
        self._logprobs = _PendingLogprobs(self._copied(tensors), indices, counts)

    def send_prompt_logprobs(self, index: int, position: int, tensors: LogprobsTensors) -> None:
        """``position``: of the first prompt token that the entries are for."""
        self._prompt_logprobs.append((index, position, self._copied(tensors)))

    def _copied(self, tensors: LogprobsTensors) -> LogprobsTensors:
        copies = []
        for tensor in tensors:
            host, self._event = self.device.copy_out(tensor)  # copies are in order: the last event covers all
            copies.append(host)
        return LogprobsTensors(*copies)

    def get(self) -> ModelRunnerOutput:
        """Wait for the copies, and make plain Python of them."""
        if self._event is not None:
            self._event.wait()
        output = ModelRunnerOutput(sampled_token_ids=[])
        if self._tokens is not None:
            token_ids, invalid = self._tokens.tolist()
            output.sampled_token_ids = [[token] for token in token_ids]
            if any(invalid):
                output.invalid = {index: INVALID_MESSAGE for index, flag in enumerate(invalid) if flag}
        if self._logprobs is not None:
            rows = self._logprobs.tensors.to_rows(self._logprobs.counts)
            output.logprobs = {index: [row] for index, row in zip(self._logprobs.indices, rows, strict=True)}
        for index, position, tensors in self._prompt_logprobs:
            output.prompt_logprobs[index] = (position, tensors.to_rows())
        return output
