"""The block store connectors and their scheduler side: KV blocks in files, or in host memory. No torch."""

from __future__ import annotations

import logging
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import partial
from itertools import chain, takewhile
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
    block_key,
    block_path,
    num_host_blocks,
)
from fleetfoot.records.kv_layout import slab_of, usable_by_all
from fleetfoot.records.request import Request
from fleetfoot.records.step import KVConnectorOutput, SchedulerOutput
from fleetfoot.scheduler.block_pool import BlockPools

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
        return BlockStoreScheduler(context, HostIndex(context, num_host_blocks(context)))

    @staticmethod
    def worker_side(context: TransferContext) -> WorkerConnector:
        from fleetfoot.kv_transfer.blockstore.worker import HostStoreWorker

        return HostStoreWorker(context, num_host_blocks(context))


# --- the scheduler side ---------------------------------------------------------------------------------------------


class BlockIndex(ABC):
    """The blocks in a store, as known to the scheduler side."""

    epoch: str

    def __init__(self, context: TransferContext) -> None:
        self._context = context

    def count_stored(self, request: Request, first: int, last: int) -> int:
        """How many of the request's blocks from ``first`` on, before ``last``, every group of layers can have."""
        if self._context.groups[0].has_layers:
            last = first + self._count_first_group(request, first, last)
        return self._count_usable(request, first, last)

    def _count_first_group(self, request: Request, first: int, last: int) -> int:
        """How many blocks of the first group are stored before the first that is not."""
        return sum(1 for _ in takewhile(partial(self._is_stored, 0), request.block_hashes[first:last]))

    def _count_usable(self, request: Request, first: int, last: int) -> int:
        """How many of these blocks, which the first group has, the other groups can have too."""

        def has(group: int, block: int) -> bool:
            return self._is_stored(group, request.block_hashes[block])

        return usable_by_all(self._context.groups, last, self._context.block_size, has, first) - first

    def _transfers(self, request: Request, first: int, last: int) -> Iterator[BlockTransfer]:
        """The blocks of all groups."""
        hashes = request.block_hashes
        for group, begin, block_ids in request.blocks_between(first, last):
            if self._context.groups[group].has_layers:
                for index, block_id in enumerate(block_ids, begin):
                    yield BlockTransfer(block_id, hashes[index], group)

    @abstractmethod
    def _is_stored(self, group: int, block_hash: bytes) -> bool: ...

    def load(self, request: Request, first: int, last: int) -> list[BlockTransfer]:
        """The transfers that load these blocks, which `count_stored` has found."""
        return list(self._transfers(request, first, last))

    def save(self, request: Request, first: int, last: int) -> list[BlockTransfer]:
        """The transfers that save these blocks; none for blocks that need no saving."""
        return list(self._transfers(request, first, last))

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
        self._block_size, self._groups = context.block_size, context.groups
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
            reused: set[int] = set(scheduler_output.changed_slabs)
            for request in scheduler_output.new_requests:  # blocks of a prefix hit are only read
                num_hits = request.num_computed_tokens // self._block_size
                for group, block_ids in enumerate((request.block_ids, *request.group_block_ids)):
                    reused.update(self._slabs(group, block_ids[num_hits:]))
            for _, _, block_ids in scheduler_output.new_block_ids:
                reused.update(self._slabs(0, block_ids))
            last = len(self._groups) - 1  # each slot of a row's states has a table
            for table, _, _, block_ids in scheduler_output.new_group_block_ids:
                reused.update(self._slabs(min(table, last), block_ids))
            reused.update(self._slabs(last, [slot for _, _, slot in scheduler_output.snapshots]))
            self._metadata.reused += sorted(reused)
        metadata, self._metadata = self._metadata, BlockStoreMetadata(self.index.epoch)
        self.index.metadata_built([*metadata.flushes, *metadata.saves], scheduler_output.finished_req_ids)
        return None if metadata.is_empty else metadata

    def _slabs(self, group: int, block_ids: Sequence[int]) -> Iterator[int]:
        return (slab_of(self._groups, group, block_id) for block_id in block_ids)

    def slabs_reused(self, slabs: Iterable[int]) -> None:
        if self._can_save:
            self._metadata.reused += slabs

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
        super().__init__(context)
        self._root = root
        self.epoch = context.fingerprint
        # each file is looked up once for a request: its blocks of the first group that have files,
        self._found: dict[str, range] = {}
        self._counted: dict[str, tuple[range, int]] = {}  # and how many of a range the other groups can have too
        self._invalid: dict[bytes, list[tuple[int, int] | None]] = {}  # block -> its files when a load failed

    def _count_first_group(self, request: Request, first: int, last: int) -> int:
        found = self._found.get(request.request_id, range(first, first))
        if not found.start <= first <= found.stop:  # evicted from the prefix cache, and perhaps without files
            found = range(first, first)
        stop = found.stop + super()._count_first_group(request, found.stop, last)
        self._found[request.request_id] = range(found.start, stop)
        return max(0, min(stop, last) - first)

    def _count_usable(self, request: Request, first: int, last: int) -> int:
        blocks, count = self._counted.get(request.request_id, (range(0), 0))
        if blocks != range(first, last):
            count = super()._count_usable(request, first, last)
            self._counted[request.request_id] = range(first, last), count
        return count

    def load(self, request: Request, first: int, last: int) -> list[BlockTransfer]:
        self._forget(request.request_id)
        return super().load(request, first, last)

    def metadata_built(self, saved: Sequence[BlockTransfer], finished_req_ids: Set[str]) -> None:
        for request_id in finished_req_ids:
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        self._found.pop(request_id, None)
        self._counted.pop(request_id, None)

    def update(self, output: KVConnectorOutput) -> None:
        for failure in output.failed.values():
            if failure.block is not None:
                self._invalid[failure.block] = self._identities(failure.block)
                self._found.clear()
                self._counted.clear()

    def reset(self, unsent: Sequence[BlockTransfer], weights: str) -> None:
        """Without ``weights`` the new epoch is unknown to other engines, and to this one after a restart."""
        self._found.clear()
        self._counted.clear()
        self._invalid.clear()
        self.epoch = weights or f"{self._context.fingerprint}-{secrets.token_hex(8)}"

    def _is_stored(self, group: int, block_hash: bytes) -> bool:
        key = block_key(group, block_hash)
        if key in self._invalid:
            if self._identities(key) == self._invalid[key]:
                return False
            del self._invalid[key]
        return all(os.path.exists(path) for path in self._paths(key))

    def _paths(self, key: bytes) -> list[str]:
        ranks = range(self._context.num_ranks)
        return [block_path(self._context, self._root, self.epoch, rank, key) for rank in ranks]

    def _identities(self, key: bytes) -> list[tuple[int, int] | None]:
        """Inode and modification time of each rank's file; None: there is no such file."""
        identities: list[tuple[int, int] | None] = []
        for path in self._paths(key):
            try:
                found = os.stat(path)
                identities.append((found.st_ino, found.st_mtime_ns))
            except OSError:
                identities.append(None)
        return identities


