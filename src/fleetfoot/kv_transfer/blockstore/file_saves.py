"""Saves from KV blocks into files: copied to host memory by the worker, written by threads."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from fleetfoot.kv_transfer.base.block_copies import BlockCopies, CopyEvent
from fleetfoot.kv_transfer.base.counters import TransferCounters
from fleetfoot.kv_transfer.base.host_memory import FreeSlots, HostMemory
from fleetfoot.kv_transfer.base.io_threads import Jobs
from fleetfoot.kv_transfer.blockstore.block_moves import BlockMove

logger = logging.getLogger(__name__)

WriteBlock = Callable[[BlockMove, str, memoryview], bool]
"""Writes a block's file of an epoch; False: there is one. Raises OSError."""


@dataclass(slots=True)
class _Write:
    move: BlockMove
    epoch: str
    slot: int
    copied: CopyEvent
    is_new: bool = False
    error: Exception | None = None


class FileSaves:
    """All saves of a worker. What finds no free slot in host memory is not saved: this is a cache, and may forget.

    Everything but the writing itself happens in the worker's thread.
    """

    def __init__(
        self, copies: BlockCopies, host: HostMemory, writers: Jobs, write_block: WriteBlock, counters: TransferCounters
    ) -> None:
        self._copies = copies
        self._host = host
        self._free = FreeSlots(host.num_slots)
        self._writers = writers
        self._write_block = write_block
        self._counters = counters
        self._under_way: set[tuple[str, bytes]] = set()
        self._ended: queue.SimpleQueue[_Write] = queue.SimpleQueue()
        self._has_complained = False

    def begin(self, moves: Sequence[BlockMove], epoch: str) -> None:
        """Copy blocks, as they are behind all that is queued so far, and write them."""
        self.get_finished()
        wanted = [move for move in moves if (epoch, move.digest) not in self._under_way]
        taken = wanted[: len(self._free)]  # of a prefix, the beginning is worth more than the end
        self._counters.add("saves_dropped", len(wanted) - len(taken))
        if not taken:
            return
        slots = [self._free.take() for _ in taken]
        copied = self._copies.to_host([move.block_id for move in taken], self._host.tensor, slots)
        for move, slot in zip(taken, slots, strict=True):
            self._under_way.add((epoch, move.digest))
            self._writers.submit(partial(self._run, _Write(move, epoch, slot, copied)))

    def get_finished(self) -> None:
        """Count what has been written, and take its memory back."""
        while True:
            try:
                write = self._ended.get_nowait()
            except queue.Empty:
                return
            self._free.give_back(write.slot)
            self._under_way.discard((write.epoch, write.move.digest))
            if write.error is not None:
                self._counters.add("saves_failed")
                self._complain(write.error)
            elif write.is_new:
                self._counters.add("blocks_saved")
                self._counters.add("bytes_saved", self._copies.bytes_per_block)

    def _run(self, write: _Write) -> None:
        """In a thread: nothing but the slot is touched."""
        try:
            write.copied.synchronize()
            write.is_new = self._write_block(write.move, write.epoch, self._host.row(write.slot))
        except Exception as error:
            write.error = error
        self._ended.put(write)

    def _complain(self, error: Exception) -> None:
        if not self._has_complained:
            self._has_complained = True
            logger.warning("a KV block could not be saved, and is left out; later ones are only counted: %s", error)
