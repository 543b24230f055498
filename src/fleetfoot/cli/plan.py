"""`fleetfoot plan`: prints the plan of an engine. Reads config.json only, and does not import torch."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fleetfoot.cli.arguments import add_engine_arguments, add_model_argument, engine_config, size_in_bytes
from fleetfoot.cli.command import Command, UsageError, usage_errors
from fleetfoot.cli.output import count, dump_object, readable

if TYPE_CHECKING:
    from fleetfoot.config.engine import EngineConfig
    from fleetfoot.plan.machine import Machine

ASSUMED_GPU_BYTES = 80 << 30

_EPILOG = """\
Without flags of the machine, the plan is for this one. With them it is for the machine that they describe.

--json prints one object. Sizes are in bytes, lengths in tokens.
  model_runner (v1 or v2), explicit (whether you chose it), reasons (sentences)
  unsupported: what is on and Model Runner V2 lacks
  runnable (whether an engine would start), problems (why not), advice, warnings (sentences)
  architecture, num_parameters, device, gpu_name, dtype, attention_backend, async_scheduling
  kernels: for each operation, the implementation that runs
  layers: runs of decoder layers (first, last), fused or not, with the reason
  max_model_len, max_num_seqs, max_num_batched_tokens
  graphs: num_shapes; decode (requests), uniform (requests, num_drafts drafts each), mixed (tokens), full_step (tokens
    of a mixed batch that fills a step; null: it runs eagerly): the shapes; captured_at_start; is_captured (false:
    shapes are dispatched to, but run eagerly, for the attention backend cannot be captured)
  parallel: tensor_parallel_size, pipeline_parallel_size, vocab_rows (of a rank); stages: for each pipeline rank, its
    ranks (first and last in the world), layers (first and last), num_heads and num_kv_heads (of a rank), and the parts
    of a rank's memory
  drafter: of speculative decoding, else null: method, model (null for n-grams), num_speculative_tokens,
    prompt_lookup_max, prompt_lookup_min, disable_by_batch_size, adaptive; num_layers, weights, bytes_per_block and
    kv_cache are its own, on the last rank of a pipeline, and part of that rank's weights and KV cache below
  kv_connector: null without one; else name, role, connectors (one, or several by their order) and
    load_failure_policy
  kv_layout: name, dimensions, shape (of a layer, on a rank), num_layers (of the model), dtype, bytes_per_block (over
    all layers of a rank)
  memory: of a rank, the one with the least room: total; budget (what the engine may use), which is weights + kv_cache
    + graphs + activations + runner_state + rotary_table + sampling_scratch + communication + driver + left;
    num_blocks, block_size, num_tokens (of the KV cache), kv_cache_is (what decided on its size)
  capacity: longest_context, requests_at_longest_context, requests_at_max_model_len (at the same time),
    context_at_max_num_seqs (of each)
A model that no runner can load has its decision, and null for what follows from its shape.
The exit code is 0 for a plan, also of an engine that would not start, and 2 where no plan can be made: no such model, a
wrong flag, or not enough memory."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    machine = parser.add_argument_group("the machine, where it is not this one")
    machine.add_argument("--gpu-memory", type=size_in_bytes, metavar="SIZE", help="of its GPU: 80GiB, 80GB, or bytes")
    machine.add_argument("--gpu-name", metavar="NAME", help="of its GPU, for the report")
    machine.add_argument(
        "--cpu-memory", type=size_in_bytes, metavar="SIZE", help="that programs can take: 16GiB, 16GB, or bytes"
    )
    machine.add_argument(
        "--triton", action=argparse.BooleanOptionalAction, help="whether its GPU has Triton (default: on)"
    )
    add_engine_arguments(parser, leave_out=("model",))


def _run(arguments: argparse.Namespace) -> int:
    with usage_errors():
        config = engine_config(arguments)
        machine, warnings = _machine(arguments, config)
        report = make_report(config, machine)
    report["warnings"] += warnings
    if arguments.json:
        print(dump_object(report))
    else:
        print(plan_text(config.model, report))
        for warning in [text for text in report["warnings"] if text not in report["reasons"]]:
            print(f"fleetfoot plan: warning: {warning}", file=sys.stderr)
    return 0


def make_report(config: EngineConfig, machine: Machine) -> dict[str, Any]:
    """The report of `fleetfoot.plan.report`, also for a kind of model that cannot be loaded.

    Raises:
        ValueError, TypeError, FileNotFoundError: no plan can be made.
    """
    from fleetfoot.config.json_fields import ConfigError
    from fleetfoot.config.model import read_config_json
    from fleetfoot.plan.oracle import ModelFeatures, decide
    from fleetfoot.plan.report import decision_report, plan_report
    from fleetfoot.plan.resolve import find_model, resolve_plan

    try:
        plan = resolve_plan(config, machine, config_only=True)
    except ConfigError as error:
        model = ModelFeatures.of(read_config_json(find_model(config.model, config.revision, config_only=True)), None)
        if model.is_loadable:
            raise  # the config is invalid
        decision, device = decide(config, model, machine), machine.choose_device(config.device)
        return decision_report(decision, architecture=model.architecture, device=device, problem=str(error))
    return plan_report(plan)


