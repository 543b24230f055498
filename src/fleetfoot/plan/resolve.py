"""From settings, a model and a machine to a plan."""

from __future__ import annotations

import logging
from pathlib import Path

from fleetfoot.assets import embedded_model_path
from fleetfoot.config.engine import EMBEDDED_MODEL, EngineConfig
from fleetfoot.config.model import ModelConfig, load_model_config
from fleetfoot.plan.graphs import CaptureTable
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.weights.hub import resolve_model

logger = logging.getLogger(__name__)

DEFAULT_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}


def resolve_plan(config: EngineConfig, machine: Machine) -> EnginePlan:
    """Decide everything that can be decided before any memory is taken.

    Raises:
        ValueError: settings that do not go together, with the model or with the machine.
    """
    model_path = find_model(config.model, config.revision)
    model = load_model_config(model_path)
    device = _device(config, machine)
    dtype = _dtype(config, model, device)
    max_model_len = _max_model_len(config, model)
    budget = config.max_num_batched_tokens or max(DEFAULT_BATCHED_TOKENS[device], config.max_num_seqs)
    if not config.enable_chunked_prefill and budget < max_model_len:
        if config.max_num_batched_tokens is not None:
            raise ValueError(
                f"max_num_batched_tokens is {budget}, but without chunked prefill a step must hold a whole prompt of "
                f"max_model_len {max_model_len}; raise it, lower max_model_len, or set enable_chunked_prefill=True"
            )
        budget = max_model_len
    runner = "v2" if config.runner == "v2" else "v1"
    reason = "you asked for it" if config.runner == "v1" else "it is the runner that this version has"
    return EnginePlan(
        config=config,
        model=model,
        model_path=model_path,
        tokenizer_path=_tokenizer_path(config, model_path),
        device=device,
        dtype=dtype,
        runner=runner,
        reasons=(f"Model Runner V1 runs: {reason}.",),
        max_model_len=max_model_len,
        max_num_batched_tokens=budget,
        async_scheduling=_async_scheduling(config, runner, device),
        capture_table=CaptureTable.of(
            device=device,
            enforce_eager=config.enforce_eager or runner == "v1",
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=budget,
        ),
    )


def _async_scheduling(config: EngineConfig, runner: str, device: str) -> bool:
    if config.async_scheduling is not None:
        return config.async_scheduling
    return runner == "v2" and device != "cpu"  # a CPU that computes cannot schedule at the same time


def find_model(name: str, revision: str | None = None) -> Path:
    """The folder of a model: the embedded one by its name, a local path, or a hub id."""
    if name == EMBEDDED_MODEL and not Path(name).exists():
        return embedded_model_path()
    return resolve_model(name, revision)


def _tokenizer_path(config: EngineConfig, model_path: Path) -> Path | None:
    if config.skip_tokenizer_init:
        if config.tokenizer is not None:
            raise ValueError(f"tokenizer is {config.tokenizer!r}, but skip_tokenizer_init is set; leave one out")
        return None
    return model_path if config.tokenizer is None else find_model(config.tokenizer)


def _device(config: EngineConfig, machine: Machine) -> str:
    if config.device == "auto":
        return "cuda" if machine.gpu_memory_bytes else "cpu"
    if config.device == "cuda" and not machine.gpu_memory_bytes:
        raise ValueError("device is 'cuda', but torch finds no GPU here; use device='cpu' or 'auto'")
    return config.device


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
