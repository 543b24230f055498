"""Which tokens a request rules in or out, and what it adds to logits: allowed_token_ids, bad_words, min_tokens,
logit_bias.

Tokens are ruled out by adding -inf, not by writing it: NaN and +inf in the model's logits then stay visible as NaN, and
the sampler can report the row instead of sampling from what is left. Additions of -inf and of one finite bias give the
same sum in any order, so tokens named twice need no care.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TokenBias:
    """Numbers to add to single logits."""

    rows: torch.Tensor  # [m] int64
    token_ids: torch.Tensor  # [m] int64
    biases: torch.Tensor  # [m] float32

    @classmethod
    def build(cls, biases: Mapping[int, Mapping[int, float]], device: torch.device) -> TokenBias | None:
        """From row -> token id -> number; ``None`` if there is nothing to add."""
        rows = [row for row, by_token in biases.items() for _ in by_token]
        if not rows:
            return None
        return cls(
            torch.tensor(rows, device=device),
            torch.tensor([token_id for by_token in biases.values() for token_id in by_token], device=device),
            torch.tensor(
                [bias for by_token in biases.values() for bias in by_token.values()],
                dtype=torch.float32,
                device=device,
            ),
        )

    def apply(self, logits: torch.Tensor) -> None:
        """Add to ``logits [n, vocab]`` float32, in place."""
        logits.index_put_((self.rows, self.token_ids), self.biases, accumulate=True)


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Rows that may produce only some tokens."""

    rows: torch.Tensor  # [a] int64, the rows that have such a list
    entry_rows: torch.Tensor  # [m] int64, for each allowed token the index into `rows`
    token_ids: torch.Tensor  # [m] int64

    @classmethod
    def build(cls, allowed: Mapping[int, Sequence[int]], device: torch.device) -> AllowedTokens | None:
        """From row -> token ids; ``None`` if no row has any."""
        if not allowed:
            return None
        return cls(
            torch.tensor(list(allowed), device=device),
            torch.tensor([i for i, token_ids in enumerate(allowed.values()) for _ in token_ids], device=device),
            torch.tensor([token_id for token_ids in allowed.values() for token_id in token_ids], device=device),
        )

    def apply(self, logits: torch.Tensor) -> None:
        """Rule out all other tokens of ``logits [n, vocab]`` float32, in place."""
        chosen = logits[self.rows]  # [a, vocab]
        masked = chosen - torch.inf
        masked[self.entry_rows, self.token_ids] = chosen[self.entry_rows, self.token_ids]
        logits[self.rows] = masked


def banned_tokens(
    output_token_ids: Sequence[int],
    bad_words: Iterable[Sequence[int]],
    min_tokens: int,
    stop_token_ids: Iterable[int],
) -> dict[int, float]:
    """Token id -> -inf for tokens that may not come next after ``output_token_ids``.

    Those are the last tokens of bad words (token sequences) whose earlier tokens have just been generated, and while
    there are fewer than ``min_tokens``, those of ``stop_token_ids``.
    """
    banned = set(stop_token_ids) if len(output_token_ids) < min_tokens else set()
    for sequence in bad_words:
        start = len(output_token_ids) - (len(sequence) - 1)
        if start >= 0 and all(a == b for a, b in zip(sequence, output_token_ids[start:], strict=False)):
            banned.add(sequence[-1])
    return dict.fromkeys(sorted(banned), -math.inf)
