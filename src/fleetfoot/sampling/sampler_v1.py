"""The sampler of Model Runner V1: parameters are gathered on the host for each batch.

The order of operations is vLLM's. Logprobs are computed from the model's logits. Then, in float32: allowed tokens, bad
words, min_tokens and logit_bias, penalties; greedy rows take the argmax of the result. Random rows continue: subtract
the row's maximum, divide by the temperature, min_p, top_k, top_p, Gumbel-max with the row's own noise.

Every operation processes each row separately, so a row's token and logprobs are bitwise the same in every batch.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import numpy as np
import torch

from fleetfoot.kernels.interface import Kernels, Sample, TokenLogprobs
from fleetfoot.kernels.sampling.logits_processors import count_tokens, penalize
from fleetfoot.kernels.sampling.sample import RandomRows, RowFilters, sample_torch
from fleetfoot.kernels.sampling.token_logprobs import token_logprobs_torch
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import ModelRunnerOutput, NewRequest, TokenMasks
from fleetfoot.sampling.custom_processors import (
    NO_PROCESSORS,
    EngineProcessor,
    ProcessorBatch,
    bind_tokens,
    describe,
)
from fleetfoot.sampling.logprobs import LogprobsTensors, PromptLogprobs, token_logprobs
from fleetfoot.sampling.request_params import has_filters, has_penalties
from fleetfoot.sampling.verification import INVALID_MESSAGE, verify_drafts


@dataclass(slots=True, eq=False)
class SamplingRow:
    """One row of logits: its request's parameters and tokens.

    Every token id must be within the model's vocabulary (`SamplingParams.validate_for_model`).
    """

    params: SamplingParams
    seed: int
    """64 bits (`request_seed`)."""
    token_ids: Sequence[int]
    """Prompt and output. The list may grow; `SamplingMetadata.refresh` reads it again."""
    num_prompt_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that are banned before ``min_tokens``: the model's end tokens and the request's stop tokens."""
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    """Token sequences that must not be completed."""

    _prompt_tokens: np.ndarray | None = field(init=False, default=None, repr=False)

    @property
    def has_biases(self) -> bool:
        """Whether it has a logit bias, or its output can ban tokens."""
        has_bans = bool(self.bad_words_token_ids) or (self.params.min_tokens > 0 and bool(self.stop_token_ids))
        return has_bans or bool(self.params.logit_bias)

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def prompt_tokens(self) -> np.ndarray | None:
        """The prompt's distinct tokens, int64, computed once; None if the penalties do not include them."""
        if self._prompt_tokens is None and self.params.repetition_penalty != 1:
            self._prompt_tokens = np.unique(np.asarray(self.token_ids[: self.num_prompt_tokens], dtype=np.int64))
        return self._prompt_tokens

    def biases(self) -> dict[int, float]:
        """Token id -> value to add: the logit bias, -inf for banned tokens."""
        params, output = self.params, self.output_token_ids
        banned = banned_tokens(output, self.bad_words_token_ids, params.min_tokens, self.stop_token_ids)
        return {**(params.logit_bias or {}), **dict.fromkeys(banned, -math.inf)}


def banned_tokens(
    output_token_ids: Sequence[int], bad_words: Iterable[Sequence[int]], min_tokens: int, stop_token_ids: Iterable[int]
) -> set[int]:
    """The tokens that must not follow ``output_token_ids``.

    These are the last tokens of bad words (token sequences) with a prefix that the output ends with, and
    ``stop_token_ids`` while the output has fewer than ``min_tokens`` tokens.
    """
    banned = set(stop_token_ids) if len(output_token_ids) < min_tokens else set()
    for *prefix, last in bad_words:
        start = len(output_token_ids) - len(prefix)
        if start >= 0 and list(output_token_ids[start:]) == prefix:
            banned.add(last)
    return banned


