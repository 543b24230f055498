"""The sampler of Model Runner V1: parameters are gathered on the host for each batch.

The order of operations is vLLM's. Logprobs are computed from the model's logits. Then, in float32: allowed tokens, bad
words and min_tokens, logit_bias, penalties; greedy rows take the argmax of the result. Random rows continue: subtract
the row's maximum, divide by the temperature, min_p, top_k, top_p, Gumbel-max with the row's own noise.

Every operation processes each row separately, so a row's token and logprobs are bitwise the same in every batch.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fleetfoot.kernels.interface import Kernels, Sample, TokenLogprobs
from fleetfoot.kernels.sampling.sample import sample_torch
from fleetfoot.kernels.sampling.token_logprobs import token_logprobs_torch
from fleetfoot.records.step import NewRequest
from fleetfoot.sampling.logprobs import LogprobsTensors, PromptLogprobs, token_logprobs
from fleetfoot.sampling.metadata import SamplingMetadata, SamplingRow
from fleetfoot.sampling.verification import HostSamples, verify_drafts


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token for each row of logits."""

    token_ids: torch.Tensor
    """``[n]`` int64"""
    invalid: torch.Tensor
    """``[n]`` bool: the row's logits contain NaN or +inf, or only -inf; its token is undefined."""
    logprobs: LogprobsTensors | None
    """Of the rows in ``metadata.logprobs``, in that order; ``None`` if there are none."""


class Sampler:
    """Holds a `SamplingRow` for each running request, and the metadata of the last batch.

    Args:
        compute_logits: ``[n, hidden_size]`` -> ``[n, vocab_size]``, for prompt logprobs.
    """

    def __init__(self, ops: Kernels, compute_logits: Callable[[torch.Tensor], torch.Tensor], vocab_size: int) -> None:
        self._ops = ops
        self._rows: dict[int, SamplingRow] = {}
        self._last = SamplingMetadata([], torch.device("cpu"))
        self.prompt_logprobs = PromptLogprobs(compute_logits, vocab_size, ops.token_logprobs)

    def add(self, request: NewRequest) -> None:
        """A request takes a row. Its ``token_ids`` grow while it runs."""
        self._rows[request.row] = SamplingRow(
            params=request.params,
            seed=request.seed,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            stop_token_ids=request.stop_token_ids,
            bad_words_token_ids=request.bad_words_token_ids,
        )
        self.prompt_logprobs.add(request)

    def remove(self, row: int) -> None:
        """A row is freed."""
        self._rows.pop(row, None)
        self.prompt_logprobs.remove(row)

    def __call__(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
    ) -> HostSamples:
        """Sample, and verify drafts. Waits for the device.

        Args:
            logits: ``[num_logits, vocab_size]``: ``1 + d`` rows for each decode, then one for each other request.
            rows: ``[num_sampled]``: the requests' rows.
            drafts, max_new_tokens: as for `verify_drafts`.
        """
        metadata = self._metadata(rows, drafts, logits.device)
        output = sample(logits, metadata, self._ops.sample, self._ops.token_logprobs)
        logprobs = {}
        if output.logprobs is not None and metadata.logprobs is not None:
            entries = output.logprobs.to_rows(metadata.logprobs.counts)
            logprobs = dict(zip(metadata.logprobs.indices, entries, strict=True))
        return verify_drafts(output.token_ids.tolist(), output.invalid.tolist(), drafts, max_new_tokens, logprobs)

    def _metadata(self, rows: Sequence[int], drafts: Sequence[Sequence[int]], device: torch.device) -> SamplingMetadata:
        batch: list[SamplingRow] = []
        for index, row in enumerate(rows):
            batch.append(self._rows[row])
            if index < len(drafts):
                batch += _rows_behind(self._rows[row], drafts[index])
        last = self._last
        is_same = len(last.rows) == len(batch) and all(map(operator.is_, last.rows, batch))
        self._last = last.refresh() if is_same and batch else SamplingMetadata.build(batch, device)
        return self._last


def _rows_behind(row: SamplingRow, drafts: Sequence[int]) -> Iterator[SamplingRow]:
    """The row with its first draft accepted, its first two, and so on. The input of an absent draft (-1) is token 0."""
    if row.has_penalties:
        row.prompt_tokens()  # computed once for all copies
    for count in range(1, len(drafts) + 1):
        behind = copy.copy(row)
        behind.token_ids = [*row.token_ids, *(max(draft, 0) for draft in drafts[:count])]
        yield behind


def sample(
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    sample_op: Sample = sample_torch,
    logprobs_op: TokenLogprobs = token_logprobs_torch,
) -> SamplerOutput:
    """Sample one token per row of ``logits [n, vocab]`` (any float dtype), which are not modified.

    Raises `ValueError` if ``metadata`` describes another number of rows.
    """
    if len(logits) != len(metadata.rows):
        raise ValueError(f"logits have {len(logits)} rows and the sampling metadata {len(metadata.rows)}")
    invalid = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    token_ids = sample_op(process_logits(logits, metadata), metadata.random, invalid=invalid)
    logprobs = None
    if metadata.logprobs is not None:
        rows, count = metadata.logprobs.rows, metadata.logprobs.max_count
        logprobs = token_logprobs(logits[rows], count, token_ids[rows], logprobs_op)
    return SamplerOutput(token_ids, invalid, logprobs)


def process_logits(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
    """The logits ``[n, vocab]`` after the logits processors, in float32 if there are any."""
    processors = metadata.logits_processors
    if not processors:
        return logits
    processed = logits.to(torch.float32, copy=True)
    for processor in processors:
        processor.apply(processed)
    return processed
