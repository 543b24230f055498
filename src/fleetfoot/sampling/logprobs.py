"""Log-probabilities of chosen tokens and of the most probable ones, on the device.

They are those of the model: log_softmax in float32 of the logits before any of the request's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fleetfoot.sampling.gumbel import rows_per_chunk
from fleetfoot.sampling.logprob import RowLogprobs


class LogprobsTensors(NamedTuple):
    """Log-probabilities of ``n`` positions; column 0 is the chosen token, the others the most probable, descending."""

    token_ids: torch.Tensor  # [n, num + 1] int64
    logprobs: torch.Tensor  # [n, num + 1] float32
    ranks: torch.Tensor  # [n] int64, how many tokens are at least as probable as the chosen one: 1 for the best

    def to_rows(self, counts: Sequence[int] | None = None) -> list[RowLogprobs]:
        """Copy to the host. ``counts``: how many of the most probable tokens each row keeps (-1 or None: all)."""
        token_ids, logprobs, ranks = self.token_ids.tolist(), self.logprobs.tolist(), self.ranks.tolist()
        if counts is None:
            counts = [-1] * len(ranks)
        return [
            RowLogprobs(ids[: count + 1] if count >= 0 else ids, values[: count + 1] if count >= 0 else values, rank)
            for ids, values, rank, count in zip(token_ids, logprobs, ranks, counts, strict=True)
        ]


def gather_logprobs(logprobs: torch.Tensor, num: int, token_ids: torch.Tensor) -> LogprobsTensors:
    """Pick the chosen tokens ``token_ids [n]`` and the ``num`` most probable ones out of ``logprobs [n, vocab]``.

    Tokens that tie stand in order of their ids, so the first ``m`` are the same whatever ``num`` is.
    """
    chosen_ids = token_ids.unsqueeze(1)  # [n, 1]
    chosen = logprobs.gather(1, chosen_ids)
    ranks = (logprobs >= chosen).sum(dim=-1)
    if num == 0:
        return LogprobsTensors(chosen_ids, chosen, ranks)
    top_ids = _top_token_ids(logprobs, num)  # [n, num]
    return LogprobsTensors(
        torch.cat((chosen_ids, top_ids), dim=1), torch.cat((chosen, logprobs.gather(1, top_ids)), dim=1), ranks
    )


def token_logprobs(logits: torch.Tensor, num: int, token_ids: torch.Tensor) -> LogprobsTensors:
    """`gather_logprobs` from raw ``logits [n, vocab]`` (any float dtype); -1 for ``num``: the whole vocabulary.

    Works on a few rows at a time, so that temporaries do not grow with ``n``.
    """
    vocab_size = logits.shape[1]
    num = vocab_size if num == -1 else min(num, vocab_size)
    step = rows_per_chunk(vocab_size, logits.device)
    chunks = [
        gather_logprobs(
            logits[start : start + step].log_softmax(dim=-1, dtype=torch.float32), num, token_ids[start : start + step]
        )
        for start in range(0, max(len(logits), 1), step)  # one empty chunk where there are no rows
    ]
    return LogprobsTensors(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


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
    return LogprobsTensors(*(torch.cat(parts) for parts in zip(*chunks, strict=True)))


def _top_token_ids(values: torch.Tensor, num: int) -> torch.Tensor:
    """Ids of the ``num`` highest of ``values [n, vocab]`` float32, descending, the lower id first among equals.

    topk promises no order among equals. So it runs on integers that are all different: the value's bits, made to order
    like the value itself, above the complement of the id.
    """
    bits = values.contiguous().view(torch.int32)
    # Negative floats order backwards by their bits: flip all but the sign.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = values.shape[1] - 1
    complement = torch.arange(last, -1, -1, device=values.device)
    keys = (ordered.to(torch.int64) << 32) | complement  # [n, vocab]
    return last - (keys.topk(num).values & 0xFFFFFFFF)
