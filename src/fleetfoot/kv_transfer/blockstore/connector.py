"""The block store connectors and their scheduler side: KV blocks in files, or in host memory. No torch."""

from __future__ import annotations

import logging
import os
import secrets
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence, Set
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

from fleetfoot.kv_transfer.base.connector import (
    ARENA,
    BLOCK_CONTIGUOUS_HND,
    KVConnector,
    SchedulerConnector,
    TransferContext,
    WorkerConnector,
    warn_of_unused_fields,
)
from fleetfoot.kv_transfer.blockstore.blocks import (
    BlockStoreMetadata,
    BlockTransfer,
    FilesystemSettings,
    block_path,
    num_host_blocks,
)
from fleetfoot.records.request import Request
from fleetfoot.records.step import KVConnectorOutput, SchedulerOutput

logger = logging.getLogger(__name__)


class SharedStorageConnector(KVConnector):
    """KV blocks in files of a shared folder, for later runs and other engines with the same model.

    Also named ``FilesystemConnector``. Settings: `FilesystemSettings`.
    """

    accepted_kv_layouts: ClassVar[frozenset[str]] = frozenset({ARENA, BLOCK_CONTIGUOUS_HND})

    @staticmethod
    def check_settings(context: TransferContext) -> None:
        FilesystemSettings.of(context.config)
        warn_of_unused_fields(context.config)

    @staticmethod
    def scheduler_side(context: TransferContext) -> SchedulerConnector:
        return BlockStoreScheduler(context, FileIndex(context, FilesystemSettings.of(context.config).path))

    @staticmethod
    def worker_side(context: TransferContext) -> WorkerConnector:
        from fleetfoot.kv_transfer.blockstore.worker import FileStoreWorker

        return FileStoreWorker(context, FilesystemSettings.of(context.config))


class OffloadingConnector(KVConnector):
    """KV blocks in host memory, for prefixes that were evicted from the device's KV cache.

    ``kv_offloading_size`` implies it. Settings: see `num_host_blocks`.
    """

    accepted_kv_layouts: ClassVar[frozenset[str]] = frozenset({ARENA, BLOCK_CONTIGUOUS_HND})

    @staticmethod
    def check_settings(context: TransferContext) -> None:
        num_host_blocks(context)
        warn_of_unused_fields(context.config)
        if context.config.kv_role != "kv_both":
            never = "loads" if context.config.can_save else "saves"
            message = "kv_role of %s is %r: it never %s, so its memory is not used; set kv_role to 'kv_both'"
            logger.warning(message, context.config.kv_connector, context.config.kv_role, never)

    @staticmethod
    def scheduler_side(context: TransferContext) -> SchedulerConnector:
        return BlockStoreScheduler(context, HostIndex(num_host_blocks(context)))

    @staticmethod
    def worker_side(context: TransferContext) -> WorkerConnector:
        from fleetfoot.kv_transfer.blockstore.worker import HostStoreWorker

        return HostStoreWorker(context, num_host_blocks(context))


# --- the scheduler side ---------------------------------------------------------------------------------------------


class BlockIndex(ABC):
    """The blocks in a store, as known to the scheduler side."""

    epoch: str

    def count_stored(self, request: Request, first: int, last: int) -> int:
        """How many of the request's blocks ``first .. last - 1`` are stored before the first that is not."""
        return sum(1 for _ in takewhile(self._is_stored, request.block_hashes[first:last]))

    @abstractmethod
    def _is_stored(self, block_hash: bytes) -> bool: ...

    @abstractmethod
    def load(self, request: Request, first: int, last: int) -> list[BlockTransfer]:
        """The transfers that load these blocks, which `count_stored` has found."""

    @abstractmethod
    def save(self, request: Request, first: int, last: int) -> list[BlockTransfer]:
        """The transfers that save these blocks; none for blocks that need no saving."""

    def request_finished(self, request: Request) -> None:  # noqa: B027
        """A request has ended and still has its blocks and hashes."""

    def metadata_built(self, saved: Sequence[BlockTransfer], finished_req_ids: Set[str]) -> None:  # noqa: B027
        """The transfers ``saved`` are in the metadata of the step being scheduled."""

    @abstractmethod
    def update(self, output: KVConnectorOutput) -> None:
        """Process loads that have ended."""

    @abstractmethod
    def reset(self, unsent: Sequence[BlockTransfer], weights: str) -> None:
        """Begin a new epoch. ``unsent``: saves that will not be carried out; ``weights``: see `reset_cache`."""


