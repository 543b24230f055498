"""`fleetfoot bench`: measures latency, throughput, a cold start or a server. docs/benchmarks.md has the results."""

from __future__ import annotations

import argparse
import dataclasses
import math
import platform
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fleetfoot._version import __version__
from fleetfoot.cli import bench_serve, command
from fleetfoot.cli.arguments import add_engine_arguments, given_settings
from fleetfoot.cli.bench_cold import ColdSamples, cold_results, cold_summary, run_cold
from fleetfoot.cli.bench_load import BenchRequest, Lengths, Samples, Workload, results, run_load, tails_chart
from fleetfoot.cli.bench_roofline import Roofline, floor_report, measure_floor, roofline_chart
from fleetfoot.cli.drawing import check_plot_file, draw
from fleetfoot.inputs import PromptType
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.utils.process import SHORT_COLLECTIONS
from fleetfoot.utils.progress import progress_bar

if TYPE_CHECKING:
    from fleetfoot.engine.engine import LLMEngine

_EPILOG = """\
The result is one JSON object: benchmark, versions, machine, engine, settings, results. docs/benchmarks.md describes
its fields and how they are measured. Times of many samples are objects of mean, p50, p90, p95, p99, max and count.
The progress bar shows on a terminal only, so that drawing it does not disturb what a script measures."""

_WARM_UP, _MEASURED = 1, 2
"""Random streams: measured prompts differ from those of the warm-up."""

_INPUT_LEN = Lengths(512, 512)
"""Default of the throughput benchmark."""


def _add_latency_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_number(parser.add_argument, "--input-len", 32, "tokens of each prompt")
    command.add_number(parser.add_argument, "--output-len", 128, "tokens to generate for each")
    command.add_number(parser.add_argument, "--batch-size", 8, "requests that start together")
    command.add_number(parser.add_argument, "--num-iters", 10, "batches to measure, one after the other")
    command.add_number(parser.add_argument, "--num-warmup", 2, "batches before them that do not count", least=0)
    _add_shared_arguments(parser)


def _run_latency(arguments: argparse.Namespace) -> int:
    batch = arguments.batch_size, arguments.input_len, arguments.output_len
    lengths = Lengths(arguments.input_len, arguments.input_len), Lengths(arguments.output_len, arguments.output_len)
    with _started(arguments) as (engine, start_s):
        workload = Workload(engine.input_processor.vocab_size, *lengths, seed=arguments.seed)
        warm_up = [workload.random_requests(batch[0], stream=(_WARM_UP, i)) for i in range(arguments.num_warmup)]
        measured = [workload.random_requests(batch[0], stream=(_MEASURED, i)) for i in range(arguments.num_iters)]
        samples = _measure(engine, warm_up, measured, arguments.temperature)
        roofline = measure_floor(engine)
        floor = floor_report(roofline, samples, batch=batch)
        settings = ("input_len", "output_len", "batch_size", "num_iters", "num_warmup", "temperature", "seed")
        report = _report("latency", engine, start_s) | {
            "settings": {name: getattr(arguments, name) for name in settings},
            "results": results(samples, with_loads=True, floor=floor),
        }
        _plot(arguments, engine, samples, roofline)
    return _print(report, arguments.output, summary(report["results"]))


def _add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_number(parser.add_argument, "--num-prompts", None, "requests (default: 100, or all of --prompts-file)")
    text = f"tokens of a prompt, or a range to draw from evenly, both ends included (default: {_INPUT_LEN})"
    parser.add_argument("--input-len", type=Lengths.parse, metavar="N[:M]", help=text)
    text = "tokens to generate, or a range (default: 128)"
    parser.add_argument("--output-len", type=Lengths.parse, default=Lengths(128, 128), metavar="N[:M]", help=text)
    command.add_number(
        parser.add_argument, "--prefix-len", 0, "tokens at the beginning of prompts that all have in common", least=0
    )
    text = "prompts to use instead of random tokens, as for `fleetfoot generate`"
    parser.add_argument("--prompts-file", metavar="FILE", help=text)
    text = "requests that arrive in a second, at random times (a Poisson process); inf: all at once (default: inf)"
    parser.add_argument("--request-rate", type=command.positive, default=math.inf, metavar="X", help=text)
    command.add_number(parser.add_argument, "--num-warmup", 1, "requests before them that do not count", least=0)
    _add_shared_arguments(parser)