def _machine(arguments: argparse.Namespace, config: EngineConfig) -> tuple[Machine, list[str]]:
    """This machine with the overrides of the flags; and warnings about assumptions."""
    from fleetfoot.plan.machine import Machine

    gpu_bytes, cpu_bytes, has_triton = arguments.gpu_memory, arguments.cpu_memory, arguments.triton
    describes_gpu = gpu_bytes is not None or arguments.gpu_name is not None
    if describes_gpu and config.device == "cpu":
        raise UsageError("--gpu-memory and --gpu-name describe a GPU, and --device is cpu; leave them or it out")
    here = Machine.without_gpu() if config.device == "cpu" or gpu_bytes is not None else Machine.detect()
    warnings = []
    if gpu_bytes is None and here.gpu_memory_bytes == 0 and (describes_gpu or config.device == "cuda"):
        gpu_bytes = ASSUMED_GPU_BYTES
        warnings = ["no GPU is here and --gpu-memory is not given: 80GiB is assumed."]
    is_this_gpu = gpu_bytes is None
    machine = Machine(
        cpu_memory_bytes=here.cpu_memory_bytes if cpu_bytes is None else cpu_bytes,
        gpu_name=arguments.gpu_name or here.gpu_name,
        gpu_memory_bytes=gpu_bytes or here.gpu_memory_bytes,
        has_triton=(here.has_triton if is_this_gpu else True) if has_triton is None else has_triton,
        has_native=here.has_native,
        native_problem=here.native_problem,
    )
    return machine, warnings


COMMAND = Command(
    "plan", "show what an engine would do, before any memory is taken", _add_arguments, _run, _EPILOG, "[MODEL] "
)


_WIDTH = 18
_MEMORY_LINES = (
    ("weights", "weights"),
    ("kv_cache", "KV cache"),
    ("graphs", "graphs"),
    ("activations", "activations"),
    ("runner_state", "runner state"),
    ("rotary_table", "rotary table"),
    ("sampling_scratch", "sampling scratch"),
    ("communication", "buffers between ranks"),
    ("driver", "driver"),
    ("left", "left"),
)
_STAGE_PARTS = (("weights", "weights"), ("kv_cache", "KV cache"), ("left", "left"))


def plan_text(model: str, report: dict[str, Any]) -> str:
    """The report of `make_report`, one fact per line."""
    lines = [
        _line("model", f"{model}: {report['architecture']}{_model_size(report)}"),
        _line("device", _device(report)),
    ]
    lines += [_line("model runner", f"{report['model_runner'].upper()}{' (you chose it)' * report['explicit']}")]
    lines += [_line("", reason) for reason in report["reasons"]]
    lines += [_line("V2 lacks", ", ".join(report["unsupported"]) or "nothing that is on")]
    if not report["runnable"]:
        lines += [_line("NOT RUNNABLE", report["problems"][0]), *(_line("", more) for more in report["problems"][1:])]
        lines += [_line("", report["advice"])] if report["advice"] else []
    if report["memory"] is not None:
        lines += [*_running(report), *_memory(report), *_capacity(report)]
    return "\n".join(lines)


def _line(name: str, text: str) -> str:
    return f"{name:<{_WIDTH}}{text}"


def _model_size(report: dict[str, Any]) -> str:
    return f", {report['num_parameters']:,} parameters, {report['dtype']}" if report["memory"] is not None else ""


def _device(report: dict[str, Any]) -> str:
    memory, name = report["memory"], report.get("gpu_name")
    size = "" if memory is None else f", {readable(memory['total'])}"
    return f"{report['device']}{f' ({name})' if name else ''}{size}"


def _kernels(kernels: dict[str, str]) -> str:
    """Each implementation with the number of operations that it serves."""
    counts = Counter(kernels.values()).most_common()
    return f"{', '.join(f'{name} for {count}' for name, count in counts)} of {len(kernels)} operations"


def _layers(runs: list[dict[str, Any]]) -> list[str]:
    names = ["layers", *[""] * (len(runs) - 1)]
    return [
        _line(name, f"{run['first']} to {run['last']} {'fused' if run['fused'] else 'plain'}: {run['reason']}")
        for name, run in zip(names, runs, strict=True)
    ]


def _running(report: dict[str, Any]) -> list[str]:
    layout, graphs = report["kv_layout"], report["graphs"]
    shape = ", ".join(f"{name} {size}" for name, size in zip(layout["dimensions"], layout["shape"], strict=True))
    lines = [
        _line("attention", report["attention_backend"]),
        _line("kernels", _kernels(report["kernels"])),
        *_layers(report["layers"]),
        _line("scheduling", "overlapped with the device" if report["async_scheduling"] else "in lockstep"),
        _line("KV layout", f"{layout['name']}: [{shape}], {layout['num_layers']} layers, {layout['dtype']}"),
    ]
    lines[-1:-1] = [*_parallel(report["parallel"]), *_drafter(report["drafter"]), *_connector(report["kv_connector"])]
    if not graphs["num_shapes"]:
        return [*lines, _line("graphs", "none: every step runs eagerly")]
    capture = f"{graphs['captured_at_start']} captured at the start"
    if not graphs["is_captured"]:
        capture = f"run eagerly, for attention with {report['attention_backend']} cannot be captured"
    lines.append(_line("graphs", f"{graphs['num_shapes']} shapes, {capture}"))
    for name, unit in (("decode", "requests"), ("uniform", "requests with drafts"), ("mixed", "tokens")):
        if graphs[name]:
            lines.append(_line("", f"{name}: {_ranges(graphs[name])} {unit}"))
    if graphs["full_step"] is not None:
        lines.append(_line("", f"full step: {graphs['full_step']} tokens, or nearly as many"))
    return lines


