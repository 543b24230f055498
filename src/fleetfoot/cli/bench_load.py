"""Puts a benchmark's load on an engine and collects what the engine measures."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fleetfoot.cli.bench_workload import BenchRequest
from fleetfoot.cli.command import usage_errors
from fleetfoot.records.outputs import RequestOutput
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from fleetfoot.engine.engine import LLMEngine
    from fleetfoot.engine.stats import StatsCollector, StepStats
    from fleetfoot.scheduler.stats import DraftStats, SchedulerStats, TransferStats

TAKE_EVERY = 20_000
"""Samples after which they are taken out of the engine's collector, which keeps a limited number."""


@dataclass(slots=True)
class Samples:
    """What was measured, over one load or several. Times are seconds."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    request_latency: list[float] = field(default_factory=list)
    load_duration: list[float] = field(default_factory=list)
    """Of each load, from its first request to its last token."""
    steps: list[StepStats] = field(default_factory=list)
    in_steps: float = 0.0
    """Inside the engine's steps."""
    work: list[Work] = field(default_factory=list)
    """Of each request."""
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    drafts: DraftStats | None = None
    """From the first load to the last; None: before the first."""
    drafts_before: DraftStats | None = None
    """What had been counted before the first load."""
    transfers: TransferStats | None = None
    """As ``drafts``."""
    transfers_before: TransferStats | None = None

    def take(self, collector: StatsCollector) -> None:
        """Move the collector's samples here."""
        self.itl += collector.itl
        self.tpot += collector.tpot
        self.steps += collector.steps
        collector.clear_samples()

    def add_scheduler(self, before: SchedulerStats, after: SchedulerStats) -> None:
        self.num_preemptions += after.num_preemptions - before.num_preemptions
        self.prefix_cache_queries += after.prefix_cache_queries - before.prefix_cache_queries
        self.prefix_cache_hits += after.prefix_cache_hits - before.prefix_cache_hits
        self.drafts_before = self.drafts_before or before.drafts
        self.drafts = after.drafts.since(self.drafts_before)
        self.transfers_before = self.transfers_before or before.transfers
        self.transfers = after.transfers.since(self.transfers_before)

    def add_finished(self, output: RequestOutput, due_ts: float | None) -> None:
        """A request has ended.

        Args:
            due_ts: when it arrived, on the clock of the metrics; None: when the engine took it. An arrival during a
                step has to wait for the step's end, and that counts.
        """
        metrics = output.metrics
        begin = metrics.queued_ts if due_ts is None else due_ts
        self.ttft.append(metrics.first_token_ts - begin)
        self.request_latency.append(metrics.last_token_ts - begin)
        prompt_len = len(output.prompt_token_ids)
        self.work.append(Work(prompt_len, output.num_cached_tokens, metrics.num_generation_tokens))
        self.num_requests += 1
        self.num_prompt_tokens += prompt_len
        self.num_output_tokens += metrics.num_generation_tokens


def run_load(
    engine: LLMEngine,
    requests: Sequence[BenchRequest],
    samples: Samples,
    *,
    temperature: float = 0.0,
    on_finished: Callable[[RequestOutput], None] = lambda output: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Run requests to their ends.

    Args:
        requests: in the order of their arrival.
        samples: gets what was measured.
        on_finished: called for each request that has ended, between steps.
        clock: the engine's own, in seconds.

    Raises:
        UsageError: the engine refuses a request.
        RuntimeError: a request has failed.
    """
    collector = engine.stats_collector
    collector.clear_samples()
    before = engine.stats().scheduler
    waiting = deque(enumerate(requests))
    begin = clock()
    while waiting or engine.has_unfinished_requests():
        now = clock() - begin
        while waiting and (waiting[0][1].due_s or 0.0) <= now:
            _add(engine, *waiting.popleft(), temperature)
        if not engine.has_unfinished_requests():
            sleep((waiting[0][1].due_s or 0.0) - now)
            continue
        step_begin = clock()
        outputs = engine.step()
        samples.in_steps += clock() - step_begin
        for output in outputs:
            _check(output)
            due_s = requests[int(output.request_id)].due_s
            samples.add_finished(output, None if due_s is None else begin + due_s)
            on_finished(output)
        if len(collector.itl) >= TAKE_EVERY or len(collector.steps) >= TAKE_EVERY:
            samples.take(collector)
    samples.load_duration.append(clock() - begin)
    samples.take(collector)
    samples.add_scheduler(before, engine.stats().scheduler)


def _add(engine: LLMEngine, number: int, request: BenchRequest, temperature: float) -> None:
    with usage_errors():
        params = SamplingParams(
            temperature=temperature,
            max_tokens=request.output_len,
            ignore_eos=True,  # so that the amount of work does not depend on the model's mood
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(str(number), request.prompt, params)


def _check(output: RequestOutput) -> None:
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise RuntimeError(f"request {output.request_id} has failed: {completion.stop_reason}")


@dataclass(frozen=True, slots=True)
class Work:
    """What the attention of one request had to do."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
