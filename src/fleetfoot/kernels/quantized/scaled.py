"""Linear layers with a weight of 8 bits (e4m3 or int8) and scales, and the quantization of their inputs.

Here are the weight as kernels read it, and the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

FP8 = torch.float8_e4m3fn
LIMITS = {FP8: (-448.0, 448.0, 448.0), torch.int8: (-128.0, 127.0, 127.5)}
"""The least and the largest value, and what the largest magnitude is divided by: compressed-tensors takes half of the
range."""
_MIN_SCALE = 1e-12
"""The least scale: a row of zeros has one too."""
_MAX_ELEMENTS = 1 << 22
"""Values of the weight that the reference has in float32 at once."""


@dataclass(frozen=True, slots=True)
class ScaledMatrix:
    """A weight ``[out, in]``: ``values[n, k] * scales[n // rows, k // columns]``, and a bias."""

    values: torch.Tensor
    """``[out, in]`` e4m3 or int8, contiguous."""
    scales: torch.Tensor
    """``[ceil(out / rows), ceil(in / columns)]`` float32."""
    rows: int
    columns: int
    activations: str
    """``token``, ``group`` (of as many inputs as ``columns``), ``static``, or empty: see `WeightFormat`."""
    input_scale: torch.Tensor | None = None
    """``[1]`` float32, of ``static``."""
    bias: torch.Tensor | None = None
    """``[out]`` in the dtype of the activations."""

    def dequantized(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Outputs ``begin`` to ``end`` of the weight, in float32."""
        values = self.values[begin:end].float()
        rows = torch.arange(begin, begin + len(values), device=values.device) // self.rows
        return values.mul_(_expand(self.scales[rows], self.columns, values.shape[1]))

    def of_stack(self, count: int, index: Any) -> torch.Tensor:
        """Some of ``count`` matrices of equal height, one below the other here: ``[..., out / count, in]`` float32."""
        values = self.values.view(torch.uint8).unflatten(0, (count, -1))[index]  # a GPU cannot index e4m3
        scales = self.scales.unflatten(0, (count, -1))[index].repeat_interleave(self.rows, dim=-2)
        return values.view(self.values.dtype).float().mul_(_expand(scales, self.columns, values.shape[-1]))


def _expand(scales: torch.Tensor, size: int, length: int) -> torch.Tensor:
    """``[..., groups]`` -> ``[..., length]``, or ``[..., 1]`` where there is one group."""
    return scales if scales.shape[-1] == 1 else scales.repeat_interleave(size, dim=-1)[..., :length]


def quantize(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values / scales``, rounded to e4m3 or int8 and limited to what it holds. Both in float32."""
    scaled = values.float() / scales
    return (scaled if dtype is FP8 else scaled.round()).clamp(*LIMITS[dtype][:2]).to(dtype)


def scales_of(largest: torch.Tensor, dtype: torch.dtype, *, is_exact: bool = False) -> torch.Tensor:
    """The float32 scales of values with these largest magnitudes. ``is_exact``: that what they become is as large, so
    that quantizing it again changes nothing."""
    return (largest.float() / LIMITS[dtype][1 if is_exact else 2]).clamp(min=_MIN_SCALE)


def quantize_rows(x: torch.Tensor, weight: ScaledMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs ``x [n, in]`` as ``weight.activations`` says: values ``[n, in]`` of the weight's dtype, and their float32
    scales ``[n, 1]``, ``[n, ceil(in / columns)]`` for groups, or ``[1, 1]`` for static ones."""
    dtype = weight.values.dtype
    if weight.activations == "static":
        assert weight.input_scale is not None
        return quantize(x, weight.input_scale, dtype), weight.input_scale.view(1, 1)
    if weight.activations == "token":
        scales = scales_of(x.abs().amax(dim=1, keepdim=True), dtype)
        return quantize(x, scales, dtype), scales
    size = weight.columns
    groups = F.pad(x, (0, -x.shape[1] % size)).unflatten(1, (-1, size))  # [n, groups, columns]
    scales = scales_of(groups.abs().amax(dim=2), dtype)
    return quantize(x, _expand(scales, size, x.shape[1]), dtype), scales


def scaled_linear_torch(x: torch.Tensor, weight: ScaledMatrix) -> torch.Tensor:
    """``x [n, in]`` -> ``x @ weight.T + bias [n, out]``, with ``x`` quantized first, by products in float32."""
    inputs = x.float()
    if weight.activations:
        values, scales = quantize_rows(x, weight)
        inputs = values.float() * _expand(scales, weight.columns, x.shape[1])
    num_outputs, num_inputs = weight.values.shape
    output = torch.empty(x.shape[0], num_outputs, dtype=x.dtype, device=x.device)
    step = max(1, _MAX_ELEMENTS // max(1, num_inputs))
    for begin in range(0, num_outputs, step):
        product = F.linear(inputs, weight.dequantized(begin, begin + step))
        if weight.bias is not None:
            product += weight.bias[begin : begin + step]
        output[:, begin : begin + step] = product
    return output
