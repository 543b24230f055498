"""What the sampler must know about the rows of a batch, as tensors on the logits' device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from fleetfoot.kernels.sampling.filters import RowFilters
from fleetfoot.kernels.sampling.penalties import Penalties, count_tokens
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.sampling.masks import AllowedTokens, TokenBias, banned_tokens


@dataclass(slots=True, eq=False)
class SamplingRow:
    """One row of logits: its request's parameters and its tokens so far. Lives as long as the request runs.

    Every token id must be within the model's vocabulary (`SamplingParams.validate_for_model`).
    """

    params: SamplingParams
    seed: int
    """64 bits for this sequence alone (`request_seed`)."""
    token_ids: Sequence[int]
    """Prompt and output so far. The list may grow; `SamplingMetadata.refresh` reads it again."""
    num_prompt_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens held back until there are ``min_tokens``: the model's end tokens and the request's own."""
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    """Token sequences that must not be completed (`bad_words_token_ids` in params.py)."""

    is_filtered: bool = field(init=False)
    """Whether min_p, top_k or top_p are on."""
    is_penalized: bool = field(init=False)
    may_ban: bool = field(init=False)
    """Whether tokens can be ruled out by what has been generated."""
    is_plain: bool = field(init=False)
    """Whether there is nothing beyond temperature and filters: no masks, no penalties, no logprobs."""
    _prompt_tokens: np.ndarray | None = field(init=False, default=None, repr=False)

    def __post_init__(self) -> None:
        params = self.params
        self.is_filtered = params.min_p > 0 or params.top_k > 0 or params.top_p < 1
        self.is_penalized = (
            params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        )
        self.may_ban = bool(self.bad_words_token_ids) or (params.min_tokens > 0 and bool(self.stop_token_ids))
        self.is_plain = not (
            self.is_penalized
            or self.may_ban
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.logprobs is not None
        )

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
class RandomRows:
    """How each of the ``n`` rows draws, where some do."""

    temperature: torch.Tensor  # [n] float32, 0 where a row takes the most probable token
    seeds: torch.Tensor  # [n] int64, 64-bit patterns
    positions: torch.Tensor  # [n] int64, index in the sequence of the token to draw
    filters: RowFilters | None
    """None: they are off everywhere."""

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], device: torch.device) -> RandomRows | None:
        """None: nobody draws."""
        if all(row.params.temperature == 0 for row in rows):
            return None
        seeds = np.array([row.seed & 0xFFFFFFFFFFFFFFFF for row in rows], dtype=np.uint64).view(np.int64)
        has_filters = any(row.is_filtered and row.params.temperature > 0 for row in rows)
        return cls(
            temperature=torch.tensor([row.params.temperature for row in rows], dtype=torch.float32, device=device),
            seeds=torch.from_numpy(seeds).to(device),
            positions=_positions(rows, device),
            filters=_filters([row.params for row in rows], device) if has_filters else None,
        )


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """The rows that asked for log-probabilities."""

    indices: Sequence[int]  # the same as `rows`, on the host
    rows: torch.Tensor  # [l] int64
    counts: Sequence[int]  # how many of the most probable tokens each wants; -1: all

    @property
    def max_count(self) -> int:
        """The most that any row wants; -1: all."""
        return -1 if -1 in self.counts else max(self.counts)


class LogitsEdit(Protocol):
    """Changes logits ``[n, vocab]`` float32 in place."""

    def apply(self, logits: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """What the sampler needs for a batch of ``num_rows`` rows; parts that no row needs are absent.

    Only ``positions``, ``banned_tokens`` and ``penalties`` depend on the tokens so far: while the batch has the same
    rows in the same order, keep this and call `refresh` after each step.
    """

    rows: Sequence[SamplingRow]
    device: torch.device
    random: RandomRows | None = None
    allowed_tokens: AllowedTokens | None = None
    logit_bias: TokenBias | None = None
    banned_tokens: TokenBias | None = None
    penalties: LogitsEdit | None = None
    logprobs: LogprobRows | None = None

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def all_greedy(self) -> bool:
        return self.random is None

    @property
    def edits_logits(self) -> bool:
        """Whether some row's logits are changed before a token is chosen."""
        parts = (self.allowed_tokens, self.logit_bias, self.banned_tokens, self.penalties)
        return any(part is not None for part in parts)

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], device: torch.device) -> SamplingMetadata:
        """Gather the rows' parameters, in the order of the logits."""
        special = {i: row for i, row in enumerate(rows) if not row.is_plain}
        wanted = {i: row.params.logprobs for i, row in special.items() if row.params.logprobs is not None}
        return cls(
            rows=rows,
            device=device,
            random=RandomRows.build(rows, device),
            allowed_tokens=AllowedTokens.build(
                {i: ids for i, row in special.items() if (ids := row.params.allowed_token_ids) is not None}, device
            ),
            logit_bias=TokenBias.build({i: row.params.logit_bias or {} for i, row in special.items()}, device),
            banned_tokens=_banned_tokens(special, device),
            penalties=_penalties(special, device),
            logprobs=LogprobRows(list(wanted), torch.tensor(list(wanted), device=device), list(wanted.values()))
            if wanted
            else None,
        )

    def refresh(self) -> SamplingMetadata:
        """The metadata of the same rows after their ``token_ids`` have grown."""
        random = self.random
        if random is not None:
            random = dataclasses.replace(random, positions=_positions(self.rows, self.device))
        special = {i: row for i, row in enumerate(self.rows) if row.may_ban or row.is_penalized}
        return dataclasses.replace(
            self,
            random=random,
            banned_tokens=_banned_tokens(special, self.device),
            penalties=_penalties(special, self.device),
        )


def _positions(rows: Sequence[SamplingRow], device: torch.device) -> torch.Tensor:
    return torch.tensor([len(row.token_ids) for row in rows], device=device)


def _filters(params: Sequence[SamplingParams], device: torch.device) -> RowFilters:
    log_min_p = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
    top_k = [max(p.top_k, 0) for p in params]
    return RowFilters(
        torch.tensor(log_min_p, dtype=torch.float32, device=device),
        torch.tensor(top_k, dtype=torch.int32, device=device),
        torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
    )


def _banned_tokens(rows: dict[int, SamplingRow], device: torch.device) -> TokenBias | None:
    banned = {
        i: banned_tokens(row.output_token_ids, row.bad_words_token_ids, row.params.min_tokens, row.stop_token_ids)
        for i, row in rows.items()
        if row.may_ban
    }
    return TokenBias.build(banned, device)


def _penalties(rows: dict[int, SamplingRow], device: torch.device) -> Penalties | None:
    penalized = {i: row for i, row in rows.items() if row.is_penalized}
    if not penalized:
        return None
    counts = [
        count_tokens(row.prompt_tokens() if row.params.repetition_penalty != 1 else None, row.output_token_ids)
        for row in penalized.values()
    ]
    factors = [
        (row.params.repetition_penalty, row.params.frequency_penalty, row.params.presence_penalty)
        for row in penalized.values()
    ]
    return Penalties.build(list(penalized), counts, factors, device)
