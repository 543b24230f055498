"""KV blocks in files of a shared folder: engines with the same model find what another, or an earlier one, computed."""

from __future__ import annotations

from typing import ClassVar

from fleetfoot.kv_transfer.base.connector import KVConnector, TransferContext, WorkerConnector
from fleetfoot.kv_transfer.base.layouts import BLOCK_CONTIGUOUS_HND
from fleetfoot.kv_transfer.base.settings import tell_of_unused_fields
from fleetfoot.kv_transfer.blockstore.filesystem_settings import FilesystemSettings
from fleetfoot.records.kv_connector import SchedulerConnector


class SharedStorageConnector(KVConnector):
    """Also known as ``FilesystemConnector``. Settings: `FilesystemSettings`."""

    accepted_kv_layouts: ClassVar[frozenset[str]] = frozenset({BLOCK_CONTIGUOUS_HND})

    @staticmethod
    def check_settings(context: TransferContext) -> None:
        FilesystemSettings.of(context.config)
        tell_of_unused_fields(context.config)

    @staticmethod
    def scheduler_side(context: TransferContext) -> SchedulerConnector:
        from fleetfoot.kv_transfer.blockstore.filesystem_scheduler import FilesystemScheduler

        return FilesystemScheduler(context, FilesystemSettings.of(context.config))

    @staticmethod
    def worker_side(context: TransferContext) -> WorkerConnector:
        from fleetfoot.kv_transfer.blockstore.filesystem_worker import FilesystemWorker

        return FilesystemWorker(context, FilesystemSettings.of(context.config))
