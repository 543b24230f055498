"""A benchmark's result as a JSON object. docs/benchmarks.md describes every field; change both together."""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fleetfoot._version import __version__
from fleetfoot.cli.bench_load import Samples
from fleetfoot.cli.output import steps_without_drafts
from fleetfoot.scheduler.stats import DraftStats, TransferStats

if TYPE_CHECKING:
    from fleetfoot.engine.engine import LLMEngine

PERCENTILES = (50, 90, 95, 99)
_MS, _US = 1e3, 1e6


def report(
    benchmark: str,
    engine: LLMEngine,
    start_s: float,
    settings: dict[str, Any],
    samples: Samples,
    floor: dict[str, Any] | None,
) -> dict[str, Any]:
    """The whole object."""
    return {
        "benchmark": benchmark,
        "versions": _versions(),
        "machine": _machine(engine.plan.device),
        "engine": _engine(engine, start_s),
        "settings": settings,
        "results": results(samples, with_loads=benchmark == "latency", floor=floor),
    }


def results(samples: Samples, *, with_loads: bool, floor: dict[str, Any] | None = None) -> dict[str, Any]:
    """Statistics of the samples.

    Args:
        floor: as returned by `fleetfoot.cli.bench_roofline.floor_report`.
        with_loads: include the durations of single loads (the batches of a latency benchmark).
    """
    duration = sum(samples.load_duration)
    steps, num_steps = samples.steps, len(samples.steps)
    in_runner = sum(step.execute_s for step in steps)
    host = sum(step.host_s for step in steps)
    content: dict[str, Any] = {
        "duration_s": duration,
        "num_requests": samples.num_requests,
        "num_prompt_tokens": samples.num_prompt_tokens,
        "num_output_tokens": samples.num_output_tokens,
        "requests_per_s": _ratio(samples.num_requests, duration),
        "output_tokens_per_s": _ratio(samples.num_output_tokens, duration),
        "total_tokens_per_s": _ratio(samples.num_prompt_tokens + samples.num_output_tokens, duration),
        "ttft_ms": distribution(samples.ttft, _MS),
        "tpot_ms": distribution(samples.tpot, _MS),
        "itl_ms": distribution(samples.itl, _MS),
        "request_latency_ms": distribution(samples.request_latency, _MS),
    }
    if with_loads:
        content["batch_latency_ms"] = distribution(samples.load_duration, _MS)
    return content | {
        "num_steps": num_steps,
        "steps_per_s": _ratio(num_steps, duration),
        "requests_per_step": _ratio(sum(step.num_requests for step in steps), num_steps),
        "tokens_per_step": _ratio(sum(step.num_tokens for step in steps), num_steps),
        "host_time_per_step_us": distribution((step.host_s for step in steps), _US),
        "schedule_time_per_step_us": distribution((step.schedule_s for step in steps), _US),
        "update_time_per_step_us": distribution((step.update_s for step in steps), _US),
        "output_time_per_step_us": _ratio((samples.in_steps - in_runner - host) * _US, num_steps),
        "runner_time_per_step_ms": distribution((step.execute_s for step in steps), _MS),
        "runner_share": _ratio(in_runner, duration),
        "prefix_cache": {
            "queried_tokens": samples.prefix_cache_queries,
            "hit_tokens": samples.prefix_cache_hits,
            "hit_rate": _ratio(samples.prefix_cache_hits, samples.prefix_cache_queries),
        },
        "num_preemptions": samples.num_preemptions,
        "drafts": _drafts(samples.drafts),
        "kv_transfer": _transfers(samples.transfers),
        "floor": floor,
    }


def _drafts(drafts: DraftStats | None) -> dict[str, Any] | None:
    """Of speculative decoding; None if it is off."""
    if drafts is None or not drafts.accepted_at:
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


