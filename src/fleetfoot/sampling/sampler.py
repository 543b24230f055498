"""The sampler: from logits to tokens, for a batch whose rows want different things.

The order is vLLM's. Log-probabilities come from the logits as they are. Then, in float32: allowed tokens, bad words and
min_tokens, logit_bias, penalties; greedy rows take the argmax of that. Random rows go on: shift by the row's maximum,
divide by the temperature, min_p, top_k, top_p, Gumbel-max with the row's own noise.

Every step works on the rows that need it, and on each by itself, so a row's token and log-probabilities are bit for bit
the same whatever its neighbours want.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fleetfoot.kernels.opset import ChooseTokens
from fleetfoot.kernels.sampling.choose_tokens import choose_tokens_torch
from fleetfoot.sampling.logprobs import LogprobsTensors, token_logprobs
from fleetfoot.sampling.metadata import SamplingMetadata


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token for each row of logits."""

    token_ids: torch.Tensor  # [n] int64
    invalid: torch.Tensor
    """``[n]`` bool: the row's logits hold NaN or +inf, or nothing but -inf; its token means nothing."""
    logprobs: LogprobsTensors | None
    """Of the rows in ``metadata.logprobs``, in that order; ``None`` if no row asked."""


class Sampler:
    """Chooses the next tokens. Keeps no state.

    Args:
        choose_tokens: of the `OpSet`.
    """

    def __init__(self, choose_tokens: ChooseTokens = choose_tokens_torch) -> None:
        self._choose_tokens = choose_tokens

    def __call__(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Sample one token per row of ``logits [n, vocab]`` (any float dtype), which stay as they are.

        Raises `ValueError` if ``metadata`` describes another number of rows.
        """
        if len(logits) != metadata.num_rows:
            raise ValueError(f"logits have {len(logits)} rows and the sampling metadata {metadata.num_rows}")
        processed, random = process_logits(logits, metadata), metadata.random
        invalid = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
        if random is None:
            token_ids = self._choose_tokens(processed, invalid=invalid)
        else:
            token_ids = self._choose_tokens(
                processed, random.temperature, random.seeds, random.positions, invalid=invalid, filters=random.filters
            )
        return SamplerOutput(token_ids, invalid, _logprobs(logits, token_ids, metadata))


def process_logits(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """The logits ``[n, vocab]`` after masks, biases and penalties, in float32 if there are any: what greedy rows take
    the argmax of."""
    if not metadata.edits_logits:
        return logits
    processed = logits.to(torch.float32, copy=True)
    for part in (metadata.allowed_tokens, metadata.banned_tokens, metadata.logit_bias, metadata.penalties):
        if part is not None:
            part.apply(processed)
    return processed


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor, metadata: SamplingMetadata) -> LogprobsTensors | None:
    if metadata.logprobs is None:
        return None
    rows = metadata.logprobs.rows
    return token_logprobs(logits[rows], metadata.logprobs.max_count, token_ids[rows])
