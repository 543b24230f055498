"""Sampling parameters of a batch in Model Runner V1, as tensors on the logits' device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fleetfoot.kernels.sampling.filters import RowFilters
from fleetfoot.kernels.sampling.logits_processors import TokenPenalties, count_tokens
from fleetfoot.kernels.sampling.sample import RandomRows
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.sampling.logits_processors import AllowedTokens, LogitsProcessor, TokenBias, banned_tokens


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

    has_filters: bool = field(init=False)
    """Whether min_p, top_k or top_p are on."""
    has_penalties: bool = field(init=False)
    has_bans: bool = field(init=False)
    """Whether the output can ban tokens."""
    is_plain: bool = field(init=False)
    """Whether the row has only a temperature and filters: no logits processors, no logprobs."""
    _prompt_tokens: np.ndarray | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        params = self.params
        self.has_filters = params.min_p > 0 or params.top_k > 0 or params.top_p < 1
        self.has_penalties = (
            params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        )
        self.has_bans = bool(self.bad_words_token_ids) or (params.min_tokens > 0 and bool(self.stop_token_ids))
        has_lists = self.has_bans or bool(params.logit_bias) or params.allowed_token_ids is not None
        self.is_plain = not (self.has_penalties or has_lists or params.logprobs is not None)

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def prompt_tokens(self) -> np.ndarray:
        """The prompt's distinct tokens, int64; computed once."""
        if self._prompt_tokens is None:
            prompt = np.asarray(self.token_ids[: self.num_prompt_tokens], dtype=np.int64)
            self._prompt_tokens = np.unique(prompt)
        return self._prompt_tokens


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The rows with logprobs."""

    indices: Sequence[int]
    rows: torch.Tensor
    """``[l]`` int64, ``indices`` on the device."""
    counts: Sequence[int]
    """Number of top logprobs of each; -1: all."""

    @property
    def max_count(self) -> int:
        """The largest number; -1: all."""
        return -1 if -1 in self.counts else max(self.counts)

    @classmethod
    def build(cls, counts: dict[int, int], device: torch.device) -> LogprobRows | None:
        """From row -> number of top logprobs; ``None`` if there are none."""
        indices = list(counts)
        return cls(indices, torch.tensor(indices, device=device), list(counts.values())) if counts else None


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The sampler's input for a batch; parts that no row uses are None.

    Only ``random.positions``, ``banned_tokens`` and ``penalties`` depend on the tokens: while the batch has the same
    rows in the same order, `refresh` is enough after each step.
    """

    rows: Sequence[SamplingRow]
    device: torch.device
    random: RandomRows | None = None
    """None: every row is greedy."""
    allowed_tokens: AllowedTokens | None = None
    logit_bias: TokenBias | None = None
    banned_tokens: TokenBias | None = None
    penalties: TokenPenalties | None = None
    logprobs: LogprobRows | None = None

    @property
    def logits_processors(self) -> list[LogitsProcessor]:
        """In the order of their application."""
        processors = (self.allowed_tokens, self.banned_tokens, self.logit_bias, self.penalties)
        return [processor for processor in processors if processor is not None]

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], device: torch.device) -> SamplingMetadata:
        """Gather the rows' parameters, in the order of the logits."""
        special = {i: row for i, row in enumerate(rows) if not row.is_plain}
        allowed = {i: ids for i, row in special.items() if (ids := row.params.allowed_token_ids) is not None}
        biases = {i: row.params.logit_bias or {} for i, row in special.items()}
        counts = {i: count for i, row in special.items() if (count := row.params.logprobs) is not None}
        return cls(
            rows=rows,
            device=device,
            random=_random_rows(rows, device),
            allowed_tokens=AllowedTokens.build(allowed, device),
            logit_bias=TokenBias.build(biases, device),
            banned_tokens=_banned_tokens(special, device),
            penalties=_penalties(special, device),
            logprobs=LogprobRows.build(counts, device),
        )

    def refresh(self) -> SamplingMetadata:
        """The metadata of the same rows after their ``token_ids`` have grown."""
        random = self.random
        if random is not None:
            random = dataclasses.replace(random, positions=_positions(self.rows, self.device))
        special = {i: row for i, row in enumerate(self.rows) if row.has_bans or row.has_penalties}
        banned, penalties = _banned_tokens(special, self.device), _penalties(special, self.device)
        return dataclasses.replace(self, random=random, banned_tokens=banned, penalties=penalties)


def _positions(rows: Sequence[SamplingRow], device: torch.device) -> torch.Tensor:
    return torch.tensor([len(row.token_ids) for row in rows], device=device)


def _random_rows(rows: Sequence[SamplingRow], device: torch.device) -> RandomRows | None:
    if all(row.params.temperature == 0 for row in rows):
        return None
    seeds = np.array([row.seed & 0xFFFFFFFFFFFFFFFF for row in rows], dtype=np.uint64).view(np.int64)
    has_filters = any(row.has_filters and row.params.temperature > 0 for row in rows)
    return RandomRows(
        temperatures=torch.tensor([row.params.temperature for row in rows], dtype=torch.float32, device=device),
        seeds=torch.from_numpy(seeds).to(device),
        positions=_positions(rows, device),
        filters=_filters([row.params for row in rows], device) if has_filters else None,
    )


def _filters(params: Sequence[SamplingParams], device: torch.device) -> RowFilters:
    log_min_p = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
    return RowFilters(
        torch.tensor(log_min_p, dtype=torch.float32, device=device),
        torch.tensor([max(p.top_k, 0) for p in params], dtype=torch.int32, device=device),
        torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
    )


def _banned_tokens(rows: dict[int, SamplingRow], device: torch.device) -> TokenBias | None:
    banned = {
        i: banned_tokens(row.output_token_ids, row.bad_words_token_ids, row.params.min_tokens, row.stop_token_ids)
        for i, row in rows.items()
        if row.has_bans
    }
    return TokenBias.build(banned, device)


def _penalties(rows: dict[int, SamplingRow], device: torch.device) -> TokenPenalties | None:
    penalized = {i: row for i, row in rows.items() if row.has_penalties}
    if not penalized:
        return None
    counts = [
        count_tokens(row.prompt_tokens() if row.params.repetition_penalty != 1 else None, row.output_token_ids)
        for row in penalized.values()
    ]
    params = [row.params for row in penalized.values()]
    factors = [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for p in params]
    return TokenPenalties.build(list(penalized), counts, factors, device)
