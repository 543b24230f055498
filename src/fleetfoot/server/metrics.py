"""The engine's statistics in Prometheus' text format, under names with ``fleetfoot:`` and with ``vllm:`` before them,
so that dashboards for vLLM work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest

PREFIXES = ("fleetfoot", "vllm")

_GAUGES = {
    "num_requests_running": "Requests that steps compute.",
    "num_requests_waiting": "Requests that wait for a row or for KV blocks.",
    "proxy_engines_refused": "Engines that a proxy does not use, because their answers would differ.",
    "proxy_engines_unavailable": "Engines of a proxy that serve nothing now: lost, stuck, interrupted or refused.",
    "kv_cache_usage_perc": "Share of the KV blocks in use, 0 to 1.",
}
_COUNTERS = {
    "num_preemptions": "Requests that lost their KV blocks to others.",
    "prompt_tokens": "Prompt tokens.",
    "generation_tokens": "Generated tokens.",
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "prefix_cache_lost": "Tokens with KV in the prefix cache, computed again for want of a recurrent state.",
    "engine_steps": "Steps of the engine.",
    "engine_restarts": "Restarts of the workers after an error.",
    "proxy_prefills": "Prompts that prefill engines have computed.",
    "proxy_prefills_failed": "Prompts that decode engines compute, because no prefill engine has.",
    "proxy_requests_resumed": "Requests that continue on another engine, because theirs was lost.",
    "spec_decode_num_drafts": "Verifications of draft tokens.",
    "spec_decode_num_draft_tokens": "Draft tokens verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted.",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From arrival in the engine to the first token.",
    "inter_token_latency_seconds": "Between tokens of a request.",
    "request_time_per_output_token_seconds": "Mean time between the tokens of a request.",
    "e2e_request_latency_seconds": "From arrival to the last token.",
    "request_queue_time_seconds": "From arrival to the first step.",
    "request_prefill_time_seconds": "From the first step to the first token.",
    "request_decode_time_seconds": "From the first token to the last.",
    "request_inference_time_seconds": "From the first step to the last token.",
    "request_prompt_tokens": "Prompt tokens of a request.",
    "request_generation_tokens": "Generated tokens of a request.",
    "iteration_tokens_total": "Tokens of a step.",
}


def render_metrics(values: Any, model: str) -> bytes:
    """``values``: of `fleetfoot.engine.output_router.OutputRouter.metrics`; several as a list, with their engines."""
    text: bytes = generate_latest(_Collector(values, model))
    return text


class _Collector:
    """What `generate_latest` reads in place of a registry."""

    def __init__(self, values: Any, model: str) -> None:
        engines: list[Mapping[str, Any]] = values if isinstance(values, list) else [values]
        self._engines = [([model, engine.get("engine", "0")], engine) for engine in engines]

    def collect(self) -> Iterable[Metric]:
        names = ["model_name", "engine"]
        for prefix in PREFIXES:
            families: list[tuple[str, Any, Mapping[str, str]]] = [
                ("gauges", GaugeMetricFamily, _GAUGES),
                ("counters", CounterMetricFamily, _COUNTERS),
            ]
            for section, kind, texts in families:
                for name, text in texts.items():
                    family = kind(f"{prefix}:{name}", text, labels=names)
                    for labels, values in self._engines:
                        if name in values.get(section, ()):
                            family.add_metric(labels, values[section][name])
                    if family.samples:
                        yield family
            success = CounterMetricFamily(
                f"{prefix}:request_success", "Requests that have ended.", labels=[*names, "finished_reason"]
            )
            for labels, values in self._engines:
                for reason, count in sorted(values.get("finished", {}).items()):
                    success.add_metric([*labels, reason], count)
            yield success
            for name, text in _HISTOGRAMS.items():
                histogram = HistogramMetricFamily(f"{prefix}:{name}", text, labels=names)
                for labels, values in self._engines:
                    if one := values.get("histograms", {}).get(name):
                        buckets = [(str(limit), count) for limit, count in one["buckets"]]
                        histogram.add_metric(labels, buckets, one["sum"])
                yield histogram
