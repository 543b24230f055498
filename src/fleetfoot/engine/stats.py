"""What the engine measures about itself: counters, and samples of latencies for percentiles."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from fleetfoot.records.outputs import RequestMetrics
from fleetfoot.scheduler.stats import DraftStats, SchedulerStats, TransferStats

WINDOW = 100_000
"""Latency samples kept; older ones are dropped, so a server's memory does not grow."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step, in seconds of host time and in tokens."""

    num_requests: int
    num_tokens: int
    """Tokens computed, of prompts and outputs."""
    schedule_s: float
    execute_s: float
    """In the runner: on a CPU the computation itself, on a GPU the queueing of it (and waiting, if not overlapped)."""
    update_s: float
    """Taking in tokens: the scheduler's update. What users are owed is made after the step."""
    num_drafted: int = 0
    """Draft tokens that it verified."""
    num_accepted: int = 0
    """Draft tokens that it accepted."""

    @property
    def host_s(self) -> float:
        """Host time outside the runner."""
        return self.schedule_s + self.update_s


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A moment of the engine: counters since its start, and the scheduler's state."""

    num_steps: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_finished: dict[str, int]
    """Requests that ended, by finish reason."""
    scheduler: SchedulerStats
    num_idle_steps: int = 0
    """Steps that computed nothing, for the KV connector alone; not counted in ``num_steps``."""

    @property
    def drafts(self) -> DraftStats:
        """Acceptance of draft tokens, and why steps went without them."""
        return self.scheduler.drafts

    @property
    def transfers(self) -> TransferStats:
        """What the KV connector did."""
        return self.scheduler.transfers


class StatsCollector:
    """Collects; costs an append per event. Samples are seconds.

    ``itl`` has the time between arrivals at a request: several tokens that a step brings at once are one arrival.
    """

    def __init__(self) -> None:
        self.ttft: deque[float] = deque(maxlen=WINDOW)
        self.itl: deque[float] = deque(maxlen=WINDOW)
        self.tpot: deque[float] = deque(maxlen=WINDOW)
        self.steps: deque[StepStats] = deque(maxlen=WINDOW)
        self.num_steps = 0
        self.num_idle_steps = 0
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_finished: dict[str, int] = {}

    def clear_samples(self) -> None:
        """Forget latencies, not counters: a benchmark begins to measure after its warm-up."""
        for samples in (self.ttft, self.itl, self.tpot, self.steps):
            samples.clear()

    def request_added(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens += num_prompt_tokens

    def step(self, stats: StepStats) -> None:
        self.num_steps += 1
        self.steps.append(stats)

    def idle_step(self) -> None:
        self.num_idle_steps += 1

    def request_finished(self, metrics: RequestMetrics, reason: str | None) -> None:
        self.num_finished[str(reason)] = self.num_finished.get(str(reason), 0) + 1
        if metrics.num_generation_tokens > 1:
            self.tpot.append(metrics.time_per_output_token)

    def snapshot(self, scheduler: SchedulerStats) -> EngineStats:
        return EngineStats(
            num_steps=self.num_steps,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generation_tokens=self.num_generation_tokens,
            num_finished=dict(self.num_finished),
            scheduler=scheduler,
            num_idle_steps=self.num_idle_steps,
        )
