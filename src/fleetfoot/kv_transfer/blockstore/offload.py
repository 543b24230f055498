"""KV blocks in host memory: what the device's KV cache has no room for any more is still found there."""

from __future__ import annotations

import logging
from typing import ClassVar

from fleetfoot.kv_transfer.base.connector import KVConnector, TransferContext, WorkerConnector
from fleetfoot.kv_transfer.base.layouts import BLOCK_CONTIGUOUS_HND
from fleetfoot.kv_transfer.base.settings import tell_of_unused_fields
from fleetfoot.kv_transfer.blockstore.offload_settings import num_host_blocks
from fleetfoot.records.kv_connector import SchedulerConnector

logger = logging.getLogger(__name__)


class OffloadingConnector(KVConnector):
    """What ``kv_offloading_size`` implies. Settings: see `num_host_blocks`."""

    accepted_kv_layouts: ClassVar[frozenset[str]] = frozenset({BLOCK_CONTIGUOUS_HND})

    @staticmethod
    def check_settings(context: TransferContext) -> None:
        num_host_blocks(context)
        tell_of_unused_fields(context.config)
        role = context.config.kv_role
        if role != "kv_both":
            lacks = "loads" if context.config.can_save else "saves"
            logger.warning(
                "kv_role of %s is %r: it never %s, so its memory serves nobody; set kv_role to 'kv_both'",
                context.config.kv_connector,
                role,
                lacks,
            )

    @staticmethod
    def scheduler_side(context: TransferContext) -> SchedulerConnector:
        from fleetfoot.kv_transfer.blockstore.offload_scheduler import OffloadScheduler

        return OffloadScheduler(context, num_host_blocks(context))

    @staticmethod
    def worker_side(context: TransferContext) -> WorkerConnector:
        from fleetfoot.kv_transfer.blockstore.offload_worker import OffloadWorker

        return OffloadWorker(context, num_host_blocks(context))
