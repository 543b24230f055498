"""Linear layers over a tensor group: split by outputs, or by inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from fleetfoot.config.sharding import vocab_rows, vocab_span
from fleetfoot.layers.context import ModelContext, WeightModule
from fleetfoot.quantization.base import LinearShape
from fleetfoot.records.weights import WeightSpec


class ColumnParallelLinear(WeightModule):
    """``x [n, in_features]`` -> ``x @ weight.T + bias [n, outputs of this rank]``.

    Several layers of the checkpoint that read the same input are one matrix product (q, k and v; gate and up).
    """

    def __init__(
        self,
        context: ModelContext,
        in_features: int,
        parts: Sequence[tuple[str, int]],
        bias: bool = False,
        *,
        rows: Sequence[slice] | None = None,
        columns: slice | None = None,
        padding: int = 0,
    ) -> None:
        """Args:
        in_features, parts: as in the checkpoint: the number of input features, and the name of each fused layer with
            its number of output features.
        rows: of each part, the outputs that this rank computes; None: all.
        columns: the inputs that this rank has; None: all.
        padding: outputs behind the others that are always 0.
        """
        super().__init__()
        own_rows = tuple(slice(0, size) for _, size in parts) if rows is None else tuple(rows)
        own_columns = slice(0, in_features) if columns is None else columns
        shape = LinearShape(in_features, tuple(parts), own_rows, own_columns, bias, padding)
        self.weight = context.linear_method.make_weight(shape, context.ops, context.dtype, context.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [n, inputs of this rank]`` -> ``[n, outputs of this rank]``."""
        return self.weight.apply(x)

    def own_weight_specs(self, prefix: str, name: str) -> Iterator[WeightSpec]:
        return self.weight.weight_specs(prefix)

    def process_own_weights(self) -> None:
        self.weight.process_weights_after_loading()


class RowParallelLinear(WeightModule):
    """``x [n, inputs of this rank]`` -> ``[n, out_features]``, complete on every rank.

    There are two ways over a tensor group. Split by inputs, each rank computes a part of a sum (Megatron-LM, Shoeybi et
    al. 2019): one all-reduce, and rounding that depends on the number of ranks. Split by outputs, the inputs are
    gathered before and the outputs behind: two messages, and the bits of one rank. The group determines which
    (`TensorGroup.bitwise_reproducible`).
    """

    def __init__(
        self, context: ModelContext, name: str, in_features: int, out_features: int, bias: bool, inputs: slice
    ) -> None:
        """``name``: in the checkpoint. ``inputs``: those of ``in_features`` that this rank has."""
        super().__init__()
        group = self.group = context.tensor_group
        self._in_features, self._out_features = in_features, out_features
        self.is_gathered = group.bitwise_reproducible and group.size > 1
        if self.is_gathered:
            rows = vocab_span(out_features, group.rank, group.size)
            shape = LinearShape(
                in_features,
                ((name, out_features),),
                (rows,),
                slice(0, in_features),
                bias,
                padding=vocab_rows(out_features, group.size) - (rows.stop - rows.start),
            )
        else:
            has_bias = bias and group.is_first_rank  # once in the sum over the ranks
            shape = LinearShape(in_features, ((name, out_features),), (slice(0, out_features),), inputs, has_bias)
        self.weight = context.linear_method.make_weight(shape, context.ops, context.dtype, context.device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x [n, inputs of this rank]`` -> ``[n, out_features]``."""
        partial = self.partial(x)
        return partial if self.is_gathered else self.group.all_reduce(partial)

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """``[n, out_features]``: this rank's part of the sum over the group; the whole where it is gathered."""
        if not self.is_gathered:
            return self.weight.apply(x)
        whole = self.group.all_gather(x, self._in_features)
        return self.group.all_gather(self.weight.apply(whole), self._out_features)

    def own_weight_specs(self, prefix: str, name: str) -> Iterator[WeightSpec]:
        return self.weight.weight_specs(prefix)

    def process_own_weights(self) -> None:
        self.weight.process_weights_after_loading()
