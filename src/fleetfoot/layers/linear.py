"""A linear layer that holds one or more of the checkpoint's, fused by rows into a single matrix product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from fleetfoot.kernels.interface import PrepareLinear
from fleetfoot.kernels.linear.linear import PreparedLinear, ReadsPendingNorm
from fleetfoot.kernels.norm.pending_norm import PendingNorm
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.slots import WeightSlot


class Linear:
    """``x [n, in_features]`` -> ``x @ weight.T + bias [n, sum of the parts]``, or this rank's part of it.

    The weight lies plain while values are being written to its slots. `finish_loading` then hands it to the operation
    that prepares it, which may rearrange it, and lets go of the plain one. A slot that is opened later gets the plain
    values back, and the next `finish_loading` puts them in the place of the prepared ones.
    """

    __slots__ = ("_bias", "_columns", "_in_features", "_parts", "_prepare", "_prepared", "_rows", "_shape", "_weight")

    def __init__(
        self,
        context: ModelContext,
        in_features: int,
        parts: Sequence[tuple[str, int]],
        bias: bool,
        prepare: PrepareLinear | None = None,
        *,
        rows: Sequence[slice] | None = None,
        columns: slice | None = None,
        padding: int = 0,
    ) -> None:
        """Args:
        in_features, parts: as in the checkpoint: the number of input features, and the name of each fused layer with
            its number of output features.
        prepare: the operation that makes the layer, which may give its result another form; None:
            ``Kernels.prepare_linear``.
        rows: of each part, the outputs that this rank computes; None: all.
        columns: the inputs that this rank has; None: all. With fewer, its outputs are to be summed over the ranks, and
            one rank alone is to have the bias.
        padding: outputs behind the others that are always 0.
        """
        self._prepare = context.ops.prepare_linear if prepare is None else prepare
        self._parts = tuple(parts)
        self._in_features = in_features
        self._rows = tuple(slice(0, size) for _, size in parts) if rows is None else tuple(rows)
        self._columns = slice(0, in_features) if columns is None else columns
        held = sum(span.stop - span.start for span in self._rows)
        self._shape = (held + padding, self._columns.stop - self._columns.start)
        weight = torch.empty(self._shape, dtype=context.dtype, device=context.device)
        weight[held:] = 0
        self._weight: torch.Tensor | None = weight
        self._bias = torch.zeros(self._shape[0], dtype=context.dtype, device=context.device) if bias else None
        self._prepared: PreparedLinear | None = None

    def __call__(self, x: torch.Tensor | PendingNorm) -> torch.Tensor:
        """``x`` may be what a norm gives, with part of the norm left to be done, if it `reads_pending_norm`."""
        if self._prepared is None:
            raise RuntimeError("a linear layer was called before finish_loading()")
        if isinstance(x, PendingNorm):
            assert isinstance(self._prepared, ReadsPendingNorm)
            return self._prepared.of_pending_norm(x)
        return self._prepared(x)

    def reads_pending_norm(self, num_rows: int) -> bool:
        """Whether it takes a `PendingNorm` of so many rows."""
        return isinstance(self._prepared, ReadsPendingNorm) and self._prepared.reads_pending_norm(num_rows)

    @property
    def prepared(self) -> PreparedLinear:
        """What the operation has made of it, from the first `finish_loading` on."""
        assert self._prepared is not None
        return self._prepared

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        """One slot for the weight, and the bias if there is one, of each part: ``{prefix}{part}.weight``."""
        first = 0
        for (name, size), rows in zip(self._parts, self._rows, strict=True):
            span = slice(first, first + rows.stop - rows.start)
            weight, bias, has_all_rows = f"{prefix}{name}.weight", f"{prefix}{name}.bias", rows == slice(0, size)
            part = () if has_all_rows and self._columns == slice(0, self._in_features) else (rows, self._columns)
            yield WeightSlot(weight, (size, self._in_features), partial(self._weight_rows, span), part=part)
            if self._bias is not None:
                open_bias = partial(self._bias.__getitem__, span)
                yield WeightSlot(bias, (size,), open_bias, part=() if has_all_rows else (rows,))
            first = span.stop

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
