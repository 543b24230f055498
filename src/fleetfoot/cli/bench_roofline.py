"""The roofline of a benchmark: the time that memory bandwidth and arithmetic alone would take.

A step reads every weight once and multiplies each token with it; the slower of the two counts. A decode reads the keys
and values of its context, and a prompt attends to itself. For a token that is not sampled from, the last layer computes
keys and values only. Launches, norms, sampling and scheduling are left out. Peak rates of the machine are measured with
a copy and a matrix product. Nothing imports torch before it is measured.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from fleetfoot.cli.drawing import Chart, Curve
from fleetfoot.config.model import DTYPE_BYTES, ModelConfig

if TYPE_CHECKING:
    from fleetfoot.cli.bench_load import Samples
    from fleetfoot.engine.engine import LLMEngine

_COPY_BYTES = 256 << 20
_MATRIX_SIZE = {"cuda": 8192, "cpu": 2048}
_SMALL_MATRIX = 256
"""Shows on a CPU whether torch has a fast product of a dtype, in 30 ms if it has not: with AVX2, 2048 rows of bfloat16
take 14 s, and 0.2 s in float32."""
_REPEATS = 5


class AttentionCosts(NamedTuple):
    """What attention of one layer reads and computes."""

    kv_bytes: int
    """Keys and values of one position."""
    flops: int
    """Operations of one query token and one position."""
    window: int | None = None
    """How many positions a token sees; None: all."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What a model reads and computes, over all its ranks together."""

    weight_bytes: int
    """Read by a step: all layers and the logits head; of the embedding a few rows, which are not counted."""
    flops_per_token: int
    """Operations of the linear layers, but for what `flops_per_logits` has of the last one."""
    flops_per_logits: int
    """Operations of the logits head, and of the last layer without its K and V: for each token that is sampled."""
    attention: tuple[AttentionCosts, ...]
    """Those of each layer."""

    @classmethod
    def of(cls, model: ModelConfig, dtype: str) -> Costs:
        layers, head = model.layer_parameters(), model.vocab_size * model.hidden_size
        mixers, last = model.attentions, model.layers[-1]
        kv_sizes = [2 * mixer.num_kv_heads * mixer.head_dim for mixer in mixers]
        sampled = 0  # of the last layer, which computes all tokens if it has a state
        if last.attention is not None:
            sampled = last.num_parameters(model.hidden_size) - kv_sizes[-1] * model.hidden_size
        return cls(
            weight_bytes=(layers + head) * DTYPE_BYTES[dtype],
            flops_per_token=2 * (layers - sampled),
            flops_per_logits=2 * (head + sampled),
            attention=tuple(
                AttentionCosts(kv_size * DTYPE_BYTES[dtype], 4 * mixer.num_heads * mixer.head_dim, mixer.window)
                for kv_size, mixer in zip(kv_sizes, mixers, strict=True)
            ),
        )

    def attention_flops(self, first: int, count: int) -> int:
        """Operations of attention for ``count`` tokens in a row, the first of them at position ``first``."""
        kinds = Counter(self.attention).items()
        return sum(layers * kind.flops * _positions(first, count, kind.window) for kind, layers in kinds)

    def attention_bytes(self, first: int, count: int) -> int:
        """Bytes of K and V that as many tokens read, one in each step."""
        kinds = Counter(self.attention).items()
        return sum(layers * kind.kv_bytes * _positions(first, count, kind.window) for kind, layers in kinds)


def _positions(first: int, count: int, window: int | None) -> int:
    """Pairs of query token and position in one layer."""
    if window is None:
        window = first + count
    growing = max(0, min(count, window - first))  # tokens that see all before them, and themselves
    return growing * first + growing * (growing + 1) // 2 + (count - growing) * window


