"""The worker side of the block store connectors, the protocol of stores, and the store in host memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

import torch

from fleetfoot.kv_transfer.base.block_copies import BlockCopies, CopyEvent, HostMemory, block_copies
from fleetfoot.kv_transfer.base.connector import TransferContext, TransferCounters, WorkerConnector
from fleetfoot.kv_transfer.blockstore.scheduler import BlockStoreMetadata, BlockTransfer, RequestLoad
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.kv_output import KVConnectorOutput, TransferFailure

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
