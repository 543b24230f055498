"""A plan as plain data, for `fleetfoot plan --json` and its text."""

from __future__ import annotations

from typing import Any

from fleetfoot.config.sharding import num_kv_heads, pipeline_layers, vocab_rows
from fleetfoot.kv_transfer.base.registry import LAYOUT_DIMENSIONS, MULTI_CONNECTOR, part_configs
from fleetfoot.plan.oracle import Decision
from fleetfoot.plan.plan import EnginePlan

_OF_THE_SHAPE = (
    *("attention_backend", "kernels", "layers", "graphs", "parallel"),
    *("drafter", "kv_connector", "kv_layout", "memory", "capacity"),
)
"""Keys that are null for a model that cannot be run."""


def plan_report(plan: EnginePlan) -> dict[str, Any]:
    """Everything that was decided. Sizes in bytes, lengths in tokens. `fleetfoot plan --help` describes the keys."""
    report = decision_report(plan.decision, architecture=plan.model.architecture, device=plan.device)
    return report | {
        "warnings": list(plan.warnings),
        "gpu_name": plan.machine.gpu_name if plan.device == "cuda" else None,
        "dtype": plan.dtype,
        "num_parameters": plan.model.num_parameters,
        "attention_backend": plan.kernels["attention"],
        "kernels": dict(plan.kernels),
        "layers": _layers(plan),
        "async_scheduling": plan.async_scheduling,
        "max_model_len": plan.max_model_len,
        "max_num_seqs": plan.config.max_num_seqs,
        "max_num_batched_tokens": plan.max_num_batched_tokens,
        "graphs": _graphs(plan),
        "parallel": _parallel(plan),
        "drafter": _drafter(plan),
        "kv_connector": _kv_connector(plan),
        "kv_layout": _kv_layout(plan),
        "memory": _memory(plan),
        "capacity": _capacity(plan),
    }


def decision_report(decision: Decision, *, architecture: str, device: str, problem: str = "") -> dict[str, Any]:
    """The choice of a runner, which there is also for a model that cannot be run; ``problem`` says why it cannot."""
    problems = [problem] if problem else []
    problems += [str(feature) for feature in decision.missing]
    return {
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
    } | dict.fromkeys(_OF_THE_SHAPE)


def _layers(plan: EnginePlan) -> list[dict[str, Any]]:
    """Runs of consecutive decoder layers with the same decision about fusion."""
    runs: list[dict[str, Any]] = []
    for layer, fusion in enumerate(plan.fusion):
        decision = {"fused": fusion.is_fused, "reason": fusion.reason}
        if runs and {name: runs[-1][name] for name in decision} == decision:
            runs[-1]["last"] = layer
        else:
            runs.append({"first": layer, "last": layer, **decision})
    return runs


def _graphs(plan: EnginePlan) -> dict[str, Any]:
    table = plan.capture_table
    return {
        "num_shapes": len(table.keys),
        "decode": list(table.decode),
        "num_drafts": table.num_drafts,
        "uniform": list(table.uniform),
        "mixed": list(table.mixed),
        "full_step": table.full_step,
        "captured_at_start": len(table.first_keys),
        "is_captured": bool(table.keys) and plan.kernels.is_capturable,
    }


def _parallel(plan: EnginePlan) -> dict[str, Any]:
    config, model = plan.config, plan.model
    tensor_size, pipeline_size = config.tensor_parallel_size, config.pipeline_parallel_size
    stages = []
    for rank in range(pipeline_size):
        layers, memory = pipeline_layers(model, rank, pipeline_size), plan.memory.stage(rank)
        stages.append(
            {
                "pipeline_rank": rank,
                "ranks": [rank * tensor_size, (rank + 1) * tensor_size - 1],
                "layers": [layers.start, layers.stop - 1],
                "num_heads": model.num_heads // tensor_size,
                "num_kv_heads": num_kv_heads(model, tensor_size),
                **memory.parts(),
                "left": memory.left,
            }
        )
    return {
        "tensor_parallel_size": tensor_size,
        "pipeline_parallel_size": pipeline_size,
        "vocab_rows": vocab_rows(model.vocab_size, tensor_size),
        "stages": stages,
    }


def _kv_connector(plan: EnginePlan) -> dict[str, Any] | None:
    """The active KV connector; None: there is none."""
    if plan.connector is None:
        return None
    connector = plan.connector.config
    parts = part_configs(connector) if connector.kv_connector == MULTI_CONNECTOR else [connector]
    return {
        "name": connector.kv_connector,
        "role": connector.kv_role,
        "connectors": [part.kv_connector for part in parts],
        "load_failure_policy": connector.kv_load_failure_policy,
    }


def _drafter(plan: EnginePlan) -> dict[str, Any] | None:
    """The drafter, and its memory on the last rank of a pipeline; None: there is none."""
    config, drafter, memory = plan.config.speculative_config, plan.drafter, plan.memory
    if config is None:
        return None
    per_block = drafter.kv_block_bytes(plan.dtype, memory.block_size)
    return {
        "method": config.method,
        "model": None if drafter.model is None else drafter.model.name,
        "num_speculative_tokens": config.num_speculative_tokens,
        "prompt_lookup_max": config.prompt_lookup_max,
        "prompt_lookup_min": config.prompt_lookup_min,
        "disable_by_batch_size": config.disable_by_batch_size,
        "adaptive": config.adaptive,
        "num_layers": len(drafter.kv_specs),
        "weights": drafter.weight_bytes,
        "bytes_per_block": per_block,
        "kv_cache": memory.num_blocks * per_block,
    }


def _kv_layout(plan: EnginePlan) -> dict[str, Any]:
    model, memory = plan.model, plan.memory
    kv_heads = num_kv_heads(model, plan.config.tensor_parallel_size)
    return {
        "name": plan.kv_layout,
        "dimensions": list(LAYOUT_DIMENSIONS[plan.kv_layout]),
        "shape": [memory.num_blocks, 2, kv_heads, memory.block_size, model.head_dim],
        "num_layers": model.num_layers,
        "dtype": plan.dtype,
        "bytes_per_block": memory.bytes_per_block,
    }


def _memory(plan: EnginePlan) -> dict[str, Any]:
    memory = plan.memory
    return {
        "total": memory.total,
        "budget": memory.budget,
        **memory.parts(),
        "left": memory.left,
        "num_blocks": memory.num_blocks,
        "block_size": memory.block_size,
        "num_tokens": memory.num_tokens,
        "kv_cache_is": memory.kv_reason,
    }


def _capacity(plan: EnginePlan) -> dict[str, Any]:
    memory, most = plan.memory, plan.config.max_num_seqs
    longest = min(plan.max_model_len, memory.num_tokens)
    return {
        "longest_context": longest,
        "requests_at_longest_context": memory.concurrency(longest, most),
        "requests_at_max_model_len": memory.concurrency(plan.max_model_len, most),
        "context_at_max_num_seqs": min(plan.max_model_len, memory.num_blocks // most * memory.block_size),
    }
