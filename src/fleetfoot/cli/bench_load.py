"""The load of a benchmark: requests generated from a seed, the loop that runs and measures them, and their statistics.

docs/benchmarks.md describes every field of the results; change both together.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, quantiles
from typing import TYPE_CHECKING, Any

from fleetfoot.cli.command import usage_errors
from fleetfoot.cli.drawing import Chart, Curve
from fleetfoot.inputs import PromptType
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.scheduler.stats import DraftStats, SchedulerStats, TransferStats

if TYPE_CHECKING:
    import numpy as np

    from fleetfoot.engine.engine import LLMEngine
    from fleetfoot.engine.stats import StatsCollector, StepStats

PERCENTILES = (50, 90, 95, 99)

_ARRIVALS = 1 << 30
"""Random stream of arrival times; requests use others."""
_NO_COUNTERS = SchedulerStats(0, 0, 0.0, 0, 0, 0)
_MS, _US = 1e3, 1e6


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
        return list(map(BenchRequest, prompts, self.output_len.draw(self._rng(*stream), len(prompts))))

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


@dataclass(frozen=True, slots=True)
class Work:
    """Token counts of one finished request."""

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
    """Seconds of each load, from its first request to its last token."""
    steps: list[StepStats] = field(default_factory=list)
    in_steps: float = 0.0
    """Total time in the engine's steps."""
    work: list[Work] = field(default_factory=list)
    """The work of each request."""
    before: SchedulerStats | None = None
    """Counters of the scheduler before the first load."""
    after: SchedulerStats | None = None
    """The same after the last load."""

    def take(self, collector: StatsCollector) -> None:
        """Move the collector's samples here."""
        self.itl += collector.itl
        self.tpot += collector.tpot
        self.steps += collector.steps
        collector.clear_samples()


