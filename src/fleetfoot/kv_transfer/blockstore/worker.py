"""The worker side of the block store connectors, and the two stores: host memory, and files."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fleetfoot.kv_transfer.base.block_copies import CopyEvent, HostMemory, block_copies
from fleetfoot.kv_transfer.base.connector import TransferContext, TransferCounters, WorkerConnector
from fleetfoot.kv_transfer.base.io_threads import IOThreads, drain
from fleetfoot.kv_transfer.base.registry import CPU_BYTES
from fleetfoot.kv_transfer.blockstore.blocks import (
    IN_FLIGHT,
    NUM_BLOCKS,
    BlockFile,
    BlockFileError,
    BlockStoreMetadata,
    BlockTransfer,
    FilesystemSettings,
    block_path,
    by_group,
    num_unused,
)
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import KVConnectorOutput, TransferFailure
from fleetfoot.scheduler.block_pool import BlockPools

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 10.0
"""How long `FileStoreWorker.shutdown` waits for files that are being written."""
READ_SHARE = 4
"""Memory for reads is this fraction of the memory for writes: reads can wait for memory, and writes are dropped."""
WAIT_SECONDS = 0.02
"""How long an idle step waits for progress."""
NO_TRANSFERS = BlockStoreMetadata()


class BlockStoreWorker(WorkerConnector):
    """Passes the transfers of each step to a store, in order."""

    def __init__(self, context: TransferContext) -> None:
        self._context = context
        self._counters = TransferCounters()
        self._metadata = NO_TRANSFERS

    @abstractmethod
    def open(self, layout: KVLayout, *, pinned: bool) -> None:
        """Allocate memory. ``pinned``: page-locked, for copies to and from a GPU."""

    @abstractmethod
    def save(self, blocks: Sequence[BlockTransfer], epoch: str) -> None:
        """Start saving blocks, as written by all work queued so far."""

    @abstractmethod
    def load(self, request_id: str, blocks: Sequence[BlockTransfer], epoch: str) -> None:
        """Start loading the blocks of a request."""

    @abstractmethod
    def collect(self, finished_req_ids: set[str], output: KVConnectorOutput) -> None:
        """Add the loads that have ended to ``output``."""

    def count(self, verb: str, blocks: Sequence[BlockTransfer]) -> None:
        """Count blocks that were ``saved`` or ``loaded``."""
        self._counters.add(f"blocks_{verb}", len(blocks))
        self._counters.add(f"bytes_{verb}", sum(self._copies.block_bytes[block.group] for block in blocks))

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        self._copies = block_copies(kv_caches, layout, shares_blocks=self._context.shares_blocks)
        self.open(layout, pinned=kv_caches[0].device.type != "cpu")

    def bind_connector_metadata(self, metadata: object | None) -> None:
        if not isinstance(metadata, BlockStoreMetadata | None):
            kind = type(metadata).__name__
            raise TypeError(f"KV connector metadata is a {kind}; it must be BlockStoreMetadata or None")
        self._metadata = metadata or NO_TRANSFERS

    def flush(self) -> None:
        if self._metadata.flushes:
            self.save(self._metadata.flushes, self._metadata.epoch)
        self._copies.fence(self._metadata.reused)

    def start_load_kv(self) -> None:
        for request_id, blocks in self._metadata.loads:
            self.load(request_id, blocks, self._metadata.epoch)

    def save_kv(self) -> None:
        if self._metadata.saves:
            self.save(self._metadata.saves, self._metadata.epoch)

    def wait_for_save(self) -> None:
        """Full blocks are only written by their next owners, which wait for the copies: see `flush`."""

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        output = KVConnectorOutput()
        self.collect(finished_req_ids, output)
        output.counters = self._counters.take()
        return output

    def clear_connector_metadata(self) -> None:
        self._metadata = NO_TRANSFERS


class HostStoreWorker(BlockStoreWorker):
    """Copies blocks between the device and slots of host memory, in the order of the calls. ``num_units``: blocks, or
    slabs of several groups, that host memory holds.

    It records what each slot holds: a save that was lost with a failed step must not be taken for KV.
    """

    def __init__(self, context: TransferContext, num_units: int) -> None:
        super().__init__(context)
        self._num_units = num_units
        self._held: dict[tuple[int, int], tuple[str, bytes]] = {}  # group and slot -> epoch and hash of its block
        self._loading: deque[tuple[str, Sequence[BlockTransfer], CopyEvent]] = deque()  # copies end in order
        self._refused: dict[str, TransferFailure] = {}
        self._memory: HostMemory | None = None

    def open(self, layout: KVLayout, *, pinned: bool) -> None:
        asked_by = f"kv_offloading_size, {CPU_BYTES} or {NUM_BLOCKS}"
        counts = [group.blocks_per_slab for group in layout.groups]
        slots = list(zip(counts, layout.group_bytes, strict=True))
        num_units = self._num_units + num_unused(self._context)
        self._memory = HostMemory(num_units, layout.bytes_per_block, slots, pinned=pinned, asked_by=asked_by)

    def save(self, blocks: Sequence[BlockTransfer], epoch: str) -> None:
        assert self._memory is not None
        for group, part in by_group(blocks):
            self._copies.to_host(
                group, [block.block_id for block in part], self._memory, [block.slot for block in part]
            )
        self._held.update(((block.group, block.slot), (epoch, block.block_hash)) for block in blocks)
        self.count("saved", blocks)

    def load(self, request_id: str, blocks: Sequence[BlockTransfer], epoch: str) -> None:
        assert self._memory is not None
        for block in blocks:
            if self._held.get((block.group, block.slot)) != (epoch, block.block_hash):
                reason = f"slot {block.slot} of host memory does not hold KV block {block.key.hex()} any more"
                self._refused[request_id] = TransferFailure(reason)
                return
        for group, part in by_group(blocks):
            slots, block_ids = [block.slot for block in part], [block.block_id for block in part]
            event = self._copies.from_host(group, self._memory, slots, block_ids)
        self._loading.append((request_id, blocks, event))

    def collect(self, finished_req_ids: set[str], output: KVConnectorOutput) -> None:
        output.failed, self._refused = self._refused, {}
        self._counters.add("loads_failed", len(output.failed))
        while self._loading and self._loading[0][2].query():
            request_id, blocks, _ = self._loading.popleft()
            output.loaded.add(request_id)
            self.count("loaded", blocks)

    def wait_for_progress(self) -> None:
        if self._loading and not self._refused:
            self._loading[0][2].synchronize()  # takes as long as one copy

    def shutdown(self) -> None:
        if self._memory is not None:
            for _, _, event in self._loading:
                event.synchronize()
            self._copies.close()
            self._memory.close()


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

    request_id: str
    epoch: str
    num_blocks: int
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


class _BlockMemory(HostMemory):
    """Host memory for at least ``num_bytes`` of blocks of any groups, and its free slots; () without memory at all."""

    def __init__(self, num_bytes: int, layout: KVLayout, *, pinned: bool) -> None:
        counts = [group.blocks_per_slab for group in layout.groups]
        num_units = max(1, num_bytes // layout.bytes_per_block) if num_bytes else 0
        self._pools = BlockPools(max(1, num_units), layout.block_size, layout.groups, enable_caching=False)
        slots, is_shared = list(zip(counts, layout.group_bytes, strict=True)), len(layout.groups) > 1
        super().__init__(num_units + is_shared, layout.bytes_per_block, slots, pinned=pinned, asked_by=IN_FLIGHT)
        self._is_empty = num_units == 0

    def take(self, group: int) -> int | None:
        """A free slot for a block of the group; None: there is none."""
        self._pools.take_changed()  # slabs of host memory are not cleared
        needs = [int(index == group) for index in range(len(self._pools.all))]
        return None if self._is_empty or self._pools.num_missing(needs) > 0 else self._pools.take(needs)[group][0]

    def put_back(self, group: int, slot: int) -> None:
        self._pools.all[group].free((slot,))


class FileStoreWorker(BlockStoreWorker):
    """Copies blocks out within the step and writes them after it; reads files beside steps and copies them in.

    Only `_read` and `_write` run in threads, and they access nothing but their slot and file. ``readers``, ``writers``:
    threads; None: `IOThreads`.
    """

    def __init__(
        self,
        context: TransferContext,
        settings: FilesystemSettings,
        readers: IOThreads | None = None,
        writers: IOThreads | None = None,
    ) -> None:
        super().__init__(context)
        self._config, self._settings = context.config, settings
        self._clock = context.clock or time.monotonic
        self._readers = readers or IOThreads("kv-read", settings.num_threads)
        self._writers = writers or IOThreads("kv-write", settings.num_threads)
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

    def open(self, layout: KVLayout, *, pinned: bool) -> None:
        self._rank_layout = layout.fingerprint
        most = max(READ_SHARE, self._settings.max_bytes_in_flight)
        self._read_memory = _BlockMemory(most // READ_SHARE * self._config.can_load, layout, pinned=pinned)
        self._write_memory = _BlockMemory(most * self._config.can_save, layout, pinned=pinned)
        self._is_open = True

    def save(self, blocks: Sequence[BlockTransfer], epoch: str) -> None:
        self._process_writes()
        new = {block.key: block for block in blocks if (epoch, block.key) not in self._writing}
        # of a prefix, the first blocks are the most useful
        taken = {
            block.key: slot for block in new.values() if (slot := self._write_memory.take(block.group)) is not None
        }
        self._counters.add("saves_dropped", len(new) - len(taken))
        for group, part in by_group(new[key] for key in taken):
            slots = [taken[block.key] for block in part]
            copied = self._copies.to_host(group, [block.block_id for block in part], self._write_memory, slots)
            for block, slot in zip(part, slots, strict=True):
                self._writing.add((epoch, block.key))
                self._writers.submit(partial(self._write, _Write(block, epoch, slot, copied)))

    def load(self, request_id: str, blocks: Sequence[BlockTransfer], epoch: str) -> None:
        """Its reads wait for free slots, at most until the timeout: a read that has begun by then ends in host memory,
        and is ignored."""
        deadline = self._clock() + self._config.kv_transfer_timeout
        load = _Load(request_id, epoch, len(blocks), deadline, len(blocks))
        self._loads.append(load)
        self._waiting.extend(_Read(load, block) for block in blocks)
        self._start_reads()

    def collect(self, finished_req_ids: set[str], output: KVConnectorOutput) -> None:
        self._process_writes()
        now = self._clock()
        for load in self._loads:
            if load.failure is None and load.request_id in finished_req_ids and not load.is_new:
                load.failure = TransferFailure("the request has ended before its KV arrived")
            elif load.failure is None and now >= load.deadline:
                reason = (
                    f"{load.num_left} of {load.num_blocks} KV blocks had not been read after "
                    f"{self._config.kv_transfer_timeout:g} s (kv_transfer_timeout)"
                )
                load.failure = TransferFailure(reason, timed_out=True)
            load.is_new = False
        self._copy_in(drain(self._read_done))
        self._process_copies()
        self._start_reads()
        for load in [load for load in self._loads if not load.num_copying]:
            if load.failure is not None:
                output.failed[load.request_id] = load.failure
                self._counters.add("loads_failed")
            elif load.num_left == 0:
                output.loaded.add(load.request_id)
            else:
                continue
            self._loads.remove(load)

    def wait_for_progress(self) -> None:
        if self._copying:
            self._copying[0][0].synchronize()
        elif self._loads:
            with contextlib.suppress(queue.Empty):
                self._copy_in([self._read_done.get(timeout=WAIT_SECONDS)])

    def shutdown(self) -> None:
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
            file = self._file(write.epoch, write.block)
            write.is_new = file.path in self._invalid_files or not os.path.exists(file.path)
            if write.is_new:
                file.write(self._write_memory.row(write.block.group, write.slot))
                self._invalid_files.discard(file.path)
        except Exception as error:
            write.error = error
        self._written.put(write)

    def _read(self, read: _Read) -> None:
        file = self._file(read.load.epoch, read.block)
        try:
            file.read(self._read_memory.row(read.block.group, read.slot))
        except BlockFileError as error:
            if self._config.can_save:
                self._invalid_files.add(file.path)
            read.error = str(error)
        except Exception as error:  # any error must end the load
            read.error = f"it cannot be read ({type(error).__name__}: {error})"
        self._read_done.put(read)

    def _file(self, epoch: str, block: BlockTransfer) -> BlockFile:
        path = block_path(self._context, self._settings.path, epoch, self._context.rank, block.key)
        return BlockFile(path, epoch, self._rank_layout, block.key)

    # --- in the worker's thread -------------------------------------------------------------------------------------

    def _process_writes(self) -> None:
        for write in drain(self._written):
            self._write_memory.put_back(write.block.group, write.slot)
            self._writing.discard((write.epoch, write.block.key))
            if write.error is not None:
                self._counters.add("saves_failed")
                if not self._has_warned:
                    self._has_warned = True
                    logger.warning("a KV block could not be saved; further failures are only counted: %s", write.error)
            elif write.is_new:
                self.count("saved", [write.block])

    def _start_reads(self) -> None:
        while self._waiting:
            read = self._waiting[0]
            if read.load.failure is None:
                if (slot := self._read_memory.take(read.block.group)) is None:
                    return
                read.slot = slot
                self._readers.submit(partial(self._read, read))
            self._waiting.popleft()

    def _copy_in(self, reads: Iterable[_Read]) -> None:
        """Copy blocks that were read to the device; an invalid file fails its load."""
        arrived: dict[int, list[_Read]] = {}
        for read in reads:
            if read.error and read.load.failure is None:
                key = read.block.key
                read.load.failure = TransferFailure(f"KV block {key.hex()}: {read.error}", block=key)
            if read.load.failure is None:
                arrived.setdefault(read.block.group, []).append(read)
                read.load.num_copying += 1
            else:
                self._read_memory.put_back(read.block.group, read.slot)
        for group, part in arrived.items():
            slots, block_ids = [read.slot for read in part], [read.block.block_id for read in part]
            self._copying.append((self._copies.from_host(group, self._read_memory, slots, block_ids), part))

    def _process_copies(self) -> None:
        while self._copying and self._copying[0][0].query():
            _, reads = self._copying.popleft()
            for read in reads:
                self._read_memory.put_back(read.block.group, read.slot)
                read.load.num_copying -= 1
                read.load.num_left -= 1
            self.count("loaded", [read.block for read in reads])
