"""Blocks in files, which threads read and write beside the steps."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fleetfoot.kv_transfer.base.block_copies import BlockCopies, CopyEvent, HostMemory
from fleetfoot.kv_transfer.base.connector import TransferContext
from fleetfoot.kv_transfer.base.io_threads import IOThreads, Jobs, drain
from fleetfoot.kv_transfer.blockstore.block_file import (
    BlockFileError,
    BlockFolder,
    BlockFormat,
    read_block,
    write_block,
)
from fleetfoot.kv_transfer.blockstore.scheduler import BlockTransfer, RequestLoad
from fleetfoot.kv_transfer.blockstore.worker import BlockStore
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.kv_output import KVConnectorOutput, TransferFailure

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 10.0
"""How long `FileStore.close` waits for files that are being written."""
READ_SHARE = 4
"""Memory for reads is this fraction of the memory for writes: reads can wait for memory, and writes are dropped."""
WAIT_SECONDS = 0.02
"""How long an idle step waits for progress."""


@dataclass(slots=True)
class _Write:
    """A block that was copied to host memory, and is written to a file."""

    block: BlockTransfer
    epoch: str
    slot: int
    copied: CopyEvent
    is_new: bool = False
    error: Exception | None = None


@dataclass(slots=True, eq=False)
class _Load:
    """A request's load. It ends when each of its blocks has arrived, or with its first failure."""

    load: RequestLoad
    epoch: str
    deadline: float
    num_left: int
    """Blocks that have not arrived."""
    num_copying: int = 0
    """Blocks that a queued copy writes."""
    is_new: bool = True
    """Started in this step: a finished request with its id is an earlier one."""
    failure: TransferFailure | None = None


@dataclass(slots=True)
class _Read:
    """A block of a load that is read into a slot of host memory."""

    load: _Load
    block: BlockTransfer
    slot: int = -1
    error: str = ""


