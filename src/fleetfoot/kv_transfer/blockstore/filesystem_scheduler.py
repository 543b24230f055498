"""The scheduler's side of the filesystem connector: which blocks there are files of. No torch."""

from __future__ import annotations

import os
import secrets
from typing import Any

from fleetfoot.kv_transfer.base.connector import TransferContext
from fleetfoot.kv_transfer.blockstore.block_moves import BlockMove, BlockMoves, LoadOrder
from fleetfoot.kv_transfer.blockstore.filesystem_settings import BlockFolder, FilesystemSettings, file_name
from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.kv_output import KVConnectorOutput
from fleetfoot.records.request import Request
from fleetfoot.records.step import SchedulerOutput


class FilesystemScheduler(SchedulerConnector):
    """Looks for files when a request is to be admitted; whether they hold what they should is found when they are read.

    A block is there once every rank's file is. A file that could not be read is left alone until it is another one: it
    must not make every request fail that begins with these tokens.
    """

    def __init__(self, context: TransferContext, settings: FilesystemSettings) -> None:
        self._context = context
        self._config = context.config
        self._folder = BlockFolder.of(context, settings)
        self._moves = BlockMoves()
        self._found: dict[str, range] = {}  # request -> those of its blocks whose files were seen: nobody looks twice
        self._bad: dict[bytes, list[_FileIdentity]] = {}  # block -> its files as they were when it could not be loaded
        self._set_epoch(context.fingerprint)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        if not self._config.can_load:
            return 0
        block_size = self._context.block_size
        num_usable = min((request.num_tokens - 1) // block_size, len(request.block_hashes))
        first = num_computed_tokens // block_size
        found = self._found.get(request.request_id, range(first, first))
        if not found.start <= first <= found.stop:  # what was in the prefix cache, and has left it, may have no files
            found = range(first, first)
        last = found.stop
        while last < num_usable and self._is_there(request.block_hashes[last]):
            last += 1
        self._found[request.request_id] = range(found.start, last)
        return max(0, min(last, num_usable) - first) * block_size

    def update_state_after_alloc(self, request: Request, num_computed_tokens: int, num_external_tokens: int) -> None:
        first = num_computed_tokens // self._context.block_size
        last = first + num_external_tokens // self._context.block_size
        self._found.pop(request.request_id, None)
        self._moves.loads.append(LoadOrder(request.request_id, _moves(request, first, last)))

    def blocks_filled(self, request: Request, first: int, last: int, *, by_this_step: bool) -> None:
        if self._config.can_save:
            going_out = self._moves.saves if by_this_step else self._moves.flushes
            going_out += _moves(request, first, last)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        return False, None  # what is saved of its blocks is copied before anything can overwrite them

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> BlockMoves | None:
        for request_id in scheduler_output.finished_req_ids:
            self._found.pop(request_id, None)
        if self._config.can_save:
            self._moves.add_new_owners(scheduler_output, self._context.block_size)
        moves, self._moves = self._moves, BlockMoves(self._moves.epoch)
        return None if moves.is_empty else moves

    def blocks_reused(self, block_ids: list[int]) -> None:
        if self._config.can_save:
            self._moves.reused += block_ids

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        for failure in output.failed.values():
            if failure.block is not None:
                self._bad[failure.block] = self._identities(failure.block)
                self._found.clear()

    @property
    def has_pending(self) -> bool:
        return not self._moves.is_empty

    def reset_cache(self) -> None:
        """What other weights compute has a name that no other engine knows, nor this one's next run."""
        self._found.clear()
        self._bad.clear()
        self._moves.saves.clear()
        self._moves.flushes.clear()
        self._set_epoch(f"{self._context.fingerprint}-{secrets.token_hex(8)}")

    def _set_epoch(self, epoch: str) -> None:
        self._moves.epoch = epoch
        self._folders = [self._folder.of_rank(epoch, rank) for rank in range(self._context.num_ranks)]

    def _is_there(self, digest: bytes) -> bool:
        if digest in self._bad:
            if self._identities(digest) == self._bad[digest]:
                return False
            del self._bad[digest]
        return all(os.path.exists(path) for path in self._paths(digest))

    def _paths(self, digest: bytes) -> list[str]:
        """The block's files, one of each rank."""
        name = file_name(digest)
        return [os.path.join(folder, name) for folder in self._folders]

    def _identities(self, digest: bytes) -> list[_FileIdentity]:
        return [_identity(path) for path in self._paths(digest)]


_FileIdentity = tuple[int, int] | None
"""Inode and time of change; None: there is no such file."""


def _identity(path: str) -> _FileIdentity:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _moves(request: Request, first: int, last: int) -> list[BlockMove]:
    pairs = zip(request.block_ids[first:last], request.block_hashes[first:last], strict=True)
    return [BlockMove(block_id, digest) for block_id, digest in pairs]
