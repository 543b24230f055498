"""The output of a step while its copies to the host are in flight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fleetfoot.kernels.prepare.staging import Event
from fleetfoot.records.step import BalanceReport, KVConnectorOutput, ModelRunnerOutput, PackedLogprobs
from fleetfoot.runner.v2.device import Device
from fleetfoot.sampling.logprobs import LogprobsTensors
from fleetfoot.sampling.verification import INVALID_MESSAGE


@dataclass(slots=True)
class AsyncOutput:
    """Copies that are queued after a step; `get` waits for them.

    Tokens and flags of invalid rows are one copy. Logprobs are a second copy, if requested.
    """

    device: Device
    kv_connector_output: KVConnectorOutput | None = None
    balance: BalanceReport | None = None
    _tokens: torch.Tensor | None = None
    _num_decodes: int = 0
    _num_drafts: int = 0
    _event: Event | None = None
    _logprobs: list[tuple[LogprobsTensors, Sequence[int], Mapping[int, int]]] = field(default_factory=list)
    """Logprobs, by the arguments of `send_logprobs`."""
    _prompt_logprobs: list[tuple[int, int, LogprobsTensors]] = field(default_factory=list)
    _drafts: torch.Tensor | None = None

    def send_tokens(self, packed: torch.Tensor, num_decodes: int, num_drafts: int) -> None:
        """Queue the copy of `DeviceSamples.packed`; the first ``num_decodes`` requests are decodes."""
        self._num_decodes, self._num_drafts = num_decodes, num_drafts
        self._tokens, self._event = self.device.copy_out(packed)

    def send_logprobs(
        self, tensors: LogprobsTensors, counts: Mapping[int, int], positions: Sequence[int] | None = None
    ) -> None:
        """Queue the copy of logprobs. ``counts``: rows of logits that use them -> number of top logprobs (-1: all
        tokens); ``positions``: the row of ``tensors`` of each; None: the row of logits."""
        self._logprobs.append((self._copied(tensors), list(counts) if positions is None else positions, counts))

    def send_prompt_logprobs(self, index: int, position: int, tensors: LogprobsTensors) -> None:
        """Queue the copy of prompt logprobs of the request ``index``, from the prompt token at ``position`` on."""
        self._prompt_logprobs.append((index, position, self._copied(tensors)))

    def send_drafts(self, draft_token_ids: torch.Tensor) -> None:
        """Queue the copy of the drafts of each request that sampled, ``[n, k]``, for the next step."""
        self._drafts, self._event = self.device.copy_out(draft_token_ids)

    def _copied(self, tensors: LogprobsTensors) -> LogprobsTensors:
        host, self._event = self.device.copy_out(tensors.packed)  # copies are in order: the last event covers all
        return LogprobsTensors(host)

    def get(self) -> ModelRunnerOutput:
        """Wait for the copies, and convert them."""
        if self._event is not None:
            self._event.synchronize()
        output = ModelRunnerOutput([], kv_connector_output=self.kv_connector_output, balance=self.balance)
        if self._tokens is not None:
            read = self._read_drafts if self._num_drafts else self._read_tokens
            read(self._tokens.tolist(), output)
        if self._drafts is not None:
            output.draft_token_ids = self._drafts.tolist()
        for index, position, tensors in self._prompt_logprobs:
            output.prompt_logprobs[index] = (position, tensors.to_rows())
        return output

    def _read_tokens(self, packed: list[list[int]], output: ModelRunnerOutput) -> None:
        """Without drafts: one token for each request."""
        token_ids, invalid = packed
        output.sampled_token_ids = [[token] for token in token_ids]
        if any(invalid):
            output.invalid = {index: INVALID_MESSAGE for index, flag in enumerate(invalid) if flag}
        output.logprobs = {index: [row] for index, row in self._logprobs_of_logits()}

    def _read_drafts(self, packed: list[list[int]], output: ModelRunnerOutput) -> None:
        """Tokens of a step with drafts: 1 + accepted drafts for each decode, one token for each prefill that ended."""
        width, num_decodes = 1 + self._num_drafts, self._num_decodes
        for index, entry in enumerate(packed):
            num_sampled = entry[-2]
            output.sampled_token_ids.append(entry[:num_sampled])
            if num_sampled and entry[width + num_sampled - 1]:
                output.invalid[index] = INVALID_MESSAGE
        output.num_drafted = [entry[-1] for entry in packed[:num_decodes]]
        for logits_row, row in self._logprobs_of_logits():
            # decodes have ``width`` rows of logits each; the prefills after them have one
            index, offset = divmod(logits_row, width)
            if index >= num_decodes:
                index, offset = num_decodes + logits_row - num_decodes * width, 0
            if offset < len(output.sampled_token_ids[index]):
                output.logprobs.setdefault(index, []).append(row)

    def _logprobs_of_logits(self) -> Iterator[tuple[int, PackedLogprobs]]:
        """Rows of logits with their logprobs."""
        for tensors, positions, counts in self._logprobs:
            yield from zip(counts, tensors.to_rows(list(counts.values()), positions), strict=True)