def _transfers(transfers: TransferStats | None) -> dict[str, Any] | None:
    """Of the KV connector; None if there is none or it was idle."""
    if transfers is None or not (transfers.loads_started or transfers.counters):
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
    num_values = len(ordered)
    if not num_values:
        return {"mean": None, **{f"p{percent}": None for percent in PERCENTILES}, "max": None, "count": 0}
    content: dict[str, float | int | None] = {"mean": math.fsum(ordered) / num_values * scale}
    for percent in PERCENTILES:
        place = (num_values - 1) * percent / 100
        below = int(place)
        above = min(below + 1, num_values - 1)
        content[f"p{percent}"] = (ordered[below] + (ordered[above] - ordered[below]) * (place - below)) * scale
    return content | {"max": ordered[-1] * scale, "count": num_values}


def summary(content: dict[str, Any]) -> str:
    """The result in two lines of text, with one more each for the roofline and for drafts."""
    measured = content["results"]
    times = ", ".join(
        f"{name} {measured[key]['mean']:.2f} ms (p99 {measured[key]['p99']:.2f})"
        for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"))
        if measured[key]["count"]
    )
    return (
        f"[{measured['num_requests']} requests in {measured['duration_s']:.2f} s: "
        f"{measured['output_tokens_per_s']:.1f} output tokens/s, {measured['total_tokens_per_s']:.1f} tokens/s in all, "
        f"{measured['steps_per_s']:.1f} steps/s\n"
        f" {times}, host time {measured['host_time_per_step_us']['mean']:.0f} us a step"
        f"{_floor_summary(measured)}{_drafts_summary(measured['drafts'])}]"
    )


def _floor_summary(measured: dict[str, Any]) -> str:
    floor = measured["floor"]
    if floor is None or floor["share"] is None:
        return ""
    speed = f"{floor['copy_bandwidth_gb_s']:,.0f} GB/s and {floor['matmul_tflop_s']:.3g} TFLOP/s"
    parts = [f"{100 * floor['share']:.0f}% of what {speed} could do"]
    for name, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms")):
        if key in floor and measured[key]["count"]:
            parts.append(f"{name} {100 * floor[key] / measured[key]['mean']:.0f}% of {floor[key]:.2f} ms")
    return "\n " + ", ".join(parts)


def _drafts_summary(drafts: dict[str, Any] | None) -> str:
    if drafts is None:
        return ""
    text = "none were verified"
    if drafts["acceptance_rate"] is not None:
        rates = ", ".join(f"{100 * rate:.0f}" for rate in drafts["acceptance_rate_at"])
        text = (
            f"{drafts['mean_acceptance_length']:.2f} tokens a step, {100 * drafts['acceptance_rate']:.0f}% of "
            f"{drafts['num_drafted_tokens']} accepted ({rates}% by place)"
        )
    return f"\n drafts: {text}{steps_without_drafts(drafts['steps_without'])}"


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _versions() -> dict[str, str | None]:
    own = {"fleetfoot": __version__, "python": platform.python_version()}
    return own | {name: _installed(name) for name in ("torch", "triton", "numpy")}


def _installed(distribution_name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version(distribution_name)
    except PackageNotFoundError:
        return None


def _machine(device: str) -> dict[str, Any]:
    import torch

    return {
        "system": f"{platform.system()} {platform.release()}",
        "device": device,
        "device_name": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "num_threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    """From /proc/cpuinfo; without it, the architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _engine(engine: LLMEngine, start_s: float) -> dict[str, Any]:
    plan, scheduler = engine.plan, engine.core.scheduler.config
    return {
        "architecture": plan.model.architecture,
        "num_parameters": plan.model.num_parameters,
        "dtype": plan.dtype,
        "runner": engine.runner_name,
        "runner_reasons": list(plan.reasons),
        "max_model_len": engine.input_processor.max_model_len,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "block_size": scheduler.block_size,
        "num_kv_blocks": scheduler.num_blocks,
        "start_s": start_s,
        "config": dataclasses.asdict(plan.config),
    }
