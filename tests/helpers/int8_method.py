"""A linear method for tests: int8 weights with a float32 scale for each output."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

from fleetfoot.kernels.interface import Kernels
from fleetfoot.quantization.base import LinearMethod, LinearMethods, LinearShape, LinearWeight
from fleetfoot.records.weights import WeightSpec

_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


class Int8Weight(LinearWeight):
    """The checkpoint has int8 values as ``{part}.weight [out, in]`` and ``{part}.weight_scale [out]``."""

    def __init__(self, shape: LinearShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        num_outputs = shape.num_outputs + shape.padding
        self._values = torch.zeros(num_outputs, shape.num_inputs, dtype=torch.int8, device=device)
        self._scales = torch.ones(num_outputs, dtype=torch.float32, device=device)
        self._bias = torch.zeros(num_outputs, dtype=dtype, device=device) if shape.has_bias else None

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, (self._values * self._scales[:, None]).to(x.dtype), self._bias)

    def weight_specs(self, prefix: str) -> Iterator[WeightSpec]:
        for name, size, rows, span in self._shape.row_spans():
            whole, part = (size, self._shape.in_features), (rows, self._shape.columns)
            values = partial(self._values.__getitem__, span)
            yield WeightSpec(f"{prefix}{name}.weight", whole, values, part=part, kind="integer")
            for kind, tensor in (("weight_scale", self._scales), ("bias", self._bias)):
                if tensor is not None:
                    yield WeightSpec(f"{prefix}{name}.{kind}", (size,), partial(tensor.__getitem__, span), part=(rows,))

    def process_weights_after_loading(self) -> None:
        """Nothing: they are applied as they are stored."""


class Int8(LinearMethod):
    name = "int8"

    def make_weight(self, shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device) -> LinearWeight:
        return Int8Weight(shape, dtype, device)

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: str) -> int:
        return num_outputs * (num_inputs + 4)


def quantize(
    tensors: dict[str, torch.Tensor], methods: LinearMethods | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A checkpoint in the form that `Int8Weight` reads, and an unquantized one of the same values. ``methods``: which
    layers have it; None: all."""
    quantized, rounded = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        is_chosen = methods is None or isinstance(methods.of([module]), Int8)
        if kind == "weight" and module.rpartition(".")[2] in _LINEAR and is_chosen:
            scale = tensor.abs().amax(dim=1) / 127  # [out]
            quantized[name] = (tensor / scale[:, None]).round().to(torch.int8)
            quantized[f"{module}.weight_scale"] = scale
            rounded[name] = quantized[name] * scale[:, None]
    return quantized, rounded
