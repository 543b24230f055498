"""Edits of logits that depend on tokens which only the device knows: penalties, bad words, min_tokens.

They compute what `fleetfoot.sampling` computes from host lists, from the token pages instead, with the same float32
operations in the same order, so that both runners choose the same tokens bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fleetfoot.runner.v2.state import DeviceState
from fleetfoot.sampling.gumbel import rows_per_chunk
from fleetfoot.sampling.masks import TokenBias


@dataclass(frozen=True, slots=True)
class TokensSoFar:
    """The tokens of some requests of the batch, on the device."""

    token_ids: torch.Tensor
    """``[p, length]`` int64; entries past a request's end mean nothing."""
    in_prompt: torch.Tensor
    """``[p, length]`` bool"""
    in_output: torch.Tensor
    """``[p, length]`` bool"""


def tokens_so_far(state: DeviceState, rows: torch.Tensor, seq_lens: torch.Tensor, length: int) -> TokensSoFar:
    """Read token pages.

    Args:
        rows: ``[p]`` int64, rows of the state. seq_lens: ``[p]`` int32. length: at least the longest of them.
    """
    position = torch.arange(length, device=rows.device)  # [length]
    blocks = state.block_tables.tensor[rows, : -(-length // state.block_size)].to(torch.int64)
    slots = blocks[:, position // state.block_size] * state.block_size + position % state.block_size  # [p, length]
    prompt_lens = state.requests.prompt_lens[rows].unsqueeze(1)
    in_prompt = position < prompt_lens
    in_output = ~in_prompt & (position < seq_lens.unsqueeze(1))
    return TokensSoFar(state.requests.token_pages[slots].to(torch.int64), in_prompt, in_output)


@dataclass(frozen=True, slots=True)
class DevicePenalties:
    """Repetition, frequency and presence penalties of ``p`` requests of the batch.

    Counts are made anew in a scratch of a few rows by the vocabulary: nothing is kept, so 1024 requests of a large
    vocabulary cost no memory while they run.
    """

    state: DeviceState
    indices: torch.Tensor
    """``[p]`` int64: batch indices."""
    rows: torch.Tensor
    """``[p]`` int64: rows of the state."""
    seq_lens: torch.Tensor
    """``[p]`` int32"""
    length: int

    def apply(self, logits: torch.Tensor) -> None:
        """Penalise ``logits [n, vocab]`` float32, in place."""
        step = rows_per_chunk(logits.shape[1], logits.device)
        for begin in range(0, len(self.rows), step):
            self._apply(logits, slice(begin, begin + step))

    def _apply(self, logits: torch.Tensor, chunk: slice) -> None:
        rows, indices, requests = self.rows[chunk], self.indices[chunk], self.state.requests
        tokens = tokens_so_far(self.state, rows, self.seq_lens[chunk], self.length)
        chosen = logits[indices]  # [p, vocab]
        counts = torch.zeros_like(chosen).scatter_add_(1, tokens.token_ids, tokens.in_output.to(torch.float32))
        known = torch.zeros_like(chosen).scatter_add_(1, tokens.token_ids, tokens.in_prompt.to(torch.float32))
        known += counts
        repetition = requests.repetition_penalty[rows].unsqueeze(1)
        values = torch.where(chosen > 0, chosen / repetition, chosen * repetition)
        values -= requests.frequency_penalty[rows].unsqueeze(1) * counts
        values -= requests.presence_penalty[rows].unsqueeze(1) * (counts > 0)
        logits[indices] = torch.where(known > 0, values, chosen)


class BannedWords:
    """bad_words and min_tokens of a batch, laid out once for a batch that does not change.

    Args:
        sequences: (batch index, row, token sequence) of each bad word.
        held_back: (batch index, row, token) of each stop token that waits for min_tokens.
    """

    def __init__(
        self,
        state: DeviceState,
        sequences: Sequence[tuple[int, int, Sequence[int]]],
        held_back: Sequence[tuple[int, int, int]],
    ) -> None:
        device = state.arena.flat.device
        self._state = state
        longest = max((len(sequence) - 1 for _, _, sequence in sequences), default=0)
        # the tokens before the last one, counted backwards from the end of the output; -1 where there is none
        prefixes = [[*reversed(sequence[:-1]), *[-1] * (longest - len(sequence) + 1)] for _, _, sequence in sequences]
        entries = [(index, row, sequence[-1]) for index, row, sequence in sequences] + list(held_back)
        self._num_words = len(sequences)
        self._indices, self._rows, self._token_ids = torch.tensor(entries, device=device).unbind(1)  # each [m] int64
        self._prefixes = torch.tensor(prefixes, device=device).view(len(sequences), longest)
        self._lengths = torch.tensor([len(sequence) - 1 for _, _, sequence in sequences], device=device)

    def bias(self, seq_lens: torch.Tensor) -> TokenBias:
        """-inf for what may not come next, 0 for the rest.

        Args:
            seq_lens: ``[n]`` int32, of the batch.
        """
        requests = self._state.requests
        num_output = (seq_lens[self._indices] - requests.prompt_lens[self._rows]).to(torch.int64)  # [m]
        banned = num_output < requests.min_tokens[self._rows]
        if self._num_words:
            banned[: self._num_words] = self._completes(seq_lens, num_output[: self._num_words])
        biases = torch.zeros(banned.shape, device=banned.device).masked_fill_(banned, -torch.inf)
        return TokenBias(self._indices, self._token_ids, biases)

    def _completes(self, seq_lens: torch.Tensor, num_output: torch.Tensor) -> torch.Tensor:
        """``[words]`` bool: whether the output ends with the word's tokens but the last."""
        state, words = self._state, slice(0, self._num_words)
        rows, size = self._rows[words], state.block_size
        back = torch.arange(self._prefixes.shape[1], device=rows.device)
        position = (seq_lens[self._indices[words]].to(torch.int64).unsqueeze(1) - 1 - back).clamp_(min=0)
        blocks = state.block_tables.tensor[rows.unsqueeze(1), position // size].to(torch.int64)
        last_tokens = state.requests.token_pages[blocks * size + position % size]  # [words, longest]
        same = (last_tokens == self._prefixes) | (self._prefixes < 0)
        return same.all(dim=1) & (num_output >= self._lengths)
