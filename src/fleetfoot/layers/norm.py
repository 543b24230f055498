"""Root mean square normalisation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

from fleetfoot.layers.context import ModelContext, WeightModule
from fleetfoot.records.weights import Rows, WeightSpec, count_rows


class RMSNorm(WeightModule):
    """``x / sqrt(mean(x^2) + eps) * (weight + offset)`` over the last dimension (Zhang and Sennrich 2019). ``rows``:
    those of the weight's elements that are stored, in that order; None: all of the checkpoint's."""

    def __init__(
        self, context: ModelContext, size: int, eps: float, offset: float = 0.0, *, rows: Rows | None = None
    ) -> None:
        super().__init__()
        num_elements = size if rows is None else count_rows(rows)
        self.weight = torch.empty(num_elements, dtype=context.dtype, device=context.device)
        self.eps, self.offset, self._size = eps, offset, size
        self._part: tuple[Rows, ...] = () if rows is None else (rows,)
        self._rms_norm = context.ops.rms_norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [num_tokens, size]`` -> the same shape."""
        return self._rms_norm(x, self.weight, self.eps, self.offset)

    def own_weight_specs(self, prefix: str, name: str) -> Iterator[WeightSpec]:
        init: Literal["zeros", "ones"] = "zeros" if self.offset else "ones"
        yield WeightSpec(f"{prefix}{name}.weight", (self._size,), lambda: self.weight, init=init, part=self._part)
