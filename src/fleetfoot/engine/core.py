"""The engine's heart: schedule, run, update; one step after the other."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from fleetfoot.engine.stats import StatsCollector, StepStats
from fleetfoot.runner.contract import PendingOutput
from fleetfoot.scheduler.output import ModelRunnerOutput, SchedulerOutput
from fleetfoot.scheduler.request import Request, RequestStatus
from fleetfoot.scheduler.scheduler import Scheduler, StepResult


class Executor(Protocol):
    """Runs steps on one worker or many."""

    runner_name: str

    def execute_model(self, scheduler_output: SchedulerOutput) -> None: ...

    def sample_tokens(self, grammar_output: object | None) -> PendingOutput: ...

    def shutdown(self) -> None: ...


StepOutput = tuple[list[StepResult], ModelRunnerOutput]


class EngineCore:
    """A scheduler and an executor.

    Args:
        depth: steps that may be queued before the result of the oldest is waited for: 0 runs in lockstep; 1 schedules
            step N+1 while the device runs step N.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        stats: StatsCollector,
        *,
        depth: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.stats = stats
        self.clock = clock
        self._depth = depth
        self._queue: deque[tuple[SchedulerOutput, PendingOutput, float, float]] = deque()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_unfinished or bool(self._queue)

    def add_request(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def finish(self, request_id: str, status: RequestStatus, stop_reason: int | str | None = None) -> None:
        """End a request from outside; what steps in flight yield for it is discarded."""
        self.scheduler.finish(request_id, status, stop_reason)

    def step(self) -> StepOutput | None:
        """Queue one step if there is one, and take in the oldest once more than `depth` are queued.

        Returns:
            What the oldest step yielded; None if nothing was taken in.
        """
        queued = self._launch()
        if len(self._queue) > self._depth or (self._queue and not queued):
            return self._retire()
        if not self._queue and self.scheduler.has_unfinished:
            raise RuntimeError(f"requests wait for nothing, and none can be scheduled: {self.scheduler.stats()}")
        return None

    def settle(self) -> None:
        """Take in the steps in flight that no request waits for any more, so that all they hold is free again."""
        while self._queue and not self.scheduler.has_unfinished:
            self._retire()

    def _launch(self) -> bool:
        begin = self.clock()
        scheduler_output = self.scheduler.schedule()
        if scheduler_output is None:
            return False
        scheduled = self.clock()
        for new in scheduler_output.new_requests:
            request = self.scheduler.requests[new.request_id]
            request.scheduled_ts = request.scheduled_ts or scheduled
        self.executor.execute_model(scheduler_output)
        pending = self.executor.sample_tokens(None)
        self._queue.append((scheduler_output, pending, scheduled - begin, self.clock() - scheduled))
        return True

    def _retire(self) -> StepOutput:
        scheduler_output, pending, schedule_s, execute_s = self._queue.popleft()
        begin = self.clock()
        output = pending.get()
        arrived = self.clock()
        results = self.scheduler.update(scheduler_output, output)
        self.stats.step(
            StepStats(
                num_requests=len(scheduler_output.rows),
                num_tokens=scheduler_output.total_num_scheduled_tokens,
                schedule_s=schedule_s,
                execute_s=execute_s + arrived - begin,
                update_s=self.clock() - arrived,
            )
        )
        if not self.has_work:
            self.scheduler.check_idle()
        return results, output

    def shutdown(self) -> None:
        self._queue.clear()
        self.executor.shutdown()