def _run_throughput(arguments: argparse.Namespace) -> int:
    prompts = _dataset(arguments)
    is_paced = math.isfinite(arguments.request_rate)
    lengths = arguments.input_len or _INPUT_LEN, arguments.output_len
    with _started(arguments) as (engine, start_s):
        workload = Workload(engine.input_processor.vocab_size, *lengths, arguments.prefix_len, arguments.seed)
        if prompts is None:
            warm_up = workload.random_requests(arguments.num_warmup, stream=(_WARM_UP,))
            requests = workload.random_requests(arguments.num_prompts or 100, stream=(_MEASURED,))
        else:
            warm_up = workload.dataset_requests(prompts[: arguments.num_warmup], stream=(_WARM_UP,))
            requests = workload.dataset_requests(prompts, stream=(_MEASURED,))
        requests = workload.with_arrivals(requests, arguments.request_rate)
        samples = _measure(engine, [warm_up], [requests], arguments.temperature)
        roofline = measure_floor(engine)
        floor = floor_report(roofline, samples, is_paced=is_paced)
        settings = ("prefix_len", "prompts_file", "num_warmup", "temperature", "seed")
        report = _report("throughput", engine, start_s) | {
            "settings": {name: getattr(arguments, name) for name in settings}
            | {
                "num_prompts": len(requests),
                "input_len": str(workload.input_len) if prompts is None else None,
                "output_len": str(workload.output_len),
                "request_rate": arguments.request_rate if is_paced else "inf",
            },
            "results": results(samples, with_loads=False, floor=floor),
        }
        _plot(arguments, engine, samples, roofline)
    return _print(report, arguments.output, summary(report["results"]))


def _add_cold_arguments(parser: argparse.ArgumentParser) -> None:
    command.add_number(parser.add_argument, "--duration", 60, "seconds of load from the first request on")
    text = "tokens of a prompt, or a range to draw from evenly (default: 1:2000)"
    parser.add_argument("--input-len", type=Lengths.parse, default=Lengths(1, 2000), metavar="N[:M]", help=text)
    text = "tokens to generate, or a range (default: 2:48)"
    parser.add_argument("--output-len", type=Lengths.parse, default=Lengths(2, 48), metavar="N[:M]", help=text)
    _add_shared_arguments(parser, has_temperature=False)


def _run_cold(arguments: argparse.Namespace) -> int:
    lengths = {"input_len": arguments.input_len, "output_len": arguments.output_len}
    with _started(arguments) as (engine, start_s), SHORT_COLLECTIONS:
        longest = arguments.input_len.high + arguments.output_len.high
        if longest > (limit := engine.input_processor.max_model_len):
            raise command.UsageError(
                f"--input-len and --output-len allow {longest} tokens, and max_model_len is {limit}"
            )
        samples = ColdSamples()
        load = {"seconds": arguments.duration, "seed": arguments.seed, **lengths}
        with progress_bar(sys.stderr.isatty(), total=arguments.duration, description="Seconds of load") as advance:
            run_cold(engine, samples, **load, on_round=lambda seconds, tokens: advance(tokens, by=seconds))
        report = _report("cold", engine, start_s) | {
            "settings": {name: str(value) for name, value in lengths.items()}
            | {"duration": arguments.duration, "seed": arguments.seed},
            "results": (measured := cold_results(samples)),
        }
    if arguments.plot is not None:
        tails = {"TTFT": samples.ttft, "TTFT alone": samples.ttft_alone, "ITL": samples.itl}
        draw(f"{report['engine']['architecture']}, right after its start", [tails_chart(tails)], arguments.plot)
    return _print(report, arguments.output, f"ready after {start_s:.1f} s, {cold_summary(measured)}")


