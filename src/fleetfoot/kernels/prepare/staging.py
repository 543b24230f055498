"""Staged writes: the host collects the updates of a step in one buffer, which one kernel applies on the device.

The state that the host writes is one int32 arena on the device, divided into `StagedWriteTensor`. A staged write is a
pair (index in the arena, value) in the step's buffer. The buffer begins with the step's ``idx_mapping`` and
``query_start_loc``. The kernel copies these and scatters the pairs.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch


class Event(Protocol):
    """A point in the device's queue; `torch.cuda.Event` implements it."""

    def query(self) -> bool:
        """Whether the device has passed it; does not wait."""

    def synchronize(self) -> None:
        """Block the host until the device has passed it."""


class StagingDevice(Protocol):
    """What staging needs of a device; `fleetfoot.runner.v2.device.Device` has more."""

    torch_device: torch.device

    def pinned(self, size: int) -> torch.Tensor:
        """``[size]`` int32 on the host, page-locked where that makes copies asynchronous."""

    def copy_in(self, source: torch.Tensor, front: torch.Tensor, arena: torch.Tensor, num_writes: int) -> None:
        """Queue `Kernels.apply_staged_writes` of a source that `pinned` returned."""

    def record(self) -> Event:
        """An event after everything queued so far."""


class StagedWriteTensor:
    """A part of the arena: an int32 tensor on the device that the host writes through the staging buffer."""

    __slots__ = ("base", "row_stride", "tensor")

    def __init__(self, arena: torch.Tensor, base: int, shape: tuple[int, ...]) -> None:
        self.base = base
        self.tensor = arena[base : base + math.prod(shape)].view(shape)
        self.row_stride = self.tensor.stride(0)

    def index(self, row: int, column: int = 0) -> int:
        """The arena's index of an element."""
        return self.base + row * self.row_stride + column


class Arena:
    """One int32 allocation on the device, divided into `StagedWriteTensor`.

    Raises:
        ValueError: it is too large for int32 indices.
    """

    def __init__(self, device: torch.device, *shapes: tuple[int, ...]) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        total = sum(sizes)
        if total >= 2**31:
            raise ValueError(
                f"the runner's state would have {total:,} entries, more than 2^31; lower max_num_seqs or max_model_len"
            )
        self.flat = torch.zeros(total, dtype=torch.int32, device=device)
        bases = np.cumsum([0, *sizes[:-1]]).tolist()
        self.parts = [StagedWriteTensor(self.flat, base, shape) for base, shape in zip(bases, shapes, strict=True)]


class StagingBuffer:
    """A ring of pinned host buffers, and the device's copy of the front of the last one.

    Layout, in int32: ``idx_mapping [max_num_seqs]``, ``query_start_loc [max_num_seqs + 1]``, pairs (index, value).
    A host buffer is reused after the device has read it. If a step has more writes than fit a buffer (hundreds of
    requests admitted at once), the full buffer is applied early.

    Args:
        arena: the target of the pairs.
        max_num_seqs: maximum number of requests in a step.
        max_writes: maximum number of pairs in a buffer.
        num_slots: host buffers in the ring: queued steps, and the one that is written.
    """

    def __init__(
        self, device: StagingDevice, arena: torch.Tensor, max_num_seqs: int, max_writes: int, num_slots: int = 3
    ) -> None:
        self._device = device
        self._arena = arena
        self._starts_begin = max_num_seqs
        self._pairs_begin = 2 * max_num_seqs + 1
        self.max_writes = max_writes
        self._host = [device.pinned(self._pairs_begin + 2 * max_writes) for _ in range(num_slots)]
        self._padding = device.pinned(self._pairs_begin)
        self._padding_read_by: Event | None = None
        self._numpy = [buffer.numpy() for buffer in self._host]
        self._read_by: list[Event | None] = [None] * num_slots
        self._slot = 0
        self._num_writes = 0
        self.on_device = torch.zeros(self._pairs_begin, dtype=torch.int32, device=device.torch_device)
        self.idx_mapping = self.on_device[: self._starts_begin]
        self.query_start_loc = self.on_device[self._starts_begin :]

    def begin(self) -> None:
        """Switch to the next host buffer, and wait until the device has read it."""
        self._slot = (self._slot + 1) % len(self._host)
        reader = self._read_by[self._slot]
        if reader is not None and not reader.query():
            reader.synchronize()
        self._read_by[self._slot] = None
        self._num_writes = 0

    def write(self, indices: np.ndarray | int, values: np.ndarray | list[int] | int, count: int) -> None:
        """Stage ``count`` pairs; the indices of a step are distinct.

        Raises:
            ValueError: they exceed a whole buffer.
        """
        if count > self.max_writes:
            raise ValueError(f"{count} values cannot be staged at once: the buffer holds {self.max_writes}")
        if self._num_writes + count > self.max_writes:
            self._apply()
            self.begin()
        first, last = self._num_writes, self._num_writes + count
        pairs = self._numpy[self._slot][self._pairs_begin + 2 * first : self._pairs_begin + 2 * last]
        pairs[0::2] = indices
        pairs[1::2] = values
        self._num_writes = last

    def clear_on_device(self, query_start_loc: np.ndarray) -> None:
        """Set the front on the device to padding requests only; a step of them changes no state.

        Args:
            query_start_loc: ``[padded_reqs + 1]``
        """
        if self._padding_read_by is not None:  # a buffer outside of the ring, in which a step may be half staged
            self._padding_read_by.synchronize()
        buffer = self._padding.numpy()
        buffer[: self._starts_begin] = -1
        buffer[self._starts_begin : self._starts_begin + len(query_start_loc)] = query_start_loc
        self._device.copy_in(self._padding, self.on_device, self._arena, 0)
        self._padding_read_by = self._device.record()

    def _apply(self) -> None:
        self._device.copy_in(self._host[self._slot], self.on_device, self._arena, self._num_writes)
        self._read_by[self._slot] = self._device.record()

    def apply_staged_writes(self, rows: list[int] | np.ndarray, query_start_loc: np.ndarray, padded: int) -> None:
        """Queue the kernel that applies the step's writes.

        Args:
            rows: in batch order; this method pads them to ``padded`` with -1.
            query_start_loc: ``[padded + 1]``.
        """
        buffer, num_reqs = self._numpy[self._slot], len(rows)
        buffer[:num_reqs] = rows
        buffer[num_reqs:padded] = -1
        buffer[self._starts_begin : self._starts_begin + padded + 1] = query_start_loc
        self._apply()
