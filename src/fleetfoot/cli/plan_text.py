"""The report of `fleetfoot plan` as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fleetfoot.cli.command import count

_MEMORY_NAMES = {"kv_cache": "KV cache", "communication": "buffers between ranks"}
"""Names of parts of the memory, where they are not those of the report."""


def plan_text(model: str, report: dict[str, Any]) -> str:
    """The report of `fleetfoot.cli.plan.make_report`, one fact per line."""
    lines = [*_decision_lines(model, report)]
    if report["memory"] is not None:
        lines += [*_setup_lines(report), *graph_lines(report), *_compilation_lines(report), *_memory_lines(report)]
    texts = [f"{name:<18}{text}" for name, text in lines]
    return "\n".join([*texts, *kernel_lines(report.get("kernel_table", {}))])


def kernel_lines(table: Mapping[str, Sequence[tuple[int, int, str]]]) -> Iterator[str]:
    """A paragraph for each operation, with a line for each kernel in it and its range of rows."""
    for operation, runs in table.items():
        yield from ("", operation)
        for first, last, kernel in runs:
            yield f"{first if first == last else f'{first}-{last}':>11}  {kernel}"


_Lines = Iterator[tuple[str, str]]
"""Pairs of name and text; a line that continues another has no name."""


def _decision_lines(model: str, report: dict[str, Any]) -> _Lines:
    memory, gpu = report["memory"], report.get("gpu_name")
    active = ""
    if experts := report.get("experts"):
        kinds = (f"{kind['num_chosen']} of {kind['num_experts']}" for kind in experts["kinds"])
        active = f" ({experts['num_active_parameters']:,} active: experts {', '.join(kinds)})"
    size = "" if memory is None else f", {report['num_parameters']:,} parameters{active}, {report['dtype']}"
    yield "model", f"{model}: {report['architecture']}{size}"
    size = "" if memory is None else f", {readable(memory['total'])}"
    yield "device", f"{report['device']}{f' ({gpu})' if gpu else ''}{size}"
    name = f"{report['model_runner'].upper()}{' (you chose it)' * report['explicit']}"
    has_plan = f"; the plan is that of {name}" * (memory is not None)
    yield "model runner", name if report["runnable"] else f"none{has_plan}"
    yield from (("", reason) for reason in report["reasons"])
    if report["runnable"] or report["unsupported"]:
        yield "V2 lacks", ", ".join(report["unsupported"]) or "nothing that is on"
    if not report["runnable"]:
        texts = [*report["problems"], *filter(None, [report["advice"]])]
        yield from zip(["NOT RUNNABLE", *[""] * (len(texts) - 1)], texts, strict=True)


def _setup_lines(report: dict[str, Any]) -> _Lines:
    yield "attention", report["attention_backend"]
    variant = report["native_variant"]
    named = {"native": f"native ({variant})"} if variant else {}
    kernels = Counter(named.get(name, name) for name in report["kernels"].values()).most_common()
    yield "kernels", f"{', '.join(f'{name} for {n}' for name, n in kernels)} of {len(report['kernels'])} operations"
    yield from (("", f"none for Hopper GPUs alone: {text}") for text in [report["hopper_problem"]] if text)
    for weights in report["weights"] if len(report["weights"]) > 1 else ():
        sizes = f"{count(weights['num_matrices'], 'matrix', 'matrices')}, {readable(weights['bytes'])}"
        yield "" if weights is not report["weights"][0] else "linear layers", f"{weights['format']}: {sizes}"
    for run in report["layers"]:
        fused = "fused" if run["fused"] else "plain"
        yield "" if run["first"] else "layers", f"{run['first']} to {run['last']} {fused}: {run['reason']}"
    if limits := (chain := report["layer_chain"])["max_contexts"]:
        contexts = ", ".join(f"{context:,} ({count(most, 'request')})" for most, context in limits)
        yield "", f"decodes with contexts of up to {contexts} tokens: two CUDA kernels for each layer"
    elif chain["reason"]:
        yield "", f"never two CUDA kernels for each layer: {chain['reason']}"
    if report["compiles_layers"]:
        yield "torch.compile", "each decoder layer, at the start"
    ropes = [f"{len(each['layers'])} layers: {each['rope'] or 'none'}" for each in report["positions"]]
    yield "positions", "; ".join(ropes)
    yield "scheduling", "overlapped with the device" if report["async_scheduling"] else "in lockstep"
    if (workers := report["workers"])["on_error"] == "restart":
        where = {"uni": "the worker in the engine's process", "mp": "workers in processes of their own"}
        limit = f"{count(workers['max_restarts'], 'time')} within an hour"
        yield "after an error", f"restart {where[workers['executor']]}, at most {limit}"
    yield from _parallel_lines(report["parallel"])
    for kind in (report["experts"] or {"kinds": []})["kinds"]:
        if slots := kind.get("slots"):
            redundant = sum(slots) - kind["num_experts"]
            more = f" and {count(redundant, 'redundant one')}" * bool(redundant)
            places = f"{' + '.join(map(str, slots))} on the ranks of a stage"
            yield "experts", f"{kind['num_experts']}{more} of each of {count(kind['num_layers'], 'layer')}: {places}"
            yield "", f"{readable(kind['bytes'])} on a rank with {slots[0]}"
    if report["drafter"] is not None:
        yield from _drafter_lines(report["drafter"])
    if (pooling := report["pooling"]) is not None:
        yield from _pooling_lines(pooling)
    if report["logits_processors"]:
        yield "logits processors", ", ".join(report["logits_processors"])
    if (sleep := report["sleep"]) is not None:
        level_1, level_2, pinned = map(readable, sleep.values())
        yield "sleep", f"gives {level_1} back at level 1, with {pinned} of pinned host memory; {level_2} at level 2"
    if (connector := report["kv_connector"]) is not None:
        after = {"recompute": "are computed again", "fail": "fail their request"}[connector["load_failure_policy"]]
        names = ", then ".join(connector["connectors"])
        yield "KV connector", f"{names} as {connector['role']}; tokens that cannot be loaded {after}"
    layout = report["kv_layout"]
    shape = ", ".join(f"{name} {size}" for name, size in zip(layout["dimensions"], layout["shape"], strict=True))
    yield "KV layout", f"{layout['name']}: [{shape}], {layout['num_layers']} layers, {layout['dtype']}"
    if layout["reason"] is not None:
        yield "", layout["reason"]
    if (cost := layout["cost"]) is not None:
        own, arena = readable(cost["bytes_per_request"]), readable(cost["in_an_arena"])
        yield "", f"it frees no windows: {own} of KV for a request of max_model_len, {arena} in an arena"


def _pooling_lines(pooling: dict[str, Any]) -> _Lines:
    kind = pooling["token_pooling_type" if pooling["prefers_tokens"] else "pooling_type"]
    of_tokens = f"; of tokens: {pooling['token_pooling_type']}" * (not pooling["prefers_tokens"])
    direction = "" if pooling["is_causal"] else ", bidirectional attention"
    yield "pooling", f"{', '.join(pooling['tasks'])}: {kind} of a prompt's hidden states{of_tokens}{direction}"
    token_ids = pooling["token_ids"]
    head = {
        "none": f"{'dense layers to ' * bool(pooling['projections'])}{pooling['size']} elements",
        **dict.fromkeys(("score", "biased_score"), f"linear head score, labels: {pooling['size']}"),
        "reward": f"two-layer head score, labels: {pooling['size']}",
        "logits": f"logits of the tokens {', '.join(map(str, token_ids))}",
    }[pooling["head"]]
    if pooling["is_difference"]:
        head = f"logit of token {token_ids[1]} minus that of {token_ids[0]}"
    off = "" if pooling["use_activation"] else f"none ({pooling['activation']} if a request has use_activation)"
    yield "", f"{head}; activation: {off or pooling['activation']}"


def _parallel_lines(parallel: dict[str, Any]) -> _Lines:
    tensor_size, pipeline_size = parallel["tensor_parallel_size"], parallel["pipeline_parallel_size"]
    if (replicas := parallel["data_parallel_size"]) > 1:
        ranks = count(tensor_size * pipeline_size, "rank")
        kind = f"engines of {ranks}"
        if parallel["shares_experts"]:
            kind = f"of {ranks} in one engine, which share experts and step together"
        yield "replicas", f"{replicas} {kind}; all else is of one"
    if tensor_size * pipeline_size == 1:
        return
    sizes = f"{tensor_size} tensor parallel x {pipeline_size} pipeline parallel"
    yield "ranks", f"{tensor_size * pipeline_size}: {sizes}"
    for stage in parallel["stages"]:
        ranks, layers = ("-".join(map(str, dict.fromkeys(stage[key]))) for key in ("ranks", "layers"))
        heads = f"{stage['num_heads']} heads and {stage['num_kv_heads']} KV heads each"
        sizes = ", ".join(f"{readable(stage[key])} {_part_name(key)}" for key in ("weights", "kv_cache", "left"))
        yield "", f"{ranks}: layers {layers}, {heads}; {sizes}"


def _drafter_lines(drafter: dict[str, Any]) -> _Lines:
    if drafter["method"] == "ngram":
        name = f"n-grams of {drafter['prompt_lookup_min']} to {drafter['prompt_lookup_max']} tokens"
    else:
        name = f"{'EAGLE head' if drafter['method'] == 'eagle' else 'draft model'} {drafter['model']}"
    text, limit = (
        f"{count(drafter['num_speculative_tokens'], 'draft')} for each decode",
        drafter["disable_by_batch_size"],
    )
    text += "" if limit is None else f", up to {count(limit, 'request')} at a time"
    yield "drafter", f"{name}: {text}{', where it is seen to pay' * drafter['adaptive']}"
    if drafter["num_layers"]:
        sizes = f"{readable(drafter['weights'])} weights, {readable(drafter['kv_cache'])} KV cache"
        yield "", f"{count(drafter['num_layers'], 'layer')}: {sizes}, counted in below"


def graph_lines(report: dict[str, Any]) -> _Lines:
    graphs = report["graphs"]
    if not graphs["num_shapes"]:
        yield "graphs", "none: every step runs eagerly"
        return
    capture = f"{graphs['num_graphs']} graphs, {readable(graphs['bytes'])}, captured in {graphs['seconds']:.1f} s"
    if not graphs["is_captured"]:
        capture = f"run eagerly, for attention with {report['attention_backend']} cannot be captured"
    yield "graphs", f"{graphs['num_shapes']} shapes, {capture}"
    units = {
        "decode": "requests",
        "short": "requests with short contexts",
        "uniform": "requests with drafts",
        "mixed": "tokens",
        "split": "tokens with long decodes",
    }
    for name, unit in units.items():
        if graphs[name]:
            yield "", f"{name}: {_ranges(graphs[name])} {unit}"
    if graphs["full_step"] is not None:
        yield "", f"full step: {graphs['full_step']} tokens, or nearly as many"


def _compilation_lines(report: dict[str, Any]) -> _Lines:
    if report["compiles_kernels"]:
        number = report.get("num_kernels")
        counted = "all kernels of steps (--kernels counts them)" if number is None else count(number, "kernel")
        yield "before ready", f"{counted}, compiled or from the cache, and {report['graphs']['num_graphs']} graphs"


def _memory_lines(report: dict[str, Any]) -> _Lines:
    memory, parallel, capacity = report["memory"], report["parallel"], report["capacity"]
    is_shared = parallel["tensor_parallel_size"] * parallel["pipeline_parallel_size"] > 1
    of_each = " on each rank" * is_shared
    yield "memory", f"{readable(memory['budget']):>12}  to use{of_each}, of {readable(memory['total'])}"
    keys = list(memory)
    for key in keys[keys.index("weights") : keys.index("left") + 1]:
        if key != "communication" or is_shared:
            yield "", f"{readable(memory[key]):>12}  {memory[key]:>16,} bytes  {_part_name(key)}"
    groups, size = report["kv_layout"]["groups"], memory["block_size"]
    blocks = f"blocks of {size}" if len(groups) == 1 else "slabs"
    blocks = f"{memory['num_blocks']:,} {blocks}, {memory['num_tokens']:,} tokens"
    yield "KV cache", f"{blocks} ({memory['kv_cache_is']})"
    for group in groups if len(groups) > 1 else ():
        kind = "no window" if group["window"] is None else f"a window of {group['window']:,}"
        layers = count(group["layers"], "layer")
        if group["states"]:
            states = f"{count(group['blocks'], 'state')} of {readable(group['bytes_per_block'])} for {layers}"
            yield "", f"a slab is {states}; a running request has {group['states']}, a cached prefix 1"
            room, used = memory["num_blocks"] * group["blocks"], report["max_num_seqs"] * group["states"]
            others = "others" if group["max_snapshots"] is None else f"at most {group['max_snapshots']:,}"
            yield "", f"room for {room:,} states: {used:,} of {report['max_num_seqs']:,} requests, {others} of prefixes"
        elif group["layers"]:
            yield "", f"a slab is {count(group['blocks'], 'block')} of {size} tokens for {layers} with {kind}"
    requests = count(capacity["requests_at_longest_context"], "such request")
    yield "longest context", f"{capacity['longest_context']:,} tokens, {requests} at a time"
    context = f"{capacity['context_at_max_num_seqs']:,} tokens each"
    yield "largest batch", f"{report['max_num_seqs']:,} requests of {context}"
    paced = f"; of prompts of several clients, {report['prompt_step_s'] * 1000:g} ms" if report["prompt_step_s"] else ""
    yield "largest step", f"{report['max_num_batched_tokens']:,} tokens{paced}"


def _part_name(key: str) -> str:
    return _MEMORY_NAMES.get(key, key.replace("_", " "))


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


def readable(num_bytes: int) -> str:
    """``79.25 GiB``, ``512.0 MiB``, ``12 B``."""
    size = float(num_bytes)
    for unit, digits in (("B", 0), ("KiB", 1), ("MiB", 1)):
        if abs(size) < 1024:
            return f"{size:.{digits}f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
