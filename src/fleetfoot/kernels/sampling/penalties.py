"""Repetition, frequency and presence penalties, on the tokens that a sequence holds and no others.

The work and the memory grow with the distinct tokens of the penalised sequences, not with batch times vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """The distinct tokens of one sequence that its penalties concern, and how often its output holds each."""

    token_ids: np.ndarray  # [t] int64
    output_counts: np.ndarray  # [t] int64, 0 for tokens of the prompt alone


def count_tokens(prompt_token_ids: np.ndarray | None, output_token_ids: Sequence[int] | np.ndarray) -> TokenCounts:
    """Count a sequence's tokens.

    ``prompt_token_ids`` holds the prompt's distinct tokens (np.unique), or is ``None`` if the prompt does not count
    (only the repetition penalty looks at it).
    """
    token_ids, counts = np.unique(np.asarray(output_token_ids, dtype=np.int64), return_counts=True)
    if prompt_token_ids is not None:
        prompt_only = np.setdiff1d(prompt_token_ids, token_ids, assume_unique=True)
        token_ids = np.concatenate((token_ids, prompt_only))
        counts = np.concatenate((counts, np.zeros_like(prompt_only)))
    return TokenCounts(token_ids, counts)


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of a batch. Entry ``i`` concerns ``token_ids[i]`` in row ``rows[i]``; no pair comes twice."""

    rows: torch.Tensor  # [m] int64
    token_ids: torch.Tensor  # [m] int64
    output_counts: torch.Tensor  # [m] float32
    repetition: torch.Tensor  # [m] float32
    frequency: torch.Tensor  # [m] float32
    presence: torch.Tensor  # [m] float32

    @classmethod
    def build(
        cls,
        rows: Sequence[int],
        counts: Sequence[TokenCounts],
        factors: Sequence[tuple[float, float, float]],
        device: torch.device,
    ) -> Penalties:
        """From at least one row, each with its counts and its (repetition, frequency, presence) penalties."""
        lengths = [len(count.token_ids) for count in counts]

        def spread(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
            return torch.from_numpy(np.repeat(values, lengths)).to(device=device, dtype=dtype)

        repetition, frequency, presence = np.asarray(factors, dtype=np.float32).T
        return cls(
            rows=spread(np.asarray(rows, dtype=np.int64), torch.int64),
            token_ids=torch.from_numpy(np.concatenate([count.token_ids for count in counts])).to(device),
            output_counts=torch.from_numpy(np.concatenate([count.output_counts for count in counts])).to(
                device=device, dtype=torch.float32
            ),
            repetition=spread(repetition, torch.float32),
            frequency=spread(frequency, torch.float32),
            presence=spread(presence, torch.float32),
        )

    def apply(self, logits: torch.Tensor) -> None:
        """Penalise ``logits [n, vocab]`` float32, in place: repetition, then frequency, then presence."""
        values = logits[self.rows, self.token_ids]  # [m]
        values = torch.where(values > 0, values / self.repetition, values * self.repetition)
        values -= self.frequency * self.output_counts
        values -= self.presence * (self.output_counts > 0)
        logits[self.rows, self.token_ids] = values
