"""A scheduler's steps through a runner, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fleetfoot.records.step import EngineOutput, ModelRunnerOutput, PendingOutput, SchedulerOutput
from fleetfoot.scheduler.scheduler import Scheduler

Execute = Callable[[SchedulerOutput], PendingOutput]


@dataclass(frozen=True, slots=True)
class TakenStep:
    """A step whose output the scheduler has taken in."""

    scheduled: SchedulerOutput
    output: ModelRunnerOutput
    results: list[EngineOutput]


def run_steps(scheduler: Scheduler, execute: Execute, *, depth: int = 0) -> Iterator[TakenStep]:
    """Until every request has ended, in lockstep or with ``depth`` steps queued ahead."""
    queue: list[tuple[SchedulerOutput, PendingOutput]] = []
    while scheduler.has_unfinished or queue:
        scheduled = scheduler.schedule()
        if scheduled is not None:
            queue.append((scheduled, execute(scheduled)))
        if queue and (len(queue) > depth or scheduled is None):
            oldest, pending = queue.pop(0)
            output = pending.get()
            yield TakenStep(oldest, output, scheduler.update(oldest, output))


def queue_step(scheduler: Scheduler, execute: Execute) -> tuple[SchedulerOutput, PendingOutput]:
    """One step, which there is; its output is not taken in."""
    scheduled = scheduler.schedule()
    assert scheduled is not None
    return scheduled, execute(scheduled)


def take_steps(scheduler: Scheduler, execute: Execute, count: int) -> None:
    """So many steps, one after the other."""
    for _ in range(count):
        scheduled, pending = queue_step(scheduler, execute)
        scheduler.update(scheduled, pending.get())


def finish(scheduler: Scheduler, execute: Execute, *, depth: int = 0) -> None:
    """Run every request to its end; nothing is left behind."""
    for _ in run_steps(scheduler, execute, depth=depth):
        pass
    scheduler.check_idle()
