"""From settings, a model and a machine to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fleetfoot.assets import embedded_model_path
from fleetfoot.config.engine import EMBEDDED_MODEL, EngineConfig
from fleetfoot.config.model import ModelConfig, read_config_json
from fleetfoot.config.parsing import load_model_config
from fleetfoot.config.sharding import check_pipeline_parallel_size, check_tensor_parallel_size
from fleetfoot.fusion.fit import plan_fusion
from fleetfoot.kernels.registry import DeviceFacts, plan_kernels
from fleetfoot.kv_transfer.base.registry import V2_LAYOUT
from fleetfoot.plan.connector import locate_connector, resolve_connector
from fleetfoot.plan.fit import Device, fit_engine
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.memory import EngineShape, MemoryPlan
from fleetfoot.plan.oracle import Decision, ModelFeatures, Situation, decide, explicit_choice
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.plan.transfer_context import check_connector_settings
from fleetfoot.runner.graphs import CaptureTable
from fleetfoot.speculative.find import DrafterModel, drafter_shape, find_drafter
from fleetfoot.weights.hub import resolve_model

DEFAULT_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
_LAUNCH_BOUND_PRODUCTS = 42 * 10**9
"""Weights times tokens that a GPU multiplies while the host launches a decoder layer's kernels one by one: 0.34 ms, or
2,700 tokens of Qwen3-0.6B, measured on an H100. Graphs pay up to about so many; beyond, padding to them costs more."""
_FULL_STEP_PRODUCTS = 4 * _LAUNCH_BOUND_PRODUCTS
"""The same for a full step, which is hardly padded: a slow host takes 1.6 times as long to launch, and its other work
on the step adds to that. 16 prompts of 512 tokens take Qwen3-0.6B on an H100 23.7 ms there, and 18.8 ms elsewhere."""


def resolve_plan(
    config: EngineConfig,
    machine: Machine,
    *,
    environ: Mapping[str, str] | None = None,
    config_only: bool = False,
) -> EnginePlan:
    """Decide everything that can be decided before any memory is taken.

    Args:
        environ: environment variables; None: the process's own.
        config_only: nothing will be loaded, so no more than ``config.json`` is downloaded, and no tokenizer.

    Raises:
        ValueError, TypeError: settings that do not go together, with the model or with the machine, or that a KV
            connector refuses.
        FileNotFoundError: there is no such model.
    """
    model_path = find_model(config.model, config.revision, config_only=config_only)
    model = load_model_config(model_path)
    device = choose_device(config, machine)
    traits = ModelFeatures.of(read_config_json(model_path), model)
    situation = _situation(config, traits, machine, environ)
    decision = decide(situation)
    drafter = find_drafter(config, model, config_only=config_only)
    shape, memory = _fit(config, model, drafter, machine, device, decision.runner)
    if drafter is not None:
        drafter.check_length(shape.max_model_len)
    plan = EnginePlan(
        config=config,
        machine=machine,
        model=model,
        model_path=model_path,
        tokenizer_path=None if config_only else _tokenizer_path(config, model_path),
        device=device,
        dtype=shape.dtype,
        decision=decision,
        kernels=shape.kernels,
        kv_layout=V2_LAYOUT,  # V1 keeps its KV in the same one
        max_model_len=shape.max_model_len,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        async_scheduling=_async_scheduling(config, decision.runner, device),
        capture_table=shape.capture_table,
        memory=memory,
        fusion=plan_fusion(model, decision.runner),
        connector=locate_connector(situation.connector),
        drafter=shape.drafter,
    )
    check_connector_settings(plan)
    return plan


def resolve_runner(
    config: EngineConfig, model: ModelFeatures, machine: Machine, environ: Mapping[str, str] | None = None
) -> Decision:
    """The choice of the runner, also for models that no runner can load.

    Raises:
        ValueError: the environment variable holds neither 0 nor 1, or there is no such device.
    """
    return decide(_situation(config, model, machine, environ))


def _situation(
    config: EngineConfig, model: ModelFeatures, machine: Machine, environ: Mapping[str, str] | None
) -> Situation:
    choice, device = explicit_choice(config, environ), choose_device(config, machine)
    return Situation(config, model, device, machine.has_triton, choice, resolve_connector(config))


def find_model(name: str, revision: str | None = None, *, config_only: bool = False) -> Path:
    """The folder of a model: the embedded one by its name, a local path, or a hub id."""
    if name == EMBEDDED_MODEL and not Path(name).exists():
        return embedded_model_path()
    return resolve_model(name, revision, config_only=config_only)


def choose_device(config: EngineConfig, machine: Machine) -> str:
    """``cpu`` or ``cuda``.

    Raises:
        ValueError: a GPU was asked for and there is none.
    """
    if config.device == "auto":
        return "cuda" if machine.gpu_memory_bytes else "cpu"
    if config.device == "cuda" and not machine.gpu_memory_bytes:
        raise ValueError("device is 'cuda', but torch finds no GPU here; use device='cpu' or 'auto'")
    return config.device


def _fit(
    config: EngineConfig, model: ModelConfig, found: DrafterModel | None, machine: Machine, device: str, runner: str
) -> tuple[EngineShape, MemoryPlan]:
    dtype = _dtype(config, model, device)
    kernels = plan_kernels(DeviceFacts(device, machine.has_native, machine.has_triton))
    check_tensor_parallel_size(model, config.tensor_parallel_size)
    check_pipeline_parallel_size(model, config.pipeline_parallel_size)
    drafter = drafter_shape(config, model, found, dtype, device)
    layer_weights = model.layer_parameters(config.tensor_parallel_size)

    def make_shape(config: EngineConfig, max_model_len: int) -> EngineShape:
        budget = _max_num_batched_tokens(config, device, max_model_len)
        return EngineShape(
            model=model,
            dtype=dtype,
            device=device,
            runner=runner,
            block_size=config.block_size,
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=budget,
            capture_table=CaptureTable.of(
                device=device,
                enforce_eager=config.enforce_eager or runner == "v1",
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=budget,
                num_drafts=drafter.num_drafts,
                most_mixed_tokens=_LAUNCH_BOUND_PRODUCTS // layer_weights,
                most_full_tokens=_FULL_STEP_PRODUCTS // layer_weights,
            ),
            kernels=kernels,
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
            drafter=drafter,
        )

    make_shape(config, _max_model_len(config, model))  # settings that do not go together are refused first
    total = machine.memory_bytes(device)
    if device == "cpu":  # which all ranks share
        total //= config.tensor_parallel_size * config.pipeline_parallel_size
    return fit_engine(config, Device(total, make_shape, model.max_position_embeddings))


def _max_num_batched_tokens(config: EngineConfig, device: str, max_model_len: int) -> int:
    budget = config.max_num_batched_tokens or max(DEFAULT_BATCHED_TOKENS[device], config.max_decode_tokens)
    if config.enable_chunked_prefill or budget >= max_model_len:
        return budget
    if config.max_num_batched_tokens is not None:
        raise ValueError(
            f"max_num_batched_tokens is {budget}, but without chunked prefill a step must hold a whole prompt of "
            f"max_model_len {max_model_len}; raise it, lower max_model_len, or set enable_chunked_prefill=True"
        )
    return max_model_len


def _async_scheduling(config: EngineConfig, runner: str, device: str) -> bool:
    if config.async_scheduling is not None:
        return config.async_scheduling
    return runner == "v2" and device != "cpu"  # a CPU that computes cannot schedule at the same time


def _tokenizer_path(config: EngineConfig, model_path: Path) -> Path | None:
    if config.skip_tokenizer_init:
        if config.tokenizer is not None:
            raise ValueError(f"tokenizer is {config.tokenizer!r}, but skip_tokenizer_init is set; leave one out")
        return None
    return model_path if config.tokenizer is None else find_model(config.tokenizer)


def _dtype(config: EngineConfig, model: ModelConfig, device: str) -> str:
    if config.dtype != "auto":
        return config.dtype
    if device == "cuda" and model.dtype == "float32":
        return "bfloat16"  # what a GPU is built for; float32 has to be asked for
    return model.dtype


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    limit = model.max_position_embeddings
    if config.max_model_len is None:
        return limit
    if config.max_model_len > limit:
        raise ValueError(
            f"max_model_len is {config.max_model_len}, but the model's positions end at {limit} "
            f"(max_position_embeddings in its config.json); set max_model_len to at most {limit}"
        )
    return config.max_model_len
