"""Weights in the dtype of the activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from fleetfoot.config.model import DTYPE_BYTES
from fleetfoot.quantization.base import LinearMethod, LinearShape, LinearWeight
from fleetfoot.records.weights import WeightSpec

if TYPE_CHECKING:
    import torch

    from fleetfoot.kernels.interface import Kernels
    from fleetfoot.kernels.linear.linear import PreparedLinear


class UnquantizedWeight(LinearWeight):
    """The weight lies plain while its specs are written to. `process_weights_after_loading` then has it prepared for
    the device, which may rearrange it (a CPU packs it), and drops the plain copy. A spec that is opened later gets the
    plain values back; the next `process_weights_after_loading` puts them in the place of the prepared ones.
    """

    def __init__(self, shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        import torch  # a plan can be made where there is no torch

        self._shape = shape
        self._prepare = ops.prepare_linear
        size = (shape.num_outputs + shape.padding, shape.num_inputs)
        self._plain: torch.Tensor | None = torch.empty(size, dtype=dtype, device=device)
        self._plain[shape.num_outputs :] = 0
        self._bias = torch.zeros(size[0], dtype=dtype, device=device) if shape.has_bias else None
        self._prepared: PreparedLinear | None = None

    @property
    def dense(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        assert self._prepared is not None
        return (self._prepared.weight(), self._bias) if self._prepared.is_dense else None

    @property
    def product(self) -> Callable[[torch.Tensor], torch.Tensor]:
        assert self._prepared is not None
        return self._prepared

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        if self._prepared is None:
            raise RuntimeError("a linear layer was called before process_weights_after_loading")
        return self._prepared(x)

    def weight_specs(self, prefix: str) -> Iterator[WeightSpec]:
        shape = self._shape
        for name, size, rows, span in shape.row_spans():
            has_all_rows = rows == slice(0, size)
            is_whole = has_all_rows and shape.columns == slice(0, shape.in_features)
            yield WeightSpec(
                f"{prefix}{name}.weight",
                (size, shape.in_features),
                partial(self._plain_rows, span),
                part=() if is_whole else (rows, shape.columns),
            )
            if self._bias is not None:
                destination = partial(self._bias.__getitem__, span)
                yield WeightSpec(f"{prefix}{name}.bias", (size,), destination, part=() if has_all_rows else (rows,))

    def process_weights_after_loading(self) -> None:
        if self._plain is None:  # nothing was opened since; a bias is written where it is read
            return
        if self._prepared is None:
            self._prepared = self._prepare(self._plain, self._bias)
        else:
            self._prepared.replace(self._plain)
        self._plain = None

    def _plain_rows(self, span: slice) -> torch.Tensor:
        if self._plain is None:
            assert self._prepared is not None
            self._plain = self._prepared.weight()
        return self._plain[span]


class Unquantized(LinearMethod):
    """`UnquantizedWeight` for every layer."""

    name = "unquantized"

    def make_weight(self, shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device) -> LinearWeight:
        return UnquantizedWeight(shape, ops, dtype, device)

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: str) -> int:
        return num_outputs * num_inputs * DTYPE_BYTES[dtype]


UNQUANTIZED = Unquantized()
