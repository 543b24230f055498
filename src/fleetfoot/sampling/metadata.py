"""What the sampler must know about the rows of a batch, as tensors on the logits' device."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from fleetfoot.sampling.filters import RowFilters
from fleetfoot.sampling.masks import AllowedTokens, TokenBias, banned_tokens
from fleetfoot.sampling.params import SamplingParams
from fleetfoot.sampling.penalties import Penalties, count_tokens


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
    """The rows that draw at random; those with and without filters make two of these."""

    indices: Sequence[int]  # the same as `rows`, on the host
    rows: torch.Tensor  # [r] int64
    temperature: torch.Tensor  # [r] float32, above 0
    seeds: torch.Tensor  # [r] int64, 64-bit patterns
    positions: torch.Tensor  # [r] int64, index in the sequence of the token to draw
    log_min_p: torch.Tensor | None = None  # [r] float32, -inf where off
    top_k: torch.Tensor | None = None  # [r] int64, 0 where off
    top_p: torch.Tensor | None = None  # [r] float32, 1 where off
    max_top_k: int = 0

    @property
    def has_filters(self) -> bool:
        return self.log_min_p is not None or self.top_k is not None or self.top_p is not None

    def filters(self) -> RowFilters:
        """All three, those too that are off everywhere."""
        temperature = self.temperature
        return RowFilters(
            torch.full_like(temperature, -math.inf) if self.log_min_p is None else self.log_min_p,
            torch.zeros_like(temperature, dtype=torch.int32) if self.top_k is None else self.top_k.to(torch.int32),
            torch.ones_like(temperature) if self.top_p is None else self.top_p,
        )

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], indices: Sequence[int], device: torch.device) -> RandomRows:
        chosen = [rows[i] for i in indices]
        params = [row.params for row in chosen]
        seeds = np.array([row.seed & 0xFFFFFFFFFFFFFFFF for row in chosen], dtype=np.uint64).view(np.int64)
        log_min_p = [math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]
        top_k = [max(p.top_k, 0) for p in params]
        top_p = [p.top_p for p in params]

        def floats(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        return cls(
            indices=indices,
            rows=torch.tensor(indices, device=device),
            temperature=floats([p.temperature for p in params]),
            seeds=torch.from_numpy(seeds).to(device),
            positions=_positions(rows, indices, device),
            log_min_p=floats(log_min_p) if max(log_min_p) > -math.inf else None,
            top_k=torch.tensor(top_k, device=device) if max(top_k) > 0 else None,
            top_p=floats(top_p) if min(top_p) < 1 else None,
            max_top_k=max(top_k),
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
    random: tuple[RandomRows, ...] = ()
    """Rows without and with filters. Rows in neither are greedy."""
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
        return not self.random

    @property
    def edits_logits(self) -> bool:
        """Whether some row's logits are changed before a token is chosen."""
        parts = (self.allowed_tokens, self.logit_bias, self.banned_tokens, self.penalties)
        return any(part is not None for part in parts)

    @classmethod
    def build(cls, rows: Sequence[SamplingRow], device: torch.device) -> SamplingMetadata:
        """Gather the rows' parameters, in the order of the logits."""
        plain: list[int] = []
        filtered: list[int] = []
        for i, row in enumerate(rows):
            if row.params.temperature > 0:
                (filtered if row.is_filtered else plain).append(i)
        special = {i: row for i, row in enumerate(rows) if not row.is_plain}
        wanted = {i: row.params.logprobs for i, row in special.items() if row.params.logprobs is not None}
        return cls(
            rows=rows,
            device=device,
            random=tuple(RandomRows.build(rows, indices, device) for indices in (plain, filtered) if indices),
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
        random = tuple(
            dataclasses.replace(part, positions=_positions(self.rows, part.indices, self.device))
            for part in self.random
        )
        special = {i: row for i, row in enumerate(self.rows) if row.may_ban or row.is_penalized}
        return dataclasses.replace(
            self,
            random=random,
            banned_tokens=_banned_tokens(special, self.device),
            penalties=_penalties(special, self.device),
        )


def _positions(rows: Sequence[SamplingRow], indices: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([len(rows[i].token_ids) for i in indices], device=device)


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
