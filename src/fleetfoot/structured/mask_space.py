"""Where the token masks of a step are written."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fleetfoot.utils.shared_words import SharedWords

_NUM_MASKS = 4096


@dataclass(slots=True)
class MaskSpace:
    """Memory for the masks of a step."""

    masks: np.ndarray
    """``[num_masks, ceil(vocab_size / 32)]`` int32, contiguous."""
    descriptor: int = -1
    """Of the file that they are in, which other processes can map; -1: they are in memory of this process alone."""
    offset: int = 0
    """int32 in the file before the first mask."""


class MaskMemory:
    """Memory for one step at a time. ``num_words``: int32 of a mask."""

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self._shared: SharedWords | None = None  # made when the first request needs it

    def allocate(self, num_masks: int) -> MaskSpace:
        """Memory for the masks of a step, which the next one overwrites."""
        if num_masks > _NUM_MASKS:
            return MaskSpace(np.empty((num_masks, self._num_words), dtype=np.int32))
        if self._shared is None:
            self._shared = SharedWords(_NUM_MASKS * self._num_words, name="fleetfoot-masks")
        masks = self._shared.words[: num_masks * self._num_words].reshape(num_masks, self._num_words)
        return MaskSpace(masks, self._shared.descriptor)
