"""The block store connectors and their settings: KV blocks in files, or in host memory. No torch."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.base.connector import (
    BLOCK_CONTIGUOUS_HND,
    MAX_THREADS,
    ConnectorSettings,
    KVConnector,
    SchedulerConnector,
    TransferContext,
    WorkerConnector,
    warn_of_unused_fields,
)
from fleetfoot.kv_transfer.base.registry import CPU_BYTES
from fleetfoot.kv_transfer.blockstore.block_file import BlockFolder
from fleetfoot.kv_transfer.blockstore.scheduler import BlockStoreScheduler, FileIndex, HostIndex

logger = logging.getLogger(__name__)

IN_FLIGHT = "max_bytes_in_flight"
DEFAULT_BYTES_IN_FLIGHT = 1 << 30
DEFAULT_NUM_THREADS = 4
NUM_BLOCKS = "num_cpu_blocks"


@dataclass(frozen=True, slots=True)
class FilesystemSettings:
    """``kv_connector_extra_config`` of `SharedStorageConnector`."""

    path: Path
    """``shared_storage_path``: the folder, created when the first block is saved."""
    max_bytes_in_flight: int
    """Bytes of host memory on each rank for blocks that are still to be written, and a quarter of it in addition for
    blocks that are being read. A block that finds no room is not saved."""
    num_threads: int
    """For reading, and as many for writing."""

    @classmethod
    def of(cls, config: KVTransferConfig) -> FilesystemSettings:
        """
        Raises:
            ValueError, TypeError: a setting is missing, unknown or invalid.
        """
        settings = ConnectorSettings(config)
        path = settings.text("shared_storage_path")
        num_bytes = settings.integer(IN_FLIGHT, DEFAULT_BYTES_IN_FLIGHT)
        num_threads = settings.integer("num_threads", DEFAULT_NUM_THREADS, maximum=MAX_THREADS)
        settings.check_all_read()
        if path is None:
            raise settings.error("shared_storage_path", None, "the folder in which engines share their KV blocks")
        return cls(_folder(settings, path), num_bytes, num_threads)


def _folder(settings: ConnectorSettings, path: str) -> Path:
    """The folder at ``path``, which may not exist yet; ValueError if it cannot be created."""
    expected = "a folder, or a path at which one can be made"
    try:
        folder = Path(path).expanduser()
        if "\0" in path:
            raise settings.error("shared_storage_path", path, f"{expected}; paths have no null characters")
        existing = next((part for part in (folder, *folder.parents) if part.exists()), folder)
        if existing.exists() and not existing.is_dir():
            raise settings.error("shared_storage_path", path, f"{expected}; {existing} is a file")
    except (OSError, RuntimeError) as error:  # RuntimeError: the home directory of ~ is unknown
        raise settings.error("shared_storage_path", path, f"{expected} ({error})") from error
    return folder


class SharedStorageConnector(KVConnector):
    """KV blocks in files of a shared folder, for later runs and other engines with the same model.

    Also named ``FilesystemConnector``. Settings: `FilesystemSettings`.
    """

    accepted_kv_layouts: ClassVar[frozenset[str]] = frozenset({BLOCK_CONTIGUOUS_HND})

    @staticmethod
    def check_settings(context: TransferContext) -> None:
        FilesystemSettings.of(context.config)
        warn_of_unused_fields(context.config)

    @staticmethod
    def scheduler_side(context: TransferContext) -> SchedulerConnector:
        folder = BlockFolder.of(context, FilesystemSettings.of(context.config).path)
        return BlockStoreScheduler(context, FileIndex(context, folder))

    @staticmethod
    def worker_side(context: TransferContext) -> WorkerConnector:
        from fleetfoot.kv_transfer.blockstore.worker import BlockStoreWorker, FileStore

        settings = FilesystemSettings.of(context.config)
        folder = BlockFolder.of(context, settings.path)
        store = FileStore(context, folder, settings.max_bytes_in_flight, settings.num_threads, asked_by=IN_FLIGHT)
        return BlockStoreWorker(context, store)


def num_host_blocks(context: TransferContext) -> int:
    """How many blocks host memory holds; each rank holds its part of every block.

    ``cpu_bytes_to_use`` is the size for all ranks together; ``num_cpu_blocks`` is the size in blocks.

    Raises:
        ValueError, TypeError: none or both are given, or a block does not fit.
    """
    settings = ConnectorSettings(context.config)
    num_bytes = settings.integer(CPU_BYTES, None)
    num_blocks = settings.integer(NUM_BLOCKS, None)
    settings.check_all_read()
    if num_bytes is None and num_blocks is not None:
        return num_blocks
    if num_bytes is None or num_blocks is not None:
        raise ValueError(
            f"kv_connector_extra_config of {context.config.kv_connector}: {CPU_BYTES} is {num_bytes} and {NUM_BLOCKS} "
            f"is {num_blocks}; give one of them, or leave kv_transfer_config out and set kv_offloading_size (GiB)"
        )
    if num_bytes < context.bytes_per_block:
        raise ValueError(
            f"{num_bytes:,} bytes of host memory for KV (kv_offloading_size or {CPU_BYTES}) do not hold a single block "
            f"of {context.bytes_per_block:,} bytes; give more"
        )
    return num_bytes // context.bytes_per_block


class OffloadingConnector(KVConnector):
    """KV blocks in host memory, for prefixes that were evicted from the device's KV cache.

    ``kv_offloading_size`` implies it. Settings: see `num_host_blocks`.
    """

    accepted_kv_layouts: ClassVar[frozenset[str]] = frozenset({BLOCK_CONTIGUOUS_HND})

    @staticmethod
    def check_settings(context: TransferContext) -> None:
        num_host_blocks(context)
        warn_of_unused_fields(context.config)
        if context.config.kv_role != "kv_both":
            logger.warning(
                "kv_role of %s is %r: it never %s, so its memory is not used; set kv_role to 'kv_both'",
                context.config.kv_connector,
                context.config.kv_role,
                "loads" if context.config.can_save else "saves",
            )

    @staticmethod
    def scheduler_side(context: TransferContext) -> SchedulerConnector:
        return BlockStoreScheduler(context, HostIndex(num_host_blocks(context)))

    @staticmethod
    def worker_side(context: TransferContext) -> WorkerConnector:
        from fleetfoot.kv_transfer.blockstore.worker import BlockStoreWorker, HostStore

        asked_by = f"kv_offloading_size, {CPU_BYTES} or {NUM_BLOCKS}"
        return BlockStoreWorker(context, HostStore(num_host_blocks(context), asked_by))
