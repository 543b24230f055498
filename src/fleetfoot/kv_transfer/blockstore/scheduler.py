"""The scheduler side of the block store connectors: which blocks each step moves, and the stores' indexes. No torch."""

from __future__ import annotations

import os
import secrets
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from fleetfoot.kv_transfer.base.connector import TransferContext
from fleetfoot.kv_transfer.blockstore.block_file import BlockFolder
from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.request import Request
from fleetfoot.records.step import KVConnectorOutput, SchedulerOutput


@dataclass(slots=True)
class BlockTransfer:
    """A KV block to be saved or loaded."""

    block_id: int
    block_hash: bytes
    """The chain hash of the block's tokens and all tokens before them."""
    slot: int = -1
    """In host memory; -1: the store has no slots."""


@dataclass(slots=True)
class RequestLoad:
    """The blocks that a request waits for."""

    request_id: str
    blocks: list[BlockTransfer]


@dataclass(slots=True)
class BlockStoreMetadata:
    """The metadata of a step."""

    epoch: str = ""
    """Identifies the weights: blocks of different epochs differ, whatever their hashes."""
    flushes: list[BlockTransfer] = field(default_factory=list)
    """To be saved before the step can overwrite them."""
    loads: list[RequestLoad] = field(default_factory=list)
    saves: list[BlockTransfer] = field(default_factory=list)
    """To be saved after the step has filled them."""
    reused: list[int] = field(default_factory=list)
    """Blocks with new owners from this step on: they must not be written before earlier copies out have ended."""

    @property
    def is_empty(self) -> bool:
        return not (self.flushes or self.loads or self.saves or self.reused)


class BlockIndex(ABC):
    """The blocks in a store, as known to the scheduler side."""

    epoch: str

    @abstractmethod
    def count_stored(self, request: Request, first: int, last: int) -> int:
        """How many of the request's blocks ``first .. last - 1`` are stored before the first that is not."""

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
    def reset(self, unsent: Sequence[BlockTransfer]) -> None:
        """Begin a new epoch. ``unsent``: saves that will not be carried out."""


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
        self._metadata.loads.append(RequestLoad(request.request_id, self.index.load(request, first, last)))

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

    def reset_cache(self) -> None:
        """Loads that the workers have not received yet stay: their blocks are of another epoch, so they will fail."""
        metadata = self._metadata
        self.index.reset([*metadata.flushes, *metadata.saves])
        self._metadata = BlockStoreMetadata(self.index.epoch, loads=metadata.loads, reused=metadata.reused)


_FileIdentity = tuple[int, int] | None
"""Inode and modification time; None: there is no such file."""


class FileIndex(BlockIndex):
    """Looks for files when a request is scheduled; their contents are checked when they are read.

    A block is stored if the file of every rank exists. After a failed load a block's files are ignored until they have
    changed: one invalid file must not fail every request with this prefix.
    """

    def __init__(self, context: TransferContext, folder: BlockFolder) -> None:
        self._fingerprint = context.fingerprint
        self._num_ranks = context.num_ranks
        self._folder = folder
        self.epoch = context.fingerprint
        self._found: dict[str, range] = {}  # request -> its blocks that have files: each is looked up once
        self._invalid: dict[bytes, list[_FileIdentity]] = {}  # block -> its files when a load failed

    def count_stored(self, request: Request, first: int, last: int) -> int:
        found = self._found.get(request.request_id, range(first, first))
        if not found.start <= first <= found.stop:  # evicted from the prefix cache, and perhaps without files
            found = range(first, first)
        stop = found.stop
        while stop < last and self._is_stored(request.block_hashes[stop]):
            stop += 1
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

    def reset(self, unsent: Sequence[BlockTransfer]) -> None:
        """The new epoch is unknown to other engines, and to this one after a restart."""
        self._found.clear()
        self._invalid.clear()
        self.epoch = f"{self._fingerprint}-{secrets.token_hex(8)}"

    def _is_stored(self, block_hash: bytes) -> bool:
        if block_hash in self._invalid:
            if self._identities(block_hash) == self._invalid[block_hash]:
                return False
            del self._invalid[block_hash]
        return all(os.path.exists(path) for path in self._paths(block_hash))

    def _paths(self, block_hash: bytes) -> Iterable[str]:
        return (self._folder.path(self.epoch, rank, block_hash) for rank in range(self._num_ranks))

    def _identities(self, block_hash: bytes) -> list[_FileIdentity]:
        return [_identity(path) for path in self._paths(block_hash)]


def _transfers(request: Request, first: int, last: int) -> list[BlockTransfer]:
    pairs = zip(request.block_ids[first:last], request.block_hashes[first:last], strict=True)
    return [BlockTransfer(block_id, block_hash) for block_id, block_hash in pairs]


def _identity(path: str) -> _FileIdentity:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


