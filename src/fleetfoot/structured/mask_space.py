"""Masks of allowed tokens, and where those of steps are written. A mask is int32 words: token ``t`` is bit ``t % 32``
of word ``t // 32``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from multiprocessing import reduction
from typing import Any

import numpy as np

from fleetfoot.utils.shared_words import SharedWords


class MaskMemory:
    """Memory for at most ``max_masks`` masks of ``num_words`` int32 for each of the ``num_steps`` newest steps, those
    in flight and one more. Other processes can map it, and runners may page-lock it."""

    def __init__(self, num_words: int, max_masks: int, num_steps: int = 1) -> None:
        self.num_words = num_words
        self._max_masks, self._num_steps = max_masks, num_steps
        self._turn = 0

    @cached_property
    def file(self) -> SharedWords:
        """All of it, ``[num_steps * max_masks * num_words]``."""
        return SharedWords(self._num_steps * self._max_masks * self.num_words, name="fleetfoot-masks")

    def __getstate__(self) -> dict[str, Any]:
        """Pickled for a process that is spawned with it, which maps the same memory."""
        return {**self.__dict__, "_turn": 0, "file": reduction.DupFd(self.file.descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, file=SharedWords(descriptor=state["file"].detach()))

    def at(self, offset: int, num_masks: int) -> np.ndarray:
        """What `next` has returned with this offset."""
        masks: np.ndarray = self.file.words[offset : offset + num_masks * self.num_words]
        return masks.reshape(num_masks, self.num_words)

    def next(self, num_masks: int) -> tuple[np.ndarray, int]:
        """The masks of the next step, ``[num_masks, num_words]`` int32, and how many int32 are before them."""
        self._turn = (self._turn + 1) % self._num_steps
        offset = self._turn * self._max_masks * self.num_words
        return self.at(offset, num_masks), offset


def fill_masks(matcher: Any, drafts: Sequence[int], masks: np.ndarray) -> Any:
    """Fill the mask of a matcher's next token, and of those after its drafts as far as it accepts them; after that,
    every token is allowed. ``masks``: ``[1 + num_drafts or more, words]`` int32, contiguous. Returns the
    matcher that has computed them: an error is its own."""
    if len(masks) > 1:
        masks.fill(-1)
    # Drafts on a copy: after a rollback or a reset, llguidance may return the last mask from before, if both texts have
    # as many lexemes.
    matcher = matcher.deep_copy() if drafts else matcher
    address, size = masks.ctypes.data, masks[0].nbytes
    matcher.unsafe_compute_mask_ptr(address, size)
    for place, token_id in enumerate(drafts, start=1):
        if matcher.try_consume_tokens([token_id]) != 1:
            break
        matcher.unsafe_compute_mask_ptr(address + place * size, size)
    return matcher


def set_only(mask: np.ndarray, token_id: int) -> None:
    """Allow one token."""
    mask.fill(0)
    mask.view(np.uint32)[token_id // 32] = 1 << (token_id % 32)


def clear_bits(mask: Any, token_ids: Iterable[int]) -> None:
    """Do not allow tokens, if others are left. ``mask``: words of int32, of which memory takes a tenth of an array's
    time."""
    cleared: dict[int, int] = {}  # word -> its former value
    for token_id in token_ids:
        place, bit = divmod(token_id, 32)
        word = int(mask[place]) if place < len(mask) else 0
        if word >> bit & 1:
            cleared.setdefault(place, word)
            mask[place] = word - (1 << bit if bit < 31 else -(1 << 31))
    if cleared and not any(mask):
        for place, word in cleared.items():
            mask[place] = word
