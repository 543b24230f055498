"""A worker's side of the filesystem connector."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from fleetfoot.kv_transfer.base.block_copies import BlockCopies, block_copies
from fleetfoot.kv_transfer.base.connector import TransferContext, WorkerConnector
from fleetfoot.kv_transfer.base.counters import TransferCounters
from fleetfoot.kv_transfer.base.host_memory import HostMemory
from fleetfoot.kv_transfer.base.io_threads import IOThreads, Jobs
from fleetfoot.kv_transfer.blockstore.block_file import BlockFileError, BlockFormat, read_block, write_block
from fleetfoot.kv_transfer.blockstore.block_moves import NO_MOVES, BlockMove, moves_of
from fleetfoot.kv_transfer.blockstore.file_loads import FileLoads
from fleetfoot.kv_transfer.blockstore.file_saves import FileSaves
from fleetfoot.kv_transfer.blockstore.filesystem_settings import IN_FLIGHT, BlockFolder, FilesystemSettings, file_name
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.kv_output import KVConnectorOutput

SHUTDOWN_SECONDS = 10.0
"""How long the end waits for files that are still being written."""
READ_SHARE = 4
"""Reads may wait for memory, and writes may not, so reads get a part of what writes get."""


class FilesystemWorker(WorkerConnector):
    """Copies blocks out within the step and writes them behind it; reads files beside steps and copies them in.

    Args:
        readers, writers: threads; tests bring their own.
    """

    def __init__(
        self,
        context: TransferContext,
        settings: FilesystemSettings,
        readers: Jobs | None = None,
        writers: Jobs | None = None,
    ) -> None:
        self._context = context
        self._settings = settings
        self._folder = BlockFolder.of(context, settings)
        self._readers = readers or IOThreads("kv-read", settings.num_threads)
        self._writers = writers or IOThreads("kv-write", settings.num_threads)
        self._counters = TransferCounters()
        self._moves = NO_MOVES
        self._bad_files: set[str] = set()  # found to be so, and to be written over

    def register_kv_caches(self, kv_caches: Sequence[torch.Tensor], layout: KVLayout) -> None:
        self._layout = layout
        self._copies: BlockCopies = block_copies(kv_caches, layout, shares_blocks=self._context.shares_blocks)
        config, is_gpu = self._context.config, kv_caches[0].device.type != "cpu"
        row, in_flight = layout.bytes_per_block, self._settings.max_bytes_in_flight
        num_reads, num_writes = max(1, in_flight // READ_SHARE // row), max(1, in_flight // row)
        self._load_memory = HostMemory(num_reads if config.can_load else 0, row, pinned=is_gpu, asked_by=IN_FLIGHT)
        self._save_memory = HostMemory(num_writes if config.can_save else 0, row, pinned=is_gpu, asked_by=IN_FLIGHT)
        self._loads = FileLoads(
            self._copies,
            self._load_memory,
            self._readers,
            self._read,
            self._counters,
            timeout=config.kv_transfer_timeout,
            clock=self._context.clock or time.monotonic,
        )
        self._saves = FileSaves(self._copies, self._save_memory, self._writers, self._write, self._counters)

    def bind_connector_metadata(self, metadata: object | None) -> None:
        self._moves = moves_of(metadata)

    def flush(self) -> None:
        if self._moves.flushes:
            self._saves.begin(self._moves.flushes, self._moves.epoch)
        self._copies.fence(self._moves.reused)

    def start_load_kv(self) -> None:
        for order in self._moves.loads:
            self._loads.begin(order, self._moves.epoch)

    def save_kv(self) -> None:
        if self._moves.saves:
            self._saves.begin(self._moves.saves, self._moves.epoch)

    def wait_for_save(self) -> None:
        """Full blocks are written to by their next owners alone, and these wait: see `flush`."""

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        output = KVConnectorOutput()
        self._saves.get_finished()
        self._loads.get_finished(finished_req_ids, output)
        output.counters = self._counters.take()
        return output

    def clear_connector_metadata(self) -> None:
        self._moves = NO_MOVES

    def wait_for_progress(self) -> None:
        self._loads.wait()

    def shutdown(self) -> None:
        """Blocks that were copied are still written, within `SHUTDOWN_SECONDS`."""
        has_ended = self._readers.stop(SHUTDOWN_SECONDS, finish=False)
        has_ended &= self._writers.stop(SHUTDOWN_SECONDS, finish=True)
        if hasattr(self, "_copies"):
            self._saves.get_finished()  # a short run ends before it hears of a disk that took nothing
            self._copies.close()
            if has_ended:  # else a thread may still be reading its memory, which then stays
                self._load_memory.close()
                self._save_memory.close()

    def _path(self, move: BlockMove, epoch: str) -> str:
        return os.path.join(self._folder.of_rank(epoch, self._context.rank), file_name(move.digest))

    def _format(self, epoch: str) -> BlockFormat:
        return BlockFormat(epoch, self._layout.fingerprint, self._layout.bytes_per_block)

    def _read(self, move: BlockMove, epoch: str, into: memoryview) -> None:
        path = self._path(move, epoch)
        try:
            read_block(Path(path), move.digest, into, self._format(epoch))
        except BlockFileError:
            if self._context.config.can_save:
                self._bad_files.add(path)
            raise

    def _write(self, move: BlockMove, epoch: str, payload: memoryview) -> bool:
        path = self._path(move, epoch)
        if path not in self._bad_files and os.path.exists(path):
            return False
        write_block(Path(path), move.digest, payload, self._format(epoch))
        self._bad_files.discard(path)
        return True