class HostIndex(BlockIndex):
    """Assigns slots of host memory to blocks: each block is stored once, and the least recently used are evicted.

    Workers copy in the order of the metadata, so a slot can be reassigned while its block is still being written or
    read. Within a step loads come before saves, so blocks saved by a step can be loaded only once its metadata is
    built: until then their slots are pinned. Slots of loads are pinned until the loads have ended.

    Args:
        num_slots: blocks that host memory holds.
    """

    def __init__(self, num_slots: int) -> None:
        self.slots = SlotTable(num_slots)
        self.epoch = "0"
        self._unsent: set[bytes] = set()  # saves of the metadata to be built next
        self._loading: dict[str, list[list[BlockTransfer]]] = {}  # a request id may return before its first load ends

    def count_stored(self, request: Request, first: int, last: int) -> int:
        stop = first
        while stop < last and self._is_stored(request.block_hashes[stop]):
            stop += 1
        return stop - first

    def load(self, request: Request, first: int, last: int) -> list[BlockTransfer]:
        blocks = _transfers(request, first, last)
        for block in blocks:
            slot = self.slots.get(block.block_hash)
            if slot is None:
                raise RuntimeError(f"request {request.request_id!r} is to load a block that is not in host memory")
            self.slots.pin(slot)
            block.slot = slot
        self._touch(request.block_hashes[:last])
        self._loading.setdefault(request.request_id, []).append(blocks)
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
        self._touch(request.block_hashes)

    def metadata_built(self, saved: Sequence[BlockTransfer], finished_req_ids: Set[str]) -> None:
        for block in saved:
            self.slots.unpin(block.slot)
        self._unsent.clear()

    def update(self, output: KVConnectorOutput) -> None:
        for request_id in (*output.loaded, *output.failed):
            for block in self._pop_load(request_id):
                if request_id in output.failed and self.slots.get(block.block_hash) == block.slot:
                    self.slots.remove(block.block_hash)
                self.slots.unpin(block.slot)

    def reset(self, unsent: Sequence[BlockTransfer]) -> None:
        self.metadata_built(unsent, set())
        self.slots.clear()
        self.epoch = str(int(self.epoch) + 1)

    def _is_stored(self, block_hash: bytes) -> bool:
        return self.slots.get(block_hash) is not None and block_hash not in self._unsent

    def _pop_load(self, request_id: str) -> list[BlockTransfer]:
        """The oldest load with that id; empty for loads of other connectors."""
        loads = self._loading.get(request_id)
        if loads is None:
            return []
        blocks = loads.pop(0)
        if not loads:
            del self._loading[request_id]
        return blocks

    def _touch(self, block_hashes: list[bytes]) -> None:
        """Mark as used, the beginning of the prefix last: without it the other blocks are useless."""
        self.slots.touch(reversed(block_hashes))


class SlotTable:
    """Slots by block hash, in least-recently-used order. A pinned slot is not evicted.

    Args:
        num_slots: slots are 0 .. num_slots - 1.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots: OrderedDict[bytes, int] = OrderedDict()
        self._hashes: dict[int, bytes] = {}  # the inverse
        self._pins: dict[int, int] = {}  # slot -> pin count
        self._free = list(range(num_slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, block_hash: bytes) -> int | None:
        """The slot of a block; None: it is not stored."""
        return self._slots.get(block_hash)

    def add(self, block_hash: bytes) -> int | None:
        """Assign a slot to a new block; evicts the least recently used block without a pin. None: all are pinned."""
        if not self._free:
            victim = next((other for other, slot in self._slots.items() if slot not in self._pins), None)
            if victim is None:
                return None
            self.remove(victim)
        slot = self._free.pop()
        self._slots[block_hash] = slot
        self._hashes[slot] = block_hash
        return slot

    def touch(self, block_hashes: Iterable[bytes]) -> None:
        """Mark as used, the last one as the most recent; unknown blocks are skipped."""
        for block_hash in block_hashes:
            if block_hash in self._slots:
                self._slots.move_to_end(block_hash)

    def remove(self, block_hash: bytes) -> None:
        """Forget a block; its slot is free once it has no pins."""
        slot = self._slots.pop(block_hash, None)
        if slot is not None:
            del self._hashes[slot]
            self._free_if_unused(slot)

    def clear(self) -> None:
        for block_hash in list(self._slots):
            self.remove(block_hash)

    def pin(self, slot: int) -> None:
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        """Undo one `pin`."""
        left = self._pins.pop(slot) - 1
        if left:
            self._pins[slot] = left
        self._free_if_unused(slot)

    def check_integrity(self) -> None:
        """Raise RuntimeError unless every slot is exactly one of free or in use (assigned or pinned)."""
        slots = sorted([*self._free, *(set(self._hashes) | set(self._pins))])
        if slots != list(range(self.num_slots)) or self._hashes != {s: h for h, s in self._slots.items()}:
            raise RuntimeError(
                f"the slots of host memory are not consistent: free {self._free}, assigned {dict(self._slots)}, "
                f"pinned {self._pins}"
            )

    def _free_if_unused(self, slot: int) -> None:
        if slot not in self._pins and slot not in self._hashes:
            self._free.append(slot)
