"""What connectors are told of their engine, from its plan. No torch: it is also asked where nothing is started."""

from __future__ import annotations

from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.config.model import DTYPE_BYTES
from fleetfoot.kv_transfer.base.connector import TransferContext
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.records.kv_layout import LayerGroup


def transfer_context(
    plan: EnginePlan, config: KVTransferConfig, *, block_size: int, rank: int = 0, fingerprint: str = ""
) -> TransferContext:
    """The context of one side of the connector that ``config`` names.

    Args:
        block_size: tokens in a block.
        rank: of a worker; the scheduler's side has 0.
        fingerprint: `fleetfoot.plan.fingerprint.engine_fingerprint`, for which the weights are read; empty where
            settings are only checked.
    """
    tensor, pipeline = plan.config.tensor_parallel_size, plan.config.pipeline_parallel_size
    return TransferContext(
        config=config,
        block_size=block_size,
        fingerprint=fingerprint,
        engine_id=config.engine_id or plan.engine_id,
        num_ranks=tensor * pipeline,
        rank=rank,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        bytes_per_block=_bytes_per_block(plan, block_size),
        dtype=plan.dtype,
    )


def _bytes_per_block(plan: EnginePlan, block_size: int) -> int:
    """K and V of all layers on all ranks. Ranks that outnumber the KV heads each hold one."""
    model, ranks = plan.model, plan.config.tensor_parallel_size
    groups = LayerGroup(model.num_layers, model.num_kv_heads, model.head_dim), *plan.drafter.layer_groups
    elements = sum(group.num_layers * max(group.num_kv_heads, ranks) * group.head_dim for group in groups)
    return 2 * elements * block_size * DTYPE_BYTES[plan.dtype]
