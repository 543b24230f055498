"""An executor for a plan: in this process if one worker is enough, else with a process for each rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetfoot.config.engine import EngineConfig
from fleetfoot.executor.in_process import InProcessExecutor
from fleetfoot.executor.worker import Worker
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.records.kv_layout import KVLayout

if TYPE_CHECKING:
    from fleetfoot.executor.protocol import Executor


def start_executor(plan: EnginePlan) -> tuple[Executor, KVLayout]:
    """Load the model and take the KV cache's memory, in this process or in others.

    Returns:
        The executor, and the layout of the KV cache on rank 0; all ranks have equally many blocks.

    Raises:
        ValueError: there are fewer GPUs than ranks, this is not the first node, the nodes' settings differ, or what a
            worker raised when it started: there is no memory, or the weights do not fit.
    """
    if not needs_processes(plan.config):
        worker = Worker(plan)
        layout = worker.start()
        return InProcessExecutor(worker), layout
    from fleetfoot.executor.multiprocess import MultiprocessExecutor  # it needs zmq

    executor = MultiprocessExecutor(plan)
    return executor, executor.layout


def needs_processes(config: EngineConfig) -> bool:
    """Whether workers run in processes of their own."""
    return config.world_size > 1 or config.distributed_executor_backend == "mp"
