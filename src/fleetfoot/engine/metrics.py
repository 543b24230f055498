"""The engine's statistics as vLLM's metrics, which are at `fleetfoot.v1.metrics.reader`."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from fleetfoot.engine.stats import StatsCollector
from fleetfoot.scheduler.stats import SchedulerStats

_BUCKETS = [step * 10.0**power for power in range(-3, 3) for step in (1, 2, 5)]
"""Upper limits, 1 ms to 500 s."""
_INTERVALS = {
    "e2e_request_latency": ("queued_ts", "last_token_ts"),
    "request_queue_time": ("queued_ts", "scheduled_ts"),
    "request_inference_time": ("scheduled_ts", "last_token_ts"),
    "request_prefill_time": ("scheduled_ts", "first_token_ts"),
    "request_decode_time": ("first_token_ts", "last_token_ts"),
}
"""Between two fields of `RequestMetrics`."""


@dataclass
class Metric:
    """A metric; ``labels`` distinguish those of one name."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """Since the engine's start."""

    value: int


@dataclass
class Vector(Metric):
    """Counters, one for each position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """At this moment."""

    value: float


@dataclass
class Histogram(Metric):
    """Samples in seconds, the latest 100,000."""

    count: int
    sum: float
    buckets: dict[str, int]
    """Upper limit, the last one ``+Inf`` -> number of samples up to it."""


def engine_metrics(collector: StatsCollector, scheduler: SchedulerStats, model: str) -> list[Metric]:
    """All metrics, under vLLM's names with the prefix ``fleetfoot:`` and with ``vllm:``. ``model``: for the labels."""
    labels, drafts = {"model_name": model, "engine": "0"}, scheduler.drafts
    metrics: list[Metric] = [
        Gauge("num_requests_running", labels, scheduler.num_running),
        Gauge("num_requests_waiting", labels, scheduler.num_waiting),
        Gauge("kv_cache_usage_perc", labels, scheduler.kv_cache_usage),
        Counter("num_preemptions", labels, scheduler.num_preemptions),
        Counter("prompt_tokens", labels, collector.num_prompt_tokens),
        Counter("generation_tokens", labels, collector.num_generation_tokens),
        Counter("prefix_cache_queries", labels, scheduler.prefix_cache_queries),
        Counter("prefix_cache_hits", labels, scheduler.prefix_cache_hits),
        Counter("prefix_cache_lost", labels, scheduler.prefix_cache_lost),
    ]
    for reason, count in sorted(collector.num_finished.items()):
        metrics.append(Counter("request_success", {**labels, "finished_reason": reason}, count))
    if drafts.accepted_at:  # with speculative decoding
        metrics += [
            Counter("spec_decode_num_drafts", labels, drafts.num_rows),
            Counter("spec_decode_num_draft_tokens", labels, drafts.num_drafted),
            Counter("spec_decode_num_accepted_tokens", labels, drafts.num_accepted),
            Vector("spec_decode_num_accepted_tokens_per_pos", labels, [*drafts.accepted_at]),
        ]
    if (balance := collector.balance) is not None:
        metrics += [
            Gauge("expert_balancedness", labels, balance.balancedness),
            Gauge("expert_balancedness_least", labels, balance.least),
            Gauge("expert_balancedness_expected", labels, balance.expected),
            Counter("expert_rebalancings", labels, balance.num_rounds),
            Counter("expert_moves", labels, balance.num_moved),
        ]
    times = {"time_to_first_token": collector.ttft, "inter_token_latency": collector.itl}
    samples = {name: sorted(values) for name, values in times.items()}
    requests = [request for request in collector.requests if request.first_token_ts]
    for name, (begin, end) in _INTERVALS.items():
        samples[name] = sorted(getattr(request, end) - getattr(request, begin) for request in requests)
    for name, ordered in samples.items():
        buckets = {f"{limit:g}": bisect_right(ordered, limit) for limit in _BUCKETS} | {"+Inf": len(ordered)}
        metrics.append(Histogram(f"{name}_seconds", labels, len(ordered), sum(ordered), buckets))
    return [replace(metric, name=f"{prefix}:{metric.name}") for prefix in ("fleetfoot", "vllm") for metric in metrics]
