"""The token masks of grammars: from the host's memory to a buffer at a fixed address, which graphs read."""

from __future__ import annotations

import numpy as np
import torch

from fleetfoot.kernels.prepare.staging import Event
from fleetfoot.records.step import TokenMasks
from fleetfoot.runner.v2.device import Device
from fleetfoot.sampling.shape import mask_size

_RING = 2


class NoMasks:
    """A step without grammars: every token is allowed."""

    def upload(self, masks: TokenMasks | None) -> None:
        pass

    def of_rows(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None

    def used(self) -> None:
        pass


NO_MASKS = NoMasks()


class GrammarMasks:
    """An index of each row of logits, and masks, in one buffer: ``[max_rows]``, then ``[max_rows, words]`` int32.

    Masks are uploaded beside the forward pass, from where they were computed if that memory lives as long as the
    engine: it is page-locked then. Others are copied to page-locked memory. ``max_rows``: rows of logits of a step.
    """

    def __init__(self, device: Device, max_rows: int, vocab_size: int) -> None:
        self._device = device
        self._max_rows, self._num_words = max_rows, mask_size(vocab_size)
        self._on_device = torch.zeros(max_rows * (1 + self._num_words), dtype=torch.int32, device=device.torch_device)
        self._on_device[:max_rows] = -1
        self._index = self._on_device[:max_rows]
        self._words = self._on_device[max_rows:]
        self._indices: list[torch.Tensor] = []  # page-locked, as all that follow; made when they are needed
        self._copies: list[torch.Tensor] = []  # of masks in other memory
        self._copied: list[Event | None] = [None] * _RING
        self._turn = 0
        self._memory: np.ndarray | None = None  # that masks were computed in
        self._pinned = torch.empty(0, dtype=torch.int32)  # the same
        self._last_use: Event | None = None

    def of_rows(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The masks ``[max_rows, words]`` and the index ``[num_rows]`` on the device."""
        return self._words.view(self._max_rows, self._num_words), self._index[:num_rows]

    def upload(self, masks: TokenMasks | None) -> None:
        """Queue the copy of a step's masks and index. None: every token is allowed."""
        index = self._next_index()
        rows = [] if masks is None else masks.rows
        numbers = index.numpy()
        numbers.fill(-1)
        numbers[rows] = np.arange(len(rows))
        copies = [(index, self._index)]
        if masks is not None:
            copies.append((self._page_locked(masks), self._words[: masks.masks.size]))
        self._copied[self._turn] = self._device.upload(copies, self._last_use)

    def _next_index(self) -> torch.Tensor:
        if not self._indices:
            self._indices = [self._device.pinned(self._max_rows) for _ in range(_RING)]
        self._turn = (self._turn + 1) % _RING
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()  # long ago: a step with masks is after the end of an earlier one
        return self._indices[self._turn]

    def _page_locked(self, masks: TokenMasks) -> torch.Tensor:
        """The words of masks, or a copy of them."""
        if masks.memory is None:
            if not self._copies:
                self._copies = [self._device.pinned(len(self._words)) for _ in range(_RING)]
            copy = self._copies[self._turn][: masks.masks.size]
            copy.numpy()[:] = masks.masks.reshape(-1)
            return copy
        if masks.memory is not self._memory:
            self._memory, self._pinned = masks.memory, self._device.pin(masks.memory)
        return self._pinned[masks.offset : masks.offset + masks.masks.size]

    def used(self) -> None:
        """Call when the work that reads the masks is queued."""
        self._last_use = self._device.record()
