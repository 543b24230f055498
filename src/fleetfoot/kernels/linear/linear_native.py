"""Linear layers in C: the weight is packed once, and a row's result is bitwise identical in every batch."""

from __future__ import annotations

import torch

from fleetfoot.kernels.linear.linear import PreparedLinear, check_replacement, prepare_linear_torch
from fleetfoot.native.library import DTYPES, NativeLibrary, check_status


def has_matrix_unit() -> bool:
    """Whether this CPU multiplies bfloat16 tiles in hardware (AMX), which oneDNN uses and the C kernels do not."""
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(supported and supported())


def prepare_linear_native(
    library: NativeLibrary, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> PreparedLinear:
    """`NativeLinear` if it supports the dtype and is the fastest implementation, otherwise the torch implementation."""
    code = DTYPES.get(weight.dtype)
    pairs = weight.dtype is torch.bfloat16
    if code is None or weight.numel() == 0 or (pairs and (weight.shape[1] % 2 or has_matrix_unit())):
        return prepare_linear_torch(weight, bias)
    return NativeLinear(weight, bias, library)


class NativeLinear:
    """``x [n, in]`` -> ``[n, out]``. Only the packed copy of the weight is kept.

    Each output is one float32 sum over the inputs in order, so a row's result does not depend on ``n`` or on the number
    of threads.
    """

    __slots__ = (
        "_bias", "_bias_pointer", "_code", "_dtype", "_kernels", "_packed", "_shape", "_units", "_values_per_unit",
    )  # fmt: skip
    is_dense = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, kernels: NativeLibrary) -> None:
        """Args:
        weight: ``[out, in]`` float32, or bfloat16 with an even ``in``.

        Raises:
            ValueError: the bias is not ``[out]`` of the same dtype.
        """
        num_outputs, num_inputs = weight.shape
        self._shape, self._dtype, self._code = weight.shape, weight.dtype, DTYPES[weight.dtype]
        if bias is not None and (bias.shape != (num_outputs,) or bias.dtype != weight.dtype):
            raise ValueError(
                f"bias {list(bias.shape)} {bias.dtype} does not match a weight {list(weight.shape)} {weight.dtype}"
            )
        self._bias = None if bias is None else bias.contiguous()
        self._bias_pointer = None if self._bias is None else self._bias.data_ptr()
        self._kernels = kernels
        self._values_per_unit = 4 // weight.element_size()
        self._units = num_inputs // self._values_per_unit
        panel = kernels.panel_width()
        num_panels = -(-num_outputs // panel)
        self._packed = torch.empty(num_panels * panel * self._units, dtype=torch.int32)  # [panels, units, panel]
        self._pack(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        num_rows, num_inputs = x.shape
        num_outputs = self._shape[0]
        if x.dtype is not self._dtype or num_inputs != self._shape[1]:
            raise ValueError(f"x {list(x.shape)} {x.dtype} does not match a weight {list(self._shape)} {self._dtype}")
        stride = x.stride()
        if stride[1] != 1 or (self._values_per_unit == 2 and (stride[0] % 2 or x.data_ptr() % 4)):
            x = x.contiguous() if stride[1] != 1 else x.clone(memory_format=torch.contiguous_format)
            stride = x.stride()
        output = torch.empty((num_rows, num_outputs), dtype=self._dtype)
        status = self._kernels.linear(
            output.data_ptr(), x.data_ptr(), stride[0] // self._values_per_unit, self._packed.data_ptr(),
            self._bias_pointer, num_rows, num_outputs, self._units, self._code, torch.get_num_threads(),
        )  # fmt: skip
        if status:
            check_status(status, "linear")
        return output

    def weight(self) -> torch.Tensor:
        weight = torch.empty(self._shape, dtype=self._dtype)
        self._kernels.unpack_linear(
            weight.data_ptr(), self._packed.data_ptr(), self._shape[0], self._units, torch.get_num_threads()
        )
        return weight

    def replace(self, weight: torch.Tensor) -> None:
        check_replacement(weight, self._shape, self._dtype)
        self._pack(weight)

    def _pack(self, weight: torch.Tensor) -> None:
        source = weight.contiguous()
        units, num_threads = self._units, torch.get_num_threads()
        self._kernels.pack_linear(self._packed.data_ptr(), source.data_ptr(), units, self._shape[0], units, num_threads)
