"""Where the token masks of steps are written."""

from __future__ import annotations

from functools import cached_property
from multiprocessing import reduction
from typing import Any

import numpy as np

from fleetfoot.utils.shared_words import SharedWords


class MaskMemory:
    """Memory for the masks of steps, which other processes can map, and which runners may page-lock.

    Pages are there once they are written, so it takes none while no request has a grammar.

    Args:
        num_words: int32 of a mask.
        max_masks: of a step.
        num_steps: newest steps with masks that stay unchanged: those in flight, and one more.
    """

    def __init__(self, num_words: int, max_masks: int, num_steps: int = 1) -> None:
        self.num_words = num_words
        self._max_masks, self._num_steps = max_masks, num_steps
        self._turn = 0

    @cached_property
    def _shared(self) -> SharedWords:
        return SharedWords(self._num_steps * self._max_masks * self.num_words, name="fleetfoot-masks")

    @property
    def words(self) -> np.ndarray:
        """All of it, ``[num_steps * max_masks * num_words]`` int32."""
        return self._shared.words

    @property
    def descriptor(self) -> int:
        """Descriptor of its file; -1: it is in memory of this process alone."""
        return self._shared.descriptor

    def __reduce__(self) -> Any:
        """Pickle for a process that is spawned with it, which maps the same memory."""
        arguments = self.num_words, self._max_masks, self._num_steps
        return _map, (*arguments, reduction.DupFd(self.descriptor))

    def at(self, offset: int, num_masks: int) -> np.ndarray:
        """What `next` has returned with this offset."""
        masks: np.ndarray = self.words[offset : offset + num_masks * self.num_words]
        return masks.reshape(num_masks, self.num_words)

    def next(self, num_masks: int) -> tuple[np.ndarray, int]:
        """The masks of the next step, ``[num_masks, num_words]`` int32, and how many int32 are before them."""
        self._turn = (self._turn + 1) % self._num_steps
        offset = self._turn * self._max_masks * self.num_words
        return self.at(offset, num_masks), offset


def _map(num_words: int, max_masks: int, num_steps: int, descriptor: Any) -> MaskMemory:
    memory = MaskMemory(num_words, max_masks, num_steps)
    memory.__dict__["_shared"] = SharedWords(descriptor=descriptor.detach())
    return memory