def _parallel(parallel: dict[str, Any]) -> list[str]:
    """Empty for a single rank."""
    tensor_size, pipeline_size = parallel["tensor_parallel_size"], parallel["pipeline_parallel_size"]
    if tensor_size * pipeline_size == 1:
        return []
    sizes = f"{tensor_size} tensor parallel x {pipeline_size} pipeline parallel"
    lines = [_line("ranks", f"{tensor_size * pipeline_size}: {sizes}")]
    for stage in parallel["stages"]:
        ranks, layers = _span(stage["ranks"]), _span(stage["layers"])
        heads = f"{stage['num_heads']} heads and {stage['num_kv_heads']} KV heads each"
        sizes = ", ".join(f"{readable(stage[key])} {name}" for key, name in _STAGE_PARTS)
        lines.append(_line("", f"{ranks}: layers {layers}, {heads}; {sizes}"))
    return lines


def _connector(connector: dict[str, Any] | None) -> list[str]:
    """Empty without a KV connector."""
    if connector is None:
        return []
    after = {"recompute": "are computed again", "fail": "fail their request"}[connector["load_failure_policy"]]
    names = ", then ".join(connector["connectors"])
    return [_line("KV connector", f"{names} as {connector['role']}; tokens that cannot be loaded {after}")]


def _drafter(drafter: dict[str, Any] | None) -> list[str]:
    """Empty without speculative decoding."""
    if drafter is None:
        return []
    if drafter["method"] == "ngram":
        name = f"n-grams of {drafter['prompt_lookup_min']} to {drafter['prompt_lookup_max']} tokens"
    else:
        name = f"{'EAGLE head' if drafter['method'] == 'eagle' else 'draft model'} {drafter['model']}"
    num_drafts, limit = drafter["num_speculative_tokens"], drafter["disable_by_batch_size"]
    text = f"{name}: {count(num_drafts, 'draft')} for each decode"
    text += "" if limit is None else f", up to {count(limit, 'request')} at a time"
    text += ", where it is seen to pay" if drafter["adaptive"] else ""
    if not drafter["num_layers"]:
        return [_line("drafter", text)]
    sizes = f"{readable(drafter['weights'])} weights, {readable(drafter['kv_cache'])} KV cache"
    return [_line("drafter", text), _line("", f"{count(drafter['num_layers'], 'layer')}: {sizes}, counted in below")]


def _span(ends: Sequence[int]) -> str:
    return "-".join(str(end) for end in dict.fromkeys(ends))


def _memory(report: dict[str, Any]) -> list[str]:
    memory, parallel = report["memory"], report["parallel"]
    of_each = " on each rank" * (parallel["tensor_parallel_size"] * parallel["pipeline_parallel_size"] > 1)
    lines = [_line("memory", f"{readable(memory['budget']):>12}  to use{of_each}, of {readable(memory['total'])}")]
    for key, name in _MEMORY_LINES:
        if key == "communication" and not of_each:
            continue
        lines.append(_line("", f"{readable(memory[key]):>12}  {memory[key]:>16,} bytes  {name}"))
    blocks = f"{memory['num_blocks']:,} blocks of {memory['block_size']}, {memory['num_tokens']:,} tokens"
    return [*lines, _line("KV cache", f"{blocks} ({memory['kv_cache_is']})")]


def _capacity(report: dict[str, Any]) -> list[str]:
    capacity = report["capacity"]
    longest, most = capacity["longest_context"], report["max_num_seqs"]
    requests = capacity["requests_at_longest_context"]
    return [
        _line("longest context", f"{longest:,} tokens, {requests:,} such request{'s' * (requests != 1)} at a time"),
        _line("largest batch", f"{most:,} requests of {capacity['context_at_max_num_seqs']:,} tokens each"),
        _line("largest step", f"{report['max_num_batched_tokens']:,} tokens"),
    ]


def _ranges(sizes: Sequence[int]) -> str:
    """``1, 2, 4, 8-256 by 8, 272-512 by 16``."""
    parts: list[str] = []
    first = 0
    while first < len(sizes):
        last = first + 1
        while last + 1 < len(sizes) and sizes[last + 1] - sizes[last] == sizes[last] - sizes[last - 1]:
            last += 1
        if last - first >= 3:
            parts.append(f"{sizes[first]}-{sizes[last]} by {sizes[last] - sizes[last - 1]}")
            first = last + 1
        else:
            parts.append(str(sizes[first]))
            first += 1
    return ", ".join(parts)
