"""Sampling in Model Runner V2: parameters are read on the device, through the batch's row numbers.

A batch in which nobody wants more than a temperature, or than filters where the op knows them, takes one op. Where
somebody wants penalties, masks or logprobs, the `Sampler` of `fleetfoot.sampling` runs, which works on each row by
itself: what a row gets does not depend on which of the two ways its neighbours make the batch go.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fleetfoot.ops.opset import OpSet
from fleetfoot.runner.v2.device_edits import BannedWords, DevicePenalties
from fleetfoot.runner.v2.state import DeviceState
from fleetfoot.runner.v2.verification import LogitsRows
from fleetfoot.sampling.filters import RowFilters
from fleetfoot.sampling.masks import AllowedTokens, TokenBias
from fleetfoot.sampling.metadata import LogprobRows, RandomRows, SamplingMetadata, SamplingRow
from fleetfoot.sampling.sampler import Sampler, SamplerOutput
from fleetfoot.scheduler.output import NewRequest


@dataclass(slots=True)
class _Wishes:
    """What the host knows of a row: its request's parameters, and its length when it samples next."""

    sampling: SamplingRow
    length: int

    @property
    def is_filtered(self) -> bool:
        return self.sampling.is_filtered and self.sampling.params.temperature > 0


@dataclass(frozen=True, slots=True)
class _Layout:
    """What depends on who stands where in the batch, and not on any token: kept while the batch stays the same."""

    rows: list[int]
    wishes: list[_Wishes]
    random: tuple[tuple[list[int], torch.Tensor], ...]
    """Batch indices of rows that draw, without and with filters, on the host and on the device."""
    allowed_tokens: AllowedTokens | None
    logit_bias: TokenBias | None
    banned: BannedWords | None
    penalized: torch.Tensor | None
    logprobs: LogprobRows | None


