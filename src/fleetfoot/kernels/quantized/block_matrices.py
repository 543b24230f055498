"""Weights in the blocks of GGUF files as matrices of kernels with weights of 4 and 8 bits, for GPUs.

Codes of 4 bits keep their values, and scales and zero points of their groups are rounded to 16 bits. Q8_0 and Q5_0
become int8 exactly; codes of 5 and 6 bits with minima, or with scales of 16 inputs, are rounded to int8 in groups of
32, which is finer than the type by a factor of 4 at least.
"""

from __future__ import annotations

import torch

from fleetfoot.kernels.quantized import BLOCK_GROUP as GROUP
from fleetfoot.kernels.quantized.blocks import codes_of_4_bits, dequantize
from fleetfoot.kernels.quantized.packed import BLOCK, SPAN, PackedMatrix, pack_words
from fleetfoot.kernels.quantized.scaled import ScaledMatrix, quantize, scales_of

_MAX_VALUES = 1 << 22
"""Values that are brought into another form at once."""

Matrix = PackedMatrix | ScaledMatrix | torch.Tensor


def empty_matrix(
    form: tuple[str, bool],
    num_outputs: int,
    num_inputs: int,
    dtype: torch.dtype,
    device: torch.device,
    bias: torch.Tensor | None,
) -> Matrix:
    """Storage for some outputs, all 0. ``form``: see `block_form`."""
    kind, has_zeros = form
    if kind == "float":
        return torch.zeros(num_outputs, num_inputs, dtype=dtype, device=device)
    groups = num_inputs // GROUP
    if kind == "int8":
        values = torch.zeros(num_outputs, num_inputs, dtype=torch.int8, device=device)
        scales = torch.zeros(num_outputs, groups, device=device)
        return ScaledMatrix(values, scales, 1, GROUP, "", None, bias)
    blocks = -(-num_inputs // BLOCK)
    words = torch.zeros(num_outputs, blocks * SPAN, dtype=torch.int32, device=device)
    scales = torch.zeros(num_outputs, groups, dtype=dtype, device=device)
    if kind == "e2m1":
        scales = torch.zeros(num_outputs, blocks * BLOCK // GROUP, dtype=torch.uint8, device=device)
    zeros = torch.zeros(num_outputs, groups, dtype=torch.float16, device=device) if has_zeros else None
    return PackedMatrix(words, scales, zeros, GROUP, num_inputs, kind == "e2m1", None, bias)


def tensors_of(matrix: Matrix) -> list[torch.Tensor]:
    """The storage, without the bias."""
    if isinstance(matrix, ScaledMatrix):
        return [matrix.values, matrix.scales]
    if isinstance(matrix, PackedMatrix):
        return [each for each in (matrix.words, matrix.scales, matrix.zeros) if each is not None]
    return [matrix]


def write_blocks(matrix: Matrix, first: int, number: int, data: torch.Tensor) -> None:
    """Write outputs from ``first`` on. ``data [n, bytes of a row]``: their blocks, on any device."""
    num_inputs = matrix.shape[1] if isinstance(matrix, torch.Tensor) else _num_inputs(matrix)
    for part in data.split(max(1, _MAX_VALUES // num_inputs)):
        _write(matrix, slice(first, first + len(part)), number, part.to(tensors_of(matrix)[0].device))
        first += len(part)


def _num_inputs(matrix: PackedMatrix | ScaledMatrix) -> int:
    return matrix.num_inputs if isinstance(matrix, PackedMatrix) else matrix.values.shape[1]


def _write(matrix: Matrix, rows: slice, number: int, data: torch.Tensor) -> None:
    if isinstance(matrix, torch.Tensor):
        matrix[rows] = dequantize(number, data).to(matrix.dtype)
        return
    if isinstance(matrix, ScaledMatrix):
        values = dequantize(number, data)
        groups = values.unflatten(1, (-1, GROUP))
        scales = scales_of(groups.abs().amax(dim=2), torch.int8, is_exact=True)
        if number in _EXACT:
            scales = data.unflatten(1, (-1, _EXACT[number]))[..., :2].contiguous().view(torch.float16)[..., 0].float()
        divisors = torch.where(scales == 0, 1.0, scales)[..., None]
        matrix.values[rows] = quantize(groups, divisors, torch.int8).flatten(1)
        matrix.scales[rows] = scales
        return
    codes, scales, minima = codes_of_4_bits(number, data)
    if matrix.zeros is not None:
        assert minima is not None
        # A group without a scale has its minimum alone: code 0 less a zero point of 1, times the minimum.
        is_flat = scales == 0
        codes = torch.where(is_flat[..., None], 0, codes)
        matrix.zeros[rows] = torch.where(is_flat, 1.0, minima / torch.where(is_flat, 1.0, scales))
        scales = torch.where(is_flat, minima, scales)
    matrix.words[rows] = pack_words(codes.flatten(1))
    matrix.scales[rows, : scales.shape[1]] = scales.to(matrix.scales.dtype)


_EXACT = {8: 34, 6: 22}
"""Types that are int8 with a scale, and the bytes of a block, which begins with that."""
