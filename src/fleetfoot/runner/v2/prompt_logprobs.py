"""Logprobs of prompt tokens in Model Runner V2: the host knows how far each prompt has come."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fleetfoot.models.interface import CausalLM
from fleetfoot.records.step import NewRequest, SchedulerOutput
from fleetfoot.runner.v2.state import DeviceState
from fleetfoot.sampling.logprobs import LogprobsTensors, prompt_logprobs


class PromptLogprobs:
    """Keeps the requests that asked, while their prompts are being computed; most of the time that is nobody."""

    def __init__(self, state: DeviceState, model: CausalLM) -> None:
        self._state = state
        self._model = model
        self._waiting: dict[int, tuple[NewRequest, int]] = {}  # row -> request, prompt tokens computed

    def add(self, request: NewRequest) -> None:
        if request.params.prompt_logprobs is not None:
            self._waiting[request.row] = (request, request.num_computed_tokens)

    @property
    def is_wanted(self) -> bool:
        return bool(self._waiting)

    def remove(self, row: int) -> None:
        self._waiting.pop(row, None)

    def collect(self, hidden: torch.Tensor, output: SchedulerOutput) -> Iterator[tuple[int, int, LogprobsTensors]]:
        """(batch index, position of the first, logprobs of the prompt tokens that this step's positions predict).

        Args:
            hidden: ``[num_tokens, hidden_size]``, in batch order.
        """
        if not self._waiting:
            return
        first = 0
        for index, (row, num_tokens) in enumerate(zip(output.rows, output.num_scheduled_tokens, strict=True)):
            if row in self._waiting:
                request, begin = self._waiting[row]
                count = min(num_tokens, request.num_prompt_tokens - 1 - begin)
                if count > 0:
                    yield index, begin + 1, self._compute(hidden[first : first + count], request, begin)
                self._waiting[row] = (request, begin + num_tokens)
                if begin + num_tokens >= request.num_prompt_tokens:
                    del self._waiting[row]
            first += num_tokens

    def _compute(self, hidden: torch.Tensor, request: NewRequest, begin: int) -> LogprobsTensors:
        targets = torch.tensor(request.token_ids[begin + 1 : begin + 1 + len(hidden)], device=hidden.device)
        wanted = request.params.prompt_logprobs
        assert wanted is not None
        return prompt_logprobs(hidden, targets, wanted, self._model.compute_logits, self._model.config.vocab_size)
