"""The scheduler's side of the filesystem connector: which blocks there are files of. No torch."""

from __future__ import annotations

import os
import secrets
from typing import Any

from fleetfoot.kv_transfer.block_moves import BlockMove, BlockMoves, LoadOrder
from fleetfoot.kv_transfer.connector import SchedulerConnector, TransferContext
from fleetfoot.kv_transfer.filesystem import BlockFolder, FilesystemSettings, file_name
from fleetfoot.kv_transfer.output import KVConnectorOutput
from fleetfoot.scheduler.output import SchedulerOutput
from fleetfoot.scheduler.request import Request


class FilesystemScheduler(SchedulerConnector):
    """Looks for files when a request is to be admitted; whether they hold what they should is found when they are read.

    A block is there once every rank's file is.
    """

    def __init__(self, context: TransferContext, settings: FilesystemSettings) -> None:
        self._context = context
        self._config = context.config
        self._folder = BlockFolder.of(context, settings)
        self._moves = BlockMoves()
        self._num_found: dict[str, int] = {}  # request -> its first blocks that were seen, so that nobody looks twice
        self._set_epoch(context.fingerprint)

    def num_matched_tokens(self, request: Request, num_local: int) -> int:
        if not self._config.can_load:
            return 0
        block_size = self._context.block_size
        num_usable = min((request.num_tokens - 1) // block_size, len(request.block_hashes))
        num_blocks = max(num_local // block_size, self._num_found.get(request.request_id, 0))
        while num_blocks < num_usable and self._is_there(request.block_hashes[num_blocks]):
            num_blocks += 1
        self._num_found[request.request_id] = num_blocks
        return max(0, min(num_blocks, num_usable) * block_size - num_local)

    def start_load(self, request: Request, num_local: int, num_matched: int) -> None:
        first, last = num_local // self._context.block_size, (num_local + num_matched) // self._context.block_size
        self._num_found.pop(request.request_id, None)
        self._moves.loads.append(LoadOrder(request.request_id, _moves(request, first, last)))

    def blocks_filled(self, request: Request, first: int, last: int, *, by_this_step: bool) -> None:
        if self._config.can_save:
            going_out = self._moves.saves if by_this_step else self._moves.flushes
            going_out += _moves(request, first, last)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        return False, None  # what is saved of its blocks is copied before anything can overwrite them

    def build_metadata(self, scheduler_output: SchedulerOutput) -> BlockMoves | None:
        for request_id in scheduler_output.finished_req_ids:
            self._num_found.pop(request_id, None)
        if self._config.can_save:
            self._moves.add_new_owners(scheduler_output, self._context.block_size)
        moves, self._moves = self._moves, BlockMoves(self._moves.epoch)
        return None if moves.is_empty else moves

    def blocks_reused(self, block_ids: list[int]) -> None:
        if self._config.can_save:
            self._moves.reused += block_ids

    def update(self, output: KVConnectorOutput) -> None:
        pass

    @property
    def has_pending(self) -> bool:
        return not self._moves.is_empty

    def forget(self) -> None:
        """What other weights compute has a name that no other engine knows, nor this one's next run."""
        self._num_found.clear()
        self._moves.saves.clear()
        self._moves.flushes.clear()
        self._set_epoch(f"{self._context.fingerprint}-{secrets.token_hex(8)}")

    def _set_epoch(self, epoch: str) -> None:
        self._moves.epoch = epoch
        self._folders = [self._folder.of_rank(epoch, rank) for rank in range(self._context.num_ranks)]

    def _is_there(self, digest: bytes) -> bool:
        name = file_name(digest)
        return all(os.path.exists(os.path.join(folder, name)) for folder in self._folders)


def _moves(request: Request, first: int, last: int) -> list[BlockMove]:
    pairs = zip(request.block_ids[first:last], request.block_hashes[first:last], strict=True)
    return [BlockMove(block_id, digest) for block_id, digest in pairs]
