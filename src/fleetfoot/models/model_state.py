"""What a family of models needs in a step besides its layers, behind the points at which Model Runner V2 calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fleetfoot.kernels.prepare.tables import StepBuffers
from fleetfoot.records.forward_context import IntermediateTensors
from fleetfoot.records.step import NewRequest


@dataclass(frozen=True, slots=True)
class StateSizes:
    """What a `ModelState` is made for."""

    max_num_seqs: int
    """Rows: each running request has one."""
    max_num_tokens: int
    """Most tokens of a step."""
    device: torch.device


class ModelState:
    """What is kept of each row besides KV, and made for each step besides token ids. This class: nothing.

    `add` and `remove` are the host's. The others queue work on the device, in this order in each step, without waiting
    for it; a graph captures them for padding requests, whose row is -1. So what they read and write has fixed
    addresses, and what they return has shapes that follow from those of ``batch``.
    """

    def add(self, request: NewRequest) -> None:
        """A request gets its row, or gets one again after a preemption."""

    def remove(self, row: int) -> None:
        """A row is freed."""

    def prepare_inputs(self, batch: StepBuffers) -> Any:
        """What `ForwardContext.family_inputs` has for the layers. The inputs of the step are in ``batch``."""
        return None

    def embed(self, batch: StepBuffers, received: IntermediateTensors | None) -> IntermediateTensors | None:
        """What the first layer of this rank reads; None: the embedding of ``batch.input_ids``. ``received``: of the
        rank before; None on the first."""
        return received

    def post_update(self, batch: StepBuffers) -> None:
        """The rows advance by their queries."""

    def reject(self, rows: torch.Tensor, num_rejected: torch.Tensor) -> None:
        """The last tokens of these rows' queries do not count: their drafts were rejected. ``rows [n]``, ``num_rejected
        [n]``: int32. It follows `post_update`; before the last rank of a pipeline it comes with the sampled tokens, but
        before the next step of these rows."""


NO_STATE = ModelState()
