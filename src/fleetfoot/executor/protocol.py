"""The executor's interface, its errors, and the check of what a worker has built against the plan. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fleetfoot.config.sharding import pipeline_layers
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import PendingOutput, SchedulerOutput, TokenMasks


class WorkerError(RuntimeError):
    """A worker process has raised, or has ended. The text has its rank, and its traceback if there is one."""


class PlanMismatchError(RuntimeError):
    """What a worker has built is not what the plan names."""


class Executor(Protocol):
    """Runs steps on one worker or many."""

    runner_name: str
    """``v1`` or ``v2``: the runner that the workers report."""
    layout: KVLayout
    """The layout of the KV cache on rank 0; all ranks have equally many blocks."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Take a step; it is executed at the latest when `sample_tokens` is called, and at once if it is followed by
        masks (`SchedulerOutput.structured`)."""

    def sample_tokens(self, masks: TokenMasks | None) -> PendingOutput:
        """Sample the tokens of the step that `execute_model` took. ``masks``: of its rows of logits; None: every token
        is allowed."""

    def collective_rpc(
        self, method: str | Callable[..., Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> list[Any]:
        """Call a function of the worker, or its method of this name, on every rank; no step is in flight.

        Returns the results in the order of the ranks.

        Raises:
            ValueError: there is no such method, or the call cannot be sent to another process.
            Exception: what the first of the ranks raises; the workers go on.
            WorkerError: a worker has ended.
        """

    def shutdown(self) -> None:
        """End the workers and give their memory back."""


def planned_parts(plan: EnginePlan, rank: int) -> dict[str, object]:
    """The parts of a worker that the plan names for a rank. Ranks before the last pipeline stage have no drafter."""
    speculative, config = plan.config.speculative_config, plan.config
    stage = rank % config.replica_size // config.tensor_parallel_size
    layers = pipeline_layers(plan.model, stage, config.pipeline_parallel_size)
    drafts = stage == config.pipeline_parallel_size - 1
    fused = [layer for layer, fusion in enumerate(plan.drafter_fusion) if drafts and fusion.is_fused]
    return {
        "runner": plan.runner,
        "kernels": str(plan.kernels),
        "attention": plan.kernels["attention"],
        "kv_layout": plan.kv_layout,
        "connector": "none" if plan.connector is None else plan.connector.class_name,
        "drafter": speculative.method if speculative is not None and drafts else "none",
        "ranks": config.group_sizes,
        "fused_layers": tuple(layer for layer in layers if plan.fusion[layer].is_fused),
        "fused_drafter_layers": tuple(fused),
    }


def check_parts(plan: EnginePlan, rank: int, parts: Mapping[str, object]) -> None:
    """Raise PlanMismatchError, with both sides of each difference, if a rank has other parts than the plan names."""
    planned = planned_parts(plan, rank)
    differences = [
        f"\n  - worker {rank}: {name} is {built!r}, and the plan names {planned[name]!r}"
        for name, built in parts.items()
        if built != planned[name]
    ]
    if differences:
        raise PlanMismatchError(f"the engine was not built as planned:{''.join(differences)}")
