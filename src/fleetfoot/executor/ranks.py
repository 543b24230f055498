"""Which worker does what."""

from __future__ import annotations

from fleetfoot.config.engine import EngineConfig
from fleetfoot.plan.plan import EnginePlan


def output_rank(config: EngineConfig) -> int:
    """Whose tokens count: the first rank of the tensor group that is last in the pipeline; the others of that group
    have the same."""
    return (config.pipeline_parallel_size - 1) * config.tensor_parallel_size


def answering_ranks(plan: EnginePlan) -> range | tuple[int]:
    """The ranks that answer each step: all if there is a KV connector, from which each rank reports."""
    return (output_rank(plan.config),) if plan.connector is None else range(plan.config.world_size)


def node_ranks(config: EngineConfig) -> range:
    """The ranks of this node."""
    first = config.node_rank * config.local_world_size
    return range(first, first + config.local_world_size)
