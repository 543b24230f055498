"""The linear layers whose output joins the residual: attention's last, and the MLP's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from fleetfoot.config.sharding import vocab_rows, vocab_span
from fleetfoot.kernels.linear.linear import Accumulates, Joins, Streams
from fleetfoot.kernels.norm.pending_norm import PendingNorm
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.linear import Linear
from fleetfoot.layers.norm import NormedLinear
from fleetfoot.layers.slots import WeightSlot


class ResidualLinear:
    """``x [n, this rank's inputs]`` -> ``[n, out_features]``, or what the next norm makes that of.

    Over a tensor group each rank has a part of the inputs, and there are two ways to go on. Split by inputs, every rank
    makes a part of a sum: one message in all, and rounding that depends on the number of ranks. Split by outputs, the
    inputs are gathered before and the outputs behind: two messages, and the bits that one rank alone would get. The
    group says which (`TensorGroup.bitwise_reproducible`).
    """

    __slots__ = (
        "_accumulate",
        "_group",
        "_in_features",
        "_is_gathered",
        "_join",
        "_linear",
        "_out_features",
        "streamed",
    )

    def __init__(
        self, context: ModelContext, name: str, in_features: int, out_features: int, bias: bool, inputs: slice
    ) -> None:
        """``inputs``: those of ``in_features`` that this rank has."""
        group = self._group = context.tensor_group
        self._in_features, self._out_features = in_features, out_features
        self._is_gathered = group.bitwise_reproducible and group.size > 1
        parts = ((name, out_features),)
        self._accumulate: Callable[[torch.Tensor, torch.Tensor], bool] | None = None
        self._join: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], PendingNorm | None] | None = None
        self.streamed: torch.Tensor | None = None
        """The weight, if kernels read it as it is: whoever runs before may ask for it."""
        if self._is_gathered:
            rows = vocab_span(out_features, group.rank, group.size)
            padding = vocab_rows(out_features, group.size) - (rows.stop - rows.start)
            self._linear = Linear(context, in_features, parts, bias, rows=(rows,), padding=padding)
        else:
            has_bias = bias and group.is_first_rank  # once in the sum over the ranks
            prepare = context.ops.prepare_residual_linear
            self._linear = Linear(context, in_features, parts, has_bias, prepare, columns=inputs)

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, then: NormedLinear | None = None
    ) -> torch.Tensor | PendingNorm:
        """The result is for the norm that follows: it adds up what may be partial sums, and what the ranks have.

        Args:
            residual: ``[n, out_features]``, to which the result may be added where it lies; then the result is it.
            then: that norm and who reads what it gives, where the result may be the sum with part of the norm done.
        """
        if self._join and residual is not None and then is not None and then.linear.reads_pending_norm(len(x)):
            pending = self._join(x, residual, then.norm.weight, then.norm.eps)
            if pending is not None:
                return pending
        if residual is not None and self._accumulate is not None and self._accumulate(x, residual):
            return residual
        if self._is_gathered:
            whole = self._group.all_gather(x, self._in_features)
            return self._group.all_gather(self._linear(whole), self._out_features)
        return self._linear(x)

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        return self._linear.weight_slots(prefix)

    def finish_loading(self) -> None:
        self._linear.finish_loading()
        prepared = self._linear.prepared
        self.streamed = prepared.streamed if isinstance(prepared, Streams) else None
        if self._group.size == 1:  # else there is a sum over the ranks to be made before
            self._accumulate = prepared.accumulate if isinstance(prepared, Accumulates) else None
            self._join = prepared.join if isinstance(prepared, Joins) else None
