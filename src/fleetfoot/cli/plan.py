"""`fleetfoot plan`: prints the plan of an engine. Reads config.json only, and imports no torch but for the table of
kernels, which the modules of attention kernels choose."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from fleetfoot.cli.arguments import add_engine_arguments, engine_config, size_in_bytes
from fleetfoot.cli.command import Command, UsageError, dump_object, print_status, usage_errors
from fleetfoot.cli.plan_text import plan_text
from fleetfoot.config.model import DTYPE_BYTES, Linear
from fleetfoot.config.sharding import num_kv_heads, pipeline_layers, vocab_rows
from fleetfoot.quantization.unquantized import UNQUANTIZED
from fleetfoot.records.kv_layout import (
    ARENA,
    LAYOUT_DIMENSIONS,
    ONE_GROUP,
    KVLayout,
    kv_cache_specs,
    make_groups,
    slabs_of,
)

if TYPE_CHECKING:
    from fleetfoot.config.engine import EngineConfig
    from fleetfoot.config.kv_transfer import KVTransferConfig
    from fleetfoot.config.model import ModelConfig
    from fleetfoot.plan.machine import Machine
    from fleetfoot.plan.oracle import Decision
    from fleetfoot.plan.plan import EnginePlan

ASSUMED_GPU_BYTES = 80 << 30

_EPILOG = """\
Without flags of the machine, the plan is for this one. With them it is for the machine that they describe.

