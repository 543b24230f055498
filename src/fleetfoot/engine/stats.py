"""Statistics of the engine: counters, and samples of latencies for percentiles."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from fleetfoot.outputs import RequestMetrics
from fleetfoot.records.request import Request
from fleetfoot.records.step import BalanceReport, SchedulerOutput
from fleetfoot.scheduler.stats import DraftStats, SchedulerStats, TransferStats

WINDOW = 100_000
"""Samples of tokens and steps to keep; older ones are dropped, to bound memory."""
REQUEST_WINDOW = 10_000
"""The same of requests, which take some 200 bytes each."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step. Times are seconds on the host."""

    num_requests: int
    num_tokens: int
    """Tokens computed, of prompts and of outputs."""
    schedule_s: float
    execute_s: float
    """In the executor: on a CPU the computation, on a GPU queueing it, and waiting for it."""
    update_s: float
    """The scheduler's update with the result; without output processing."""
    num_drafted: int = 0
    """Draft tokens verified."""
    num_accepted: int = 0
    """Draft tokens accepted."""

    @property
    def host_s(self) -> float:
        """Host time outside the executor."""
        return self.schedule_s + self.update_s


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot: counters since the start, and the scheduler's state."""

    num_steps: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_finished: dict[str, int]
    """Finished requests, by finish reason."""
    scheduler: SchedulerStats
    num_idle_steps: int = 0
    """Steps without requests, which serve the KV connector; not counted in ``num_steps``."""
    num_restarts: int = 0
    """How often the workers were rebuilt after an error."""

    @property
    def drafts(self) -> DraftStats:
        """Acceptance of draft tokens, and reasons of steps without them."""
        return self.scheduler.drafts

    @property
    def transfers(self) -> TransferStats:
        """Transfers of the KV connector."""
        return self.scheduler.transfers


class StatsCollector:
    """Collects statistics; an event costs one append. Samples are in seconds.

    ``itl`` has the times between arrivals of tokens at a request: several tokens of one step are one arrival.
    """

    def __init__(self) -> None:
        self.itl = deque[float](maxlen=WINDOW)
        self.ttft, self.tpot = (deque[float](maxlen=REQUEST_WINDOW) for _ in range(2))
        self.steps: deque[StepStats] = deque(maxlen=WINDOW)
        self.requests: deque[RequestMetrics] = deque(maxlen=REQUEST_WINDOW)  # that have finished
        self.num_steps = self.num_idle_steps = self.num_prompt_tokens = self.num_generation_tokens = 0
        self.num_restarts = 0
        self.balance: BalanceReport | None = None
        """None: no experts have been placed anew."""
        self.num_finished: Counter[str] = Counter()

    def clear_samples(self) -> None:
        """Drop latency samples but not counters, as a benchmark does after its warm-up."""
        for samples in (self.ttft, self.itl, self.tpot, self.steps, self.requests):
            samples.clear()

    def step(self, stats: StepStats) -> None:
        self.num_steps += 1
        self.steps.append(stats)

    def request_finished(self, metrics: RequestMetrics, reason: str | None) -> None:
        self.num_finished[str(reason)] += 1
        self.requests.append(metrics)
        if metrics.num_generation_tokens > 1:
            self.tpot.append(metrics.time_per_output_token)

    def snapshot(self, scheduler: SchedulerStats) -> EngineStats:
        counts = self.num_steps, self.num_prompt_tokens, self.num_generation_tokens
        return EngineStats(*counts, dict(self.num_finished), scheduler, self.num_idle_steps, self.num_restarts)


class NoWatch:
    """What is told of each step while nobody looks; see `fleetfoot.engine.watch.Watch`."""

    def begin(self, request: Request, now: float) -> None:
        """A request has been scheduled for the first time, or again."""

    def record(self, output: SchedulerOutput, began: float, seconds: float, drafts: tuple[int, int]) -> None:
        """A step has retired."""


NO_WATCH = NoWatch()


class Histogram:
    """Counts of samples up to limits, since the start; a sample costs one search."""

    def __init__(self, limits: Sequence[float]) -> None:
        self._limits = limits
        self._counts = [0] * (len(limits) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._limits, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[str, int]]:
        """``(limit, samples up to it)``, the last one ``+Inf``."""
        total, result = 0, []
        for limit, count in zip([*map(str, self._limits), "+Inf"], self._counts, strict=True):
            total += count
            result.append((limit, total))
        return result