class BlockStoreScheduler(SchedulerConnector):
    """Saves every block that is filled, and loads the blocks that are stored."""

    def __init__(self, context: TransferContext, index: BlockIndex) -> None:
        self.index = index
        self._block_size = context.block_size
        self._can_load, self._can_save = context.config.can_load, context.config.can_save
        self._metadata = BlockStoreMetadata(index.epoch)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        if not self._can_load:
            return 0
        last = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        return self.index.count_stored(request, num_computed_tokens // self._block_size, last) * self._block_size

    def update_state_after_alloc(self, request: Request, num_computed_tokens: int, num_external_tokens: int) -> None:
        first = num_computed_tokens // self._block_size
        last = first + num_external_tokens // self._block_size
        self._metadata.loads.append((request.request_id, self.index.load(request, first, last)))

    def blocks_filled(self, request: Request, first: int, last: int, *, by_this_step: bool) -> None:
        if self._can_save:
            blocks = self._metadata.saves if by_this_step else self._metadata.flushes
            blocks += self.index.save(request, first, last)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self.index.request_finished(request)
        return False, None  # blocks to be saved are copied before anything can overwrite them

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> BlockStoreMetadata | None:
        if self._can_save:
            for request in scheduler_output.new_requests:  # blocks of a prefix hit are only read
                self._metadata.reused += request.block_ids[request.num_computed_tokens // self._block_size :]
            for _, _, block_ids in scheduler_output.new_block_ids:
                self._metadata.reused += block_ids
        metadata, self._metadata = self._metadata, BlockStoreMetadata(self.index.epoch)
        self.index.metadata_built([*metadata.flushes, *metadata.saves], scheduler_output.finished_req_ids)
        return None if metadata.is_empty else metadata

    def blocks_reused(self, block_ids: list[int]) -> None:
        if self._can_save:
            self._metadata.reused += block_ids

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self.index.update(output)

    @property
    def has_pending(self) -> bool:
        return not self._metadata.is_empty

    def reset_cache(self, weights: str = "") -> None:
        """Loads that the workers have not received yet stay: their blocks are of another epoch, so they will fail."""
        metadata = self._metadata
        self.index.reset([*metadata.flushes, *metadata.saves], weights)
        self._metadata = BlockStoreMetadata(self.index.epoch, loads=metadata.loads, reused=metadata.reused)


class FileIndex(BlockIndex):
    """Looks for files when a request is scheduled; their contents are checked when they are read.

    A block is stored if the file of every rank exists. After a failed load a block's files are ignored until they have
    changed: one invalid file must not fail every request with this prefix.
    """

    def __init__(self, context: TransferContext, root: Path) -> None:
        self._context, self._root = context, root
        self.epoch = context.fingerprint
        self._found: dict[str, range] = {}  # request -> its blocks that have files: each is looked up once
        self._invalid: dict[bytes, list[tuple[int, int] | None]] = {}  # block -> its files when a load failed

    def count_stored(self, request: Request, first: int, last: int) -> int:
        found = self._found.get(request.request_id, range(first, first))
        if not found.start <= first <= found.stop:  # evicted from the prefix cache, and perhaps without files
            found = range(first, first)
        stop = found.stop + super().count_stored(request, found.stop, last)
        self._found[request.request_id] = range(found.start, stop)
        return max(0, min(stop, last) - first)

    def load(self, request: Request, first: int, last: int) -> list[BlockTransfer]:
        self._found.pop(request.request_id, None)
        return _transfers(request, first, last)

    def save(self, request: Request, first: int, last: int) -> list[BlockTransfer]:
        return _transfers(request, first, last)

    def metadata_built(self, saved: Sequence[BlockTransfer], finished_req_ids: Set[str]) -> None:
        for request_id in finished_req_ids:
            self._found.pop(request_id, None)

    def update(self, output: KVConnectorOutput) -> None:
        for failure in output.failed.values():
            if failure.block is not None:
                self._invalid[failure.block] = self._identities(failure.block)
                self._found.clear()

    def reset(self, unsent: Sequence[BlockTransfer], weights: str) -> None:
        """Without ``weights`` the new epoch is unknown to other engines, and to this one after a restart."""
        self._found.clear()
        self._invalid.clear()
        self.epoch = weights or f"{self._context.fingerprint}-{secrets.token_hex(8)}"

    def _is_stored(self, block_hash: bytes) -> bool:
        if block_hash in self._invalid:
            if self._identities(block_hash) == self._invalid[block_hash]:
                return False
            del self._invalid[block_hash]
        return all(os.path.exists(path) for path in self._paths(block_hash))

    def _paths(self, block_hash: bytes) -> list[str]:
        ranks = range(self._context.num_ranks)
        return [block_path(self._context, self._root, self.epoch, rank, block_hash) for rank in ranks]

    def _identities(self, block_hash: bytes) -> list[tuple[int, int] | None]:
        """Inode and modification time of each rank's file; None: there is no such file."""
        identities: list[tuple[int, int] | None] = []
        for path in self._paths(block_hash):
            try:
                found = os.stat(path)
                identities.append((found.st_ino, found.st_mtime_ns))
            except OSError:
                identities.append(None)
        return identities


def _transfers(request: Request, first: int, last: int) -> list[BlockTransfer]:
    pairs = zip(request.block_ids[first:last], request.block_hashes[first:last], strict=True)
    return [BlockTransfer(block_id, block_hash) for block_id, block_hash in pairs]


class HostIndex(BlockIndex):
    """Assigns slots of host memory to blocks: each block is stored once, and the least recently used are evicted.

    Workers copy in the order of the metadata, so a slot can be reassigned while its block is still being written or
    read. Within a step loads come before saves, so blocks saved by a step can be loaded only once its metadata is
    built: until then their slots are pinned. Slots of loads are pinned until the loads have ended. ``num_slots``:
    blocks that host memory holds.
    """

    def __init__(self, num_slots: int) -> None:
        self.slots = SlotTable(num_slots)
        self.epoch = "0"
        self._unsent: set[bytes] = set()  # saves of the metadata to be built next
        self._loading: list[tuple[str, list[BlockTransfer]]] = []  # an id may return before its first load ends

    def load(self, request: Request, first: int, last: int) -> list[BlockTransfer]:
        blocks = _transfers(request, first, last)
        for block in blocks:
            slot = self.slots.get(block.block_hash)
            if slot is None:
                raise RuntimeError(f"request {request.request_id!r} is to load a block that is not in host memory")
            self.slots.pin(slot)
            block.slot = slot
        self.slots.touch(request.block_hashes[:last])
        self._loading.append((request.request_id, blocks))
        return blocks

    def save(self, request: Request, first: int, last: int) -> list[BlockTransfer]:
        blocks = []
        for block in _transfers(request, first, last):
            if self.slots.get(block.block_hash) is not None:
                continue
            slot = self.slots.add(block.block_hash)
            if slot is None:
                break  # all slots are pinned: the rest is not saved
            self.slots.pin(slot)
            self._unsent.add(block.block_hash)
            block.slot = slot
            blocks.append(block)
        return blocks

    def request_finished(self, request: Request) -> None:
        self.slots.touch(request.block_hashes)

    def metadata_built(self, saved: Sequence[BlockTransfer], finished_req_ids: Set[str]) -> None:
        for block in saved:
            self.slots.unpin(block.slot)
        self._unsent.clear()

    def update(self, output: KVConnectorOutput) -> None:
        for request_id in (*output.loaded, *output.failed):
            load = next((load for load in self._loading if load[0] == request_id), None)  # the oldest
            if load is None:
                continue  # of another connector
            self._loading.remove(load)
            for block in load[1]:
                if request_id in output.failed and self.slots.get(block.block_hash) == block.slot:
                    self.slots.remove(block.block_hash)
                self.slots.unpin(block.slot)

    def reset(self, unsent: Sequence[BlockTransfer], weights: str) -> None:
        self.metadata_built(unsent, set())
        self.slots.clear()
        self.epoch = str(int(self.epoch) + 1)

    def _is_stored(self, block_hash: bytes) -> bool:
        return self.slots.get(block_hash) is not None and block_hash not in self._unsent


class SlotTable:
    """Slots by block hash, in least-recently-used order. A pinned slot is not evicted. Slots are 0 .. num_slots - 1."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._references = [0] * num_slots  # 1 of the block that it is assigned to, and 1 of each pin
        self._free = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, block_hash: bytes) -> int | None:
        """The slot of a block; None: it is not stored."""
        return self._slots.get(block_hash)

    def add(self, block_hash: bytes) -> int | None:
        """Assign a slot to a new block; evicts the least recently used block without a pin. None: all are pinned."""
        if not self._free:
            victim = next((other for other, slot in self._slots.items() if self._references[slot] == 1), None)
            if victim is None:
                return None
            self.remove(victim)
        slot = self._slots[block_hash] = self._free.pop()
        self.pin(slot)
        return slot

    def touch(self, block_hashes: list[bytes]) -> None:
        """Mark a prefix as used, its first block last: the other blocks are useless without it."""
        for block_hash in reversed(block_hashes):
            if block_hash in self._slots:
                self._slots.move_to_end(block_hash)

    def remove(self, block_hash: bytes) -> None:
        """Forget a block; its slot is free once it has no pins."""
        self.unpin(self._slots.pop(block_hash))

    def clear(self) -> None:
        for block_hash in list(self._slots):
            self.remove(block_hash)

    def pin(self, slot: int) -> None:
        self._references[slot] += 1

    def unpin(self, slot: int) -> None:
        """Undo one `pin`."""
        self._references[slot] -= 1
        if self._references[slot] == 0:
            self._free.append(slot)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless each slot is free or referenced, and each assigned one referenced, exactly once."""
        unused = [slot for slot, count in enumerate(self._references) if count == 0]
        assigned = set(self._slots.values())
        if sorted(self._free) != unused or len(assigned) < len(self._slots) or not assigned.isdisjoint(unused):
            raise RuntimeError(
                f"the slots of host memory are not consistent: free {self._free}, assigned {dict(self._slots)}, "
                f"references {self._references}"
            )
