"""How near a benchmark came to what the machine could do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fleetfoot.cli.bench_load import Work
from fleetfoot.plan.roofline import Costs, Floor, Speed

if TYPE_CHECKING:
    from fleetfoot.cli.bench_load import Samples
    from fleetfoot.cli.start import StartedEngine


def floor_of(started: StartedEngine) -> Floor | None:
    """Measure the machine; None: the GPU has no memory to spare for that."""
    import torch

    from fleetfoot.cli.peak_rates import measure_ceilings

    plan = started.plan
    try:
        ceilings = measure_ceilings(plan.device, plan.dtype)
    except torch.OutOfMemoryError:
        return None
    # the ranks of an engine on a CPU share what is measured here
    num_devices = plan.config.world_size if plan.device == "cuda" else 1
    speed = Speed(num_devices * ceilings.bytes_per_s, num_devices * ceilings.flops_per_s)
    return Floor(Costs.of(plan.model, plan.dtype), speed)


def floor_report(floor: Floor | None, samples: Samples, *, is_paced: bool = False) -> dict[str, Any] | None:
    """The floor of the steps that were taken, and its share of the time that they took.

    Args:
        is_paced: requests came at times of their own, so that the whole time says nothing.
    """
    if floor is None:
        return None
    duration = sum(samples.load_duration)
    linear = sum(floor.linear_s(step.num_tokens, step.num_requests) for step in samples.steps)
    attention = _attention_s(floor, samples.work)
    return {
        "copy_bandwidth_gb_s": floor.speed.bytes_per_s / 1e9,
        "matmul_tflop_s": floor.speed.flops_per_s / 1e12,
        "duration_s": linear + attention,
        "linear_s": linear,
        "attention_s": attention,
        "share": None if is_paced or not duration else (linear + attention) / duration,
    }


def batch_floors(floor: Floor, batch_size: int, input_len: int, output_len: int) -> dict[str, float]:
    """Of a batch of equal requests: milliseconds to the first token, and for each token after it."""
    first = floor.linear_s(batch_size * input_len, batch_size) + batch_size * floor.prefill_attention_s(input_len)
    content = {"ttft_ms": 1e3 * first}
    if output_len > 1:
        reading = batch_size * floor.decode_attention_s(input_len, output_len) / (output_len - 1)
        content["tpot_ms"] = 1e3 * (floor.linear_s(batch_size, batch_size) + reading)
    return content


def _attention_s(floor: Floor, work: Sequence[Work]) -> float:
    return sum(
        floor.prefill_attention_s(one.num_prompt_tokens, one.num_cached_tokens)
        + floor.decode_attention_s(one.num_prompt_tokens, one.num_output_tokens)
        for one in work
    )
