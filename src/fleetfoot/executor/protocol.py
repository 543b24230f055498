"""What the engine needs of an executor. No torch."""

from __future__ import annotations

from typing import Protocol

from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner.contract import PendingOutput


class Executor(Protocol):
    """Runs steps on one worker or many."""

    runner_name: str

    def execute_model(self, scheduler_output: SchedulerOutput) -> None: ...

    def sample_tokens(self, grammar_output: object | None) -> PendingOutput: ...

    def shutdown(self) -> None: ...
