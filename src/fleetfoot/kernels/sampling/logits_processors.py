"""Logits processors: allowed tokens, logit bias, bad words, min_tokens and penalties, read from per-row tables.

The order is: allowed tokens, biases, banned tokens, penalties. Tokens are excluded by adding -inf, not by assigning it:
NaN and +inf in the model's logits then stay visible, and the sampler reports the row instead of sampling from the rest.

`process_logits_torch` is the reference; `process_logits_cpu` is faster on a CPU, where few rows have processors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from fleetfoot.kernels.sampling import rows_per_chunk

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
class LogitsProcessorTables:
    """Everything that the logits processors read of the ``R`` rows."""

    is_limited: torch.Tensor
    """``[R]`` int32, 0 where every token is allowed."""
    allowed_masks: torch.Tensor
    """``[R, ceil(vocab / 32)]`` int32: bit ``t % 32`` of word ``t // 32`` is set if token ``t`` is allowed."""
    listed: ListedTokens
    repetition: torch.Tensor
    """``[R]`` float32; off: 1."""
    frequency: torch.Tensor
    """``[R]`` float32; off: 0."""
    presence: torch.Tensor
    """``[R]`` float32; off: 0."""
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
    history, count = tables.history, len(logits)
    step = rows_per_chunk(max(logits.shape[1], history.block_tables.shape[1] * history.block_size), logits.device)
    if count <= step:
        return _process_rows(logits, rows, seq_lens, tables, long_lists)
    chunks = [slice(begin, begin + step) for begin in range(0, count, step)]
    return torch.cat([_process_rows(logits[i], rows[i], seq_lens[i], tables, long_lists) for i in chunks])