class RowSampler:
    """Knows what every row wants, and samples a batch.

    Args:
        ops: the operations, of which ``choose_tokens`` is used.
    """

    def __init__(self, state: DeviceState, ops: OpSet, max_num_seqs: int) -> None:
        self._state = state
        self._choose_tokens = ops.choose_tokens
        self._draws_filtered = ops.filters_in_graphs
        self._sampler = Sampler(ops.choose_tokens, draws_filtered=ops.filters_in_graphs)
        self._wishes: list[_Wishes | None] = [None] * max_num_seqs
        self._num_special = 0
        self._num_filtered = 0
        self._num_random = 0
        self._layout: _Layout | None = None

    def add(self, request: NewRequest) -> None:
        """A row is taken."""
        sampling = SamplingRow(
            params=request.params,
            seed=request.seed,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            stop_token_ids=request.stop_token_ids,
            bad_words_token_ids=request.bad_words_token_ids,
        )
        wishes = _Wishes(sampling, len(request.token_ids))
        self._wishes[request.row] = wishes
        self._num_special += self._is_special(wishes)
        self._num_filtered += wishes.is_filtered
        self._num_random += request.params.temperature > 0
        self._layout = None

    def remove(self, row: int) -> None:
        """A row is given back."""
        wishes = self._wishes[row]
        if wishes is not None:
            self._num_special -= self._is_special(wishes)
            self._num_filtered -= wishes.is_filtered
            self._num_random -= wishes.sampling.params.temperature > 0
            self._wishes[row] = None
            self._layout = None

    def __call__(
        self, logits: torch.Tensor, whose: LogitsRows, rows: list[int], num_drafts: int = 0
    ) -> tuple[SamplerOutput, LogprobRows | None]:
        """Choose a token for each row of logits.

        Args:
            logits: ``[L, vocab_size]``.
            rows: the state's row of each row of logits, as the host knows it; a decode with drafts has several.

        Returns:
            Tokens, and which of the rows the logprobs in it belong to.
        """
        if not self._num_special:
            return self.sample_simple(logits, whose, is_greedy=not self._num_random, filters=self.has_filters), None
        layout = self._lay_out(rows)
        metadata = self._metadata(layout, whose, num_drafts)
        for wishes in layout.wishes:
            wishes.length += 1  # with drafts a bound, which the request's limit bounds
        return self._sampler(logits, metadata), metadata.logprobs

    def _is_special(self, wishes: _Wishes) -> bool:
        return not wishes.sampling.is_plain or (wishes.is_filtered and not self._draws_filtered)

    @property
    def is_simple(self) -> bool:
        """Whether no row wants more than a temperature, and filters where they can be part of a graph."""
        return not self._num_special

    @property
    def has_filters(self) -> bool:
        """Whether some row has filters."""
        return self._num_filtered > 0

    def sample_simple(
        self, logits: torch.Tensor, whose: LogitsRows, *, is_greedy: bool = False, filters: bool = False
    ) -> SamplerOutput:
        """Sample a batch in which nobody wants more than a temperature, and perhaps filters.

        Args:
            logits: ``[L, vocab_size]``, those of padding among them if need be.
            is_greedy: the host knows that nobody draws.
            filters: somebody has filters.
        """
        invalid = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
        if is_greedy:
            token_ids = self._choose_tokens(logits, invalid=invalid)
        else:
            requests = self._state.requests
            token_ids = self._choose_tokens(
                logits,
                requests.temperature,
                requests.seeds,
                whose.seq_lens,
                rows=whose.rows,
                invalid=invalid,
                filters=RowFilters(requests.log_min_p, requests.top_k, requests.top_p) if filters else None,
            )
        return SamplerOutput(token_ids, invalid, None)

    # --- batches in which somebody wants more -----------------------------------------------------------------------

    def _lay_out(self, rows: list[int]) -> _Layout:
        if self._layout is not None and self._layout.rows == rows:
            return self._layout
        wishes = [self._wishes_of(row) for row in rows]
        chosen = {index: wish.sampling for index, wish in enumerate(wishes)}
        device = self._state.arena.flat.device
        plain = [i for i, s in chosen.items() if s.params.temperature > 0 and not s.is_filtered]
        filtered = [i for i, s in chosen.items() if s.params.temperature > 0 and s.is_filtered]
        penalized = [i for i, s in chosen.items() if s.is_penalized]
        wanted = {i: s.params.logprobs for i, s in chosen.items() if s.params.logprobs is not None}
        words = [(i, rows[i], sequence) for i, s in chosen.items() for sequence in s.bad_words_token_ids]
        held_back = [
            (i, rows[i], token) for i, s in chosen.items() if s.params.min_tokens > 0 for token in s.stop_token_ids
        ]
        self._layout = _Layout(
            rows=rows,
            wishes=wishes,
            random=tuple((indices, torch.tensor(indices, device=device)) for indices in (plain, filtered) if indices),
            allowed_tokens=AllowedTokens.build(
                {i: ids for i, s in chosen.items() if (ids := s.params.allowed_token_ids) is not None}, device
            ),
            logit_bias=TokenBias.build({i: s.params.logit_bias or {} for i, s in chosen.items()}, device),
            banned=BannedWords(self._state, words, held_back) if words or held_back else None,
            penalized=torch.tensor(penalized, device=device) if penalized else None,
            logprobs=LogprobRows(list(wanted), torch.tensor(list(wanted), device=device), list(wanted.values()))
            if wanted
            else None,
        )
        return self._layout

    def _wishes_of(self, row: int) -> _Wishes:
        wishes = self._wishes[row]
        if wishes is None:
            raise RuntimeError(f"row {row} is scheduled, but no request has it")
        return wishes

    def _metadata(self, layout: _Layout, whose: LogitsRows, num_drafts: int) -> SamplingMetadata:
        state_rows, seq_lens = whose.rows.to(torch.int64), whose.seq_lens
        penalties = None
        if layout.penalized is not None:
            longest = max(wishes.length for wishes in layout.wishes if wishes.sampling.is_penalized) + num_drafts
            penalties = DevicePenalties(
                self._state,
                layout.penalized,
                state_rows[layout.penalized],
                seq_lens[layout.penalized],
                min(longest, self._state.max_blocks * self._state.block_size),
            )
        return SamplingMetadata(
            rows=[wishes.sampling for wishes in layout.wishes],
            device=state_rows.device,
            random=tuple(
                self._random_rows(layout, indices, index, state_rows[index], seq_lens[index])
                for indices, index in layout.random
            ),
            allowed_tokens=layout.allowed_tokens,
            logit_bias=layout.logit_bias,
            banned_tokens=None if layout.banned is None else layout.banned.bias(seq_lens),
            penalties=penalties,
            logprobs=layout.logprobs,
        )

    def _random_rows(
        self, layout: _Layout, indices: list[int], index: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor
    ) -> RandomRows:
        requests = self._state.requests
        params = [layout.wishes[i].sampling.params for i in indices]
        max_top_k = max(p.top_k for p in params)
        return RandomRows(
            indices=indices,
            rows=index,
            temperature=requests.temperature[rows],
            seeds=requests.seeds[rows],
            positions=seq_lens.to(torch.int64),
            log_min_p=requests.log_min_p[rows] if any(p.min_p > 0 for p in params) else None,
            top_k=requests.top_k[rows].to(torch.int64) if max_top_k > 0 else None,
            top_p=requests.top_p[rows] if any(p.top_p < 1 for p in params) else None,
            max_top_k=max(max_top_k, 0),
        )
