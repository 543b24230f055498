"""The engine's statistics in Prometheus' text format, under names with ``fleetfoot:`` and with ``vllm:`` before them,
so that dashboards and routers for vLLM work: those of the Gateway API, llm-d and production-stack among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

PREFIXES = ("fleetfoot", "vllm")

_GAUGES = {
    "num_requests_running": "Requests that steps compute.",
    "num_requests_waiting": "Requests that wait for a row or for KV blocks.",
    "proxy_engines_refused": "Engines that a proxy does not use, because their answers would differ.",
    "proxy_engines_unavailable": "Engines of a proxy that serve nothing now: lost, stuck, interrupted or refused.",
    "kv_cache_usage_perc": "Share of the KV blocks in use, 0 to 1.",
    "expert_balancedness": "Mean load of a rank by the largest in the last rebalancing, before it; mean of the layers.",
    "expert_balancedness_least": "The same of the layer with the least.",
    "expert_balancedness_expected": "The same of all layers where the rebalancing has placed experts.",
}
_REASONS = "stop", "length", "abort", "error"
"""Counted from 0 on, as in vLLM: an increase from nothing to 1 is none to Prometheus."""
_COUNTERS = {
    "num_preemptions": "Requests that lost their KV blocks to others.",
    "prompt_tokens": "Prompt tokens.",
    "generation_tokens": "Generated tokens.",
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "prompt_tokens_cached": "Prompt tokens that were not computed: of the prefix cache, and from other engines.",
    "external_prefix_cache_queries": "Tokens looked up by the KV connector.",
    "external_prefix_cache_hits": "Tokens with KV that the KV connector has loaded.",
    "prefix_cache_lost": "Tokens with KV in the prefix cache, computed again for want of a recurrent state.",
    "engine_steps": "Steps of the engine.",
    "engine_restarts": "Restarts of the workers after an error.",
    "proxy_prefills": "Prompts that prefill engines have computed.",
    "proxy_prefills_failed": "Prompts that decode engines compute, because no prefill engine has.",
    "proxy_requests_resumed": "Requests that continue on another engine, because theirs was lost.",
    "expert_rebalancings": "Rounds in which experts were placed anew by their load.",
    "expert_moves": "Experts that came to another place.",
    "expert_rebalancing_seconds": "Time of rebalancings, beside steps.",
    "nixl_num_failed_transfers": "Loads of KV from other engines that have failed.",
    "nixl_num_failed_notifications": "Messages about KV of other engines that did not reach them.",
    "nixl_num_kv_expired_reqs": "Prompts whose KV was held for another engine that did not read it in time.",
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
    "request_max_num_generation_tokens": "Generated tokens of a request's sequence.",
    "request_params_max_tokens": "The limit of a request's tokens.",
    "request_params_n": "Sequences of a request.",
    "request_prefill_kv_computed_tokens": "Prompt tokens of a request that were computed: neither cached nor loaded.",
    "iteration_tokens_total": "Tokens of a step.",
    "nixl_xfer_time_seconds": "Reads of another engine's memory for a prompt.",
    "nixl_post_time_seconds": "Of these, until they were under way.",
    "nixl_bytes_transferred": "Bytes that were read for a prompt.",
    "nixl_num_descriptors": "Regions of memory that were read for a prompt.",
}

_LABELLED = {
    "num_requests_waiting_by_reason": ("gauge", "Requests that wait for room, and that wait for KV to be loaded."),
    "lora_requests_info": ("gauge", "The time; adapters are not supported."),
    "engine_sleep_state": ("gauge", "1 of the state that the engine is in."),
    "cache_config_info": ("gauge", "Settings of the KV cache."),
    "prompt_tokens_by_source": ("counter", "Prompt tokens that were computed, cached, or loaded from elsewhere."),
    "spec_decode_num_accepted_tokens_per_pos": ("counter", "Draft tokens accepted at each position."),
}
"""Metrics with labels of their own."""
_OLD_NAMES = {
    "gauges": {"gpu_cache_usage_perc": "kv_cache_usage_perc"},
    "counters": {
        "gpu_prefix_cache_queries": "prefix_cache_queries",
        "gpu_prefix_cache_hits": "prefix_cache_hits",
    },
    "histograms": {"time_per_output_token_seconds": "inter_token_latency_seconds"},
}
"""Names that vLLM had, and that routers still read; with ``vllm:`` alone."""


def render_metrics(values: Any, model: str) -> bytes:
    """``values``: of `fleetfoot.engine.output_router.OutputRouter.metrics`; several as a list, with their engines. It
    takes a tenth of the time of prometheus_client, and no other request is answered meanwhile."""
    engines: list[Mapping[str, Any]] = values if isinstance(values, list) else [values]
    last = f'model_name="{_escaped(model)}"'
    labels = [(f'engine="{_escaped(each.get("engine", "0"))}"', last) for each in engines]
    named = [*zip(labels, engines, strict=True)]
    text = "".join(f"{line}\n" for line in _lines(named))
    old = "".join(f"{line}\n" for line in _lines([(of, _under_old_names(values)) for of, values in named]))
    return "".join((text.replace(_PREFIX, PREFIXES[0]), (text + old).replace(_PREFIX, PREFIXES[1]))).encode()


def _under_old_names(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        section: {old: values[section][name] for old, name in names.items() if name in values.get(section, ())}
        for section, names in _OLD_NAMES.items()
    }


_PREFIX = "\0"
"""In place of a prefix: every name is there with each of them."""


def _lines(engines: Iterable[tuple[tuple[str, str], Mapping[str, Any]]]) -> Iterator[str]:
    """The families of all metrics. ``engines``: the labels and values of each."""
    for section, kind, texts, suffix in (
        ("gauges", "gauge", _GAUGES, ""),
        ("counters", "counter", _COUNTERS, "_total"),
    ):
        for name, text in (texts | _old_texts(section)).items():
            found = [(labels, values[section][name]) for labels, values in engines if name in values.get(section, ())]
            yield from _header(f"{name}{suffix}", kind, text) if found else ()
            yield from (_sample(f"{name}{suffix}", labels, value) for labels, value in found)
    for name, (kind, text) in _LABELLED.items():
        suffix = "_total" if kind == "counter" else ""
        rows = [(labels, *row) for labels, values in engines for row in values.get("labelled", {}).get(name, ())]
        yield from _header(f"{name}{suffix}", kind, text) if rows else ()
        for labels, own, value in rows:
            pairs = sorted((*labels, *(f'{key}="{_escaped(text)}"' for key, text in own.items())))
            yield f"{_PREFIX}:{name}{suffix}{{{','.join(pairs)}}} {float(value)}"
    if any("finished" in values for _, values in engines):
        yield from _header("request_success_total", "counter", "Requests that have ended.")
    for labels, values in engines:
        counts = dict.fromkeys(_REASONS, 0) | values["finished"] if "finished" in values else {}
        for reason, count in sorted(counts.items()):
            yield _sample("request_success_total", labels, count, f'finished_reason="{_escaped(reason)}",')
    for name, text in (_HISTOGRAMS | _old_texts("histograms")).items():
        samples = [(labels, values.get("histograms", {}).get(name)) for labels, values in engines]
        yield from _header(name, "histogram", text) if any(one for _, one in samples) else ()
        for labels, one in samples:
            if one:
                for limit, count in one["buckets"]:
                    yield _sample(f"{name}_bucket", labels, count, f'le="{limit}",')
                yield _sample(f"{name}_count", labels, one["buckets"][-1][1])
                yield _sample(f"{name}_sum", labels, one["sum"])


def _old_texts(section: str) -> dict[str, str]:
    return {old: f"The same as {name}." for old, name in _OLD_NAMES[section].items()}


def _header(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {_PREFIX}:{name} {text}", f"# TYPE {_PREFIX}:{name} {kind}"


def _sample(name: str, labels: tuple[str, str], value: float, between: str = "") -> str:
    """A line. ``between``: another label, with its comma: labels are in the order of their names."""
    return f"{_PREFIX}:{name}{{{labels[0]},{between}{labels[1]}}} {float(value)}"


def _escaped(text: object) -> str:
    """A value of a label."""
    return str(text).replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"").replace(_PREFIX, "")
