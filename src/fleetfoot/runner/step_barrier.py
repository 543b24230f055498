"""What every rank must do in every step, the balancing of experts among others; `fleetfoot.runner.base` calls it.
``tests/engine/test_step_barrier.py`` tests when."""

from __future__ import annotations

from abc import ABC, abstractmethod

from fleetfoot.records.step import BalanceReport, SchedulerOutput


class StepBarrier(ABC):
    """Called once at the end of each step on every rank: with requests or without, on every stage of a pipeline, where
    padding alone is computed, and in the steps of a warm-up.

    The ranks' calls come in the same order, so a call may communicate. A step that raises ends without one, and its
    rank takes no further steps: no other rank waits for it longer than the engine takes to end them all.
    """

    def begin(self, scheduler_output: SchedulerOutput) -> None:  # noqa: B027
        """A step's forward pass is queued next; what is queued now comes before it."""

    @abstractmethod
    def step(self, scheduler_output: SchedulerOutput) -> None:
        """All work of this step is queued, the KV connector's included; what is queued now comes before the next step.
        A `WarmUpOutput` and a step without requests have no load to be counted, even if they compute padding."""

    def take_report(self) -> BalanceReport | None:
        """What has been done, if that has changed since the last call."""
        return None

    def abandon(self) -> None:  # noqa: B027
        """A step of this rank has raised: it enters no collective any more."""

    def suspend(self) -> None:  # noqa: B027
        """The memory of the weights is given back next; no step runs until `resume`."""

    def resume(self) -> None:  # noqa: B027
        """The memory of the weights is there again."""


class NoBarrier(StepBarrier):
    """Nothing is to be done: the layers are dense."""

    def step(self, scheduler_output: SchedulerOutput) -> None:
        pass
