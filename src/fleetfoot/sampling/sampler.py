"""The sampler: from logits to tokens, for a batch whose rows want different things.

The order is vLLM's. Log-probabilities come from the logits as they are. Then, in float32: allowed tokens, bad words and
min_tokens, logit_bias, penalties; greedy rows take the argmax of that. Random rows go on: shift by the row's maximum,
divide by the temperature, min_p, top_k, top_p, Gumbel-max with the row's own noise.

Every step works on the rows that need it, and on each by itself, so a row's token and log-probabilities are bit for bit
the same whatever its neighbours want.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from fleetfoot.sampling.filters import RowFilters, apply_min_p, apply_top_k, apply_top_p
from fleetfoot.sampling.gumbel import gumbel_argmax, rows_per_chunk
from fleetfoot.sampling.logprobs import LogprobsTensors, token_logprobs
from fleetfoot.sampling.metadata import RandomRows, SamplingMetadata


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token for each row of logits."""

    token_ids: torch.Tensor  # [n] int64
    invalid: torch.Tensor
    """``[n]`` bool: the row's logits hold NaN or +inf, or nothing but -inf; its token means nothing."""
    logprobs: LogprobsTensors | None
    """Of the rows in ``metadata.logprobs``, in that order; ``None`` if no row asked."""


class ChooseTokens(Protocol):
    """`fleetfoot.ops.choose_tokens`: the argmax, or a Gumbel-max draw, of each row."""

    def __call__(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor | None = None,
        seeds: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        *,
        filters: RowFilters | None = None,
    ) -> torch.Tensor: ...


class Sampler:
    """Chooses the next tokens. Keeps no state.

    Args:
        choose_tokens: draws from rows without filters; None: what draws from those with filters does it too.
        draws_filtered: it draws from rows with filters as well.
    """

    def __init__(self, choose_tokens: ChooseTokens | None = None, *, draws_filtered: bool = False) -> None:
        self._choose_tokens = choose_tokens
        self._draws_filtered = draws_filtered

    def __call__(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Sample one token per row of ``logits [n, vocab]`` (any float dtype), which stay as they are.

        Raises `ValueError` if ``metadata`` describes another number of rows.
        """
        if len(logits) != metadata.num_rows:
            raise ValueError(f"logits have {len(logits)} rows and the sampling metadata {metadata.num_rows}")
        processed = process_logits(logits, metadata)
        token_ids = processed.argmax(dim=-1)  # [n]; NaN counts as the highest
        highest = processed.gather(1, token_ids.unsqueeze(1))  # [n, 1]
        invalid = highest.isfinite().logical_not_().squeeze(1)
        for rows in metadata.random:
            if self._choose_tokens is None or (rows.has_filters and not self._draws_filtered):
                token_ids[rows.rows] = sample_rows(processed, highest, rows)
            else:
                token_ids[rows.rows] = self._choose_tokens(
                    processed[rows.rows],
                    rows.temperature,
                    rows.seeds,
                    rows.positions,
                    filters=rows.filters() if rows.has_filters else None,
                )
        return SamplerOutput(token_ids, invalid, _logprobs(logits, token_ids, metadata))


def process_logits(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """The logits ``[n, vocab]`` in float32 after masks, biases and penalties: what greedy rows take the argmax of."""
    if not metadata.edits_logits:
        return logits.to(torch.float32)
    processed = logits.to(torch.float32, copy=True)
    for part in (metadata.allowed_tokens, metadata.banned_tokens, metadata.logit_bias, metadata.penalties):
        if part is not None:
            part.apply(processed)
    return processed


def sample_rows(processed: torch.Tensor, highest: torch.Tensor, random: RandomRows) -> torch.Tensor:
    """Draw a token for each of some rows.

    Args:
        processed: ``[n, vocab]`` float32. highest: ``[n, 1]``, the maximum of each row.
        random: ``r`` of the ``n`` rows with their parameters.

    Returns ``[r]`` int64. A few rows are worked on at a time, so that temporaries do not grow with ``r``.
    """
    step = rows_per_chunk(processed.shape[1], processed.device)
    drawn = []
    for start in range(0, len(random.rows), step):
        chunk = slice(start, start + step)
        rows = random.rows[chunk]
        # Shifting first keeps the quotient from overflowing, however small the temperature.
        scores = processed[rows].sub_(highest[rows]).div_(random.temperature[chunk, None])  # [step, vocab]
        if random.log_min_p is not None:
            apply_min_p(scores, random.log_min_p[chunk])
        if random.top_k is not None:
            apply_top_k(scores, random.top_k[chunk], random.max_top_k)
        if random.top_p is not None:
            apply_top_p(scores, random.top_p[chunk])
        drawn.append(gumbel_argmax(scores, random.seeds[chunk], random.positions[chunk]))
    return torch.cat(drawn)


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, metadata: SamplingMetadata) -> LogprobsTensors | None:
    if metadata.logprobs is None:
        return None
    rows = metadata.logprobs.rows
    return token_logprobs(logits[rows], metadata.logprobs.max_count, token_ids[rows])
