"""Log-probabilities of chosen tokens and of the most probable ones, on the device.

They are those of the model: log_softmax in float32 of the logits before any of the request's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fleetfoot.kernels.sampling import token_logprobs as op
from fleetfoot.kernels.sampling.gumbel import rows_per_chunk
from fleetfoot.records.logprobs import RowLogprobs


@dataclass(frozen=True, slots=True)
class LogprobsTensors:
    """Log-probabilities of ``n`` positions; column 0 is the chosen token, the others the most probable, descending."""

    packed: torch.Tensor
    """``[n, 2 * (num + 1) + 1]`` int32, of `kernels.sampling.token_logprobs`: one copy brings it to the host."""

    @property
    def num(self) -> int:
        """How many of the most probable tokens there are of each."""
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
        """``[n]`` int32: how many tokens are at least as probable as the chosen one: 1 for the best."""
        return self.packed[:, -1]

    def to_rows(self, counts: Sequence[int] | None = None) -> list[RowLogprobs]:
        """Copy to the host. ``counts``: how many of the most probable tokens each row keeps (-1 or None: all)."""
        on_host = LogprobsTensors(self.packed.cpu())
        sizes = [self.num if count < 0 else count for count in counts or [-1] * len(self.packed)]
        width = 1 + max(sizes, default=0)  # of which most rows want most
        token_ids, logprobs = on_host.token_ids[:, :width].tolist(), on_host.logprobs[:, :width].tolist()
        return [
            RowLogprobs(ids[: size + 1], values[: size + 1], rank)
            for ids, values, rank, size in zip(token_ids, logprobs, on_host.ranks.tolist(), sizes, strict=True)
        ]


def token_logprobs(logits: torch.Tensor, num: int, token_ids: torch.Tensor) -> LogprobsTensors:
    """The chosen tokens ``token_ids [n]`` and the ``num`` most probable ones; -1 for ``num``: the whole vocabulary.

    Tokens that tie stand in order of their ids, so the first ``m`` are the same whatever ``num`` is.

    Args:
        logits: ``[n, vocab]`` of any float dtype.
    """
    vocab_size = logits.shape[1]
    return LogprobsTensors(op.token_logprobs(logits, token_ids, vocab_size if num == -1 else min(num, vocab_size)))


def prompt_logprobs(
    hidden_states: torch.Tensor,
    next_token_ids: torch.Tensor,
    num: int,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    vocab_size: int,
) -> LogprobsTensors:
    """Logprobs of prompt tokens, given the hidden states that predict them.

    Args:
        hidden_states: ``[m, hidden]``; row ``i`` predicts ``next_token_ids[i]``.
        next_token_ids: ``[m]`` int64.
        num: how many of the most probable tokens; -1: all.
        compute_logits: ``[k, hidden]`` -> ``[k, vocab_size]``, called for a few rows at a time: the logits of a whole
            prompt would be the largest tensor of the step.
    """
    step = rows_per_chunk(vocab_size, hidden_states.device)
    chunks = [
        token_logprobs(compute_logits(hidden_states[start : start + step]), num, next_token_ids[start : start + step])
        for start in range(0, max(len(hidden_states), 1), step)
    ]
    return LogprobsTensors(torch.cat([chunk.packed for chunk in chunks]))
