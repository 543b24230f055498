"""Masks of allowed tokens: int32 words, token ``t`` is bit ``t % 32`` of word ``t // 32``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


def fill_masks(matcher: Any, drafts: Sequence[int], masks: np.ndarray) -> Any:
    """Fill the mask of a matcher's next token, and of those after its drafts as far as it accepts them; after that,
    every token is allowed. ``masks``: ``[1 + num_drafts or more, words]`` int32, contiguous. Returns the
    matcher that has computed them: an error is its own."""
    if len(masks) > 1:
        masks.fill(-1)
    if drafts:
        # On a copy: after a rollback or a reset, llguidance may return the last mask from before, if both texts have as
        # many lexemes.
        matcher = matcher.deep_copy()
        matcher.unsafe_compute_mask_ptr_with_draft_token(masks.ctypes.data, masks[0].nbytes, list(drafts))
    else:
        matcher.unsafe_compute_mask_ptr(masks.ctypes.data, masks[0].nbytes)
    return matcher


def set_only(mask: np.ndarray, token_id: int) -> None:
    """Allow one token. ``mask``: as of `clear_bits`."""
    mask.fill(0)
    mask.view(np.uint32)[token_id // 32] = 1 << (token_id % 32)


def clear_bits(mask: np.ndarray, token_ids: Iterable[int]) -> None:
    """Do not allow tokens, if others are left. ``mask``: ``[words]`` int32, bit ``t % 32`` of word ``t // 32``."""
    mask = mask.view(np.uint32)
    cleared: dict[int, int] = {}  # word -> its former value
    for token_id in token_ids:
        place, bit = divmod(token_id, 32)
        word = int(mask[place]) if place < len(mask) else 0
        if word >> bit & 1:
            cleared.setdefault(place, word)
            mask[place] = word & ~(1 << bit)
    if cleared and not mask.any():
        for place, word in cleared.items():
            mask[place] = word
