"""Memory that KV arrives in before it becomes KV: nothing that comes late, or damaged, ever touches a KV block.

A read that nobody wants any more cannot always be stopped. It then goes on into staging memory, which nobody else gets
before it has ended; blocks are written here, by copies whose end is known.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch

from fleetfoot.kv_transfer.base.block_copies import LayerRows
from fleetfoot.kv_transfer.base.sockets import StoppedError
from fleetfoot.kv_transfer.nixl.transfer_agent import Transfer
from fleetfoot.records.kv_layout import KVLayout

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 0.05


class Lane:
    """Rows for the blocks of one read, and the way from there into the caches.

    Args:
        memory: uint8 ``[num_rows, bytes_per_block]``; a block's layers lie one after the other.
    """

    def __init__(self, memory: torch.Tensor, rows: LayerRows, layout: KVLayout, device: torch.device) -> None:
        self.memory = memory
        self._rows = rows
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type != "cpu" else None
        sizes = layout.layer_block_bytes
        self._offsets = np.array([0, *accumulate(sizes[:-1])], dtype=np.int64)
        self._sizes = np.array(sizes, dtype=np.int64)

    @property
    def num_rows(self) -> int:
        return len(self.memory)

    def pieces(self, count: int) -> np.ndarray:
        """Address and length of each layer's piece of the first ``count`` rows, row by row: ``[count * layers, 2]``."""
        rows = self.memory.data_ptr() + np.arange(count, dtype=np.int64) * self.memory.shape[1]
        return _pieces(rows[:, None] + self._offsets, self._sizes)

    def remote_pieces(self, layers: Sequence[int], block_ids: Sequence[int]) -> np.ndarray:
        """The same of blocks of another engine, whose layers' caches begin at these addresses."""
        blocks = np.array(block_ids, dtype=np.int64)[:, None] * self._sizes
        return _pieces(np.array(layers, dtype=np.int64) + blocks, self._sizes)

    @torch.inference_mode()
    def scatter(self, block_ids: Sequence[int], after: torch.cuda.Event | None) -> None:
        """Copy the first rows to these blocks; returns when they are there.

        Args:
            after: a point in the device's work that the copy must not overtake.
        """
        rows = self.memory[: len(block_ids)].view(self._rows.word)
        if self._stream is None:
            self._rows.scatter(rows, torch.tensor(block_ids))
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            self._rows.scatter(rows.to(self._device), torch.tensor(block_ids).to(self._device))
        self._stream.synchronize()


class Staging:
    """The lanes of a worker, one for each load that can go on at the same time.

    Args:
        num_bytes: of all lanes together; each has room for a block at least.
        device: where the memory is.

    Raises:
        ValueError: there is not as much.
    """

    def __init__(
        self,
        kv_caches: Sequence[torch.Tensor],
        layout: KVLayout,
        *,
        num_lanes: int,
        num_bytes: int,
        device: torch.device,
    ) -> None:
        cache_device = kv_caches[0].device
        rows = LayerRows(kv_caches, layout, use_triton=cache_device.type != "cpu")
        num_rows = max(1, num_bytes // num_lanes // layout.bytes_per_block)
        shape = num_lanes * num_rows, layout.bytes_per_block
        try:
            self.memory = torch.empty(shape, dtype=torch.uint8, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError is one too
            raise ValueError(
                f"no memory on {device} for {num_lanes} loads at the same time of {num_rows:,} KV blocks of "
                f"{layout.bytes_per_block:,} bytes each ({error}); lower buffer_bytes or num_threads"
            ) from error
        if cache_device.type != "cpu":  # no thread is to meet a compiler; a block is replaced by itself
            block = torch.zeros(1, dtype=torch.int64, device=cache_device)
            row = torch.empty((1, rows.num_words), dtype=rows.word, device=cache_device)
            rows.gather(block, row)
            rows.scatter(row, block)
            torch.cuda.synchronize(cache_device)
        self._changed = threading.Condition()
        self._free = [Lane(memory, rows, layout, cache_device) for memory in self.memory.split(num_rows)]
        self._blocked: list[tuple[Lane, Transfer]] = []

    def take(self, should_stop: Callable[[], bool]) -> Lane:
        """A lane that nobody else has.

        Raises:
            StoppedError: ``should_stop`` said so before there was one.
        """
        with self._changed:
            while not self._free:
                self._unblock()
                if not self._free:
                    if should_stop():
                        raise StoppedError("all memory for KV on its way is taken by other loads")
                    self._changed.wait(_WAIT_SECONDS)
            return self._free.pop()

    def give_back(self, lane: Lane, transfer: Transfer | None) -> None:
        """
        Args:
            transfer: a read into the lane that may still be going on.
        """
        with self._changed:
            if transfer is None or transfer.release():
                self._free.append(lane)
            else:
                logger.warning("a read of KV cannot be stopped: %d bytes wait for its end", lane.memory.nbytes)
                self._blocked.append((lane, transfer))
            self._changed.notify()

    def _unblock(self) -> None:
        still_blocked = []
        for lane, transfer in self._blocked:
            if transfer.release():
                self._free.append(lane)
            else:
                still_blocked.append((lane, transfer))
        self._blocked = still_blocked


def _pieces(addresses: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """``[n, 2]`` int64 of addresses ``[blocks, layers]`` and the layers' sizes."""
    lengths = np.broadcast_to(sizes, addresses.shape)
    return np.stack((addresses, lengths), axis=-1).reshape(-1, 2)
