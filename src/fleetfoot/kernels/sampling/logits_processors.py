"""Logits processors: allowed tokens, logit bias, bad words, min_tokens and penalties, read from per-row tables.

The order is: allowed tokens, biases, banned tokens, penalties. Tokens are excluded by adding -inf, not by assigning it:
NaN and +inf in the model's logits then stay visible, and the sampler reports the row instead of sampling from the rest.

`process_logits_torch` is the reference; `process_logits_cpu` is faster on a CPU, where few rows have processors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

TOKENS, BIASES, PREFIX_ENDS, PREFIX_TOKENS = range(4)


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """The tokens of each row, in pages."""

    block_tables: torch.Tensor
    """``[R, max_blocks]`` int32"""
    token_pages: torch.Tensor
    """``[num_blocks * block_size]`` int32: a token id for each KV slot."""
    prompt_lens: torch.Tensor
    """``[R]`` int32"""
    block_size: int

    def tokens(self, row: int, begin: int, end: int) -> np.ndarray:
        """int64 token ids of a row at positions ``begin`` to ``end``; CPU tensors only."""
        position = np.arange(begin, end)
        blocks = self.block_tables.numpy()[row, position // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + position % self.block_size
        return self.token_pages.numpy()[slots].astype(np.int64)

    def tokens_at(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 token ids of ``rows [n]`` at ``positions [n, m]``."""
        blocks = self.block_tables[rows].to(torch.int64).gather(1, positions // self.block_size)
        return self.token_pages[blocks * self.block_size + positions % self.block_size].to(torch.int64)


@dataclass(frozen=True, slots=True)
class AllowedTokenTable:
    """``allowed_token_ids`` of each row."""

    is_limited: torch.Tensor
    """``[R]`` int32, 0 where every token is allowed."""
    masks: torch.Tensor
    """``[R, ceil(vocab / 32)]`` int32: bit ``t % 32`` of word ``t // 32`` is set if token ``t`` is allowed."""


@dataclass(frozen=True, slots=True)
class ListedTokens:
    """Entries of each row, in this order: biases, last tokens of bad words, stop tokens banned by min_tokens.

    The tokens of a bad word before its last one are its prefix. Prefixes are stored one after the other: that of entry
    ``i`` is ``PREFIX_TOKENS[PREFIX_ENDS[i - 1] : PREFIX_ENDS[i]]``. Biases have empty prefixes.
    """

    planes: torch.Tensor
    """``[R, 4, capacity]`` int32: token ids; biases (the bits of float32); ends of prefixes; tokens of prefixes."""
    num_biases: torch.Tensor
    """``[R]`` int32, like the next three."""
    num_words: torch.Tensor
    num_stops: torch.Tensor
    min_tokens: torch.Tensor


@dataclass(frozen=True, slots=True)
class PenaltyTable:
    """Penalties of each row, ``[R]`` float32 each; 1, 0 and 0 are off."""

    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


@dataclass(frozen=True, slots=True)
class LogitsProcessorTables:
    """Everything that the logits processors read of the ``R`` rows."""

    allowed: AllowedTokenTable
    listed: ListedTokens
    penalties: PenaltyTable
    history: TokenHistory


NO_LONG_LISTS: Mapping[int, ListedTokens] = {}


def process_logits_torch(
    logits: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    tables: LogitsProcessorTables,
    long_lists: Mapping[int, ListedTokens] = NO_LONG_LISTS,
) -> torch.Tensor:
    """Apply the logits processors of each row.

    Args:
        logits: ``[n, vocab]`` of any float dtype, contiguous within rows; not modified.
        rows: ``[n]`` int32: row ``i`` uses entry ``rows[i]`` of all tables; -1: padding.
        seq_lens: ``[n]``: current length of each sequence.
        long_lists: row -> a `ListedTokens` that replaces the (empty) list of that row in ``tables``.

    Returns:
        ``[n, vocab]`` float32; the values of padding rows are undefined.
    """
    processed = logits.to(torch.float32, copy=True)
    index = torch.arange(logits.shape[1], device=logits.device)
    is_allowed = (tables.allowed.masks[rows][:, index // 32] >> (index % 32)) & 1 > 0  # [n, vocab]
    is_limited = tables.allowed.is_limited[rows].unsqueeze(1) != 0
    processed = torch.where(is_limited & ~is_allowed, processed - torch.inf, processed)
    lengths = seq_lens.to(torch.int64).unsqueeze(1)  # [n, 1]
    num_output = lengths - tables.history.prompt_lens[rows].unsqueeze(1)
    _add_listed(processed, rows, rows >= 0, lengths, num_output, tables.history, tables.listed)
    for row, listed in long_lists.items():
        _add_listed(processed, rows, rows == row, lengths, num_output, tables.history, listed)

    history, penalties = tables.history, tables.penalties
    position = torch.arange(history.block_tables.shape[1] * history.block_size, device=logits.device).unsqueeze(0)
    token_ids = history.tokens_at(rows, torch.where(position < lengths, position, 0))  # [n, max_len]
    is_output = (position < lengths) & (position >= lengths - num_output)
    counts = torch.zeros_like(processed).scatter_add_(1, token_ids, is_output.to(torch.float32))
    in_prompt = torch.zeros_like(processed).scatter_add_(1, token_ids, (position < lengths - num_output).float())
    repetition, frequency, presence = (
        values[rows].unsqueeze(1) for values in (penalties.repetition, penalties.frequency, penalties.presence)
    )
    repeated = torch.where(processed > 0, processed / repetition, processed * repetition)
    penalized = repeated - frequency * counts - presence * (counts > 0)
    return torch.where((counts > 0) | ((in_prompt > 0) & (repetition != 1)), penalized, processed)


def _add_listed(
    logits: torch.Tensor,
    rows: torch.Tensor,
    is_row: torch.Tensor,
    lengths: torch.Tensor,
    num_output: torch.Tensor,
    history: TokenHistory,
    listed: ListedTokens,
) -> None:
    """Add biases and -inf to the tokens of the lists of rows with ``is_row [n]``. ``lengths``, ``num_output [n,
    1]``."""
    planes = listed.planes[rows].to(torch.int64)  # [n, 4, capacity]
    num_biases, num_words, num_stops = (
        torch.where(is_row, count[rows], 0).unsqueeze(1)
        for count in (listed.num_biases, listed.num_words, listed.num_stops)
    )
    entry = torch.arange(planes.shape[2], device=logits.device).unsqueeze(0)  # [1, capacity]
    is_bias, is_listed = entry < num_biases, entry < num_biases + num_words + num_stops
    is_word = ~is_bias & (entry < num_biases + num_words)
    # each token of a prefix is compared with the sequence, and a word is banned if its prefix has no mismatch
    ends = torch.where(is_listed, planes[:, PREFIX_ENDS], torch.iinfo(torch.int64).max)
    word = torch.searchsorted(ends, entry.expand(len(rows), -1).contiguous(), right=True)
    distance = ends.gather(1, word.clamp(max=planes.shape[2] - 1)) - entry  # from the end of the sequence
    is_prefix = (word < planes.shape[2]) & (distance <= num_output)
    known = history.tokens_at(rows, torch.where(is_prefix, lengths - distance, 0))
    mismatches = (~is_prefix | (known != planes[:, PREFIX_TOKENS])).to(torch.int64).cumsum(1)
    mismatches = torch.nn.functional.pad(mismatches, (1, 0))  # [n, capacity + 1]: before each prefix token
    stops = torch.where(is_listed, planes[:, PREFIX_ENDS], 0)
    starts = torch.nn.functional.pad(stops[:, :-1], (1, 0))
    matches = (mismatches.gather(1, stops) == mismatches.gather(1, starts)) & (num_output >= stops - starts)
    is_stop = is_listed & ~is_bias & ~is_word & (num_output < listed.min_tokens[rows].unsqueeze(1))
    biases = planes[:, BIASES].to(torch.int32).view(torch.float32)
    added = torch.where(is_bias, biases, torch.where((is_word & matches) | is_stop, -torch.inf, 0.0))
    logits.scatter_add_(1, torch.where(is_listed, planes[:, TOKENS], 0), added)


def process_logits_cpu(
    logits: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    tables: LogitsProcessorTables,
    long_lists: Mapping[int, ListedTokens] = NO_LONG_LISTS,
) -> torch.Tensor:
    """`process_logits_torch` for CPU tensors: reads only the tables of rows with logits processors."""
    processed = logits.to(torch.float32, copy=True)
    _keep_allowed_tokens(processed, rows, tables.allowed)
    _add_listed_tokens(processed, rows, seq_lens, tables.history, tables.listed)
    for row, listed in long_lists.items():
        _add_listed_tokens(processed, torch.where(rows == row, rows, -1), seq_lens, tables.history, listed)
    _penalize(processed, rows, seq_lens, tables.history, tables.penalties)
    return processed


def _keep_allowed_tokens(logits: torch.Tensor, rows: torch.Tensor, allowed: AllowedTokenTable) -> None:
    index = torch.arange(logits.shape[1])
    for i, row in enumerate(rows.numpy().tolist()):
        if row >= 0 and allowed.is_limited.numpy()[row]:
            bits = allowed.masks[row][index // 32] >> (index % 32)
            logits[i] = torch.where((bits & 1) > 0, logits[i], logits[i] - torch.inf)


def _add_listed_tokens(
    logits: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, history: TokenHistory, listed: ListedTokens
) -> None:
    counts = (listed.num_biases, listed.num_words, listed.num_stops)
    for i, (row, length) in enumerate(zip(rows.numpy().tolist(), seq_lens.numpy().tolist(), strict=True)):
        num_biases, num_words, num_stops = (int(count.numpy()[row]) if row >= 0 else 0 for count in counts)
        if num_biases + num_words + num_stops == 0:
            continue
        values, planes = logits.numpy()[i], listed.planes.numpy()[row]
        token_ids, ends = planes[TOKENS], planes[PREFIX_ENDS]
        values[token_ids[:num_biases]] += planes[BIASES].view(np.float32)[:num_biases]
        num_output = length - int(history.prompt_lens.numpy()[row])
        banned = []
        for entry in range(num_biases, num_biases + num_words):
            prefix = planes[PREFIX_TOKENS][ends[entry - 1] if entry else 0 : ends[entry]]
            if num_output >= len(prefix) and (history.tokens(row, length - len(prefix), length) == prefix).all():
                banned.append(token_ids[entry])
        if num_output < int(listed.min_tokens.numpy()[row]):
            banned += token_ids[num_biases + num_words : num_biases + num_words + num_stops].tolist()
        with np.errstate(invalid="ignore"):  # +inf - inf
            values[np.array(banned, dtype=np.int64)] -= np.inf


def _penalize(
    logits: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, history: TokenHistory, penalties: PenaltyTable
) -> None:
    factors = torch.stack((penalties.repetition, penalties.frequency, penalties.presence), 1).numpy()  # [R, 3]
    prompt_lens = history.prompt_lens.numpy()
    penalized, counts = [], []
    for i, (row, length) in enumerate(zip(rows.numpy().tolist(), seq_lens.numpy().tolist(), strict=True)):
        if row < 0 or tuple(factors[row]) == (1.0, 0.0, 0.0):
            continue
        prompt_len = int(prompt_lens[row])
        prompt = np.unique(history.tokens(row, 0, prompt_len)) if factors[row][0] != 1 else None
        penalized.append(i)
        counts.append(count_tokens(prompt, history.tokens(row, prompt_len, length)))
    if penalized:
        of_rows = [tuple(factors[row].tolist()) for row in rows.numpy()[penalized]]
        TokenPenalties.build(penalized, counts, of_rows, logits.device).apply(logits)


class TokenCounts(NamedTuple):
    """The distinct tokens that a sequence's penalties apply to, and their number of occurrences in the output."""

    token_ids: np.ndarray  # [t] int64
    output_counts: np.ndarray  # [t] int64, 0 for tokens that only the prompt has


def count_tokens(prompt_token_ids: np.ndarray | None, output_token_ids: Sequence[int] | np.ndarray) -> TokenCounts:
    """Count a sequence's tokens.

    ``prompt_token_ids`` are the prompt's distinct tokens (np.unique), or ``None`` if the prompt does not count (only
    the repetition penalty includes it).
    """
    token_ids, counts = np.unique(np.asarray(output_token_ids, dtype=np.int64), return_counts=True)
    if prompt_token_ids is not None:
        prompt_only = np.setdiff1d(prompt_token_ids, token_ids, assume_unique=True)
        token_ids = np.concatenate((token_ids, prompt_only))
        counts = np.concatenate((counts, np.zeros_like(prompt_only)))
    return TokenCounts(token_ids, counts)


@dataclass(frozen=True, slots=True)
class TokenPenalties:
    """Penalties of a batch. Entry ``i`` applies to ``token_ids[i]`` in row ``rows[i]``; pairs are distinct.

    Time and memory grow with the distinct tokens of the penalized sequences, not with batch times vocabulary.
    """

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
    ) -> TokenPenalties:
        """From one or more rows, each with its counts and its (repetition, frequency, presence) penalties."""
        lengths = [len(count.token_ids) for count in counts]

        def repeat(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(np.repeat(values, lengths)).to(device)

        return cls(
            repeat(np.asarray(rows, dtype=np.int64)),
            torch.from_numpy(np.concatenate([count.token_ids for count in counts])).to(device),
            torch.from_numpy(np.concatenate([count.output_counts for count in counts])).to(device, torch.float32),
            *(repeat(values) for values in np.asarray(factors, dtype=np.float32).T),
        )

    def apply(self, logits: torch.Tensor) -> None:
        """Penalize ``logits [n, vocab]`` float32, in place: repetition, then frequency, then presence."""
        values = logits[self.rows, self.token_ids]  # [m]
        values = torch.where(values > 0, values / self.repetition, values * self.repetition)
        values -= self.frequency * self.output_counts
        values -= self.presence * (self.output_counts > 0)
        logits[self.rows, self.token_ids] = values
