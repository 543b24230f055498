"""The settings of the host memory connector."""

from __future__ import annotations

from fleetfoot.kv_transfer.base.connector import TransferContext
from fleetfoot.kv_transfer.base.layouts import CPU_BYTES
from fleetfoot.kv_transfer.base.settings import ConnectorSettings

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
