"""The interface of a model runner, and what all runners share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from fleetfoot.config.model import DTYPE_BYTES
from fleetfoot.records.forward_context import IntermediateTensors
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import ModelRunnerOutput, SchedulerOutput


@dataclass(slots=True)
class ExecuteModelState:
    """A step between `execute_model` and `sample_tokens`."""

    scheduler_output: SchedulerOutput
    hidden_states: torch.Tensor
    """``[num_tokens, hidden_size]``"""
    finished_req_ids: set[str] = field(default_factory=set)
    """Requests that ended before this step, for the KV connector's `post_forward`."""
    extra: Any = None
    """Data of the runner."""


class PendingOutput(Protocol):
    """The output of a step, whose copies from the device may be in flight."""

    def get(self) -> ModelRunnerOutput:
        """Wait for it."""
        ...


class ModelRunner(Protocol):
    """Turns a `SchedulerOutput` into tokens. Calls come in pairs: `execute_model`, then `sample_tokens`."""

    name: str
    """``v1`` or ``v2``."""

    fused_layers: tuple[int, ...]
    """Numbers of the decoder layers that run fused, known after `load_model`."""

    def load_model(self) -> None:
        """Read the weights to the device."""
        ...

    def initialize_kv_cache(self, layout: KVLayout) -> None:
        """Allocate the KV cache and the runner's state."""
        ...

    def warm_up(self) -> None:
        """Compile and capture what serving uses, without an effect on state or statistics."""
        ...

    def execute_model(
        self, scheduler_output: SchedulerOutput, intermediate_tensors: IntermediateTensors | None = None
    ) -> IntermediateTensors | None:
        """Queue the forward pass.

        Args:
            intermediate_tensors: of the previous pipeline stage; None: there is none, or the runner receives it.

        Returns:
            The input of the next pipeline stage, if the caller sends it; else None. `sample_tokens` is called next.
        """
        ...

    def sample_tokens(self, grammar_output: Any | None) -> PendingOutput:
        """Logits, sampling, verification of drafts, drafting, and then the KV connector, for the step that
        `execute_model` queued. On a rank that is not last in its pipeline, and after an idle step, the output has
        only that of the KV connector."""
        ...

    def shutdown(self) -> None:
        """Free the memory; the runner cannot be used afterwards."""
        ...


def allocate_kv_cache(layout: KVLayout, device: torch.device) -> list[torch.Tensor]:
    """The tensors of all layers (`KVLayout.layer_shapes`), zeroed, because masking does not remove a NaN in a slot that
    was never written.

    On a CPU, pages of zeros take memory only when blocks are first written.
    """
    dtype = getattr(torch, layout.dtype)
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for shape in layout.layer_shapes]
    return [
        torch.from_numpy(np.zeros(math.prod(shape) * DTYPE_BYTES[layout.dtype], dtype=np.uint8)).view(dtype).view(shape)
        for shape in layout.layer_shapes
    ]