def run_load(
    engine: LLMEngine,
    requests: Sequence[BenchRequest],
    samples: Samples,
    *,
    temperature: float = 0.0,
    on_finished: Callable[[int], object] = lambda num_tokens: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Run requests until all have finished.

    Args:
        requests: in the order of their arrival.
        samples: the measurements are added here.
        on_finished: called between steps for each finished request, with the number of its generated tokens.
        clock: seconds; must be the engine's clock.

    Raises:
        UsageError: the engine refuses a request.
        RuntimeError: a request has failed.
    """
    collector = engine.stats_collector
    collector.clear_samples()
    samples.before = samples.before or engine.stats().scheduler
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
            for completion in output.outputs:
                if completion.finish_reason == "error":
                    raise RuntimeError(f"request {output.request_id} has failed: {completion.stop_reason}")
            metrics, due_s = output.metrics, requests[int(output.request_id)].due_s
            # a request that arrives during a step waits for the step's end, and that wait is part of its latency
            arrival = metrics.queued_ts if due_s is None else begin + due_s
            samples.ttft.append(metrics.first_token_ts - arrival)
            samples.request_latency.append(metrics.last_token_ts - arrival)
            num_tokens = metrics.num_generation_tokens
            samples.work.append(Work(len(output.prompt_token_ids), output.num_cached_tokens, num_tokens))
            on_finished(num_tokens)
        samples.take(collector)  # each step, because the collector keeps a limited number
    samples.load_duration.append(clock() - begin)
    samples.after = engine.stats().scheduler


def _add(engine: LLMEngine, number: int, request: BenchRequest, temperature: float) -> None:
    with usage_errors():
        params = SamplingParams(
            temperature=temperature,
            max_tokens=request.output_len,
            ignore_eos=True,  # the amount of work must not depend on the sampled tokens
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine.add_request(str(number), request.prompt, params)


def results(samples: Samples, *, with_loads: bool, floor: dict[str, Any] | None = None) -> dict[str, Any]:
    """Statistics of the samples. ``floor``: as returned by `fleetfoot.cli.bench_roofline.floor_report`; ``with_loads``:
    include the durations of single loads (the batches of a latency benchmark)."""
    before, after = samples.before or _NO_COUNTERS, samples.after or _NO_COUNTERS
    duration = sum(samples.load_duration)
    steps, num_steps, num_requests = samples.steps, len(samples.steps), len(samples.work)
    num_prompt_tokens = sum(work.num_prompt_tokens for work in samples.work)
    num_output_tokens = sum(work.num_output_tokens for work in samples.work)
    in_runner = sum(step.execute_s for step in steps)
    host = sum(step.host_s for step in steps)
    queried = after.prefix_cache_queries - before.prefix_cache_queries
    hits = after.prefix_cache_hits - before.prefix_cache_hits
    return {
        "duration_s": duration,
        "num_requests": num_requests,
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_output_tokens,
        "requests_per_s": ratio(num_requests, duration),
        "output_tokens_per_s": ratio(num_output_tokens, duration),
        "total_tokens_per_s": ratio(num_prompt_tokens + num_output_tokens, duration),
        "ttft_ms": distribution(samples.ttft, _MS),
        "tpot_ms": distribution(samples.tpot, _MS),
        "itl_ms": distribution(samples.itl, _MS),
        "request_latency_ms": distribution(samples.request_latency, _MS),
        **({"batch_latency_ms": distribution(samples.load_duration, _MS)} if with_loads else {}),
        "num_steps": num_steps,
        "steps_per_s": ratio(num_steps, duration),
        "requests_per_step": ratio(sum(step.num_requests for step in steps), num_steps),
        "tokens_per_step": ratio(sum(step.num_tokens for step in steps), num_steps),
        "host_time_per_step_us": distribution((step.host_s for step in steps), _US),
        "schedule_time_per_step_us": distribution((step.schedule_s for step in steps), _US),
        "update_time_per_step_us": distribution((step.update_s for step in steps), _US),
        "output_time_per_step_us": ratio((samples.in_steps - in_runner - host) * _US, num_steps),
        "runner_time_per_step_ms": distribution((step.execute_s for step in steps), _MS),
        "runner_share": ratio(in_runner, duration),
        "prefix_cache": {"queried_tokens": queried, "hit_tokens": hits, "hit_rate": ratio(hits, queried)},
        "num_preemptions": after.num_preemptions - before.num_preemptions,
        "drafts": _drafts(after.drafts.since(before.drafts)),
        "kv_transfer": _transfers(after.transfers.since(before.transfers)),
        "floor": floor,
    }


def _drafts(drafts: DraftStats) -> dict[str, Any] | None:
    """Statistics of speculative decoding; None if it is off."""
    if not drafts.accepted_at:
        return None
    has_any = drafts.num_rows > 0
    return {
        "num_steps": drafts.num_steps,
        "num_drafted_tokens": drafts.num_drafted,
        "num_accepted_tokens": drafts.num_accepted,
        "mean_acceptance_length": drafts.mean_acceptance_length if has_any else None,
        "acceptance_rate": drafts.acceptance_rate if has_any else None,
        "acceptance_rate_at": list(drafts.acceptance_rates) if has_any else None,
        "steps_without": drafts.off,
        "off_reason": drafts.off_reason or None,
    }


def _transfers(transfers: TransferStats) -> dict[str, Any] | None:
    """Statistics of the KV connector; None if there is none or it was idle."""
    if not (transfers.loads_started or transfers.counters):
        return None
    return {
        "loads_done": transfers.loads_done,
        "loads_failed": transfers.loads_failed,
        "loads_timed_out": transfers.loads_timed_out,
        "loaded_tokens": transfers.tokens_loaded,
        "counters": transfers.counters,
    }


def distribution(values: Iterable[float], scale: float) -> dict[str, float | int | None]:
    """Mean, percentiles, maximum and count of ``values`` times ``scale``; null for all but the count if there are none.

    Percentiles are interpolated between the two nearest samples.
    """
    ordered = sorted(values)
    if not ordered:
        return dict.fromkeys(["mean", *(f"p{percent}" for percent in PERCENTILES), "max"]) | {"count": 0}
    cuts = quantiles(ordered if len(ordered) > 1 else 2 * ordered, n=100, method="inclusive")
    percentiles = {f"p{percent}": cuts[percent - 1] * scale for percent in PERCENTILES}
    return {"mean": fmean(ordered) * scale, **percentiles, "max": ordered[-1] * scale, "count": len(ordered)}


def tails_chart(times: Mapping[str, Sequence[float]]) -> Chart:
    """The times in seconds, by name, that a share of the samples stays below, in ms. The axis of shares stretches
    towards the slowest sample: 90%, 99% and 99.9% have equal distances."""
    curves = []
    for name, values in times.items():
        ordered, count = sorted(values), len(values)
        ranks = sorted(
            {count * step // 200 for step in range(200)} | {count - 1 - rank for rank in range(min(count, 100))}
        )
        curves.append(Curve(name, [(count / (count - rank), ordered[rank] * _MS) for rank in ranks if rank < count]))
    most = max((x for curve in curves for x, _ in curve.points), default=1.0)
    labels = {1.0: "0%", 2.0: "50%", 10.0: "90%", 100.0: "99%", 1e3: "99.9%", 1e4: "99.99%"}
    shown = {place: label for place, label in labels.items() if place <= most}
    title = "time that a share of the samples stays below, ms"
    return Chart(title, "share of the samples", curves, x_is_log=True, y_is_log=True, x_labels=shown)


def ratio(part: float, whole: float) -> float | None:
    """None: ``whole`` is 0."""
    return part / whole if whole else None