def _dataset(arguments: argparse.Namespace) -> list[PromptType] | None:
    """The prompts of --prompts-file; None for random prompts."""
    if arguments.prompts_file is None:
        input_len = arguments.input_len or _INPUT_LEN
        if arguments.prefix_len > input_len.low:
            raise command.UsageError(f"--prefix-len {arguments.prefix_len} is more than --input-len {input_len}")
        return None
    if arguments.input_len is not None or arguments.prefix_len:
        raise command.UsageError("--prompts-file brings its own prompts; leave out --input-len and --prefix-len")
    prompts = command.read_prompts_file(arguments.prompts_file)
    count = arguments.num_prompts or len(prompts)
    if count > len(prompts):
        raise command.UsageError(f"--num-prompts is {count}, but {arguments.prompts_file} holds {len(prompts)}")
    return prompts[:count]


def _add_shared_arguments(parser: argparse.ArgumentParser, *, has_temperature: bool = True) -> None:
    if has_temperature:
        parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default: 0)")
    command.add_number(parser.add_argument, "--seed", 0, "of random prompts, lengths and times of arrival", least=0)
    parser.add_argument("--output", metavar="FILE", help="write the JSON there, not to standard output")
    text = "draw the tails of the times, and the steps below the roofline, to an SVG or PNG file"
    parser.add_argument("--plot", metavar="FILE", help=text)
    add_engine_arguments(parser, takes_model=True)


def _started(arguments: argparse.Namespace) -> AbstractContextManager[tuple[LLMEngine, float]]:
    """The engine. Random tokens with random weights need no tokenizer, only config.json."""
    if arguments.output is not None:
        command.check_output_file("--output", arguments.output)  # before the work, not after it
    check_plot_file("--plot", arguments.plot)
    given = given_settings(arguments)
    needs_no_text = getattr(arguments, "prompts_file", None) is None and "tokenizer" not in given
    defaults = {"skip_tokenizer_init": True} if needs_no_text and given.get("load_format") == "dummy" else {}
    return command.started_engine(arguments, **defaults)


def _measure(
    engine: LLMEngine,
    warm_up: Sequence[Sequence[BenchRequest]],
    measured: Sequence[Sequence[BenchRequest]],
    temperature: float,
) -> Samples:
    """Run all loads in order; return the samples of ``measured``."""
    for requests in (*warm_up, *measured):
        _check_lengths(requests, engine)
    for description, loads in (("Warm-up", warm_up), ("Measuring", measured)):
        engine.reset_prefix_cache()
        samples = Samples()
        total = sum(map(len, loads))
        shows_bar = sys.stderr.isatty() and total > 0
        with SHORT_COLLECTIONS, progress_bar(shows_bar, total=total, description=description) as advance:
            for requests in loads:
                run_load(engine, requests, samples, temperature=temperature, on_finished=advance)
    return samples


def _check_lengths(requests: Sequence[BenchRequest], engine: LLMEngine) -> None:
    """Refuse requests that the engine would truncate: settings would then be compared on different work."""
    limit = engine.input_processor.max_model_len
    for request in requests:
        with command.usage_errors():
            input_len = len(engine.process_inputs("", request.prompt, SamplingParams()).prompt_token_ids)
        if input_len + request.output_len > limit:
            raise command.UsageError(
                f"{input_len} tokens of prompt and {request.output_len} of output are more than the {limit} that a "
                "request can have (max_model_len); shorten one of them"
            )


