"""A linear layer that holds one or more of the checkpoint's, fused by rows into a single matrix product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.slots import WeightSlot
from fleetfoot.ops.linear import PreparedLinear
from fleetfoot.ops.opset import PrepareLinear


class Linear:
    """``x [n, in_features]`` -> ``x @ weight.T + bias [n, sum of the parts]``.

    The weight lies plain while values are being written to its slots. `finish_loading` then hands it to the operation
    that prepares it, which may rearrange it, and lets go of the plain one. A slot that is opened later gets the plain
    values back, and the next `finish_loading` puts them in the place of the prepared ones.
    """

    __slots__ = ("_bias", "_parts", "_prepare", "_prepared", "_shape", "_weight")

    def __init__(
        self,
        context: ModelContext,
        in_features: int,
        parts: Sequence[tuple[str, int]],
        bias: bool,
        prepare: PrepareLinear | None = None,
    ) -> None:
        """Args:
        parts: the name of each fused layer in the checkpoint with its number of output features.
        prepare: the operation that makes the layer, which may give its result another form; None:
            ``OpSet.prepare_linear``.
        """
        self._prepare = context.ops.prepare_linear if prepare is None else prepare
        self._parts = tuple(parts)
        self._shape = (sum(rows for _, rows in parts), in_features)
        self._weight: torch.Tensor | None = torch.empty(self._shape, dtype=context.dtype, device=context.device)
        self._bias = torch.empty(self._shape[0], dtype=context.dtype, device=context.device) if bias else None
        self._prepared: PreparedLinear | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._prepared is None:
            raise RuntimeError("a linear layer was called before finish_loading()")
        return self._prepared(x)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """One slot for the weight, and the bias if there is one, of each part: ``{prefix}{part}.weight``."""
        first = 0
        for name, rows in self._parts:
            span = slice(first, first + rows)
            yield WeightSlot(f"{prefix}{name}.weight", (rows, self._shape[1]), partial(self._weight_rows, span))
            if self._bias is not None:
                yield WeightSlot(f"{prefix}{name}.bias", (rows,), partial(self._bias.__getitem__, span))
            first += rows

    def finish_loading(self) -> None:
        if self._weight is None:  # nothing was opened since; a bias is written where it is used
            return
        if self._prepared is None:
            self._prepared = self._prepare(self._weight, self._bias)
        else:
            self._prepared.replace(self._weight)
        self._weight = None

    def _weight_rows(self, span: slice) -> torch.Tensor:
        if self._weight is None:
            assert self._prepared is not None
            self._weight = self._prepared.weight()
        return self._weight[span]
