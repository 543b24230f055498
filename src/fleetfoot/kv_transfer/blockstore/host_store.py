"""Blocks in slots of host memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from fleetfoot.kv_transfer.base.block_copies import BlockCopies, CopyEvent, HostMemory
from fleetfoot.kv_transfer.blockstore.scheduler import BlockTransfer, RequestLoad
from fleetfoot.kv_transfer.blockstore.worker import BlockStore
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.kv_output import KVConnectorOutput, TransferFailure


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
