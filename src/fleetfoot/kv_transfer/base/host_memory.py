"""Host memory for KV blocks on their way, or kept there: one tensor, a row for each block."""

from __future__ import annotations

import logging

import numpy as np
import torch

logger = logging.getLogger(__name__)


class HostMemory:
    """``num_slots`` rows of ``slot_bytes`` bytes each. Where blocks go to a GPU it is page-locked, for copies that run
    beside the host.

    Page-locking is asked of the driver for the memory as it is: torch's own allocator of such memory rounds up to a
    power of two.

    Args:
        asked_by: the settings that say how much it is, for the message.

    Raises:
        ValueError: there is not as much.
    """

    def __init__(self, num_slots: int, slot_bytes: int, *, pinned: bool, asked_by: str) -> None:
        self.num_slots = num_slots
        try:
            self._array = np.empty((num_slots, slot_bytes), dtype=np.uint8)  # pages are taken as they are first touched
        except (MemoryError, ValueError) as error:  # a ValueError: more than numpy can count
            raise ValueError(
                f"no memory on the host for {num_slots:,} KV blocks of {slot_bytes:,} bytes ({error}); lower {asked_by}"
            ) from error
        self.tensor = torch.from_numpy(self._array)  # [num_slots, slot_bytes]
        self._is_pinned = pinned and num_slots > 0 and self._pin()

    def row(self, slot: int) -> memoryview:
        """The bytes of one slot, to read files into and write files from."""
        return memoryview(self._array[slot])

    def close(self) -> None:
        """Nothing on the device may use it any more."""
        if self._is_pinned:
            self._is_pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())

    def _pin(self) -> bool:
        error = torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self._array.nbytes, 0)
        if error != 0:
            logger.warning(
                "%.1f GiB of host memory for KV blocks could not be page-locked (CUDA error %s): copies will be slower",
                self._array.nbytes / (1 << 30),
                error,
            )
        return error == 0


class FreeSlots:
    """Which slots of a `HostMemory` nobody uses."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        self._free.append(slot)
