"""The load of a benchmark: requests generated from a seed, and the loop that runs and measures them."""

from __future__ import annotations

import argparse
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fleetfoot.cli.command import usage_errors
from fleetfoot.inputs import PromptType
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from fleetfoot.engine.engine import LLMEngine
    from fleetfoot.engine.stats import StatsCollector, StepStats
    from fleetfoot.scheduler.stats import DraftStats, SchedulerStats, TransferStats

TAKE_EVERY = 20_000
"""Samples after which they are moved out of the engine's collector, which keeps a limited number."""

_ARRIVALS = 1 << 30
"""Random stream of arrival times; requests use others."""


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lengths:
    """A range of lengths in tokens, both ends included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """``128``, or ``100:1024``."""
        low, colon, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high) if colon else int(low))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no length; write 128, or 100:1024 for a range") from None
        if not 1 <= lengths.low <= lengths.high:
            raise argparse.ArgumentTypeError(f"{text!r} is no range from at least 1 up; write 100:1024")
        return lengths

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """``count`` lengths, uniformly distributed."""
        drawn: list[int] = rng.integers(self.low, self.high, size=count, endpoint=True).tolist()
        return drawn

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a load."""

    prompt: PromptType
    output_len: int
    """Exact number of tokens to generate."""
    due_s: float | None = None
    """Arrival in seconds after the start; None: when the engine accepts it."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Generates requests. Different streams (warm-up, measurement) share nothing but the prefix."""

    vocab_size: int
    input_len: Lengths
    output_len: Lengths
    prefix_len: int = 0
    """Tokens that all prompts begin with."""
    seed: int = 0

    def random_requests(self, count: int, *, stream: tuple[int, ...]) -> list[BenchRequest]:
        """Requests with prompts of random tokens."""
        rng = self._rng(*stream)
        prefix = self._rng().integers(0, self.vocab_size, size=self.prefix_len).tolist()
        input_lens = self.input_len.draw(rng, count)
        output_lens = self.output_len.draw(rng, count)
        requests = []
        for input_len, output_len in zip(input_lens, output_lens, strict=True):
            own = rng.integers(0, self.vocab_size, size=input_len - self.prefix_len).tolist()
            requests.append(BenchRequest({"prompt_token_ids": prefix + own}, output_len))
        return requests

    def dataset_requests(self, prompts: Sequence[PromptType], *, stream: tuple[int, ...]) -> list[BenchRequest]:
        """Requests with given prompts."""
        output_lens = self.output_len.draw(self._rng(*stream), len(prompts))
        return [BenchRequest(prompt, output_len) for prompt, output_len in zip(prompts, output_lens, strict=True)]

    def with_arrivals(self, requests: Sequence[BenchRequest], rate: float) -> list[BenchRequest]:
        """Add the arrival times of a Poisson process of ``rate`` per second; an infinite rate adds none."""
        if math.isinf(rate):
            return list(requests)
        gaps = self._rng(_ARRIVALS).exponential(1.0 / rate, size=len(requests))
        times = (gaps.cumsum() - gaps[0]).tolist()  # the first one arrives at 0
        return [replace(request, due_s=due_s) for request, due_s in zip(requests, times, strict=True)]

    def _rng(self, *stream: int) -> np.random.Generator:
        import numpy as np

        return np.random.default_rng([self.seed, *stream])


# --- measurements -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """Token counts of one finished request, from which the cost of its attention follows."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


@dataclass(slots=True)
class Samples:
    """Measurements of one load or several. Times are in seconds."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    itl: list[float] = field(default_factory=list)
    request_latency: list[float] = field(default_factory=list)
    load_duration: list[float] = field(default_factory=list)
    """Of each load, from its first request to its last token."""
    steps: list[StepStats] = field(default_factory=list)
    in_steps: float = 0.0
    """Total time in the engine's steps."""
    work: list[Work] = field(default_factory=list)
    """Of each request."""
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    drafts: DraftStats | None = None
    """From the first load to the last; None before the first."""
    drafts_before: DraftStats | None = None
    """Counters before the first load."""
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
        """Add the difference of the scheduler's counters."""
        self.num_preemptions += after.num_preemptions - before.num_preemptions
        self.prefix_cache_queries += after.prefix_cache_queries - before.prefix_cache_queries
        self.prefix_cache_hits += after.prefix_cache_hits - before.prefix_cache_hits
        self.drafts_before = self.drafts_before or before.drafts
        self.drafts = after.drafts.since(self.drafts_before)
        self.transfers_before = self.transfers_before or before.transfers
        self.transfers = after.transfers.since(self.transfers_before)

    def add_finished(self, output: RequestOutput, due_ts: float | None) -> None:
        """Add a finished request.

        Args:
            due_ts: arrival on the clock of the metrics; None: when the engine accepted it. A request that arrives
                during a step waits for the step's end, and that wait is part of its latency.
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
    """Run requests until all have finished.

    Args:
        requests: in the order of their arrival.
        samples: the measurements are added here.
        on_finished: called between steps with each finished request.
        clock: seconds; must be the engine's clock.

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
            ignore_eos=True,  # the amount of work must not depend on the sampled tokens
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(str(number), request.prompt, params)


def _check(output: RequestOutput) -> None:
    for completion in output.outputs:
        if completion.finish_reason == "error":
            raise RuntimeError(f"request {output.request_id} has failed: {completion.stop_reason}")
