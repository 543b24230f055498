"""A plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fleetfoot.cli.numbers import count
from fleetfoot.cli.sizes import readable

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
    """The report of `fleetfoot.cli.plan.make_report`, a fact on each line."""
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


def _running(report: dict[str, Any]) -> list[str]:
    layout, graphs = report["kv_layout"], report["graphs"]
    shape = ", ".join(f"{name} {size}" for name, size in zip(layout["dimensions"], layout["shape"], strict=True))
    lines = [
        _line("attention", report["attention_backend"]),
        _line("operations", report["ops"]),
        _line("scheduling", "overlapped with the device" if report["async_scheduling"] else "in lockstep"),
        _line("KV layout", f"{layout['name']}: [{shape}], {layout['num_layers']} layers, {layout['dtype']}"),
    ]
    lines[3:3] = [*_parallel(report["parallel"]), *_drafter(report["drafter"]), *_connector(report["kv_connector"])]
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
    """Nothing for a single rank; else what each has."""
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
    """Nothing where nobody moves KV."""
    if connector is None:
        return []
    after = {"recompute": "are computed again", "fail": "fail their request"}[connector["load_failure_policy"]]
    names = ", then ".join(connector["connectors"])
    return [_line("KV connector", f"{names} as {connector['role']}; tokens that cannot be loaded {after}")]


def _drafter(drafter: dict[str, Any] | None) -> list[str]:
    """Nothing where nobody drafts."""
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
