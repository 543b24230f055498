"""The plan: everything about an engine that follows from its settings, the model and the machine, decided once."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from pathlib import Path

from fleetfoot.config.engine import EngineConfig
from fleetfoot.config.model import ModelConfig
from fleetfoot.fusion.fit import LayerFusion
from fleetfoot.kernels.interface import KernelPlan
from fleetfoot.plan.connector import ConnectorPlan
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.memory import MemoryPlan
from fleetfoot.plan.oracle import Decision, Unsupported
from fleetfoot.runner.graphs import CaptureTable
from fleetfoot.speculative.find import NO_DRAFTER, DrafterShape


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Immutable; everything that depends on a choice reads it here."""

    config: EngineConfig
    machine: Machine
    model: ModelConfig
    model_path: Path
    tokenizer_path: Path | None
    """None: prompts are token ids."""
    device: str
    """``cpu`` or ``cuda``."""
    dtype: str
    decision: Decision
    """Which model runner, and why."""
    kernels: KernelPlan
    """Attention and operations of the model's layers."""
    kv_layout: str
    """Name of the KV cache's layout (`fleetfoot.kv_transfer.base.registry`)."""
    max_model_len: int
    """What was asked for; else the model's own limit, or as much of it as there is room for."""
    max_num_batched_tokens: int
    async_scheduling: bool
    """Whether step N+1 is scheduled before the tokens of step N are known."""
    capture_table: CaptureTable
    """The batch shapes that are captured as graphs."""
    memory: MemoryPlan
    fusion: tuple[LayerFusion, ...]
    """For each decoder layer, whether it is fused, and why."""
    connector: ConnectorPlan | None = None
    """The active KV connector."""
    drafter: DrafterShape = NO_DRAFTER
    """What speculative decoding adds on the last rank of a pipeline, and the model that drafts."""
    engine_id: str = field(default_factory=lambda: uuid.uuid4().hex, compare=False)
    """What other engines know this one by, unless kv_transfer_config names it: the same in all of its processes."""

    @property
    def output_rank(self) -> int:
        """The rank that reports sampled tokens: the first of the last pipeline stage, whose ranks sample the same."""
        return self.config.world_size - self.config.tensor_parallel_size

    @property
    def reply_ranks(self) -> range:
        """The ranks that reply to each step: all if there is a KV connector, from which each rank reports."""
        if self.connector is not None:
            return range(self.config.world_size)
        return range(self.output_rank, self.output_rank + 1)

    @property
    def runner(self) -> str:
        """``v1`` or ``v2``."""
        return self.decision.runner

    @property
    def use_v2_model_runner(self) -> bool:
        return self.decision.runner == "v2"

    @property
    def explicit(self) -> bool:
        """Whether the runner is the user's choice."""
        return self.decision.explicit

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why that runner, in sentences."""
        return self.decision.reasons

    @property
    def unsupported(self) -> tuple[Unsupported, ...]:
        """What is on and Model Runner V2 lacks."""
        return self.decision.unsupported

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an engine logs as warnings when it starts, each one line."""
        warnings = list(self.decision.warnings)
        if self.device == "cpu" and self.machine.native_problem:
            warnings.append(
                "The C kernels for CPUs cannot be used, and without them every step takes several times as long: "
                f"{self.machine.native_problem}."
            )
        limit = self.model.max_position_embeddings
        if self.config.max_model_len is None and self.max_model_len < limit:
            warnings.append(
                f"There is no room for KV of the model's {limit:,} positions: requests are limited to "
                f"{self.max_model_len:,} tokens."
            )
        return tuple(warnings)
