"""An executor for a plan: in this process if one worker is enough, else with a process for each rank."""

from __future__ import annotations

from fleetfoot.executor.protocol import Executor, check_builds
from fleetfoot.executor.worker import Worker
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import PendingOutput, SchedulerOutput


class InProcessExecutor:
    """Implements `fleetfoot.executor.protocol.Executor` with one worker in this process."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.runner_name = worker.runner.name
        self.shutdown = worker.runner.shutdown

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._worker.runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: object | None) -> PendingOutput:
        return self._worker.runner.sample_tokens(grammar_output)


def start_executor(plan: EnginePlan) -> tuple[Executor, KVLayout]:
    """Load the model and allocate the KV cache, in this process or in others.

    Returns:
        The executor, and the layout of the KV cache on rank 0; all ranks have equally many blocks.

    Raises:
        ValueError: there are fewer GPUs than ranks, this is not the first node, the nodes' settings differ, or what a
            worker raised when it started: there is no memory, or the weights do not fit.
        KernelUnavailableError: kernels that the plan names cannot be used.
        PlanMismatchError: a worker has built something else than the plan names.
    """
    if plan.config.world_size > 1 or plan.config.distributed_executor_backend == "mp":
        from fleetfoot.executor.multiprocess import MultiprocessExecutor  # it needs zmq

        executor = MultiprocessExecutor(plan)
        return executor, executor.layout
    worker = Worker(plan)
    layout = worker.start()
    try:
        check_builds(plan, {0: worker.build})
    except BaseException:
        worker.runner.shutdown()
        raise
    return InProcessExecutor(worker), layout
