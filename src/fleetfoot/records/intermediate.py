"""What one rank of a pipeline hands to the next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class IntermediateTensors:
    """The state between two decoder layers: the last layer's output, not yet added, and the residual stream.

    With tensor parallelism each rank sends its own to its peer in the next group, which begins with the sum over ranks.
    """

    hidden_states: torch.Tensor
    """``[num_tokens, hidden_size]``: this rank's part of the sum over its tensor group."""
    residual: torch.Tensor
    """``[num_tokens, hidden_size]``: the same on every rank of the tensor group."""

    def first(self, num_tokens: int) -> IntermediateTensors:
        """Those of the first tokens, as views."""
        return IntermediateTensors(self.hidden_states[:num_tokens], self.residual[:num_tokens])

    def empty_like(self) -> IntermediateTensors:
        """Memory of the same shapes, dtype and device, to receive into."""
        hidden_states, residual = self.hidden_states, self.residual
        return IntermediateTensors(hidden_states.new_empty(hidden_states.shape), residual.new_empty(residual.shape))
