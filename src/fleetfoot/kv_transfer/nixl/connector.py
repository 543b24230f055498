"""KV from another engine: prefill on one, decode on another. The decode engine reads the blocks itself."""

from __future__ import annotations

from typing import ClassVar

from fleetfoot.kv_transfer.base.connector import (
    BLOCK_CONTIGUOUS_HND,
    KVConnector,
    TransferContext,
    WorkerConnector,
    warn_of_unused_fields,
)
from fleetfoot.kv_transfer.nixl.settings import NixlSettings
from fleetfoot.records.kv_connector import SchedulerConnector


class NixlConnector(KVConnector):
    """Settings: `NixlSettings`."""

    accepted_kv_layouts: ClassVar[frozenset[str]] = frozenset({BLOCK_CONTIGUOUS_HND})

    @staticmethod
    def check_settings(context: TransferContext) -> None:
        NixlSettings.of(context.config, num_ranks=context.num_ranks)
        warn_of_unused_fields(context.config)

    @staticmethod
    def scheduler_side(context: TransferContext) -> SchedulerConnector:
        from fleetfoot.kv_transfer.nixl.scheduler import NixlScheduler

        return NixlScheduler(context)

    @staticmethod
    def worker_side(context: TransferContext) -> WorkerConnector:
        from fleetfoot.kv_transfer.nixl.worker import NixlWorker

        return NixlWorker(context, NixlSettings.of(context.config, num_ranks=context.num_ranks))
