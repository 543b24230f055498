"""The engine's inner loop: schedule a step, run it, update the scheduler with its result."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fleetfoot.engine.stats import NO_WATCH, NoWatch, StatsCollector, StepStats
from fleetfoot.executor.protocol import Executor, WorkerError
from fleetfoot.records.kv_connector import SchedulerConnector
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import (
    EngineOutput,
    MasksOfRanks,
    ModelRunnerOutput,
    PendingOutput,
    SchedulerOutput,
    TokenMasks,
)
from fleetfoot.scheduler.ranks import AnyScheduler
from fleetfoot.structured.mask_space import MaskMemory
from fleetfoot.structured.masks import TokenMasker
from fleetfoot.utils.process import run_all

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _StepInFlight:
    """A step that has been queued and not retired."""

    scheduler_output: SchedulerOutput
    began: float
    """When its scheduling began, on the engine's clock."""
    schedule_s: float
    execute_s: float = 0.0
    pending: PendingOutput = field(default_factory=lambda: ModelRunnerOutput([]))
    structured: list[Request] = field(default_factory=list)
    """The requests of `SchedulerOutput.structured`."""


def no_callback() -> None:
    """Default of ``before_update``."""


class EngineCore:
    """A scheduler, an executor, and the steps between them.

    Args:
        masker: computes token masks for requests under a grammar; None: there are no such requests.
        depth: most steps in flight while another one is scheduled. 0: lockstep; 1: step N+1 is scheduled while the
            device runs step N; P: keeps P pipeline stages busy.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        scheduler: AnyScheduler,
        executor: Executor,
        stats: StatsCollector,
        *,
        masker: TokenMasker | None = None,
        depth: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler: AnyScheduler = scheduler
        self.executor: Executor = executor
        self.stats = stats
        self.clock = clock
        self.depth = depth
        self.watch: NoWatch = NO_WATCH
        self.masker = masker or TokenMasker(MaskMemory(1, 1))
        self._in_flight: deque[_StepInFlight] = deque()
        self._last_arrival = clock()  # when the last result arrived
        self._num_retired = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished or a step is in flight."""
        return self.scheduler.has_unfinished or bool(self._in_flight)

    def step(self, before_update: Callable[[], object] = no_callback) -> list[EngineOutput] | None:
        """Run one iteration of the loop. Returns the outputs of the oldest step in flight; None if none was retired.

        An idle step, which computes nothing and serves the KV connector, blocks until a transfer makes progress or a
        short timeout has passed. ``before_update``: called when a step's result has arrived, before the scheduler is
        updated. Requests that it finishes end there: their tokens in the result are discarded.
        """
        outputs = self.step_overlapped(before_update) if self.depth else self.step_lockstep(before_update)
        if outputs is None and not self._in_flight and self.scheduler.has_unfinished:
            raise RuntimeError(f"requests wait for nothing, and none can be scheduled: {self.scheduler.stats()}")
        return outputs

    def step_lockstep(self, before_update: Callable[[], object]) -> list[EngineOutput] | None:
        """Schedule a step, run it, and wait for its result."""
        step, outputs = self._launch(before_update)
        return None if step is None else [*outputs, *self._retire(before_update)]

    def step_overlapped(self, before_update: Callable[[], object]) -> list[EngineOutput] | None:
        """Schedule a step after those in flight, and wait for the oldest if more than `depth` are in flight.

        Without a new step that computes, the oldest is retired at once. A step with requests under a grammar retires
        the steps in flight that have them, before it samples.
        """
        num_retired = self._num_retired
        step, outputs = self._launch(before_update)
        is_computing = step is not None and not step.is_idle
        if len(self._in_flight) > self.depth or (self._in_flight and not is_computing):
            outputs += self._retire(before_update)
        return outputs if self._num_retired > num_retired else None

    def _launch(self, before_update: Callable[[], object]) -> tuple[SchedulerOutput | None, list[EngineOutput]]:
        """Schedule a step and queue it on the executor. Returns the step, or None if there is nothing to do; and the
        outputs of steps that were retired before it could be sampled."""
        began = self.clock()
        scheduler_output = self.scheduler.schedule()
        if scheduler_output is None:
            return None, []
        scheduled = self.clock()
        for new in scheduler_output.new_requests:
            request = self.scheduler.requests[new.request_id]
            request.scheduled_ts = request.scheduled_ts or scheduled
            self.watch.begin(request, scheduled)
        return scheduler_output, self._queue(scheduler_output, began, scheduled, before_update)

    def _queue(
        self,
        scheduler_output: SchedulerOutput,
        began: float,
        scheduled: float,
        before_update: Callable[[], object] = no_callback,
    ) -> list[EngineOutput]:
        """Queue a step on the executor. Returns the outputs of steps that were retired before it could be sampled.
        ``began``, ``scheduled``: when its scheduling began and ended."""
        self.executor.execute_model(scheduler_output)
        step = _StepInFlight(scheduler_output, began, scheduled - began)
        self._in_flight.append(step)
        outputs: list[EngineOutput] = []
        masks = None
        if scheduler_output.structured:
            masks = self._token_masks(step, outputs, before_update)
        step.pending = self.executor.sample_tokens(masks)
        step.execute_s = self.clock() - scheduled
        return outputs

    def _token_masks(
        self, step: _StepInFlight, outputs: list[EngineOutput], before_update: Callable[[], object]
    ) -> TokenMasks | None:
        """The masks of a step after its forward pass was queued.

        They depend on all earlier tokens of its requests, so steps in flight that sample for these are retired, and
        their outputs added to ``outputs``. A request that its grammar cannot serve ends with the reason.
        """
        batch, output = self.scheduler.newest_batch, step.scheduler_output
        step.structured = requests = [batch[index] for index in output.structured]
        while len(self._in_flight) > 1 and any(request.num_in_flight > 1 for request in requests):
            outputs += self._retire(before_update)
        found: list[TokenMasks | None] = []
        for part in output.of_ranks:
            own, requests = requests[: len(part.structured)], requests[len(part.structured) :]
            masks, failed = self.masker.compute(part, own) if own else (None, [])
            found.append(masks)
            for request, reason in failed:
                self.scheduler.finish(request.request_id, RequestStatus.FINISHED_UNFIT, reason)
                outputs.append(EngineOutput.last(request))
        present = [masks for masks in found if masks is not None]
        if len(found) == 1 or not present:
            return found[0]
        return MasksOfRanks([], present[0].masks, parts=tuple(found))

    def _retire(self, before_update: Callable[[], object] = no_callback) -> list[EngineOutput]:
        """Wait for the oldest step in flight, and update the scheduler with its result."""
        step = self._in_flight.popleft()
        output, drafting = step.scheduler_output, self.scheduler.drafting
        begin = self.clock()
        model_output = step.pending.get()
        arrived = self.clock()
        self._num_retired += 1
        if output.structured:
            structured = iter(step.structured)
            for part, result in zip(output.of_ranks, model_output.of_ranks, strict=True):
                for index, request in zip(part.structured, structured, strict=False):
                    if result.draft_token_ids:
                        request.grammar.drafts = result.draft_token_ids[index]
        self.stats.balance = model_output.of_ranks[0].balance or self.stats.balance
        before_update()
        outputs = self.scheduler.update(output, model_output)
        if output.is_idle:
            self.stats.num_idle_steps += 1
        else:
            seconds = arrived - max(step.began, self._last_arrival)
            drafting.observe(output, seconds)
            prompts = (part.num_scheduled_tokens[part.num_decodes :] for part in output.of_ranks)
            num_prompt_tokens = sum(map(sum, prompts))
            self.scheduler.pace.observe(output.num_decodes, num_prompt_tokens, seconds)
            self._last_arrival = arrived
            self.watch.record(output, arrived - seconds, seconds, (drafting.last_drafted, drafting.last_accepted))
            self.stats.step(
                StepStats(
                    len(output.rows),
                    output.total_num_scheduled_tokens,
                    schedule_s=step.schedule_s,
                    execute_s=step.execute_s + arrived - begin,
                    update_s=self.clock() - arrived,
                    num_drafted=drafting.last_drafted,
                    num_accepted=drafting.last_accepted,
                )
            )
        if not self.has_work:
            self.scheduler.check_idle()
        return outputs

    @property
    def is_in_flight(self) -> bool:
        """Whether a step has been queued and not retired."""
        return bool(self._in_flight)

    def retire(self, before_update: Callable[[], object] = no_callback) -> list[EngineOutput] | None:
        """Wait for the oldest step in flight without scheduling another one. None: there is none."""
        return self._retire(before_update) if self._in_flight else None

    def drain(self) -> None:
        """Retire all steps in flight once no request is unfinished, so that their rows and blocks are freed."""
        while self._in_flight and not self.scheduler.has_unfinished:
            self._retire()

    def settle_transfers(self) -> None:
        """End all transfers: when this returns, no KV is read or written. No step is in flight, no request runs.

        Loads start again later. Blocks that are held for other engines are released, after reads that are under way.
        Raises WorkerError: a step, or the connector in it, has failed.
        """
        scheduler = self.scheduler
        scheduler.restart_loads()
        try:
            scheduler.transfers.evict_all()
            while (output := scheduler.schedule_transfers()) is not None:
                self._queue(output, self.clock(), self.clock())
                self._retire()  # has no outputs: a load that fails starts again too
                scheduler.transfers.evict_all()  # what could not be evicted while it was read
        except WorkerError:
            raise
        except Exception as error:  # of a worker in this process, or of the connector
            raise WorkerError(f"a step that ends transfers has failed: {type(error).__name__}: {error}") from error

    def report_finished(self) -> None:
        """Send the ids of the last finished requests to the KV connector, in an idle step if no other step follows."""
        self.drain()
        if not self.has_work and self.scheduler.has_unreported_ids:
            self.step()

    def flush(self) -> None:
        """Queue a final empty step, which flushes pending saves and the last finished ids to the KV connector.

        Unfinished requests are aborted. The step runs after all others, and its output is not read. Workers run it
        before they shut down, within their shutdown timeout.
        """
        if (last := self.scheduler.final_output()) is not None:
            self.executor.execute_model(last)
            self.executor.sample_tokens(None)

    def end_workers(self) -> None:
        """End the workers and the connector after an error. What they raise is logged, and does not replace it."""
        for end in (self.executor.shutdown, self.scheduler.transfers.connector.shutdown):
            try:
                end()
            except Exception as error:
                logger.info("after an error, what has failed could not shut down cleanly: %r", error)

    def restart(
        self, executor: Executor, connector: SchedulerConnector, num_blocks: int, requests: Iterable[Request]
    ) -> list[tuple[Request, str]]:
        """Go on with new workers; see `Scheduler.restart`. Results of steps in flight are lost, and computed again."""
        self._in_flight.clear()
        self.executor = executor
        self._last_arrival = self.clock()
        return self.scheduler.restart(connector, num_blocks, requests)

    def shutdown(self) -> None:
        """Release all resources; unfinished transfers are abandoned."""
        self._in_flight.clear()
        connector = self.scheduler.transfers.connector
        run_all(self.executor.shutdown, connector.shutdown, self.masker.close, self.scheduler.close_events)
