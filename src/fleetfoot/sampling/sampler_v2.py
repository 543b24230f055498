"""The sampler of Model Runner V2: parameters are read from device tables, by row.

Eager and captured steps use the same code: logits processors, one op that samples every row, logprobs, verification.
A part is present if at least one row uses it, and processes each row separately: a row's result does not depend on
other rows, nor on whether the step is a graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.runtime.triton_support import next_power_of_2
from fleetfoot.kernels.sampling.sample import RandomRows
from fleetfoot.kernels.sampling.token_logprobs import MAX_SELECTED
from fleetfoot.records.step import NewRequest
from fleetfoot.sampling.logprobs import LogprobsTensors, PromptLogprobs, token_logprobs
from fleetfoot.sampling.row_tables import SamplingTables
from fleetfoot.sampling.shape import MIN_LOGPROBS, SamplingVariant
from fleetfoot.sampling.verification import DeviceSamples, DraftVerification, LogitsBatch

_RANDOM, _FILTERS, _PROCESSORS, _LOGPROBS = "random", "filters", "logits processors", "logprobs"


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """The samples of a step."""

    samples: DeviceSamples
    token_ids: torch.Tensor
    """``[L]`` int64, for each row of logits."""
    invalid: torch.Tensor
    """``[L]`` 0 or 1: the row's logits contain NaN or +inf, or only -inf; its token is undefined."""
    logprobs: LogprobsTensors | None
    """``[L]`` rows, valid for rows with 0 to 256 logprobs; None: no row has logprobs."""


class Sampler:
    """Tracks the features that the running requests use, and samples batches.

    Args:
        tables: parameters of the rows.
        verification: accepts drafts.
        compute_logits: ``[n, hidden_size]`` -> ``[n, vocab_size]``, for prompt logprobs.
    """

    def __init__(
        self,
        tables: SamplingTables,
        verification: DraftVerification,
        ops: Kernels,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        vocab_size: int,
    ) -> None:
        self._tables = tables
        self._verification = verification
        self._ops = ops
        self._vocab_size = vocab_size
        self._requests: dict[int, NewRequest] = {}
        self._features: Counter[str] = Counter()
        self._num_logprobs: Counter[int] = Counter()
        self.prompt_logprobs = PromptLogprobs(compute_logits, vocab_size, ops.token_logprobs)

    def add(self, request: NewRequest) -> None:
        """A request takes a row."""
        self._requests[request.row] = request
        self._count(request, 1)
        self.prompt_logprobs.add(request)

    def remove(self, row: int) -> None:
        """A row is freed."""
        self.prompt_logprobs.remove(row)
        request = self._requests.pop(row, None)
        if request is not None:
            self._count(request, -1)
            self._tables.remove(row)

    def _count(self, request: NewRequest, change: int) -> None:
        for feature in _features(request):
            self._features[feature] += change
        if request.params.logprobs is not None:
            self._num_logprobs[request.params.logprobs] += change

    @property
    def variant(self) -> SamplingVariant:
        """The parts that the running requests use."""
        sizes = [size for size, count in self._num_logprobs.items() if count and not _is_large(size)]
        num_logprobs = min(max(MIN_LOGPROBS, next_power_of_2(max(sizes) or 1)), self._vocab_size) if sizes else None
        return SamplingVariant(self._features[_FILTERS] > 0, self._features[_PROCESSORS] > 0, num_logprobs)

    @property
    def fits_graph(self) -> bool:
        """Whether a graph can contain the sampling of all running requests."""
        has_large = any(count for size, count in self._num_logprobs.items() if _is_large(size))
        return not (self._tables.long_lists or has_large or self.prompt_logprobs.is_active)

    def __call__(self, logits: torch.Tensor, batch: LogitsBatch) -> SamplerOutput:
        """Sample each row of ``logits [L, vocab_size]`` with the parts that the running requests use."""
        return self.sample(logits, batch, self.variant, all_greedy=not self._features[_RANDOM])

    def sample(
        self, logits: torch.Tensor, batch: LogitsBatch, variant: SamplingVariant, *, all_greedy: bool = False
    ) -> SamplerOutput:
        """Sample each row of logits, without host synchronisation: a graph can contain it.

        Args:
            logits: ``[L, vocab_size]``, with padding rows if ``batch`` has any.
            variant: has at least the parts that the rows use.
            all_greedy: no row draws.
        """
        tables = self._tables
        processed = logits
        if variant.logits_processors:
            processed = self._ops.process_logits(
                logits, batch.rows, batch.seq_lens, tables.logits_processors, tables.long_lists
            )
        sampled = torch.empty((2, len(logits)), dtype=torch.int64, device=logits.device)
        token_ids, invalid = sampled
        random = None
        if not all_greedy:
            filters = tables.filters if variant.filters else None
            random = RandomRows(tables.temperature, tables.seeds, batch.seq_lens, filters, batch.rows)
        self._ops.sample(processed, random, invalid=invalid, out=token_ids)
        logprobs = None
        if variant.logprobs is not None:
            sizes = tables.logprobs_size
            logprobs = LogprobsTensors(
                self._ops.token_logprobs(logits, token_ids, variant.logprobs, sizes=sizes, rows=batch.rows)
            )
        return SamplerOutput(self._verification(sampled, batch), token_ids, invalid, logprobs)

    def num_logprobs(self, rows: Sequence[int]) -> dict[int, int]:
        """Index in ``rows`` -> number of top logprobs, for the rows that `SamplerOutput.logprobs` is valid for."""
        return {index: size for index, size in self._logprobs_of(rows) if not _is_large(size)}

    def large_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, rows: Sequence[int]
    ) -> tuple[LogprobsTensors, dict[int, int]] | None:
        """Logprobs of the rows with more than 256, and index in ``rows`` -> number of top logprobs (-1: all).

        Args:
            logits: ``[L, vocab_size]``. token_ids: ``[L]``. rows: ``[L]``.
        """
        sizes = {index: size for index, size in self._logprobs_of(rows) if _is_large(size)}
        if not sizes:
            return None
        largest = -1 if -1 in sizes.values() else max(sizes.values())
        index = torch.tensor(list(sizes), device=logits.device)
        return token_logprobs(logits[index], largest, token_ids[index], self._ops.token_logprobs), sizes

    def _logprobs_of(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        if not self._features[_LOGPROBS]:
            return []
        sizes = ((index, self._requests[row].params.logprobs) for index, row in enumerate(rows))
        return [(index, size) for index, size in sizes if size is not None]


def _is_large(num_logprobs: int) -> bool:
    """More logprobs than a graph contains; -1: those of all tokens."""
    return num_logprobs < 0 or num_logprobs > MAX_SELECTED


def _features(request: NewRequest) -> list[str]:
    """The optional parts of sampling that a request uses."""
    params = request.params
    is_random = params.temperature > 0
    is_penalized = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
    has_lists = params.allowed_token_ids is not None or bool(params.logit_bias) or bool(request.bad_words_token_ids)
    features = {
        _RANDOM: is_random,
        _FILTERS: is_random and (params.min_p > 0 or params.top_k > 0 or params.top_p < 1),
        _PROCESSORS: is_penalized or has_lists or params.min_tokens > 0,
        _LOGPROBS: params.logprobs is not None,
    }
    return [name for name, is_on in features.items() if is_on]