class HostIndex(BlockIndex):
    """Assigns slots of host memory to blocks: each block is stored once, and the least recently used are evicted.

    Slots are managed as the blocks of the device are, by a `BlockPools` of ``num_units`` blocks, or slabs of several
    groups; references are pins. Blocks that only prefixes which end within a prompt's chunk need (of a window) are
    evicted first.

    Workers copy in the order of the metadata, so a slot can be reassigned while its block is still being written or
    read. Within a step loads come before saves, so blocks saved by a step can be loaded only once its metadata is
    built: until then their slots are pinned. Slots of loads are pinned until the loads have ended.
    """

    def __init__(self, context: TransferContext, num_units: int) -> None:
        super().__init__(context)
        self.pools = BlockPools(num_units, context.block_size, context.groups)
        self.epoch = "0"
        self._unsent: dict[tuple[int, bytes], bool] = {}  # saves of the metadata to be built next: evict first?
        self._loading: list[tuple[str, list[BlockTransfer]]] = []  # an id may return before its first load ends

    def load(self, request: Request, first: int, last: int) -> list[BlockTransfer]:
        blocks = super().load(request, first, last)
        for block in blocks:
            pool = self.pools.all[block.group]
            slot = pool.find(block.block_hash)
            if slot is None:
                raise RuntimeError(f"request {request.request_id!r} is to load a block that is not in host memory")
            pool.share((slot,))
            block.slot = slot
        self._touch(request.block_hashes[:last])
        self._loading.append((request.request_id, blocks))
        return blocks

    def save(self, request: Request, first: int, last: int) -> list[BlockTransfer]:
        blocks = []
        groups, size = self._context.groups, self._context.block_size
        # those of windows that no query reads which follows the last block
        reads = [first if group.is_state else group.first_block(last * size, size) for group in groups]
        unread = [set(request.block_hashes[first:begin]) for begin in reads]
        for block in super().save(request, first, last):
            pool = self.pools.all[block.group]
            if pool.find(block.block_hash) is not None:
                continue
            needs = [int(index == block.group) for index in range(len(groups))]
            if self.pools.num_missing(needs) > 0:
                break  # all slots are pinned: the rest is not saved
            [block.slot] = self.pools.take(needs)[block.group]
            pool.publish(block.slot, block.block_hash)
            self._unsent[block.group, block.block_hash] = block.block_hash in unread[block.group]
            blocks.append(block)
        return blocks

    def request_finished(self, request: Request) -> None:
        self._touch(request.block_hashes)

    def _touch(self, hashes: Sequence[bytes]) -> None:
        """Mark a prefix as used, its first block last: the other blocks are useless without it."""
        size = self._context.block_size
        for pool, group in zip(self.pools.all, self._context.groups, strict=True):
            pool.touch(reversed(hashes[group.first_block(len(hashes) * size, size) :]))

    def metadata_built(self, saved: Sequence[BlockTransfer], finished_req_ids: Set[str]) -> None:
        for block in saved:
            evict_first = self._unsent[block.group, block.block_hash]
            self.pools.all[block.group].free((block.slot,), evict_first=evict_first)
        self._unsent.clear()
        self.pools.take_changed()  # slabs of host memory are not cleared

    def update(self, output: KVConnectorOutput) -> None:
        for request_id in (*output.loaded, *output.failed):
            load = next((load for load in self._loading if load[0] == request_id), None)  # the oldest
            if load is None:
                continue  # of another connector
            self._loading.remove(load)
            for block in load[1]:
                pool = self.pools.all[block.group]
                if request_id in output.failed and pool.find(block.block_hash) == block.slot:
                    pool.forget(block.slot)
                pool.free((block.slot,))

    def reset(self, unsent: Sequence[BlockTransfer], weights: str) -> None:
        self.metadata_built(unsent, set())
        self.pools.clear_cache()
        self.epoch = str(int(self.epoch) + 1)

    def _is_stored(self, group: int, block_hash: bytes) -> bool:
        return self.pools.all[group].find(block_hash) is not None and (group, block_hash) not in self._unsent

    def check_integrity(self) -> None:
        """Raise RuntimeError unless the slots of saves and loads, and no others, are pinned, once for each."""
        pins: list[list[int]] = [[] for _ in self._context.groups]
        for group, block_hash in self._unsent:
            slot = self.pools.all[group].find(block_hash)
            pins[group] += [] if slot is None else [slot]
        for block in chain.from_iterable(blocks for _, blocks in self._loading):
            pins[block.group].append(block.slot)
        self.pools.check_integrity([pins])
