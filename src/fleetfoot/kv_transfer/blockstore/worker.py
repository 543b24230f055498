"""The worker side of the block store connectors, and the two stores: host memory, and files."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from fleetfoot.kv_transfer.base.block_copies import BlockCopies, CopyEvent, HostMemory, block_copies
from fleetfoot.kv_transfer.base.connector import TransferContext, TransferCounters, WorkerConnector
from fleetfoot.kv_transfer.base.io_threads import IOThreads, drain
from fleetfoot.kv_transfer.blockstore.block_file import (
    BlockFileError,
    BlockFolder,
    BlockFormat,
    read_block,
    write_block,
)
from fleetfoot.kv_transfer.blockstore.scheduler import BlockStoreMetadata, BlockTransfer, RequestLoad
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import KVConnectorOutput, TransferFailure

NO_TRANSFERS = BlockStoreMetadata()


class BlockStore(ABC):
    """Where a rank's blocks are saved. All methods are called in the worker's thread.

    Attributes:
        counters: ``blocks_saved``, ``bytes_saved``, ``blocks_loaded``, ``bytes_loaded``, ``loads_failed``, ...
    """

    def __init__(self) -> None:
        self.counters = TransferCounters()

    @abstractmethod
    def open(self, copies: BlockCopies, layout: KVLayout, *, pinned: bool) -> None:
        """Allocate memory. ``pinned``: page-locked, for copies to and from a GPU."""

    @abstractmethod
    def save(self, blocks: Sequence[BlockTransfer], epoch: str) -> None:
        """Start saving blocks, as written by all work queued so far."""

    @abstractmethod
    def load(self, load: RequestLoad, epoch: str) -> None:
        """Start loading the blocks of a request."""

    @abstractmethod
    def get_finished(self, finished_req_ids: set[str], output: KVConnectorOutput) -> None:
        """Add the loads that have ended to ``output``."""

    @abstractmethod
    def wait(self) -> None:
        """Return when a load may have ended, or after a short while; at once without loads."""

    @abstractmethod
    def close(self) -> None:
        """Stop transfers and free memory; also called if `open` was not, or has failed."""

    def count(self, verb: str, num_blocks: int, bytes_per_block: int) -> None:
        """Count blocks that were ``saved`` or ``loaded``."""
        self.counters.add(f"blocks_{verb}", num_blocks)
        self.counters.add(f"bytes_{verb}", num_blocks * bytes_per_block)


class BlockStoreWorker(WorkerConnector):
    """Passes the transfers of each step to a store, in order."""

    def __init__(self, context: TransferContext, store: BlockStore) -> None:
        self._shares_blocks = context.shares_blocks
        self._store = store
        self._metadata = NO_TRANSFERS

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        self._copies: BlockCopies = block_copies(kv_caches, layout, shares_blocks=self._shares_blocks)
        self._store.open(self._copies, layout, pinned=kv_caches[0].device.type != "cpu")

    def bind_connector_metadata(self, metadata: object | None) -> None:
        if not isinstance(metadata, BlockStoreMetadata | None):
            kind = type(metadata).__name__
            raise TypeError(f"KV connector metadata is a {kind}; it must be BlockStoreMetadata or None")
        self._metadata = metadata or NO_TRANSFERS

    def flush(self) -> None:
        if self._metadata.flushes:
            self._store.save(self._metadata.flushes, self._metadata.epoch)
        self._copies.fence(self._metadata.reused)

    def start_load_kv(self) -> None:
        for load in self._metadata.loads:
            self._store.load(load, self._metadata.epoch)

    def save_kv(self) -> None:
        if self._metadata.saves:
            self._store.save(self._metadata.saves, self._metadata.epoch)

    def wait_for_save(self) -> None:
        """Full blocks are only written by their next owners, which wait for the copies: see `flush`."""

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        output = KVConnectorOutput()
        self._store.get_finished(finished_req_ids, output)
        output.counters = self._store.counters.take()
        return output

    def clear_connector_metadata(self) -> None:
        self._metadata = NO_TRANSFERS

    def wait_for_progress(self) -> None:
        self._store.wait()

    def shutdown(self) -> None:
        self._store.close()


class HostStore(BlockStore):
    """Copies blocks between the device and slots of host memory, in the order of the calls.

    It records what each slot holds: a save that was lost with a failed step must not be taken for KV.

    Args:
        num_slots: blocks of this rank.
        asked_by: the settings that determine the number, for error messages.
    """

    def __init__(self, num_slots: int, asked_by: str) -> None:
        super().__init__()
        self._num_slots = num_slots
        self._asked_by = asked_by
        self._held: dict[int, tuple[str, bytes]] = {}  # slot -> epoch and hash of its block
        self._loading: deque[tuple[RequestLoad, CopyEvent]] = deque()  # copies end in order
        self._refused: dict[str, TransferFailure] = {}
        self._memory: HostMemory | None = None

    def open(self, copies: BlockCopies, layout: KVLayout, *, pinned: bool) -> None:
        self._copies = copies
        self._memory = HostMemory(self._num_slots, layout.bytes_per_block, pinned=pinned, asked_by=self._asked_by)
        self._rows = self._memory.tensor

    def save(self, blocks: Sequence[BlockTransfer], epoch: str) -> None:
        self._copies.to_host([block.block_id for block in blocks], self._rows, [block.slot for block in blocks])
        for block in blocks:
            self._held[block.slot] = epoch, block.block_hash
        self.count("saved", len(blocks), self._copies.bytes_per_block)

    def load(self, load: RequestLoad, epoch: str) -> None:
        for block in load.blocks:
            if self._held.get(block.slot) != (epoch, block.block_hash):
                reason = f"slot {block.slot} of host memory does not hold KV block {block.block_hash.hex()} any more"
                self._refused[load.request_id] = TransferFailure(reason)
                return
        slots, block_ids = [block.slot for block in load.blocks], [block.block_id for block in load.blocks]
        self._loading.append((load, self._copies.from_host(self._rows, slots, block_ids)))

    def get_finished(self, finished_req_ids: set[str], output: KVConnectorOutput) -> None:
        output.failed, self._refused = self._refused, {}
        self.counters.add("loads_failed", len(output.failed))
        while self._loading and self._loading[0][1].query():
            load, _ = self._loading.popleft()
            output.loaded.add(load.request_id)
            self.count("loaded", len(load.blocks), self._copies.bytes_per_block)

    def wait(self) -> None:
        if self._loading and not self._refused:
            self._loading[0][1].synchronize()  # takes as long as one copy

    def close(self) -> None:
        if self._memory is not None:
            for _, event in self._loading:
                event.synchronize()
            self._copies.close()
            self._memory.close()


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
        readers: IOThreads | None = None,
        writers: IOThreads | None = None,
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