def _allowed_tokens(
    rows: Sequence[SamplingRow], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """``[a]``: the rows with ``allowed_token_ids``; of each of their allowed tokens ``[m]`` the index into these rows,
    and ``[m]`` its id. None: there are no such rows."""
    allowed = {i: ids for i, row in enumerate(rows) if (ids := row.params.allowed_token_ids) is not None}
    if not allowed:
        return None
    entry_rows = np.repeat(np.arange(len(allowed)), [*map(len, allowed.values())])
    indices = list(allowed), entry_rows, [*chain(*allowed.values())]
    limited, entries, token_ids = (torch.tensor(values, device=device) for values in indices)
    return limited, entries, token_ids


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The sampler's input for a batch: its rows, and tensors of the parameters that do not depend on their tokens.

    While a batch has the same rows in the same order, `refresh` is enough after each step.
    """

    rows: Sequence[SamplingRow]
    random: RandomRows | None = None
    """None: every row is greedy."""
    allowed: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """See `_allowed_tokens`."""
    biased: Sequence[int] = ()
    """Indices of the rows with biases or bans."""
    penalized: Sequence[int] = ()
    """Indices of the rows with penalties."""
    logprobs: Mapping[int, int] = field(default_factory=dict)
    """Index of a row with logprobs -> number of top logprobs; -1: all."""

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], device: torch.device) -> SamplingMetadata:
        """Gather the rows' parameters, in the order of the logits."""
        return cls(
            rows,
            _random_rows(rows, device),
            _allowed_tokens(rows, device),
            [i for i, row in enumerate(rows) if row.has_biases],
            [i for i, row in enumerate(rows) if has_penalties(row.params)],
            {i: count for i, row in enumerate(rows) if (count := row.params.logprobs) is not None},
        )

    def refresh(self) -> SamplingMetadata:
        """The metadata of the same rows after their ``token_ids`` have grown."""
        if self.random is None:
            return self
        return replace(self, random=replace(self.random, positions=_positions(self.rows, self.random.seeds.device)))


def _positions(rows: Sequence[SamplingRow], device: torch.device) -> torch.Tensor:
    return torch.tensor([len(row.token_ids) for row in rows], device=device)


def _random_rows(rows: Sequence[SamplingRow], device: torch.device) -> RandomRows | None:
    params = [row.params for row in rows]
    if all(p.temperature == 0 for p in params):
        return None

    def floats(values: Iterable[float]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.float32, device=device)

    filters = None
    if any(map(has_filters, params)):
        filters = RowFilters(
            floats(math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params),
            torch.tensor([max(p.top_k, 0) for p in params], dtype=torch.int32, device=device),
            floats(p.top_p for p in params),
        )
    seeds = np.array([row.seed & 0xFFFFFFFFFFFFFFFF for row in rows], dtype=np.uint64).view(np.int64)
    temperatures = floats(p.temperature for p in params)
    return RandomRows(temperatures, torch.from_numpy(seeds).to(device), _positions(rows, device), filters)


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """One token for each row of logits."""

    token_ids: torch.Tensor
    """``[n]`` int64"""
    invalid: torch.Tensor
    """``[n]`` bool: the row's logits contain NaN or +inf, or only -inf; its token is undefined."""
    logprobs: LogprobsTensors | None
    """Logprobs of the rows in ``metadata.logprobs``, in that order; ``None`` if there are none."""
    errors: Mapping[int, str]
    """Row -> what a logits processor raised; the row's token is not to be used."""

    def reasons(self) -> list[str]:
        """``[n]``: why a row's token cannot be used; empty: it can."""
        flags = self.invalid.tolist()
        return [self.errors.get(row) or (INVALID_MESSAGE if flag else "") for row, flag in enumerate(flags)]


class Sampler:
    """Holds a `SamplingRow` for each running request, and the metadata of the last batch. ``compute_logits``:
    ``[n, hidden_size]`` -> ``[n, vocab_size]``, for prompt logprobs."""

    def __init__(
        self,
        ops: Kernels,
        compute_logits: Callable[[torch.Tensor], torch.Tensor],
        vocab_size: int,
        logits_processors: Sequence[EngineProcessor] = (),
    ) -> None:
        self._ops = ops
        self._processors = ProcessorBatch(logits_processors)
        self._rows: dict[int, SamplingRow] = {}
        self._last = SamplingMetadata([])
        self.prompt_logprobs = PromptLogprobs(compute_logits, vocab_size, ops.token_logprobs)

    def add(self, request: NewRequest) -> None:
        """A request takes a row. Its ``token_ids`` grow while it runs."""
        lists = request.stop_token_ids, request.bad_words_token_ids
        row = SamplingRow(request.params, request.seed, request.token_ids, request.num_prompt_tokens, *lists)
        self._rows[request.row] = row
        self._processors.add(row)
        self.prompt_logprobs.add(request)

    def remove(self, row: int) -> None:
        """A row is freed."""
        self._processors.remove(self._rows.pop(row, None))
        self.prompt_logprobs.remove(row)

    def __call__(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        drafts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        masks: TokenMasks | None = None,
    ) -> ModelRunnerOutput:
        """Sample, and verify drafts. Waits for the device. ``logits``: ``[num_logits, vocab_size]``: ``1 + d`` rows for
        each decode, then one for each other request; ``rows``: of the requests that sample; ``drafts``,
        ``max_new_tokens``: as for `verify_drafts`; ``masks``: of rows of logits."""
        batch: list[SamplingRow] = []
        for index, row in enumerate(rows):
            batch.append(self._rows[row])
            if index < len(drafts):
                batch += _rows_behind(self._rows[row], drafts[index])
        last = self._last
        is_same = len(last.rows) == len(batch) and all(map(operator.is_, last.rows, batch))
        self._last = metadata = last.refresh() if is_same else SamplingMetadata.build(batch, logits.device)
        mask = None if masks is None else partial(self._mask, masks)
        output = sample(logits, metadata, self._ops.sample, self._ops.token_logprobs, self._processors, mask)
        logprobs = {}
        if output.logprobs is not None:
            entries = output.logprobs.to_rows(list(metadata.logprobs.values()))
            logprobs = dict(zip(metadata.logprobs, entries, strict=True))
        return verify_drafts(output.token_ids.tolist(), output.reasons(), drafts, max_new_tokens, logprobs)

    def _mask(self, masks: TokenMasks, logits: torch.Tensor) -> None:
        """Exclude the tokens that grammars do not allow, in place."""
        index = np.full(len(logits), -1, dtype=np.int32)
        index[masks.rows] = np.arange(len(masks.rows))
        on_device = [torch.from_numpy(values).to(logits.device) for values in (masks.masks, index)]
        self._ops.mask_tokens(logits, *on_device)


def _rows_behind(row: SamplingRow, drafts: Sequence[int]) -> Iterator[SamplingRow]:
    """The row with its first draft accepted, its first two, and so on. The input of an absent draft (-1) is token 0."""
    row.prompt_tokens()  # computed once for all copies
    for count in range(1, len(drafts) + 1):
        extended = copy.copy(row)
        extended.token_ids = [*row.token_ids, *(max(draft, 0) for draft in drafts[:count])]
        yield extended


def sample(
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    sample_op: Sample = sample_torch,
    logprobs_op: TokenLogprobs = token_logprobs_torch,
    processors: ProcessorBatch = NO_PROCESSORS,
    mask: Callable[[torch.Tensor], None] | None = None,
) -> SamplerOutput:
    """Sample one token per row of ``logits [n, vocab]`` (any float dtype), which are not modified. ``processors``: the
    engine's own `LogitsProcessor`s, if it has any; ``mask``: excludes tokens from processed logits, in place.

    Raises `ValueError` if ``metadata`` describes another number of rows.
    """
    if len(logits) != len(metadata.rows):
        raise ValueError(f"logits have {len(logits)} rows and the sampling metadata {len(metadata.rows)}")
    invalid = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    errors = processors.begin(metadata.rows)
    processed, random = process_logits(logits, metadata, processors, errors), metadata.random
    if mask is not None:
        processed = processed.clone() if processed is logits else processed
        mask(processed)
    if random is not None:
        processed, random = _process_scaled(processed, random, processors, errors)
    token_ids = sample_op(processed, random, invalid=invalid)
    logprobs = None
    if counts := metadata.logprobs.values():
        rows = torch.tensor(list(metadata.logprobs), device=logits.device)
        largest = -1 if -1 in counts else max(counts)
        logprobs = token_logprobs(logits[rows], largest, token_ids[rows], logprobs_op)
    return SamplerOutput(token_ids, invalid, logprobs, errors)


def process_logits(
    logits: torch.Tensor,
    metadata: SamplingMetadata,
    processors: ProcessorBatch = NO_PROCESSORS,
    errors: dict[int, str] | None = None,
) -> torch.Tensor:
    """The logits ``[n, vocab]`` after the logits processors, in float32 if there are any. ``errors``: of each row, what
    a processor raised; extended.

    Tokens are excluded by adding -inf, not by assigning it: NaN and +inf in the model's logits then stay visible as
    NaN, and the sampler reports the row instead of sampling from the rest.
    """
    own = [i for i, row in enumerate(metadata.rows) if row.params.logits_processors]
    if metadata.allowed is None and not (metadata.biased or metadata.penalized or own or processors):
        return logits
    processed = logits.to(torch.float32, copy=True)
    if metadata.allowed is not None:
        rows, entry_rows, token_ids = metadata.allowed
        limited = processed[rows]  # [a, vocab]
        masked = limited - torch.inf
        masked[entry_rows, token_ids] = limited[entry_rows, token_ids]
        processed[rows] = masked
    entries = [(i, token, bias) for i in metadata.biased for token, bias in metadata.rows[i].biases().items()]
    if entries:
        *index, biases = zip(*entries, strict=True)
        values = torch.tensor(biases, dtype=torch.float32, device=logits.device)
        processed.index_put_(tuple(torch.tensor(index, device=logits.device)), values, accumulate=True)
    errors = {} if errors is None else errors
    processed, raised = processors.apply(processed, argmax_invariant=False)
    errors |= raised
    for i in own:
        _apply_callables(processed, i, metadata.rows[i], errors)
    if metadata.penalized:
        penalized = [metadata.rows[i] for i in metadata.penalized]
        counts = [count_tokens(row.prompt_tokens(), row.output_token_ids) for row in penalized]
        params = [row.params for row in penalized]
        factors = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
        penalize(processed, metadata.penalized, counts, factors)
    return processed


def _apply_callables(processed: torch.Tensor, index: int, row: SamplingRow, errors: dict[int, str]) -> None:
    """Apply the callables of a request to its row of ``processed [n, vocab]``."""
    prompt = row.token_ids[: row.num_prompt_tokens]
    for function in row.params.logits_processors or ():
        try:
            processed[index] = bind_tokens(function, list(prompt), list(row.output_token_ids))(processed[index])
        except Exception as error:
            errors[index] = describe(function, error)


def _process_scaled(
    logits: torch.Tensor, random: RandomRows, processors: ProcessorBatch, errors: dict[int, str]
) -> tuple[torch.Tensor, RandomRows]:
    """Apply the processors that greedy rows ignore, which see logits divided by the temperature."""
    if not processors.has_invariant:
        return logits, random
    is_random = random.temperatures > 0  # [n]
    divisors = torch.where(is_random, random.temperatures, 1.0)[:, None]
    scaled, raised = processors.apply(logits.to(torch.float32) / divisors, argmax_invariant=True)
    errors |= raised
    return torch.where(is_random[:, None], scaled, logits), replace(random, temperatures=is_random.to(torch.float32))
