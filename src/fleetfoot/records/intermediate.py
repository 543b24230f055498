"""What one rank of a pipeline passes to the next. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class IntermediateTensors:
    """The residual stream between two decoder layers, complete: summed over the ranks of a tensor group."""

    hidden_states: torch.Tensor
    """``[num_tokens, hidden_size]``"""

    def first(self, num_tokens: int) -> IntermediateTensors:
        """Those of the first tokens, as a view."""
        return IntermediateTensors(self.hidden_states[:num_tokens])

    def empty_like(self) -> IntermediateTensors:
        """Memory of the same shape, dtype and device, to receive into."""
        return IntermediateTensors(self.hidden_states.new_empty(self.hidden_states.shape))
