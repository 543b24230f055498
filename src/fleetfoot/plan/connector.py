"""The KV connector of an engine, or none, from its plan: the scheduler's side, and each worker's."""

from __future__ import annotations

from fleetfoot.kv_transfer.base.registry import find_connector
from fleetfoot.plan.connector_context import transfer_context
from fleetfoot.plan.fingerprint import engine_fingerprint
from fleetfoot.plan.oracle import active_connector
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.records.kv_connector import NoSchedulerConnector, SchedulerConnector
from fleetfoot.records.kv_layout import KVLayout
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
    connector, fingerprint = find_connector(config), engine_fingerprint(plan)
    context = transfer_context(plan, config, block_size=layout.block_size, fingerprint=fingerprint)
    return connector.scheduler_side(context)


def worker_connector(plan: EnginePlan, rank: int) -> StepConnector:
    """The side of the worker ``rank`` (0 .. tensor_parallel_size * pipeline_parallel_size - 1), to be called in its
    steps; `NoConnector` where no connector is active.

    Raises:
        ValueError: there is no such connector, or its settings do not fit.
    """
    config = active_connector(plan.config)
    if config is None:
        return NoConnector()
    connector, fingerprint = find_connector(config), engine_fingerprint(plan)
    context = transfer_context(plan, config, block_size=plan.config.block_size, rank=rank, fingerprint=fingerprint)
    return StepConnector(connector.worker_side(context))


def load_failure_policy(plan: EnginePlan) -> str:
    """``recompute`` or ``fail``: what becomes of a request whose KV cannot be loaded."""
    config = active_connector(plan.config)
    return "recompute" if config is None else config.kv_load_failure_policy
