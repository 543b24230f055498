"""A worker's side of host offload: the memory itself, and the copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fleetfoot.kv_transfer.base.block_copies import BlockCopies, CopyEvent, block_copies
from fleetfoot.kv_transfer.base.connector import TransferContext, WorkerConnector
from fleetfoot.kv_transfer.base.counters import TransferCounters
from fleetfoot.kv_transfer.base.host_memory import HostMemory
from fleetfoot.kv_transfer.base.layouts import CPU_BYTES
from fleetfoot.kv_transfer.blockstore.block_moves import NO_MOVES, BlockMove, LoadOrder, moves_of
from fleetfoot.kv_transfer.blockstore.offload_settings import NUM_BLOCKS
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.kv_output import KVConnectorOutput, TransferFailure


class OffloadWorker(WorkerConnector):
    """Copies whole blocks between the device and slots of host memory, in the order in which it is told.

    It remembers what each slot really holds: a store that was lost with a step that raised must not be taken for KV.

    Args:
        num_slots: blocks that this rank's memory holds, each this rank's part of one.
    """

    def __init__(self, context: TransferContext, num_slots: int) -> None:
        self._num_slots = num_slots
        self._shares_blocks = context.shares_blocks
        self._held: dict[int, tuple[str, bytes]] = {}  # slot -> epoch and chain hash of the block
        self._moves = NO_MOVES
        self._loading: list[tuple[LoadOrder, CopyEvent]] = []
        self._refused: dict[str, TransferFailure] = {}
        self._counters = TransferCounters()

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        self._copies: BlockCopies = block_copies(kv_caches, layout, shares_blocks=self._shares_blocks)
        is_gpu = kv_caches[0].device.type != "cpu"
        settings = f"kv_offloading_size, {CPU_BYTES} or {NUM_BLOCKS}"
        self._memory = HostMemory(self._num_slots, layout.bytes_per_block, pinned=is_gpu, asked_by=settings)

    def bind_connector_metadata(self, metadata: object | None) -> None:
        self._moves = moves_of(metadata)

    def flush(self) -> None:
        if self._moves.flushes:
            self._store(self._moves.flushes)
        self._copies.fence(self._moves.reused)

    def start_load_kv(self) -> None:
        for order in self._moves.loads:
            lost = next((move for move in order.moves if self._held.get(move.slot) != self._name(move)), None)
            if lost is not None:
                reason = f"host memory does not hold KV block {lost.digest.hex()} any more: it was to be in {lost.slot}"
                self._refused[order.request_id] = TransferFailure(reason)
                continue
            slots, block_ids = [move.slot for move in order.moves], [move.block_id for move in order.moves]
            self._loading.append((order, self._copies.from_host(self._memory.tensor, slots, block_ids)))

    def save_kv(self) -> None:
        if self._moves.saves:
            self._store(self._moves.saves)

    def wait_for_save(self) -> None:
        """Full blocks are written to by their next owners alone, and these wait: see `flush`."""

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        output = KVConnectorOutput(failed=self._refused)
        self._counters.add("loads_failed", len(self._refused))
        self._refused = {}
        while self._loading and self._loading[0][1].query():  # copies end in order
            order, _ = self._loading.pop(0)
            output.loaded.add(order.request_id)
            self._count("loaded", len(order.moves))
        output.counters = self._counters.take()
        return output

    def clear_connector_metadata(self) -> None:
        self._moves = NO_MOVES

    def wait_for_progress(self) -> None:
        if self._loading and not self._refused:
            self._loading[0][1].synchronize()  # as long as a copy takes

    def shutdown(self) -> None:
        if hasattr(self, "_copies"):
            for _, event in self._loading:
                event.synchronize()
            self._copies.close()
            self._memory.close()

    def _store(self, moves: Sequence[BlockMove]) -> None:
        slots, block_ids = [move.slot for move in moves], [move.block_id for move in moves]
        self._copies.to_host(block_ids, self._memory.tensor, slots)
        for move in moves:
            self._held[move.slot] = self._name(move)
        self._count("saved", len(moves))

    def _name(self, move: BlockMove) -> tuple[str, bytes]:
        return self._moves.epoch, move.digest

    def _count(self, what: str, num_blocks: int) -> None:
        self._counters.add(f"blocks_{what}", num_blocks)
        self._counters.add(f"bytes_{what}", num_blocks * self._copies.bytes_per_block)
