"""Runs steps in this very process: one worker, no messages."""

from __future__ import annotations

from fleetfoot.executor.worker import Worker
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner.contract import PendingOutput


class InProcessExecutor:
    """Implements `fleetfoot.executor.protocol.Executor` with one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.runner_name = worker.runner.name

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._worker.runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: object | None) -> PendingOutput:
        return self._worker.runner.sample_tokens(grammar_output)

    def shutdown(self) -> None:
        self._worker.shutdown()
