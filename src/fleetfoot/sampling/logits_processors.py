"""Logits processors of Model Runner V1: allowed tokens, logit bias, bad words and min_tokens, built from host lists.

Tokens are excluded by adding -inf, not by assigning it: NaN and +inf in the model's logits then stay visible as NaN,
and the sampler reports the row instead of sampling from the rest. Sums of -inf and one finite bias do not depend on the
order, so duplicate tokens need no special case.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class LogitsProcessor(Protocol):
    """Modifies logits ``[n, vocab]`` float32 in place."""

    def apply(self, logits: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class TokenBias:
    """Values to add to single logits."""

    rows: torch.Tensor  # [m] int64
    token_ids: torch.Tensor  # [m] int64
    biases: torch.Tensor  # [m] float32

    @classmethod
    def build(cls, biases: Mapping[int, Mapping[int, float]], device: torch.device) -> TokenBias | None:
        """From row -> token id -> bias; ``None`` if there are none."""
        entries = [(row, token_id, bias) for row, by_token in biases.items() for token_id, bias in by_token.items()]
        if not entries:
            return None
        rows, token_ids, values = zip(*entries, strict=True)
        return cls(
            torch.tensor(rows, device=device),
            torch.tensor(token_ids, device=device),
            torch.tensor(values, dtype=torch.float32, device=device),
        )

    def apply(self, logits: torch.Tensor) -> None:
        """Add to ``logits [n, vocab]`` float32, in place."""
        logits.index_put_((self.rows, self.token_ids), self.biases, accumulate=True)


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Rows with ``allowed_token_ids``."""

    rows: torch.Tensor  # [a] int64
    entry_rows: torch.Tensor  # [m] int64, for each allowed token the index into `rows`
    token_ids: torch.Tensor  # [m] int64

    @classmethod
    def build(cls, allowed: Mapping[int, Sequence[int]], device: torch.device) -> AllowedTokens | None:
        """From row -> token ids; ``None`` if there are none."""
        if not allowed:
            return None
        return cls(
            torch.tensor(list(allowed), device=device),
            torch.tensor([i for i, token_ids in enumerate(allowed.values()) for _ in token_ids], device=device),
            torch.tensor([token_id for token_ids in allowed.values() for token_id in token_ids], device=device),
        )

    def apply(self, logits: torch.Tensor) -> None:
        """Exclude all other tokens of ``logits [n, vocab]`` float32, in place."""
        limited = logits[self.rows]  # [a, vocab]
        masked = limited - torch.inf
        masked[self.entry_rows, self.token_ids] = limited[self.entry_rows, self.token_ids]
        logits[self.rows] = masked


def banned_tokens(
    output_token_ids: Sequence[int],
    bad_words: Iterable[Sequence[int]],
    min_tokens: int,
    stop_token_ids: Iterable[int],
) -> dict[int, float]:
    """Token id -> -inf for the tokens that must not follow ``output_token_ids``.

    These are the last tokens of bad words (token sequences) with a prefix that the output ends with, and
    ``stop_token_ids`` while the output has fewer than ``min_tokens`` tokens.
    """
    banned = set(stop_token_ids) if len(output_token_ids) < min_tokens else set()
    for sequence in bad_words:
        start = len(output_token_ids) - (len(sequence) - 1)
        if start >= 0 and all(a == b for a, b in zip(sequence, output_token_ids[start:], strict=False)):
            banned.add(sequence[-1])
    return dict.fromkeys(sorted(banned), -math.inf)
