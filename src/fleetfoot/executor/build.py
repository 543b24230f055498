"""An executor for a plan: in this process if one worker is enough, else with a process for each rank, here or on a
cluster."""

from __future__ import annotations

from fleetfoot.config.engine import EngineConfig
from fleetfoot.executor.protocol import Executor
from fleetfoot.kernels.runtime.compile_worker import CompilePool
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.structured.mask_space import MaskMemory


def find_machine(config: EngineConfig) -> Machine:
    """The machine that workers will run on: this one, or one of a cluster."""
    if config.distributed_executor_backend == "ray":
        from fleetfoot.executor import ray_cluster

        return ray_cluster.find_machine(config)
    return Machine.detect()


def start_executor(plan: EnginePlan, masks: MaskMemory | None = None) -> Executor:
    """Load the model and allocate the KV cache, in this process or in others.

    ``masks``: what the engine computes token masks in; None: masks come with each step.

    Raises ValueError if there are fewer GPUs than ranks, this is not the first node, or the nodes' settings differ; and
    what a worker raises when it starts: ValueError if there is no memory or the weights do not fit, and the errors of
    `Worker`.
    """
    if plan.executor == "ray":
        from fleetfoot.executor.ray_cluster import RayExecutor

        return RayExecutor(plan, masks)
    if plan.executor == "mp":
        from fleetfoot.executor.multiprocess import MultiprocessExecutor  # it needs zmq

        return MultiprocessExecutor(plan, masks)
    pool = CompilePool.beside_imports(num_ranks=1) if plan.compiles_kernels else None
    try:
        from fleetfoot.executor.worker import Worker  # it needs torch

        worker = Worker.of_only_rank(plan, pool)
    except BaseException:
        if pool is not None:
            pool.close()
        raise
    try:
        worker.start()
    except BaseException:
        worker.shutdown()
        raise
    return worker
