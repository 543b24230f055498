"""Weights in the dtype of the activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from fleetfoot.config.model import DTYPE_BYTES
from fleetfoot.quantization.base import LinearMethod, LinearMethods, LinearShape, LinearWeight
from fleetfoot.records.weights import Span, WeightSpec

if TYPE_CHECKING:
    import torch

    from fleetfoot.kernels.interface import Kernels
    from fleetfoot.kernels.linear.linear import PreparedLinear


class UnquantizedWeight(LinearWeight):
    """The weight is plain while its specs are written to. `process_weights_after_loading` then prepares it for the
    device (a CPU packs it) and drops the plain copy, and so does the last part of it that is filled. A spec that is
    opened later gets the plain values back; the next `process_weights_after_loading` puts them in the place of the
    prepared ones."""

    def __init__(self, shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        import torch  # a plan can be made where there is no torch

        self._shape = shape
        self._prepare, self._chain = ops.prepare_linear, ops.linear_chain
        size, has_bias = (shape.num_outputs + shape.padding, shape.num_inputs), shape.has_bias or shape.has_zero_bias
        self._dtype = dtype
        self._allocate = partial(torch.empty, size, dtype=dtype, device=device)
        self._plain: torch.Tensor | None = None
        self._unfilled = self._part_names()
        self._bias = torch.zeros(size[0], dtype=dtype, device=device) if has_bias else None
        self._prepared: PreparedLinear | None = None

    def chain(self, role: Any) -> Any:
        chain = self._chain if self._loaded.is_dense else None
        return None if chain is None else chain(self._loaded.weight(), self._bias, role)

    def stored(self) -> Iterator[Span]:
        if not self._loaded.is_dense:
            yield self._loaded.stored()
            return
        for tensor in (self._loaded.weight(), self._bias if self._shape.has_bias else None):
            if tensor is not None:
                rows = tensor[: self._shape.num_outputs]  # without the padding, which stays 0
                yield rows.data_ptr(), rows.nbytes

    @property
    def product(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return self._loaded

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self._loaded(x)

    def apply_unrounded(self, x: torch.Tensor) -> torch.Tensor:
        return self._loaded.unrounded(x)

    def weight_specs(self, prefix: str) -> Iterator[WeightSpec]:
        columns, in_features = self._shape.columns, self._shape.in_features
        for name, size, rows, span in self._shape.row_spans():
            has_all_rows = rows == slice(0, size)
            is_whole = has_all_rows and columns == slice(0, in_features)
            weight = partial(self._plain_rows, span)
            part = () if is_whole else (rows, columns)
            filled = partial(self._mark_filled, name)
            shape = (size, in_features)
            yield WeightSpec(f"{prefix}{name}.weight", shape, weight, part=part, filled=filled, dtype=self._dtype)
            if self._bias is not None and self._shape.has_bias:
                bias = partial(self._bias.__getitem__, span)
                yield WeightSpec(f"{prefix}{name}.bias", (size,), bias, part=() if has_all_rows else (rows,))

    def process_weights_after_loading(self) -> None:
        if self._prepared is None:
            self._prepared = self._prepare(self._plain_rows(slice(None)), self._bias)
        elif self._plain is not None:  # else nothing was opened since; a bias is written where it is read
            self._prepared.replace(self._plain)
        self._plain = None
        self._unfilled = self._part_names()

    def _part_names(self) -> set[str]:
        return {name for name, _ in self._shape.parts}

    def _mark_filled(self, name: str) -> None:
        self._unfilled.discard(name)
        if not self._unfilled:
            self.process_weights_after_loading()

    def _plain_rows(self, span: slice) -> torch.Tensor:
        if self._plain is None and self._prepared is None:
            self._plain = self._allocate()
            self._plain[self._shape.num_outputs :] = 0
        elif self._plain is None:
            self._plain = self._loaded.weight()
        return self._plain[span]

    @property
    def _loaded(self) -> PreparedLinear:
        if self._prepared is None:
            raise RuntimeError("a linear layer was called before process_weights_after_loading")
        return self._prepared


class Unquantized(LinearMethod):
    """`UnquantizedWeight` for every layer."""

    name = "unquantized"

    def make_weight(self, shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device) -> LinearWeight:
        return UnquantizedWeight(shape, ops, dtype, device)

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: str) -> int:
        return num_outputs * num_inputs * DTYPE_BYTES[dtype]

    def prepare_tied_head(self, ops: Kernels) -> Callable[[torch.Tensor], PreparedLinear]:
        return ops.prepare_linear


UNQUANTIZED = LinearMethods(Unquantized())
"""For every layer."""
