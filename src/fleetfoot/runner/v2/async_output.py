"""A step's output on its way to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fleetfoot.kernels.prepare.staging import Event
from fleetfoot.records.kv_output import KVConnectorOutput
from fleetfoot.records.logprobs import RowLogprobs
from fleetfoot.records.step import ModelRunnerOutput
from fleetfoot.runner.v2.device import Device
from fleetfoot.sampling.logprobs import LogprobsTensors
from fleetfoot.sampling.verification import INVALID_MESSAGE


@dataclass(slots=True)
class _PendingLogprobs:
    """Rows on their way, of which some are wanted."""

    tensors: LogprobsTensors
    places: Sequence[int]
    indices: Sequence[int]
    counts: Sequence[int]

    def items(self) -> Iterator[tuple[int, RowLogprobs]]:
        wanted = LogprobsTensors(self.tensors.packed[list(self.places)])
        return zip(self.indices, wanted.to_rows(self.counts), strict=True)


@dataclass(slots=True)
class AsyncOutput:
    """Copies that were queued behind a step. `get` waits for them; nothing before it does.

    The tokens and the flags of invalid rows are one copy; logprobs, where somebody asked for them, are another.
    """

    device: Device
    kv_connector_output: KVConnectorOutput | None = None
    _tokens: torch.Tensor | None = None
    _num_decodes: int = 0
    _num_drafts: int = 0
    _event: Event | None = None
    _logprobs: list[_PendingLogprobs] = field(default_factory=list)
    _prompt_logprobs: list[tuple[int, int, LogprobsTensors]] = field(default_factory=list)

    def send_tokens(self, packed: torch.Tensor, num_decodes: int, num_drafts: int) -> None:
        """Queue the copy of what `NewTokens.packed` made; the first ``num_decodes`` requests are decodes."""
        self._num_decodes, self._num_drafts = num_decodes, num_drafts
        self._tokens, self._event = self.device.copy_out(packed)

    def send_logprobs(
        self,
        tensors: LogprobsTensors,
        indices: Sequence[int],
        counts: Sequence[int],
        places: Sequence[int] | None = None,
    ) -> None:
        """Queue the copy of logprobs, of which only some may be wanted.

        Args:
            indices: rows of the logits. counts: how many most probable tokens each wants; -1: all.
            places: where in ``tensors`` each of them is; None: at its index.
        """
        places = indices if places is None else places
        self._logprobs.append(_PendingLogprobs(self._copied(tensors), places, indices, counts))

    def send_prompt_logprobs(self, index: int, position: int, tensors: LogprobsTensors) -> None:
        """``position``: of the first prompt token that the entries are for."""
        self._prompt_logprobs.append((index, position, self._copied(tensors)))

    def _copied(self, tensors: LogprobsTensors) -> LogprobsTensors:
        host, self._event = self.device.copy_out(tensors.packed)  # copies are in order: the last event covers all
        return LogprobsTensors(host)

    def get(self) -> ModelRunnerOutput:
        """Wait for the copies, and make plain Python of them."""
        if self._event is not None:
            self._event.wait()
        output = ModelRunnerOutput(sampled_token_ids=[], kv_connector_output=self.kv_connector_output)
        if self._tokens is not None:
            if self._num_drafts:
                self._read_runs(self._tokens.tolist(), output)
            else:
                self._read_tokens(self._tokens.tolist(), output)
        for index, position, tensors in self._prompt_logprobs:
            output.prompt_logprobs[index] = (position, tensors.to_rows())
        return output

    def _read_tokens(self, packed: list[list[int]], output: ModelRunnerOutput) -> None:
        """One token for each request."""
        token_ids, invalid = packed
        output.sampled_token_ids = [[token] for token in token_ids]
        if any(invalid):
            output.invalid = {index: INVALID_MESSAGE for index, flag in enumerate(invalid) if flag}
        output.logprobs = {index: [row] for pending in self._logprobs for index, row in pending.items()}

    def _read_runs(self, packed: list[list[int]], output: ModelRunnerOutput) -> None:
        """Accepted drafts and the token behind them for each decode; one token for each prefill that ended."""
        width, num_decodes = 1 + self._num_drafts, self._num_decodes
        for index, entry in enumerate(packed):
            num_sampled = entry[-2]
            output.sampled_token_ids.append(entry[:num_sampled])
            if num_sampled and entry[width + num_sampled - 1]:
                output.invalid[index] = INVALID_MESSAGE
        output.num_drafted = [entry[-1] for entry in packed[:num_decodes]]
        for place, row in (item for pending in self._logprobs for item in pending.items()):
            # the logits of decodes come first, so many for each; then one for each prefill that ended
            index, offset = divmod(place, width)
            if index >= num_decodes:
                index, offset = num_decodes + place - num_decodes * width, 0
            if offset < len(output.sampled_token_ids[index]):
                output.logprobs.setdefault(index, []).append(row)
