"""The load of `fleetfoot bench cold`: what requests wait for right after a start.

It needs no warm-up and has none: the first request is added when the engine is ready. Rounds follow one another. Each
draws a number of requests, and for each request its lengths and its sampler, from a seed. docs/benchmarks.md describes
the fields of the results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fleetfoot.cli.bench_load import Lengths, distribution
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from fleetfoot.engine.engine import LLMEngine

_MS = 1e3
_BATCHES = (1, 1, 1, 1, 2, 3, 4, 7, 8, 16, 24, 32, 64, 128, 256)
"""Requests of a round: half of the rounds have few."""
_SAMPLERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.05},
    {"temperature": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    {"temperature": 0.0, "logprobs": 5},
)


@dataclass(slots=True)
class ColdSamples:
    """Seconds, and the slowest steps."""

    ttft: list[float] = field(default_factory=list)
    ttft_alone: list[float] = field(default_factory=list)
    """In rounds with one request, where no other request's computation is part of it."""
    itl: list[float] = field(default_factory=list)
    slowest: list[dict[str, Any]] = field(default_factory=list)
    """Steps, the slowest first."""
    num_steps: int = 0
    num_requests: int = 0
    duration: float = 0.0

    def step(self, at: float, seconds: float, **sizes: int) -> None:
        """Count a step that began ``at`` seconds after the start, and keep it if it is one of the slowest."""
        self.num_steps += 1
        entry = {"at_s": round(at, 3), "ms": round(seconds * _MS, 2), **sizes}
        self.slowest = sorted([*self.slowest, entry], key=lambda step: -step["ms"])[:12]


def run_cold(
    engine: LLMEngine,
    samples: ColdSamples,
    *,
    seconds: float,
    input_len: Lengths,
    output_len: Lengths,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
    on_round: Callable[[float, int], object] = lambda seconds, tokens: None,
) -> None:
    """Run rounds until ``seconds`` have passed, and the last one to its end.

    A request's TTFT is from its arrival to the step that yields its first token; the other steps that yield a token of
    it are its ITL.

    Args:
        clock: seconds; the engine's.
        on_round: called after each round, with its seconds and its tokens.

    Raises:
        RuntimeError: a request has failed.
    """
    begin = clock()
    for number, (prompts, params) in enumerate(_rounds(engine, input_len, output_len, seed)):
        if (began := clock()) - begin >= seconds:
            break
        last: dict[str, float] = {}
        num_tokens = 0
        for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
            name = f"{number}-{index}"
            last[name] = clock()
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        waiting = {*last}
        samples.num_requests += len(last)
        while engine.has_unfinished_requests():
            step_begin = clock()
            outputs = engine.step()
            now = clock()
            counts = {"first_tokens": 0, "tokens": 0}
            for output in outputs:
                name = output.request_id
                if any(completion.finish_reason == "error" for completion in output.outputs):
                    raise RuntimeError(f"request {name} has failed: {output.outputs[0].stop_reason}")
                counts["tokens"] += 1
                counts["first_tokens"] += name in waiting
                (samples.ttft if name in waiting else samples.itl).append(now - last[name])
                if name in waiting and len(prompts) == 1:
                    samples.ttft_alone.append(now - last[name])
                waiting.discard(name)
                last[name] = now
            sizes = {"batch": len(prompts), "longest": max(map(len, prompts)), **counts}
            samples.step(step_begin - begin, now - step_begin, **sizes)
            num_tokens += counts["tokens"]
        on_round(clock() - began, num_tokens)
    samples.duration = clock() - begin


def _rounds(
    engine: LLMEngine, input_len: Lengths, output_len: Lengths, seed: int
) -> Iterator[tuple[list[list[int]], list[SamplingParams]]]:
    """Prompts and sampling parameters of each round, without end."""
    import numpy as np

    rng = np.random.default_rng([seed, 20])
    vocab_size, limit = engine.input_processor.vocab_size, engine.core.scheduler.config.max_num_seqs
    while True:
        count = min(int(rng.choice(_BATCHES)), limit)
        # one sampler for most rounds, as one kind of traffic has, else one for each request
        shared = _SAMPLERS[int(rng.integers(len(_SAMPLERS)))] if rng.random() < 0.7 else None
        lengths, outputs = input_len.draw(rng, count), output_len.draw(rng, count)
        if count > 16:  # so that a round takes a second or two
            lengths = [min(length, input_len.low + length // 4) for length in lengths]
        prompts = [rng.integers(0, vocab_size, size=length).tolist() for length in lengths]
        yield prompts, [_params(rng, shared, length) for length in outputs]


def _params(rng: np.random.Generator, shared: dict[str, Any] | None, output_len: int) -> SamplingParams:
    chosen = _SAMPLERS[int(rng.integers(len(_SAMPLERS)))] if shared is None else shared
    kind = RequestOutputKind.DELTA
    return SamplingParams(**chosen, max_tokens=output_len, ignore_eos=True, detokenize=False, output_kind=kind)


def cold_results(samples: ColdSamples) -> dict[str, Any]:
    """Statistics of the samples."""
    return {
        "duration_s": samples.duration,
        "num_requests": samples.num_requests,
        "num_steps": samples.num_steps,
        "ttft_ms": distribution(samples.ttft, _MS),
        "ttft_alone_ms": distribution(samples.ttft_alone, _MS),
        "itl_ms": distribution(samples.itl, _MS),
        "slowest_steps": samples.slowest,
    }


def cold_summary(measured: dict[str, Any]) -> str:
    """The results in one line for each figure, and one for each of the slowest steps."""
    lines = [f"{measured['num_requests']} requests and {measured['num_steps']} steps in {measured['duration_s']:.1f} s"]
    for name in ("ttft_ms", "ttft_alone_ms", "itl_ms"):
        times, label = measured[name], name.removesuffix("_ms").replace("_", " ").upper()
        if times["count"]:
            lines.append(f"{label} worst {times['max']:.1f} ms, p99 {times['p99']:.1f}, median {times['p50']:.1f}")
    lines += [
        f"{step['ms']:.1f} ms at {step['at_s']:.2f} s: {step['tokens']} tokens ({step['first_tokens']} first), "
        f"batch of {step['batch']}, prompts up to {step['longest']}"
        for step in measured["slowest_steps"]
    ]
    return "\n ".join(lines)
