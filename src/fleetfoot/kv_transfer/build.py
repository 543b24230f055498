"""The KV connector of an engine, or none, from its plan: the scheduler's side, and each worker's."""

from __future__ import annotations

from fleetfoot.attention.kv_layout import KVLayout, LayerGroup
from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.connector import NoSchedulerConnector, SchedulerConnector, TransferContext
from fleetfoot.kv_transfer.fingerprint import engine_fingerprint
from fleetfoot.kv_transfer.registry import find_connector
from fleetfoot.plan.oracle import active_connector
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.runner.step_connector import NoConnector, StepConnector


def scheduler_connector(plan: EnginePlan, layout: KVLayout) -> SchedulerConnector:
    """The scheduler's side; `NoSchedulerConnector` where no connector is active.

    Args:
        layout: of the KV cache, as the workers have it.

    Raises:
        ValueError: there is no such connector, or its settings do not fit.
    """
    config = active_connector(plan.config)
    if config is None:
        return NoSchedulerConnector()
    return find_connector(config).scheduler_side(_context(plan, config, layout.block_size, rank=0))


def worker_connector(plan: EnginePlan, rank: int) -> StepConnector:
    """The side of the worker ``rank`` (0 .. tensor_parallel_size * pipeline_parallel_size - 1), to be called in its
    steps; `NoConnector` where no connector is active.

    Raises:
        ValueError: there is no such connector, or its settings do not fit.
    """
    config = active_connector(plan.config)
    if config is None:
        return NoConnector()
    return StepConnector(find_connector(config).worker_side(_context(plan, config, plan.config.block_size, rank)))


def load_failure_policy(plan: EnginePlan) -> str:
    """``recompute`` or ``fail``: what becomes of a request whose KV cannot be loaded."""
    config = active_connector(plan.config)
    return "recompute" if config is None else config.kv_load_failure_policy


def _context(plan: EnginePlan, config: KVTransferConfig, block_size: int, rank: int) -> TransferContext:
    tensor, pipeline = plan.config.tensor_parallel_size, plan.config.pipeline_parallel_size
    return TransferContext(
        config=config,
        block_size=block_size,
        fingerprint=engine_fingerprint(plan),
        engine_id=config.engine_id or plan.engine_id,
        num_ranks=tensor * pipeline,
        rank=rank,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        bytes_per_block=_bytes_per_block(plan, block_size),
        dtype=plan.dtype,
    )


def _bytes_per_block(plan: EnginePlan, block_size: int) -> int:
    """Of all layers on all ranks. Ranks that outnumber the KV heads each hold one."""
    model, ranks = plan.model, plan.config.tensor_parallel_size
    groups = (LayerGroup(model.num_layers, model.num_kv_heads, model.head_dim), *plan.drafter.layer_groups)
    groups = tuple(LayerGroup(group.num_layers, max(group.num_kv_heads, ranks), group.head_dim) for group in groups)
    return KVLayout(1, block_size, plan.dtype, groups).bytes_per_block
