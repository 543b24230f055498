"""The token masks of grammars: from the host's memory to a buffer at a fixed address, which graphs read."""

from __future__ import annotations

import numpy as np
import torch

from fleetfoot.kernels.prepare.staging import Event
from fleetfoot.records.step import TokenMasks
from fleetfoot.runner.v2.device import Device
from fleetfoot.sampling.shape import mask_size
from fleetfoot.structured.mask_space import MaskSpace
from fleetfoot.utils.shared_words import SharedWords

_RING = 2


class GrammarMasks:
    """An index of each row of logits, and masks, in one buffer: ``[max_rows]``, then ``[max_rows, words]`` int32.

    Masks are computed in page-locked memory, by this process or by others, or copied to it, and uploaded beside the
    forward pass. ``max_rows``: rows of logits of a step.
    """

    def __init__(self, device: Device, max_rows: int, vocab_size: int) -> None:
        self._device = device
        self._max_rows, self._num_words = max_rows, mask_size(vocab_size)
        self._on_device = torch.zeros(max_rows * (1 + self._num_words), dtype=torch.int32, device=device.torch_device)
        self._on_device[:max_rows] = -1
        self._masks = self._on_device[max_rows:].view(max_rows, self._num_words)
        self._shared: SharedWords | None = None  # made when the first request needs it
        self._ring = torch.empty(0, 0, dtype=torch.int32)  # on the host, page-locked
        self._copied: list[Event | None] = [None] * _RING
        self._turn = 0
        self._last_use: Event | None = None

    def of_rows(self, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The masks ``[max_rows, words]`` and the index ``[num_rows]`` on the device."""
        return self._masks, self._on_device[:num_rows]

    def allocate(self, num_masks: int) -> MaskSpace:
        """Memory for the masks of the next `upload`."""
        size = len(self._on_device)
        if self._shared is None:
            self._shared = SharedWords(_RING * size, name="fleetfoot-masks")
            self._ring = self._device.pin(self._shared.words).view(_RING, size)
        self._turn = (self._turn + 1) % _RING
        if (copied := self._copied[self._turn]) is not None:
            copied.synchronize()  # long ago: a step with masks is behind the end of an earlier one
        begin = self._turn * size + self._max_rows
        masks = self._shared.words[begin : begin + num_masks * self._num_words]
        return MaskSpace(masks.reshape(num_masks, self._num_words), self._shared.descriptor, begin)

    def upload(self, masks: TokenMasks | None) -> None:
        """Queue the copy of a step's masks and index. None: every token is allowed."""
        rows = [] if masks is None else masks.rows
        if masks is None or not len(self._ring) or not np.may_share_memory(masks.masks, self._ring[self._turn].numpy()):
            space = self.allocate(len(rows))
            if masks is not None:
                space.masks[:] = masks.masks
        source = self._ring[self._turn]
        index = source.numpy()[: self._max_rows]
        index.fill(-1)
        index[rows] = np.arange(len(rows))
        size = self._max_rows + len(rows) * self._num_words
        self._copied[self._turn] = self._device.upload(source[:size], self._on_device[:size], self._last_use)

    def used(self) -> None:
        """Call when the work that reads the masks is queued."""
        self._last_use = self._device.record()
