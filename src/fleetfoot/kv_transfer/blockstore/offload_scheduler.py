"""The scheduler's side of host offload: the index of what lies in host memory. No torch."""

from __future__ import annotations

from typing import Any

from fleetfoot.kv_transfer.base.connector import TransferContext
from fleetfoot.kv_transfer.blockstore.block_moves import BlockMove, BlockMoves, LoadOrder
from fleetfoot.kv_transfer.blockstore.slot_index import SlotIndex
from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.kv_output import KVConnectorOutput
from fleetfoot.records.request import Request
from fleetfoot.records.step import SchedulerOutput


class OffloadScheduler(SchedulerConnector):
    """Every block that fills is stored, each only once; the least recently used go.

    Workers copy in the order in which they are told, so a slot may be given to another block while it is still being
    written, and read in any later step. Within a step loads come before stores, so what a step stores is not there
    before its metadata is made: until then its slot is pinned. Slots of loads are pinned until these have ended.

    Args:
        num_slots: blocks that the host's memory holds.
    """

    def __init__(self, context: TransferContext, num_slots: int) -> None:
        self._block_size = context.block_size
        self._can_load = context.config.can_load
        self._can_save = context.config.can_save
        self.index = SlotIndex(num_slots)
        self._epoch = 0
        self._moves = BlockMoves(epoch=str(self._epoch))
        self._coming: set[bytes] = set()  # stores of the metadata that is to be made next
        self._loading: dict[str, list[LoadOrder]] = {}  # an id may come again before its first load has ended

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        if not self._can_load:
            return 0
        first = num_computed_tokens // self._block_size
        num_usable = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        last = first
        while last < num_usable and self._is_there(request.block_hashes[last]):
            last += 1
        return (last - first) * self._block_size

    def update_state_after_alloc(self, request: Request, num_computed_tokens: int, num_external_tokens: int) -> None:
        first = num_computed_tokens // self._block_size
        last = first + num_external_tokens // self._block_size
        moves = []
        for block_id, digest in zip(request.block_ids[first:last], request.block_hashes[first:last], strict=True):
            slot = self.index.slot(digest)
            if slot is None:
                raise RuntimeError(f"request {request.request_id!r} is to load a block that was not offered to it")
            self.index.pin(slot)
            moves.append(BlockMove(block_id, digest, slot))
        self._touch(request.block_hashes[:last])
        order = LoadOrder(request.request_id, moves)
        self._loading.setdefault(request.request_id, []).append(order)
        self._moves.loads.append(order)

    def blocks_filled(self, request: Request, first: int, last: int, *, by_this_step: bool) -> None:
        if not self._can_save:
            return
        going_out = self._moves.saves if by_this_step else self._moves.flushes
        for index in range(first, last):
            digest = request.block_hashes[index]
            if self.index.slot(digest) is not None:
                continue
            slot = self.index.add(digest)
            if slot is None:
                return  # all that there is, is on its way: this is a cache, and may forget
            self.index.pin(slot)
            self._coming.add(digest)
            going_out.append(BlockMove(request.block_ids[index], digest, slot))

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self._touch(request.block_hashes)
        return False, None  # what is stored of its blocks is copied before anything can overwrite them

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> BlockMoves | None:
        if self._can_save:
            self._moves.add_new_owners(scheduler_output, self._block_size)
        moves, self._moves = self._moves, BlockMoves(epoch=str(self._epoch))
        for move in (*moves.flushes, *moves.saves):
            self.index.unpin(move.slot)
        self._coming.clear()
        return None if moves.is_empty else moves

    def blocks_reused(self, block_ids: list[int]) -> None:
        if self._can_save:
            self._moves.reused += block_ids

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        for request_id in output.loaded:
            for move in self._take_load(request_id):
                self.index.unpin(move.slot)
        for request_id in output.failed:
            for move in self._take_load(request_id):
                if self.index.slot(move.digest) == move.slot:
                    self.index.remove(move.digest)
                self.index.unpin(move.slot)

    @property
    def has_pending(self) -> bool:
        return not self._moves.is_empty

    def reset_cache(self) -> None:
        for move in (*self._moves.flushes, *self._moves.saves):
            self.index.unpin(move.slot)
        self._coming.clear()
        self.index.clear()
        self._epoch += 1
        # loads that nobody has been told of yet will find that what they want is of another epoch, and fail
        self._moves = BlockMoves(epoch=str(self._epoch), loads=self._moves.loads)

    def _is_there(self, digest: bytes) -> bool:
        return self.index.slot(digest) is not None and digest not in self._coming

    def _take_load(self, request_id: str) -> list[BlockMove]:
        """The oldest load of that id; nothing if another connector had loaded it."""
        orders = self._loading.get(request_id)
        if orders is None:
            return []
        moves = orders.pop(0).moves
        if not orders:
            del self._loading[request_id]
        return moves

    def _touch(self, digests: list[bytes]) -> None:
        """The beginning of a prefix last, so that it stays longest: without it the rest is worth nothing."""
        self.index.touch(reversed(digests))