def _process_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    tables: LogitsProcessorTables,
    long_lists: Mapping[int, ListedTokens],
) -> torch.Tensor:
    """`process_logits_torch` of a few rows: temporaries are as long as the longest sequence."""
    processed = logits.to(torch.float32, copy=True)
    index = torch.arange(logits.shape[1], device=logits.device)
    is_allowed = (tables.allowed_masks[rows][:, index // 32] >> (index % 32)) & 1 > 0  # [n, vocab]
    is_limited = tables.is_limited[rows].unsqueeze(1) != 0
    processed = torch.where(is_limited & ~is_allowed, processed - torch.inf, processed)
    lengths = seq_lens.to(torch.int64).unsqueeze(1)  # [n, 1]
    history = tables.history
    num_output = lengths - history.prompt_lens[rows].unsqueeze(1)
    _add_listed(processed, rows, rows >= 0, lengths, num_output, history, tables.listed)
    for row, listed in long_lists.items():
        _add_listed(processed, rows, rows == row, lengths, num_output, history, listed)

    position = torch.arange(history.block_tables.shape[1] * history.block_size, device=logits.device).unsqueeze(0)
    token_ids = history.tokens_at(rows, torch.where(position < lengths, position, 0))  # [n, max_len]
    is_output = (position < lengths) & (position >= lengths - num_output)
    counts = torch.zeros_like(processed).scatter_add_(1, token_ids, is_output.to(torch.float32))
    in_prompt = torch.zeros_like(processed).scatter_add_(1, token_ids, (position < lengths - num_output).float())
    repetition, frequency, presence = (
        values[rows].unsqueeze(1) for values in (tables.repetition, tables.frequency, tables.presence)
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


@np.errstate(invalid="ignore")  # +inf - inf
def process_logits_cpu(
    logits: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    tables: LogitsProcessorTables,
    long_lists: Mapping[int, ListedTokens] = NO_LONG_LISTS,
) -> torch.Tensor:
    """`process_logits_torch` for CPU tensors: reads only the tables of rows with logits processors."""
    processed = logits.to(torch.float32, copy=True)
    values, history = processed.numpy(), tables.history
    is_limited, masks, prompt_lens = (
        table.numpy() for table in (tables.is_limited, tables.allowed_masks, history.prompt_lens)
    )
    factors = torch.stack((tables.repetition, tables.frequency, tables.presence), 1).numpy()  # [R, 3]
    penalized, counts = {}, []
    for i, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        if row < 0:
            continue
        prompt_len = int(prompt_lens[row])
        if is_limited[row]:
            is_allowed = np.unpackbits(masks[row].view(np.uint8), count=values.shape[1], bitorder="little")
            values[i, is_allowed == 0] -= np.inf
        _add_listed_tokens(values[i], row, length, length - prompt_len, history, tables.listed)
        if row in long_lists:
            _add_listed_tokens(values[i], row, length, length - prompt_len, history, long_lists[row])
        if tuple(factors[row]) != (1.0, 0.0, 0.0):
            prompt = np.unique(history.tokens(row, 0, prompt_len)) if factors[row][0] != 1 else None
            penalized[i] = factors[row]
            counts.append(count_tokens(prompt, history.tokens(row, prompt_len, length)))
    if penalized:
        penalize(processed, list(penalized), counts, list(penalized.values()))
    return processed


def _add_listed_tokens(
    logits: np.ndarray, row: int, length: int, num_output: int, history: TokenHistory, listed: ListedTokens
) -> None:
    """Add biases and -inf to the tokens of a row's list. ``logits [vocab]``."""
    counts = (listed.num_biases, listed.num_words, listed.num_stops)
    first_word, first_stop, end = accumulate(int(count.numpy()[row]) for count in counts)
    if end == 0:
        return
    planes = listed.planes.numpy()[row]
    token_ids, ends = planes[TOKENS], planes[PREFIX_ENDS]
    logits[token_ids[:first_word]] += planes[BIASES].view(np.float32)[:first_word]
    stops = ends[first_word:first_stop]
    begins = np.concatenate(([ends[first_word - 1] if first_word else 0], stops[:-1]))[: len(stops)]
    lengths = stops - begins
    words = token_ids[first_word:first_stop]
    banned = words[lengths == 0].tolist()
    others = np.flatnonzero((lengths > 0) & (lengths <= num_output))
    if len(others):
        prefixes, most = planes[PREFIX_TOKENS], int(lengths[others].max())
        newest = history.tokens(row, length - most, length)
        for word in others[prefixes[stops[others] - 1] == newest[-1]]:
            if (newest[most - lengths[word] :] == prefixes[begins[word] : stops[word]]).all():
                banned.append(words[word])
    if num_output < int(listed.min_tokens.numpy()[row]):
        banned += token_ids[first_stop:end].tolist()
    logits[np.array(banned, dtype=np.int64)] -= np.inf


def count_tokens(
    prompt_token_ids: np.ndarray | None, output_token_ids: Sequence[int] | np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The distinct tokens of a sequence, and their number of occurrences in the output, int64.

    Args:
        prompt_token_ids: the prompt's distinct tokens (np.unique); None: the prompt does not count (only the repetition
            penalty includes it).
    """
    token_ids, counts = np.unique(np.asarray(output_token_ids, dtype=np.int64), return_counts=True)
    if prompt_token_ids is not None:
        prompt_only = np.setdiff1d(prompt_token_ids, token_ids, assume_unique=True)
        token_ids = np.concatenate((token_ids, prompt_only))
        counts = np.concatenate((counts, np.zeros_like(prompt_only)))
    return token_ids, counts


def penalize(
    logits: torch.Tensor,
    rows: Sequence[int],
    counts: Sequence[tuple[np.ndarray, np.ndarray]],
    factors: Sequence[Sequence[float] | np.ndarray],
) -> None:
    """Penalize ``rows`` of ``logits [n, vocab]`` float32, in place: repetition, then frequency, then presence.

    Time and memory grow with the distinct tokens of the penalized sequences, not with batch times vocabulary.

    Args:
        counts: of each row, from `count_tokens`.
        factors: of each row: repetition, frequency and presence penalty.
    """
    lengths = [len(token_ids) for token_ids, _ in counts]
    # ``[m]`` each: an entry for each distinct token of a row
    token_ids, occurrences = (np.concatenate(column) for column in zip(*counts, strict=True))
    index = torch.from_numpy(np.stack((np.repeat(rows, lengths), token_ids))).to(logits.device)
    entries = np.stack((occurrences, *np.repeat(np.array(factors, dtype=np.float32), lengths, axis=0).T))
    occurred, repetition, frequency, presence = torch.from_numpy(entries).to(logits.device, torch.float32)
    values = logits[tuple(index)]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * occurred
    values -= presence * (occurred > 0)
    logits[tuple(index)] = values
