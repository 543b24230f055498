"""Log-probabilities of sampled tokens, prompt tokens and the most probable tokens, on the device.

They are log_softmax in float32 of the model's logits, before any of the request's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch

from fleetfoot.kernels.interface import TokenLogprobs
from fleetfoot.kernels.sampling import rows_per_chunk
from fleetfoot.kernels.sampling.token_logprobs import token_logprobs_torch
from fleetfoot.records.step import NewRequest, PackedLogprobs, SchedulerOutput


@dataclass(frozen=True, slots=True)
class LogprobsTensors:
    """Log-probabilities at ``n`` positions: of the sampled token in column 0, then of the top tokens, descending."""

    packed: torch.Tensor
    """``[n, 2 * (num + 1) + 1]`` int32 of `kernels.sampling.token_logprobs`: one copy moves it to the host."""

    @property
    def num(self) -> int:
        """Number of top tokens at each position."""
        return (self.packed.shape[1] - 3) // 2

    @property
    def token_ids(self) -> torch.Tensor:
        """``[n, num + 1]`` int32"""
        return self.packed[:, : self.num + 1]

    @property
    def logprobs(self) -> torch.Tensor:
        """``[n, num + 1]`` float32"""
        return self.packed[:, self.num + 1 : -1].view(torch.float32)

    @property
    def ranks(self) -> torch.Tensor:
        """``[n]`` int32: number of tokens at least as probable as the sampled one; 1 for the most probable."""
        return self.packed[:, -1]

    def to_rows(
        self, counts: Sequence[int] | None = None, positions: Sequence[int] | None = None
    ) -> list[PackedLogprobs]:
        """Copy to the host. ``counts``: top tokens to keep of each (-1 or None: all); ``positions``: None: all."""
        data, row_bytes, middle = self.packed.cpu().numpy().tobytes(), 4 * self.packed.shape[1], 4 * (self.num + 1)
        chosen = range(len(self.packed)) if positions is None else positions
        rows = []
        for position, count in zip(chosen, repeat(-1, len(chosen)) if counts is None else counts, strict=True):
            size = middle if count < 0 else 4 * (1 + count)
            ids, end = position * row_bytes, (position + 1) * row_bytes
            logprobs = ids + middle
            rows.append(data[logprobs : logprobs + size] + data[ids : ids + size] + data[end - 4 : end])
        return rows


def token_logprobs(
    logits: torch.Tensor, num: int, token_ids: torch.Tensor, op: TokenLogprobs = token_logprobs_torch
) -> LogprobsTensors:
    """Logprobs of ``token_ids [n]`` and of the ``num`` most probable tokens (-1: the whole vocabulary).

    Tokens with equal logits are in order of their ids, so the first ``m`` are the same for every ``num``. ``logits``:
    ``[n, vocab]`` of any float dtype.
    """
    vocab_size = logits.shape[1]
    return LogprobsTensors(op(logits, token_ids, vocab_size if num == -1 else min(num, vocab_size)))


class PromptLogprobs:
    """Requests with ``prompt_logprobs`` and an incomplete prompt. ``compute_logits``: ``[n, hidden_size]`` -> ``[n,
    vocab_size]``; ``op``: see `Kernels.token_logprobs`."""

    def __init__(
        self, compute_logits: Callable[[torch.Tensor], torch.Tensor], vocab_size: int, op: TokenLogprobs
    ) -> None:
        self._compute_logits, self._vocab_size, self._op = compute_logits, vocab_size, op
        self._prefills: dict[int, tuple[NewRequest, int, int]] = {}  # row -> request, num, prompt tokens computed

    @property
    def is_active(self) -> bool:
        """Whether a running request has prompt logprobs that are incomplete."""
        return bool(self._prefills)

    def add(self, request: NewRequest) -> None:
        if (num := request.params.prompt_logprobs) is not None:
            self._prefills[request.row] = (request, num, request.num_computed_tokens)

    def remove(self, row: int) -> None:
        self._prefills.pop(row, None)

    def collect(self, hidden: torch.Tensor, output: SchedulerOutput) -> Iterator[tuple[int, int, LogprobsTensors]]:
        """Compute the logprobs of the prompt tokens that a step predicts. ``hidden``: ``[num_tokens, hidden_size]``, in
        batch order. Yields (batch index, position of the first of these prompt tokens, their logprobs)."""
        if not self._prefills:
            return
        first = 0
        for index, (row, num_tokens) in enumerate(zip(output.rows, output.num_scheduled_tokens, strict=True)):
            states, first = hidden[first : first + num_tokens], first + num_tokens
            if row not in self._prefills:
                continue
            request, num, begin = self._prefills.pop(row)
            if begin + num_tokens < request.num_prompt_tokens:
                self._prefills[row] = (request, num, begin + num_tokens)
            targets = request.token_ids[begin + 1 : min(begin + 1 + num_tokens, request.num_prompt_tokens)].tolist()
            if targets:
                target_ids = torch.tensor(targets, device=hidden.device)
                yield index, begin + 1, self.logprobs(states[: len(targets)], target_ids, num)

    def logprobs(self, hidden: torch.Tensor, next_ids: torch.Tensor, num: int) -> LogprobsTensors:
        """Logprobs of the prompt tokens ``next_ids [n]`` int64, which ``hidden [n, hidden_size]`` predict, and of the
        ``num`` top tokens (-1: all). A few rows at a time: the logits of a whole prompt would be the largest tensor of
        the step."""
        step = rows_per_chunk(self._vocab_size, hidden.device)
        chunks = zip(hidden.split(step), next_ids.split(step), strict=True)
        return LogprobsTensors(
            torch.cat([token_logprobs(self._compute_logits(x), num, ids, self._op).packed for x, ids in chunks])
        )
