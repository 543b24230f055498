"""Products with the blocks of GGUF files in C, of which inputs are quantized to int8 in groups of 32; and with int8."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from fleetfoot.kernels.native_ops import DTYPES
from fleetfoot.kernels.quantized.blocks import BlockLinear, BlockRows
from fleetfoot.kernels.quantized.scaled import ScaledMatrix, scaled_linear_torch
from fleetfoot.native.loading import NativeLibrary
from fleetfoot.native.mappings import check_status


class _Part(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row_bytes", "first", "num_rows", "type")),
        ("scales", ctypes.c_void_p),
    )


_INT8 = 1000
"""The type of rows of int8, with a scale of each output, in C."""


class NativeBlockLinear(BlockLinear):
    """The result of a row depends neither on the other rows nor on the number of threads."""

    def __init__(
        self,
        parts: Sequence[BlockRows],
        num_inputs: int,
        dtype: torch.dtype,
        bias: torch.Tensor | None,
        library: NativeLibrary,
    ) -> None:
        super().__init__(parts, num_inputs, dtype, bias)
        self._library, first = library, 0
        self._table = (_Part * len(parts))()
        for place, part in zip(self._table, parts, strict=True):
            num_rows, row_bytes = part.data.shape
            place.data, place.row_bytes, place.first = part.data.data_ptr(), row_bytes, first
            place.num_rows, place.type = num_rows, part.type
            first += num_rows

    @property
    def fields(self) -> tuple[int, int | None, int, int, int]:
        """Addresses of the table of parts and of the bias; outputs, inputs and parts."""
        bias = None if self._bias is None else self._bias.data_ptr()
        return ctypes.addressof(self._table), bias, *self._shape, len(self._table)

    def _multiply(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if x.dtype is not self._dtype or x.shape[1] != self._shape[1]:
            raise ValueError(f"x {list(x.shape)} {x.dtype} does not match a weight {list(self._shape)} {self._dtype}")
        if x.stride(1) != 1:
            x = x.contiguous()
        table, bias, num_outputs, num_inputs, num_parts = self.fields
        output = torch.empty((len(x), num_outputs), dtype=dtype)
        status = self._library.block_linear(
            output.data_ptr(), dtype is torch.float32, x.data_ptr(), x.stride(0), table, num_parts, bias, len(x),
            num_outputs, num_inputs, DTYPES[self._dtype], torch.get_num_threads(),
        )  # fmt: skip
        check_status(status, "block_linear")
        return output

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows ``[n, in]`` of the weight. Raises IndexError: there is no such row."""
        index = index.contiguous()
        output = torch.empty((len(index), self._shape[1]), dtype=self._dtype)
        table, _, _, num_inputs, num_parts = self.fields
        status = self._library.block_rows(
            output.data_ptr(), table, num_parts, index.data_ptr(), len(index), num_inputs, DTYPES[self._dtype]
        )
        if status == 2:
            raise IndexError(f"a row of a weight {list(self._shape)} is out of range: {index.min()} .. {index.max()}")
        check_status(status, "block_rows")
        return output


def block_linear_native(
    library: NativeLibrary,
    parts: Sequence[BlockRows],
    num_inputs: int,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> BlockLinear:
    """`NativeBlockLinear` where the kernels support the dtype."""
    if dtype not in DTYPES:
        return BlockLinear(parts, num_inputs, dtype, bias)
    return NativeBlockLinear(parts, num_inputs, dtype, bias, library)


def scaled_linear_native(library: NativeLibrary, x: torch.Tensor, weight: ScaledMatrix) -> torch.Tensor:
    """See `Kernels.scaled_linear`: int8 by output with inputs quantized by token, in C; other formats in torch."""
    values, scales = weight.values, weight.scales
    num_outputs, num_inputs = values.shape
    is_by_output = weight.rows == 1 and scales.shape[1] == 1 and weight.activations == "token"
    if values.dtype is not torch.int8 or not is_by_output or num_inputs % 32 or x.dtype not in DTYPES:
        return scaled_linear_torch(x, weight)
    if x.stride(1) != 1:
        x = x.contiguous()
    part = _Part(values.data_ptr(), num_inputs, 0, num_outputs, _INT8, scales.data_ptr())
    output = torch.empty((len(x), num_outputs), dtype=x.dtype)
    status = library.block_linear(
        output.data_ptr(), x.dtype is torch.float32, x.data_ptr(), x.stride(0), ctypes.addressof(part), 1,
        None if weight.bias is None else weight.bias.data_ptr(), len(x), num_outputs, num_inputs, DTYPES[x.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    check_status(status, "scaled_linear")
    return output
