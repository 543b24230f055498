"""The engine's heart: schedule, run, update; one step after the other."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from fleetfoot.engine.stats import StatsCollector, StepStats
from fleetfoot.executor.protocol import Executor
from fleetfoot.records.request import Request, RequestStatus, StepResult
from fleetfoot.records.step import ModelRunnerOutput, SchedulerOutput
from fleetfoot.runner.contract import PendingOutput
from fleetfoot.scheduler.scheduler import Scheduler
from fleetfoot.utils.process import run_all

StepOutput = tuple[list[StepResult], ModelRunnerOutput]


@dataclass(slots=True)
class _QueuedStep:
    """A step whose result has not been taken in."""

    scheduler_output: SchedulerOutput
    pending: PendingOutput
    began: float
    """When its scheduling began."""
    schedule_s: float
    execute_s: float


class EngineCore:
    """A scheduler and an executor.

    Args:
        depth: steps that may be queued before the result of the oldest is waited for: 0 runs in lockstep; 1 schedules
            step N+1 while the device runs step N; P keeps P pipeline stages busy.
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
        self._queue: deque[_QueuedStep] = deque()
        self._last_arrival = clock()  # when the last result came

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended, or a step has not been taken in."""
        return self.scheduler.has_unfinished or bool(self._queue)

    @property
    def has_transfers(self) -> bool:
        """Whether the KV connector has something to do, maybe for requests that have ended: steps go on for it."""
        return self.scheduler.has_idle_work

    def add_request(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def finish(self, request_id: str, status: RequestStatus, stop_reason: int | str | None = None) -> None:
        """End a request from outside; what steps in flight yield for it is discarded."""
        self.scheduler.finish(request_id, status, stop_reason)

    def step(self, before_update: Callable[[], object] = lambda: None) -> StepOutput | None:
        """Queue one step if there is one, and take in the oldest once more than `depth` are queued.

        An idle step, which only serves the KV connector, is taken in at once: it blocks until a transfer has got on, or
        for a short while.

        Args:
            before_update: called when the oldest step's result has arrived and has not been taken in. Requests that it
                finishes end so, whatever the result holds for them.

        Returns:
            What the oldest step yielded; None if nothing was taken in.
        """
        is_computing = self._launch()
        if len(self._queue) > self._depth or (self._queue and not is_computing):
            return self._retire(before_update)
        if not self._queue and self.scheduler.has_unfinished:
            raise RuntimeError(f"requests wait for nothing, and none can be scheduled: {self.scheduler.stats()}")
        return None

    def settle(self) -> None:
        """Take in the steps in flight that no request waits for any more, so that all they hold is free again."""
        while self._queue and not self.scheduler.has_unfinished:
            self._retire()

    def report_finished(self) -> None:
        """Run an idle step if nothing else carries the ids of the last requests to the KV connector."""
        self.settle()
        if not self.has_work and self.scheduler.has_unreported_ids:
            self.step()

    def _launch(self) -> bool:
        """Queue a step; False if there is none, or it computes nothing."""
        began = self.clock()
        scheduler_output = self.scheduler.schedule()
        if scheduler_output is None:
            return False
        scheduled = self.clock()
        for new in scheduler_output.new_requests:
            request = self.scheduler.requests[new.request_id]
            request.scheduled_ts = request.scheduled_ts or scheduled
        self.executor.execute_model(scheduler_output)
        pending = self.executor.sample_tokens(None)
        self._queue.append(_QueuedStep(scheduler_output, pending, began, scheduled - began, self.clock() - scheduled))
        return not scheduler_output.is_idle

    def _retire(self, before_update: Callable[[], object] = lambda: None) -> StepOutput:
        step = self._queue.popleft()
        begin = self.clock()
        output = step.pending.get()
        arrived = self.clock()
        before_update()
        results = self.scheduler.update(step.scheduler_output, output)
        self._note(step, begin, arrived)
        if not self.has_work:
            self.scheduler.check_idle()
        return results, output

    def _note(self, step: _QueuedStep, begin: float, arrived: float) -> None:
        """Statistics of a step whose result was waited for from `begin` to `arrived`."""
        scheduler_output, drafting = step.scheduler_output, self.scheduler.drafting
        if scheduler_output.is_idle:
            self.stats.idle_step()
            return
        drafting.observe(scheduler_output, arrived - max(step.began, self._last_arrival))
        self._last_arrival = arrived
        self.stats.step(
            StepStats(
                num_requests=len(scheduler_output.rows),
                num_tokens=scheduler_output.total_num_scheduled_tokens,
                schedule_s=step.schedule_s,
                execute_s=step.execute_s + arrived - begin,
                update_s=self.clock() - arrived,
                num_drafted=drafting.last_drafted,
                num_accepted=drafting.last_accepted,
            )
        )

    def flush(self) -> None:
        """Queue a final empty step: it saves the last blocks of requests that have ended, and gives the KV connector
        their ids. Requests that have not ended are aborted.

        The step is queued behind all others and its output is not read. Workers take it before they shut down, within
        the time that they have for that.
        """
        last = self.scheduler.final_output()
        if last is not None:
            self.executor.execute_model(last)
            self.executor.sample_tokens(None)

    def shutdown(self) -> None:
        """Give everything back; transfers that are under way are given up."""
        self._queue.clear()
        run_all(self.executor.shutdown, self.scheduler.transfers.connector.shutdown)