--json prints one object. Sizes are in bytes, lengths in tokens.
  model_runner (v1 or v2), explicit (whether you chose it), reasons (sentences)
  unsupported: what is on and Model Runner V2 lacks
  runnable (whether an engine would start), problems (why not), advice, warnings (sentences)
  architecture, num_parameters, device, gpu_name, dtype, attention_backend, async_scheduling
  experts: num_active_parameters, those that a token reads; kinds, of each the num_experts and num_chosen,
    intermediate_size and num_layers; with enable_expert_parallel also slots, places for whole experts on each rank that
    shares a layer, and bytes, of all layers of a stage on the rank with the most; null: the model has none
  kernels: for each operation, the implementation that runs; native_variant: the instruction set of the native ones;
    hopper_problem: why a Hopper GPU has none of its own ("": it has)
  weights: format, num_matrices and bytes of the linear layers, as a rank of a tensor group has them
  layers: runs of decoder layers (first, last), fused or not, with the reason; compiles_layers: whether torch.compile
    compiles each of them
  layer_chain: max_rows, the most requests of a decode in which two kernels compute a layer (0: none); max_contexts,
    pairs of a number of requests and the longest context of such a decode; reason, why not
  positions: each rotary embedding (rope), and the layers that have it; null: layers without positions
  max_model_len, max_num_seqs, max_num_batched_tokens
  prompt_step_s: seconds that prompts in a step take at most while several clients have requests; null: any
  graphs: what a start captures on a rank: num_shapes, num_graphs, bytes, seconds (estimated); the shapes:
    decode (requests), short (those that have one more for short contexts, see layer_chain), uniform (requests,
    num_drafts drafts each), mixed (tokens; of steps with drafts, the forward pass), split (tokens, with attention for
    long decodes), full_step (tokens of a mixed batch that fills a step; null: it runs eagerly); is_captured (false:
    steps run eagerly, for the attention backend cannot be captured)
  workers: executor, uni (one, in the engine's process) or mp (a process for each rank); on_error, raise or restart;
    max_restarts, within an hour
  parallel: tensor_parallel_size, pipeline_parallel_size, data_parallel_size (replicas; all else is of one),
    shares_experts (whether replicas are one engine), vocab_rows (of a rank); stages: for each pipeline rank, its
    ranks (first and last in the world), layers (first and last), num_heads and num_kv_heads (of a rank), and the parts
    of a rank's memory
  drafter: of speculative decoding, else null: method, model (null for n-grams), num_speculative_tokens,
    prompt_lookup_max, prompt_lookup_min, disable_by_batch_size, adaptive; num_layers, weights, bytes_per_block and
    kv_cache are its own, on the last rank of a pipeline, and part of that rank's weights and KV cache below
  pooling: null where text is generated; else tasks (the first is the default), pooling_type, size (elements or scores),
    head (none, score, biased_score, reward, logits), token_ids (of logits that are scores), activation (normalize,
    softmax, sigmoid, identity), use_activation, prompts of sentence-transformers, and what else decides on results
  logits_processors: classes that change logits, in their order
  sleep: null without enable_sleep_mode; else bytes that level_1 and level_2 give back on a rank, and pinned_host_memory
    that level 1 takes
  kv_connector: null without one; else name, role, connectors (one, or several by their order) and
    load_failure_policy
  kv_layout: name, reason (why it is not the runner's first one; null: it is), cost (bytes_per_request: KV of a request
    of max_model_len where no windows are freed, in_an_arena: where they are; null: as much), dimensions, shape (of a
    tensor, on a rank), num_layers (of the model), dtype, bytes_per_block (over all layers of a rank; with several
    groups, of a slab), groups (window, states of a running request, max_snapshots of the prefix cache, number of
    layers, blocks in a slab, and their bytes; the first has no window; a block of states is one, which a prefix in the
    prefix cache needs too)
  memory: of a rank, the one with the least room: total; budget (what the engine may use), which is weights + kv_cache
    + graphs + activations + runner_state + rotary_table + sampling_scratch + communication + driver + left;
    num_blocks (slabs, with several groups), block_size, num_tokens (of one request in the KV cache), kv_cache_is (what
    decided on its size)
  capacity: longest_context, requests_at_longest_context, requests_at_max_model_len (at the same time),
    context_at_max_num_seqs (of each)
  compiles_kernels: whether a start compiles the kernels of all steps, and captures the graphs, before it is ready
  num_kernels, with --kernels: how many those are, with those that are in the cache; the bar of a start counts to it;
    null: they are compiled when they are first launched
  kernel_table, with --kernels: for each operation, lists of the first and the last number (of rows, logits, tokens or
    requests, as its name says), and the kernel that computes as many, with its tile
A model that no runner can load has its decision, and null for what follows from its shape.
The exit code is 0 for a plan, 1 for that of an engine that would not start (NOT RUNNABLE), and 2 where no plan can be
made: no such model, a wrong flag, or not enough memory."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    text = "print the kernel of each matrix and of attention for every number of rows, too (Hopper GPUs)"
    parser.add_argument("--kernels", action="store_true", help=text)
    machine = parser.add_argument_group("the machine, where it is not this one")
    size = partial(machine.add_argument, type=size_in_bytes, metavar="SIZE")
    size("--gpu-memory", help="of its GPU: 80GiB, 80GB, or 80 for GiB")
    machine.add_argument("--gpu-name", metavar="NAME", help="of its GPU: kernels for Hopper need an H100, H200 or such")
    size("--cpu-memory", help="that programs can take: 16GiB, 16GB, or 16 for GiB")
    text = "whether its GPU has Triton (default: on)"
    machine.add_argument("--triton", action=argparse.BooleanOptionalAction, help=text)
    add_engine_arguments(parser, takes_model=True, takes_seed=True)


def _run(arguments: argparse.Namespace) -> int:
    with usage_errors():
        config = engine_config(arguments)
        machine, warnings = _machine(arguments, config)
        report = make_report(config, machine, with_kernels=arguments.kernels)
    report["warnings"] += warnings
    code = 0 if report["runnable"] else 1
    if arguments.json:
        print(dump_object(report))
        return code
    print(plan_text(config.model, report))
    for warning in report["warnings"]:
        if warning not in report["reasons"]:
            print_status(f"fleetfoot plan: warning: {warning}")
    return code


def _machine(arguments: argparse.Namespace, config: EngineConfig) -> tuple[Machine, list[str]]:
    """This machine with the overrides of the flags; and warnings about assumptions."""
    from fleetfoot.plan.machine import Machine, hopper_sms

    gpu_bytes, cpu_bytes, has_triton = arguments.gpu_memory, arguments.cpu_memory, arguments.triton
    describes_gpu = gpu_bytes is not None or arguments.gpu_name is not None
    if describes_gpu and config.device == "cpu":
        raise UsageError("--gpu-memory and --gpu-name describe a GPU, and --device is cpu; leave them or it out")
    here = Machine.without_gpu() if config.device == "cpu" or gpu_bytes is not None else Machine.detect()
    warnings = []
    if gpu_bytes is None and here.gpu_memory_bytes == 0 and (describes_gpu or config.device == "cuda"):
        gpu_bytes = ASSUMED_GPU_BYTES
        warnings = ["no GPU is here and --gpu-memory is not given: 80GiB is assumed."]
    if has_triton is None:
        has_triton = here.has_triton or gpu_bytes is not None
    num_sms = here.num_sms if arguments.gpu_name is None else hopper_sms(arguments.gpu_name)
    machine = dataclasses.replace(
        here,
        cpu_memory_bytes=here.cpu_memory_bytes if cpu_bytes is None else cpu_bytes,
        gpu_name=arguments.gpu_name or here.gpu_name,
        gpu_memory_bytes=gpu_bytes or here.gpu_memory_bytes,
        has_triton=has_triton,
        is_hopper=here.is_hopper if arguments.gpu_name is None else num_sms > 0,
        num_sms=num_sms,
        has_nvrtc=here.has_nvrtc or gpu_bytes is not None,
    )
    return machine, warnings


def make_report(config: EngineConfig, machine: Machine, *, with_kernels: bool = False) -> dict[str, Any]:
    """The report of a plan, also for a kind of model that cannot be loaded. ``with_kernels``: and its table of kernels.
    Raises ValueError, TypeError or FileNotFoundError if no plan can be made."""
    from fleetfoot.config.json_fields import ConfigError
    from fleetfoot.config.model import read_config_json
    from fleetfoot.plan.oracle import ModelFeatures, decide
    from fleetfoot.plan.resolve import find_model, resolve_plan

    try:
        plan = resolve_plan(config, machine, config_only=True)
    except ConfigError as error:
        folder = find_model(config.model, config.revision, config_only=True)
        model = ModelFeatures.of(read_config_json(folder, config.hf_overrides), None)
        if model.is_loadable:
            raise  # the config is invalid
        decision, device = decide(config, model, machine), machine.choose_device(config.device)
        return _decision_report(decision, model.architecture, device, problem=str(error))
    return plan_report(plan) | (_kernels(plan) if with_kernels else {})


def _kernels(plan: EnginePlan) -> dict[str, Any]:
    if find_spec("triton") is None:
        raise ValueError("the table of kernels needs Triton, which is not installed here; leave --kernels out")
    from fleetfoot.executor.kernel_count import count_kernels  # and torch
    from fleetfoot.plan.kernel_table import kernel_table

    return {"kernel_table": kernel_table(plan), "num_kernels": count_kernels(plan)}


def _decision_report(decision: Decision, architecture: str, device: str, *, problem: str = "") -> dict[str, Any]:
    """The choice of a runner, which exists also for a model that cannot be loaded, with the ``problem``."""
    problems = [*filter(None, [problem]), *map(str, decision.missing)]
    decided = {
        "model_runner": decision.runner,
        "explicit": decision.explicit,
        "reasons": list(decision.reasons),
        "unsupported": [feature.name for feature in decision.unsupported],
        "runnable": not problems,
        "problems": problems,
        "advice": decision.advice or None,
        "warnings": list(decision.warnings),
        "architecture": architecture,
        "device": device,
    }
    of_layers = ("attention_backend", "kernels", "native_variant", "layers", "layer_chain", "positions", "graphs")
    of_ranks = ("parallel", "drafter", "kv_connector", "kv_layout", "memory", "capacity")
    of_requests = ("workers", "pooling", "logits_processors", "sleep")
    return decided | dict.fromkeys((*of_layers, *of_ranks, *of_requests))


def _sleep(plan: EnginePlan) -> dict[str, int] | None:
    if not plan.config.enable_sleep_mode:
        return None
    parts = plan.memory.parts()
    weights, kv_cache = parts["weights"], parts["kv_cache"]
    moved = weights if plan.device == "cuda" else 0  # a CPU has them in the host's memory anyway
    return {"level_1": kv_cache + moved, "level_2": kv_cache + weights, "pinned_host_memory": moved}


def plan_report(plan: EnginePlan) -> dict[str, Any]:
    """Everything that was decided. Sizes in bytes, lengths in tokens. `fleetfoot plan --help` describes the keys."""
    model, memory, config, is_gpu = plan.model, plan.memory, plan.config, plan.device == "cuda"
    chain, longest = dataclasses.asdict(plan.layer_chain), min(plan.max_model_len, memory.num_tokens)
    return _decision_report(plan.decision, model.architecture, plan.device) | {
        "warnings": list(plan.warnings),
        "gpu_name": plan.machine.gpu_name if is_gpu else None,
        "dtype": plan.dtype,
        "num_parameters": model.num_parameters,
        "experts": _experts(plan),
        "attention_backend": plan.kernels["attention"],
        "kernels": dict(plan.kernels),
        "hopper_problem": plan.machine.hopper_problem if is_gpu and plan.machine.is_hopper else "",
        "native_variant": plan.native_variant,
        "layers": list(_layers(plan)),
        "weights": list(_weights(plan)),
        "layer_chain": {**chain, "max_contexts": [[*pair] for pair in plan.layer_chain.max_contexts]},
        "compiles_layers": config.compiles_layers,
        "compiles_kernels": plan.compiles_kernels,
        "positions": list(_positions(model)),
        "async_scheduling": plan.async_scheduling,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "prompt_step_s": plan.prompt_step_s,
        "graphs": _graphs(plan),
        "workers": {"executor": plan.executor, "on_error": config.on_error, "max_restarts": plan.max_restarts},
        "parallel": _parallel(plan),
        "drafter": _drafter(plan),
        "pooling": None if plan.pooling is None else {"tasks": plan.pooling.tasks, **dataclasses.asdict(plan.pooling)},
        "logits_processors": [processor.__qualname__ for processor in plan.logits_processors],
        "sleep": _sleep(plan),
        "kv_connector": None if plan.connector is None else _kv_connector(plan.connector.config),
        "kv_layout": _kv_layout(plan),
        "memory": {
            "total": memory.total,
            "budget": memory.budget,
            **memory.parts(),
            **{name: getattr(memory, name) for name in ("left", "num_blocks", "block_size", "num_tokens")},
            "kv_cache_is": memory.kv_reason,
        },
        "capacity": {
            "longest_context": longest,
            "requests_at_longest_context": memory.concurrency(longest, config.max_num_seqs),
            "requests_at_max_model_len": memory.concurrency(plan.max_model_len, config.max_num_seqs),
            "context_at_max_num_seqs": min(
                plan.max_model_len, memory.longest_of(memory.num_blocks // config.max_num_seqs)
            ),
        },
    }


def _graphs(plan: EnginePlan) -> dict[str, Any]:
    table, model = plan.capture_table, plan.model
    return {
        "num_shapes": len(table.shapes),
        "num_graphs": len(table.graphs),
        "bytes": table.num_bytes(model.num_layers, model.hidden_size * DTYPE_BYTES[plan.dtype]),
        "seconds": table.seconds(model.num_layers),
        "num_drafts": table.num_drafts,
        **{kind: list(getattr(table, kind)) for kind in ("decode", "short", "uniform", "mixed", "split")},
        "full_step": table.full_step,
        "is_captured": bool(table.shapes) and plan.kernels.is_capturable,
    }


def _kv_layout(plan: EnginePlan) -> dict[str, Any]:
    model, memory, ranks = plan.model, plan.memory, plan.config
    layers = pipeline_layers(model, 0, ranks.pipeline_parallel_size)
    specs = kv_cache_specs(model, plan.dtype, tensor_parallel_size=ranks.tensor_parallel_size, layers=layers)
    layout = KVLayout(memory.num_blocks, memory.block_size, plan.kv_dtype, specs, plan.kv_layout, memory.groups)
    return {
        "name": plan.kv_layout,
        "reason": plan.decision.kv_layout_reason,
        "cost": _cost_of_layout(plan),
        "dimensions": list(LAYOUT_DIMENSIONS[plan.kv_layout]),
        "shape": layout.dimension_sizes,
        "num_layers": model.num_layers,
        "dtype": plan.kv_dtype,
        "bytes_per_block": memory.bytes_per_block,
        "groups": [
            {
                "window": group.window,
                "states": group.num_slots if group.is_state else 0,
                "max_snapshots": plan.config.max_state_snapshots if group.is_state else 0,
                "layers": layout.group_of_layers.count(index),
                "blocks": group.blocks_per_slab,
                "bytes_per_block": layout.group_bytes[index],
            }
            for index, group in enumerate(memory.groups)
        ],
    }


def _cost_of_layout(plan: EnginePlan) -> dict[str, int] | None:
    """KV of a request of max_model_len on the ranks of a pipeline, and what an arena, which frees the blocks before
    windows, would keep; None: as much."""
    specs = kv_cache_specs(plan.model, plan.dtype, tensor_parallel_size=plan.config.tensor_parallel_size)
    size, others, dtype = plan.config.block_size, plan.drafter.kv_specs, plan.kv_dtype
    groups = make_groups(specs, others, size, dtype, plan.max_model_len)
    if plan.kv_layout == ARENA or len(groups) == 1:
        return None
    arena = KVLayout(1, size, dtype, specs, groups=groups).with_layers(others)
    one = dataclasses.replace(arena, groups=ONE_GROUP)
    counts = (slabs_of(each, size, plan.max_model_len, plan.memory.num_queries) for each in (ONE_GROUP, groups))
    return {
        name: count * layout.bytes_per_block
        for name, count, layout in zip(("bytes_per_request", "in_an_arena"), counts, (one, arena), strict=True)
    }


def _experts(plan: EnginePlan) -> dict[str, Any] | None:
    """What a token reads of a model with experts: of each kind of them the layers, the number and the chosen; and where
    they are."""
    model, split = plan.model, plan.config.expert_split
    if not model.has_experts:
        return None
    kinds: dict[tuple[int, int, int], list[int]] = {}
    for index, layer in enumerate(model.layers):
        if (spec := layer.experts) is not None:
            kinds.setdefault((spec.num_experts, spec.num_chosen, spec.intermediate_size), []).append(index)
    listed: list[dict[str, Any]] = [
        {"num_experts": number, "num_chosen": chosen, "intermediate_size": size, "num_layers": len(layers)}
        for (number, chosen, size), layers in kinds.items()
    ]
    if split is not None:
        for kind, layers in zip(listed, kinds.values(), strict=True):
            number = kind["num_experts"]
            kind["slots"] = [len(split.slots(rank, number)) for rank in range(split.num_ranks)]
            spec = model.layers[layers[0]].experts
            assert spec is not None
            held = dataclasses.replace(spec, num_experts=split.most_slots(number))
            num_stages = plan.config.pipeline_parallel_size
            stages = (pipeline_layers(model, rank, num_stages) for rank in range(num_stages))
            method = plan.linear_methods.of_experts(f"model.layers.{layers[0]}.mlp.experts")
            most = max(len([layer for layer in layers if layer in stage]) for stage in stages)
            kind["bytes"] = most * method.num_bytes(held, model.hidden_size, plan.dtype)
    return {"num_active_parameters": model.num_active_parameters, "kinds": listed}


def _weights(plan: EnginePlan) -> Iterator[dict[str, Any]]:
    """The formats of linear layers and experts, with their sizes on one rank of a tensor group."""
    model, methods, ranks = plan.model, plan.linear_methods, plan.config.tensor_parallel_size
    found: dict[str, Counter[str]] = {}
    head = Linear(("lm_head",), vocab_rows(model.vocab_size, ranks), model.hidden_size, False)
    linears = [
        (linear, [f"model.layers.{index}.{part}" for part in linear.parts])
        for index, layer in enumerate(model.layers)
        for linear in layer.linears(model.hidden_size, ranks)
    ]
    for linear, names in [*linears, *[(head, ["lm_head"])] * (not model.tie_word_embeddings)]:
        method = methods.of(names)
        num_bytes = method.num_bytes(linear.num_outputs, linear.num_inputs, plan.dtype)
        found.setdefault(method.name, Counter()).update(num_matrices=1, bytes=num_bytes)
    for index, layer in enumerate(model.layers):
        if (spec := layer.experts) is not None:
            of_experts, split = methods.of_experts(f"model.layers.{index}.mlp.experts"), plan.config.expert_split
            held = spec if split is None else dataclasses.replace(spec, num_experts=split.most_slots(spec.num_experts))
            num_bytes = of_experts.num_bytes(held, model.hidden_size, plan.dtype, ranks if split is None else 1)
            found.setdefault(of_experts.name, Counter()).update(num_matrices=3 * held.num_experts, bytes=num_bytes)
    for name, counts in found.items():
        yield {"format": plan.dtype if name == UNQUANTIZED.default.name else name, **counts}


def _layers(plan: EnginePlan) -> Iterator[dict[str, Any]]:
    """Runs of consecutive decoder layers with the same decision about fusion."""
    for fusion, run in itertools.groupby(enumerate(plan.fusion), key=itemgetter(1)):
        layers = [index for index, _ in run]
        yield {"first": layers[0], "last": layers[-1], "fused": fusion.is_fused, "reason": fusion.reason}


def _positions(model: ModelConfig) -> Iterator[dict[str, Any]]:
    mixers = {index: layer.attention for index, layer in enumerate(model.layers) if layer.attention is not None}
    for rope in dict.fromkeys(mixer.rope for mixer in mixers.values()):
        layers = [index for index, mixer in mixers.items() if mixer.rope == rope]
        yield {"rope": None if rope is None else str(rope), "layers": layers}


def _parallel(plan: EnginePlan) -> dict[str, Any]:
    model, tensor_size, pipeline_size = plan.model, plan.config.tensor_parallel_size, plan.config.pipeline_parallel_size
    stages = []
    for rank in range(pipeline_size):
        layers, memory = pipeline_layers(model, rank, pipeline_size), plan.memory.stage(rank)
        mixers = [mixer for layer in layers if (mixer := model.layers[layer].attention) is not None]
        stage = {
            "pipeline_rank": rank,
            "ranks": [rank * tensor_size, (rank + 1) * tensor_size - 1],
            "layers": [layers.start, layers.stop - 1],
            "num_heads": max((mixer.num_heads for mixer in mixers), default=0) // tensor_size,
            "num_kv_heads": max((num_kv_heads(mixer, tensor_size) for mixer in mixers), default=0),
        }
        stages.append({**stage, **memory.parts(), "left": memory.left})
    names = "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"
    sizes = dict(zip(names, (tensor_size, pipeline_size, plan.config.data_parallel_size), strict=True))
    shares_experts = plan.config.num_data_ranks > 1
    rows = vocab_rows(model.vocab_size, tensor_size)
    return {**sizes, "shares_experts": shares_experts, "vocab_rows": rows, "stages": stages}


def _drafter(plan: EnginePlan) -> dict[str, Any] | None:
    """The drafter, and its memory on the last rank of a pipeline; None: there is none."""
    config, drafter, memory = plan.config.speculative_config, plan.drafter, plan.memory
    if config is None:
        return None
    per_block = KVLayout(1, memory.block_size, plan.kv_dtype, drafter.kv_specs).bytes_per_block
    return {
        **dataclasses.asdict(config),
        "model": None if drafter.model is None else drafter.model.name,
        "num_layers": len(drafter.kv_specs),
        "weights": drafter.weight_bytes,
        "bytes_per_block": per_block,
        "kv_cache": memory.num_allocated * memory.groups[0].blocks_per_slab * per_block,
    }


def _kv_connector(config: KVTransferConfig) -> dict[str, Any]:
    from fleetfoot.kv_transfer.base.registry import MULTI_CONNECTOR, part_configs

    parts = part_configs(config) if config.kv_connector == MULTI_CONNECTOR else [config]
    return {
        "name": config.kv_connector,
        "role": config.kv_role,
        "connectors": [part.kv_connector for part in parts],
        "load_failure_policy": config.kv_load_failure_policy,
    }


_HELP = "show what an engine would do, before any memory is taken"
COMMAND = Command("plan", _HELP, _add_arguments, _run, _EPILOG, "[MODEL] ")
