"""`fleetfoot plan`: what an engine would do, before any memory is taken. Needs config.json, and no torch."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from fleetfoot.cli.arguments import add_engine_arguments, add_model_argument, engine_config
from fleetfoot.cli.command import Command, UsageError, usage_errors
from fleetfoot.cli.json_output import dump_object
from fleetfoot.cli.plan_text import plan_text
from fleetfoot.cli.sizes import size_in_bytes

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
  architecture, num_parameters, device, gpu_name, dtype, attention_backend, ops, async_scheduling
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
  kv_connector: null where nobody moves KV; else name, role, connectors (one, or several by their order) and
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
        machine, remarks = _machine(arguments, config)
        report = make_report(config, machine)
    report["warnings"] += remarks
    if arguments.json:
        print(dump_object(report))
    else:
        print(plan_text(config.model, report))
        for warning in [text for text in report["warnings"] if text not in report["reasons"]]:
            print(f"fleetfoot plan: warning: {warning}", file=sys.stderr)
    return 0


def make_report(config: EngineConfig, machine: Machine) -> dict[str, Any]:
    """`fleetfoot.plan.report`'s object, also for a model of a kind that cannot be loaded.

    Raises:
        ValueError, TypeError, FileNotFoundError: no plan can be made.
    """
    from fleetfoot.config.fields import ConfigError
    from fleetfoot.config.model import read_config_json
    from fleetfoot.plan.report import decision_report, plan_report
    from fleetfoot.plan.resolve import choose_device, find_model, resolve_plan, resolve_runner
    from fleetfoot.plan.traits import ModelTraits

    try:
        plan = resolve_plan(config, machine, config_only=True)
    except ConfigError as error:
        model = ModelTraits.of(read_config_json(find_model(config.model, config.revision, config_only=True)), None)
        if not model.is_of_another_kind:
            raise  # a field is wrong: there is no model to decide about
        decision = resolve_runner(config, model, machine)
        device = choose_device(config, machine)
        return decision_report(decision, architecture=model.architecture, device=device, problem=str(error))
    return plan_report(plan)


def _machine(arguments: argparse.Namespace, config: EngineConfig) -> tuple[Machine, list[str]]:
    """This machine, but for what was asserted; and what had to be assumed."""
    from fleetfoot.plan.machine import Machine

    gpu_bytes, cpu_bytes, has_triton = arguments.gpu_memory, arguments.cpu_memory, arguments.triton
    asserts_gpu = gpu_bytes is not None or arguments.gpu_name is not None
    if asserts_gpu and config.device == "cpu":
        raise UsageError("--gpu-memory and --gpu-name describe a GPU, and --device is cpu; leave them or it out")
    here = Machine.without_gpu() if config.device == "cpu" or gpu_bytes is not None else Machine.detect()
    remarks = []
    if gpu_bytes is None and here.gpu_memory_bytes == 0 and (asserts_gpu or config.device == "cuda"):
        gpu_bytes = ASSUMED_GPU_BYTES
        remarks = ["no GPU is here and --gpu-memory is not given: 80GiB is assumed."]
    is_here = gpu_bytes is None
    machine = Machine(
        cpu_memory_bytes=here.cpu_memory_bytes if cpu_bytes is None else cpu_bytes,
        gpu_name=arguments.gpu_name or here.gpu_name,
        gpu_memory_bytes=gpu_bytes or here.gpu_memory_bytes,
        has_triton=(here.has_triton if is_here else True) if has_triton is None else has_triton,
        has_native=here.has_native,
    )
    return machine, remarks


COMMAND = Command(
    "plan", "show what an engine would do, before any memory is taken", _add_arguments, _run, _EPILOG, "[MODEL] "
)
