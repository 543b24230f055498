"""KV blocks in host memory: what the device's KV cache has no room for any more is still found there."""

from __future__ import annotations

import logging
from typing import ClassVar

from fleetfoot.kv_transfer.base.connector import KVConnector, SchedulerConnector, TransferContext, WorkerConnector
from fleetfoot.kv_transfer.base.layouts import BLOCK_CONTIGUOUS_HND, CPU_BYTES
from fleetfoot.kv_transfer.base.settings import ConnectorSettings, tell_of_unused_fields

logger = logging.getLogger(__name__)

NUM_BLOCKS = "num_cpu_blocks"


def num_host_blocks(context: TransferContext) -> int:
    """How many blocks the host's tier holds; each rank holds its own part of every one.

    ``cpu_bytes_to_use`` is for all ranks together; ``num_cpu_blocks`` says it in blocks.

    Raises:
        ValueError, TypeError: neither is given, or both, or there is no room for a single block.
    """
    settings = ConnectorSettings(context.config)
    num_bytes = settings.integer(CPU_BYTES, None)
    num_blocks = settings.integer(NUM_BLOCKS, None)
    settings.check_all_read()
    if (num_bytes is None) == (num_blocks is None):
        raise ValueError(
            f"kv_connector_extra_config of {context.config.kv_connector}: {CPU_BYTES} is {num_bytes} and {NUM_BLOCKS} "
            f"is {num_blocks}; give one of them, or leave kv_transfer_config out and set kv_offloading_size (GiB)"
        )
    if num_blocks is not None:
        return num_blocks
    assert num_bytes is not None
    if num_bytes < context.bytes_per_block:
        raise ValueError(
            f"{num_bytes:,} bytes of host memory for KV (kv_offloading_size or {CPU_BYTES}) do not hold a single block "
            f"of {context.bytes_per_block:,} bytes; give more"
        )
    return num_bytes // context.bytes_per_block


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