def _report(benchmark: str, engine: LLMEngine, start_s: float) -> dict[str, Any]:
    """The part that does not depend on the benchmark."""
    import torch

    plan, scheduler = engine.plan, engine.core.scheduler.config
    return {
        "benchmark": benchmark,
        "versions": {"fleetfoot": __version__, "python": platform.python_version()}
        | {name: _version(name) for name in ("torch", "triton", "numpy")},
        "machine": {
            "system": f"{platform.system()} {platform.release()}",
            "device": plan.device,
            "device_name": torch.cuda.get_device_name() if plan.device == "cuda" else _cpu_name(),
            "num_threads": torch.get_num_threads(),
        },
        "engine": {
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
        },
    }


def _version(distribution: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """From /proc/cpuinfo; without it, the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _plot(arguments: argparse.Namespace, engine: LLMEngine, samples: Samples, floor: Roofline | None) -> None:
    if arguments.plot is not None:
        times = {"TTFT": samples.ttft, "TPOT": samples.tpot, "ITL": samples.itl, "latency": samples.request_latency}
        charts = [tails_chart(times), *([] if floor is None else [roofline_chart(floor, samples)])]
        draw(f"{engine.plan.model.architecture} in {engine.plan.dtype}, {engine.runner_name}", charts, arguments.plot)


def _print(report: dict[str, Any], output: str | None, status: str) -> int:
    text = command.dump_object(report)
    if output is None:
        print(text)
    else:
        Path(output).write_text(text + "\n", encoding="utf-8")
    command.print_status(status)
    return 0


def summary(measured: dict[str, Any]) -> str:
    """Results in two lines of text, with one more each for the roofline and for drafts."""
    times = [
        f"{name.upper()} {measured[key]['mean']:.2f} ms (p99 {measured[key]['p99']:.2f})"
        for name in ("ttft", "tpot", "itl")
        if measured[key := f"{name}_ms"]["count"]
    ]
    times.append(f"host time {measured['host_time_per_step_us']['mean']:.0f} us a step")
    return (
        f"[{measured['num_requests']} requests in {measured['duration_s']:.2f} s: "
        f"{measured['output_tokens_per_s']:.1f} output tokens/s, {measured['total_tokens_per_s']:.1f} tokens/s in all, "
        f"{measured['steps_per_s']:.1f} steps/s\n"
        f" {', '.join(times)}{_floor_summary(measured)}{_drafts_summary(measured['drafts'])}]"
    )


def _floor_summary(measured: dict[str, Any]) -> str:
    floor = measured["floor"]
    if floor is None or floor["share"] is None:
        return ""
    speed = f"{floor['copy_bandwidth_gb_s']:,.0f} GB/s and {floor['matmul_tflop_s']:.3g} TFLOP/s"
    parts = [f"{100 * floor['share']:.0f}% of what {speed} could do"]
    for key in ("ttft_ms", "tpot_ms"):
        if key in floor and measured[key]["count"]:
            share = 100 * floor[key] / measured[key]["mean"]
            parts.append(f"{key[:4].upper()} {share:.0f}% of {floor[key]:.2f} ms")
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
    return f"\n drafts: {text}{command.steps_without_drafts(drafts['steps_without'])}"


def _add_benchmarks(parser: argparse.ArgumentParser) -> None:
    table = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    text = "measure batches of equal requests, one batch after the other"
    latency = command.Command("latency", text, _add_latency_arguments, _run_latency, _EPILOG, "[MODEL] ")
    text = "measure many requests at once, or as they arrive"
    throughput = command.Command("throughput", text, _add_throughput_arguments, _run_throughput, _EPILOG, "[MODEL] ")
    command.add_command(table, latency)
    text = "measure what requests wait for right after a start"
    cold = command.Command("cold", text, _add_cold_arguments, _run_cold, _EPILOG, "[MODEL] ")
    command.add_command(table, throughput)
    command.add_command(table, cold)
    command.add_command(table, bench_serve.COMMAND)


COMMAND = command.Command(
    "bench", "measure latency, throughput, a cold start or a server", _add_benchmarks, epilog=_EPILOG
)
