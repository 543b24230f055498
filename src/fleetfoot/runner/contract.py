"""What every model runner does, so that the engine never asks which one it has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fleetfoot.records.intermediate import IntermediateTensors
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import ModelRunnerOutput, SchedulerOutput


@dataclass(slots=True)
class ExecuteModelState:
    """What `execute_model` leaves for `sample_tokens`: the step between the two calls."""

    scheduler_output: SchedulerOutput
    hidden_states: torch.Tensor
    """``[num_tokens, hidden_size]``"""
    finished_req_ids: set[str] = field(default_factory=set)
    """Requests that ended before this step, for the KV connector's `post_forward`."""
    extra: Any = None
    """What a runner keeps for itself."""


class PendingOutput(Protocol):
    """A step's output, which may still be on its way from the device."""

    def get(self) -> ModelRunnerOutput:
        """Wait for it."""
        ...


class ModelRunner(Protocol):
    """Turns a `SchedulerOutput` into tokens. Calls come in pairs: `execute_model`, then `sample_tokens`."""

    name: str
    """``v1`` or ``v2``: what really runs, which engines and tests report."""

    def load_model(self) -> None:
        """Read the weights to the device."""
        ...

    def initialize_kv_cache(self, layout: KVLayout) -> None:
        """Take the KV cache's memory."""
        ...

    def warm_up(self) -> None:
        """Compile and capture what serving will use, leaving no trace in state or statistics."""
        ...

    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: IntermediateTensors | None = None
    ) -> IntermediateTensors | None:
        """Queue the forward pass.

        Args:
            intermediate_tensors: what the rank before this one in the pipeline computed; None on the first.

        Returns:
            What the next rank needs, on a rank that is not the last; else None, and `sample_tokens` comes next.
        """
        ...

    def sample_tokens(self, grammar_output: Any | None) -> PendingOutput:
        """Logits, sampling, verification of drafts, drafting, and then the KV connector, for the step that
        `execute_model` queued. On a rank that is not last in its pipeline, and after an idle step, the output has
        nothing but what the KV connector reports."""
        ...

    def shutdown(self) -> None:
        """Give back memory; the runner cannot be used afterwards."""
        ...