@dataclass(frozen=True, slots=True)
class Roofline:
    """The least time of a model's work on a machine, in seconds. Rates are those of all devices together."""

    costs: Costs
    bytes_per_s: float
    """Read plus written, by a copy larger than the caches."""
    flops_per_s: float
    """The rate of a square matrix product in the model's dtype; a multiply-add counts as two."""

    def linear_s(self, num_tokens: int, num_sampled: int) -> float:
        """Seconds of one step without its attention."""
        flops = num_tokens * self.costs.flops_per_token + num_sampled * self.costs.flops_per_logits
        return max(self.costs.weight_bytes / self.bytes_per_s, flops / self.flops_per_s)

    def prefill_attention_s(self, num_tokens: int, num_cached: int = 0) -> float:
        """Seconds for a prompt, over all its chunks; ``num_cached`` of its tokens were found in the prefix cache."""
        num_computed, last = num_tokens - num_cached, self.costs.attention[-1]
        unread = last.flops * _positions(num_cached, max(0, num_computed - 1), last.window)
        return (self.costs.attention_flops(num_cached, num_computed) - unread) / self.flops_per_s

    def decode_attention_s(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """Seconds in a request's steps after its prompt: all its outputs but the last are an input of one."""
        return self.costs.attention_bytes(num_prompt_tokens, max(0, num_output_tokens - 1)) / self.bytes_per_s


def measure_floor(engine: LLMEngine) -> Roofline | None:
    """The roofline of an engine's model on this machine; None if the GPU has no memory left to measure it."""
    import torch

    plan = engine.plan
    try:
        bytes_per_s, flops_per_s = measure_peak_rates(plan.device, plan.dtype)
    except torch.OutOfMemoryError:
        return None
    # on a CPU, all ranks share the measured rates
    num_devices = plan.config.world_size if plan.device == "cuda" else 1
    return Roofline(Costs.of(plan.model, plan.dtype), num_devices * bytes_per_s, num_devices * flops_per_s)


def floor_report(
    floor: Roofline | None, samples: Samples, *, is_paced: bool = False, batch: tuple[int, int, int] | None = None
) -> dict[str, Any] | None:
    """Least time of the steps that were run, and its share of the time that they took; None without a roofline.

    Args:
        is_paced: requests arrived over time, so the duration includes waiting; the share is then None.
        batch: size, input length and output length of batches of equal requests; adds `batch_floors`.
    """
    if floor is None:
        return None
    duration = sum(samples.load_duration)
    linear = sum(floor.linear_s(step.num_tokens, step.num_requests) for step in samples.steps)
    attention = sum(
        floor.prefill_attention_s(request.num_prompt_tokens, request.num_cached_tokens)
        + floor.decode_attention_s(request.num_prompt_tokens, request.num_output_tokens)
        for request in samples.work
    )
    return {
        "copy_bandwidth_gb_s": floor.bytes_per_s / 1e9,
        "matmul_tflop_s": floor.flops_per_s / 1e12,
        "duration_s": linear + attention,
        "linear_s": linear,
        "attention_s": attention,
        "share": None if is_paced or not duration else (linear + attention) / duration,
        **({} if batch is None else batch_floors(floor, *batch)),
    }


def roofline_chart(floor: Roofline, samples: Samples) -> Chart:
    """What steps have computed, below what memory and arithmetic allow: TFLOP/s over operations for each byte read.
    Steps are counted with their linear layers alone."""
    costs, dots = floor.costs, set()
    for step in samples.steps:
        flops = step.num_tokens * costs.flops_per_token + step.num_requests * costs.flops_per_logits
        seconds = step.execute_s + step.host_s
        dots.add((float(f"{flops / costs.weight_bytes:.3g}"), float(f"{flops / seconds / 1e12:.3g}")))
    ridge = floor.flops_per_s / floor.bytes_per_s
    ends = [x for x, _ in dots] + [ridge / 4]
    roof = [
        (x, min(floor.flops_per_s, x * floor.bytes_per_s) / 1e12) for x in (min(ends), ridge, max(*ends, 4 * ridge))
    ]
    curves = [Curve("steps", sorted(dots), "dots"), Curve("roofline", roof)]
    title = "TFLOP/s over operations for each byte of weights"
    return Chart(title, "operations for each byte", curves, x_is_log=True, y_is_log=True)


def batch_floors(floor: Roofline, batch_size: int, input_len: int, output_len: int) -> dict[str, float]:
    """Least time to first token and time per output token of a batch of equal requests, in milliseconds."""
    first = floor.linear_s(batch_size * input_len, batch_size) + batch_size * floor.prefill_attention_s(input_len)
    content = {"ttft_ms": 1e3 * first}
    if output_len > 1:
        reading = batch_size * floor.decode_attention_s(input_len, output_len) / (output_len - 1)
        content["tpot_ms"] = 1e3 * (floor.linear_s(batch_size, batch_size) + reading)
    return content


def measure_peak_rates(device: str, dtype: str) -> tuple[float, float]:
    """``bytes_per_s`` and ``flops_per_s`` of one device. Takes a second or less, and 1 GB of GPU memory meanwhile.

    Args:
        device: ``cpu`` or ``cuda``, the current one.
        dtype: torch's name. A CPU that multiplies float32 faster is measured with that: kernels can widen their inputs.

    Raises:
        torch.OutOfMemoryError: the GPU has too little memory left.
    """
    if device == "cpu":
        dtype = min((dtype, "float32"), key=lambda name: _matmul_seconds(_SMALL_MATRIX, name, device, 1))
    size = _MATRIX_SIZE[device]
    return 2 * _COPY_BYTES / _seconds_of_copy(device), 2 * size**3 / _matmul_seconds(size, dtype, device)


def _seconds_of_copy(device: str) -> float:
    import torch

    source = torch.empty(_COPY_BYTES // 8, dtype=torch.int64, device=device).random_()
    return _seconds(partial(torch.empty_like(source).copy_, source), device)


def _matmul_seconds(size: int, dtype: str, device: str, repeats: int = _REPEATS) -> float:
    """Seconds of a product of two square matrices."""
    import torch

    a = torch.randn(size, size, dtype=getattr(torch, dtype), device=device)
    return _seconds(partial(torch.mm, a, torch.randn_like(a), out=torch.empty_like(a)), device, repeats)


def _seconds(work: Callable[[], object], device: str, repeats: int = _REPEATS) -> float:
    """Median of several runs, after one warm-up run."""
    work()
    return median(_timed(work, device) for _ in range(repeats))


def _timed(work: Callable[[], object], device: str) -> float:
    if device == "cpu":
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    import torch

    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before.record()
    work()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3