class FileStore(BlockStore):
    """Copies blocks out within the step and writes them behind it; reads files beside steps and copies them in.

    Only `_read` and `_write` run in threads, and they access nothing but their slot and file.

    Args:
        max_bytes_in_flight: of host memory for blocks to be written. A block that finds no free slot is not saved.
        num_threads: for reading, and as many for writing.
        readers, writers: threads; None: `IOThreads`.
    """

    def __init__(
        self,
        context: TransferContext,
        folder: BlockFolder,
        max_bytes_in_flight: int,
        num_threads: int,
        *,
        asked_by: str,
        readers: Jobs | None = None,
        writers: Jobs | None = None,
    ) -> None:
        super().__init__()
        self._rank, self._config = context.rank, context.config
        self._clock = context.clock or time.monotonic
        self._folder = folder
        self._max_bytes, self._asked_by = max_bytes_in_flight, asked_by
        self._readers = readers or IOThreads("kv-read", num_threads)
        self._writers = writers or IOThreads("kv-write", num_threads)
        self._invalid_files: set[str] = set()  # to be overwritten
        self._is_open = False
        # saves
        self._writing: set[tuple[str, bytes]] = set()  # epoch and hash
        self._written: queue.SimpleQueue[_Write] = queue.SimpleQueue()
        self._has_warned = False
        # loads
        self._loads: list[_Load] = []
        self._waiting: deque[_Read] = deque()  # for a slot
        self._read_done: queue.SimpleQueue[_Read] = queue.SimpleQueue()
        self._copying: deque[tuple[CopyEvent, list[_Read]]] = deque()

    def open(self, copies: BlockCopies, layout: KVLayout, *, pinned: bool) -> None:
        self._copies, self._layout = copies, layout
        row = layout.bytes_per_block
        num_reads = max(1, self._max_bytes // READ_SHARE // row) if self._config.can_load else 0
        num_writes = max(1, self._max_bytes // row) if self._config.can_save else 0
        self._read_memory = HostMemory(num_reads, row, pinned=pinned, asked_by=self._asked_by)
        self._write_memory = HostMemory(num_writes, row, pinned=pinned, asked_by=self._asked_by)
        self._read_slots, self._write_slots = list(range(num_reads)), list(range(num_writes))  # free ones
        self._is_open = True

    def save(self, blocks: Sequence[BlockTransfer], epoch: str) -> None:
        self._process_writes()
        new = [block for block in blocks if (epoch, block.block_hash) not in self._writing]
        taken = new[: len(self._write_slots)]  # of a prefix, the first blocks are the most useful
        self.counters.add("saves_dropped", len(new) - len(taken))
        if not taken:
            return
        slots = [self._write_slots.pop() for _ in taken]
        copied = self._copies.to_host([block.block_id for block in taken], self._write_memory.tensor, slots)
        for block, slot in zip(taken, slots, strict=True):
            self._writing.add((epoch, block.block_hash))
            self._writers.submit(partial(self._write, _Write(block, epoch, slot, copied)))

    def load(self, load: RequestLoad, epoch: str) -> None:
        """Its reads wait for free slots, at most until the timeout: a read that has begun by then ends in host memory,
        and is ignored."""
        deadline = self._clock() + self._config.kv_transfer_timeout
        self._loads.append(_Load(load, epoch, deadline, len(load.blocks)))
        self._waiting.extend(_Read(self._loads[-1], block) for block in load.blocks)
        self._start_reads()

    def get_finished(self, finished_req_ids: set[str], output: KVConnectorOutput) -> None:
        self._process_writes()
        now = self._clock()
        for load in self._loads:
            if load.failure is None and load.load.request_id in finished_req_ids and not load.is_new:
                load.failure = TransferFailure("the request has ended before its KV arrived")
            elif load.failure is None and now >= load.deadline:
                load.failure = self._timed_out(load)
            load.is_new = False
        self._copy_in(drain(self._read_done))
        self._process_copies()
        self._start_reads()
        for load in [load for load in self._loads if not load.num_copying]:
            if load.failure is not None:
                output.failed[load.load.request_id] = load.failure
                self.counters.add("loads_failed")
            elif load.num_left == 0:
                output.loaded.add(load.load.request_id)
            else:
                continue
            self._loads.remove(load)

    def wait(self) -> None:
        if self._copying:
            self._copying[0][0].synchronize()
        elif self._loads:
            with contextlib.suppress(queue.Empty):
                self._copy_in([self._read_done.get(timeout=WAIT_SECONDS)])

    def close(self) -> None:
        """Blocks that were copied to host memory are still written, within `SHUTDOWN_SECONDS`."""
        has_ended = self._readers.stop(SHUTDOWN_SECONDS, finish=False)
        has_ended &= self._writers.stop(SHUTDOWN_SECONDS, finish=True)
        if self._is_open:
            self._process_writes()  # logs the first error of a short run
            self._copies.close()
            if has_ended:  # else a thread may still access its memory
                self._read_memory.close()
                self._write_memory.close()

    # --- in threads -------------------------------------------------------------------------------------------------

    def _write(self, write: _Write) -> None:
        try:
            write.copied.synchronize()
            path = self._folder.path(write.epoch, self._rank, write.block.block_hash)
            write.is_new = path in self._invalid_files or not os.path.exists(path)
            if write.is_new:
                payload = self._write_memory.row(write.slot)
                write_block(Path(path), write.block.block_hash, payload, self._format(write.epoch))
                self._invalid_files.discard(path)
        except Exception as error:
            write.error = error
        self._written.put(write)

    def _read(self, read: _Read) -> None:
        path = self._folder.path(read.load.epoch, self._rank, read.block.block_hash)
        try:
            memory = self._read_memory.row(read.slot)
            read_block(Path(path), read.block.block_hash, memory, self._format(read.load.epoch))
        except BlockFileError as error:
            if self._config.can_save:
                self._invalid_files.add(path)
            read.error = str(error)
        except Exception as error:  # any error must end the load
            read.error = f"it cannot be read ({type(error).__name__}: {error})"
        self._read_done.put(read)

    def _format(self, epoch: str) -> BlockFormat:
        return BlockFormat(epoch, self._layout.fingerprint, self._layout.bytes_per_block)

    # --- in the worker's thread -------------------------------------------------------------------------------------

    def _process_writes(self) -> None:
        for write in drain(self._written):
            self._write_slots.append(write.slot)
            self._writing.discard((write.epoch, write.block.block_hash))
            if write.error is not None:
                self.counters.add("saves_failed")
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning("a KV block could not be saved; further failures are only counted: %s", write.error)
            elif write.is_new:
                self.count("saved", 1, self._copies.bytes_per_block)

    def _start_reads(self) -> None:
        while self._waiting and self._read_slots:
            read = self._waiting.popleft()
            if read.load.failure is None:
                read.slot = self._read_slots.pop()
                self._readers.submit(partial(self._read, read))

    def _copy_in(self, reads: Iterable[_Read]) -> None:
        """Copy blocks that were read to the device; an invalid file fails its load."""
        arrived = []
        for read in reads:
            if read.error and read.load.failure is None:
                block_hash = read.block.block_hash
                read.load.failure = TransferFailure(f"KV block {block_hash.hex()}: {read.error}", block=block_hash)
            if read.load.failure is None:
                arrived.append(read)
                read.load.num_copying += 1
            else:
                self._read_slots.append(read.slot)
        if arrived:
            slots, block_ids = [read.slot for read in arrived], [read.block.block_id for read in arrived]
            self._copying.append((self._copies.from_host(self._read_memory.tensor, slots, block_ids), arrived))

    def _process_copies(self) -> None:
        while self._copying and self._copying[0][0].query():
            _, reads = self._copying.popleft()
            for read in reads:
                self._read_slots.append(read.slot)
                read.load.num_copying -= 1
                read.load.num_left -= 1
            self.count("loaded", len(reads), self._copies.bytes_per_block)

    def _timed_out(self, load: _Load) -> TransferFailure:
        return TransferFailure(
            f"{load.num_left} of {len(load.load.blocks)} KV blocks had not been read after "
            f"{self._config.kv_transfer_timeout:g} s (kv_transfer_timeout)",
            timed_out=True,
        )
