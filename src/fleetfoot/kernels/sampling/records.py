"""What the edits read: tables with a row for each running request, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

LIST_CAPACITY = 512
"""Tokens that a row has listed, and tokens before the last of its bad words. OpenAI's API takes 300 biases."""
TOKENS, BIASES, PREFIX_ENDS, PREFIX_TOKENS = range(4)
NUM_PLANES = 4


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """Where the tokens of each row are."""

    block_tables: torch.Tensor
    """``[R, max_blocks]`` int32"""
    token_pages: torch.Tensor
    """``[num_blocks * block_size]`` int32: a token id for each KV slot."""
    prompt_lens: torch.Tensor
    """``[R]`` int32: the output begins behind it."""
    block_size: int

    def tokens(self, row: int, begin: int, end: int) -> np.ndarray:
        """int64 token ids of a row from position ``begin`` to ``end``; on a CPU."""
        position = np.arange(begin, end)
        blocks = self.block_tables.numpy()[row, position // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + position % self.block_size
        return self.token_pages.numpy()[slots].astype(np.int64)


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """Rows that may produce some tokens alone."""

    is_limited: torch.Tensor
    """``[R]`` int32, 0 where every token is allowed."""
    masks: torch.Tensor
    """``[R, ceil(vocab / 32)]`` int32: bit ``t % 32`` of word ``t // 32`` is set if token ``t`` is allowed."""


@dataclass(frozen=True, slots=True)
class ListedTokens:
    """Single tokens whose logits are changed: first those with a bias, then the last tokens of bad words, then stop
    tokens that wait for min_tokens.

    The tokens of a bad word before its last one are its prefix. Prefixes lie one behind the other: word ``i``'s ends
    where ``PREFIX_ENDS`` says, and begins where that of the entry before ends, at 0 for biases.
    """

    planes: torch.Tensor
    """``[R, 4, capacity]`` int32: token ids; biases (the bits of float32); ends of prefixes; the prefixes' tokens."""
    num_biases: torch.Tensor
    """``[R]`` int32, as the next three."""
    num_words: torch.Tensor
    num_stops: torch.Tensor
    min_tokens: torch.Tensor


@dataclass(frozen=True, slots=True)
class Penalties:
    """Each ``[R]`` float32; 1, 0 and 0 are off."""

    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor
