"""Linear layers with FP8 and int8 weights in Triton: see `fleetfoot.kernels.quantized.scaled`.

One row is quantized by every program of the product that reads it, which has all of it at once for that, and multiplied
value by value in float32 where blocks have scales; more rows are quantized by a kernel of their own before it. Up to 8
rows, warps process slices of the inputs, and values become float16, which holds each of 8 bits exactly: such a product
is bound by reading the weight. From 9 rows on, values are multiplied as they are, and sums of 128 inputs in FP8, or
those of a block, are added in float32; with few tiles of outputs, programs have ranges of the inputs, and another
kernel adds their sums. The library multiplies many rows of FP8 where scales are those of outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fleetfoot.kernels.linear.triton_kernels import write_outputs
from fleetfoot.kernels.quantized import WRITTEN_OUTPUTS, scaled_hopper
from fleetfoot.kernels.quantized.epilogue import PLAIN_EPILOGUE, Epilogue, load_norm_inputs
from fleetfoot.kernels.quantized.scaled import FP8, ScaledMatrix, scaled_linear_torch
from fleetfoot.kernels.runtime.dependent_launch import (
    can_overlap,
    launch_dependents,
    launch_options,
    prefetch_rows,
    wait_for_inputs,
)
from fleetfoot.kernels.runtime.gpu_limits import gpu_limits
from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl

FEW_ROWS = 8
LIBRARY_ROWS, WRITTEN_ROWS = 128, 512
"""More rows are multiplied by the library, where it can: as they are, and in blocks as bfloat16."""
_FAST_ROWS = 512
"""Rows from which on the library adds up FP8 in the precision of the tensor cores: for 2,048 rows and 4,096 inputs on
an H100 it is 1.2 times as fast, with a relative error of 0.0027 instead of 0.0015."""
_LIBRARY_MULTIPLE = 16
_KINDS = {"": 0, "token": 1, "group": 2, "static": 3}
_MOST_INPUTS = 16384
"""Inputs of a row that a program quantizes at once."""
_PREFETCHED = 1024
"""Inputs of each row of the weight that are prefetched to L2 while the previous kernel still runs."""


@dataclass(frozen=True, slots=True)
class ScaledTiling:
    """The kernel for a number of rows."""

    kernel: str
    """``hopper``, ``few``, ``tiled`` or ``library``."""
    outputs: int = 0
    inputs: int = 0
    row_tile: int = 0
    stages: int = 0
    """hopper: groups of inputs that a warp loads ahead."""
    num_warps: int = 4
    splits: int = 1
    product: scaled_hopper.ScaledProduct | None = None
    """hopper: its options."""

    def __str__(self) -> str:
        if self.kernel == "library":
            return "library"
        splits = f" splits={self.splits}" * (self.splits > 1)
        return f"scaled_{self.kernel} {self.outputs}x{self.inputs}x{self.row_tile} stages={self.stages}{splits}"


def scaled_tiling(
    num_rows: int,
    num_outputs: int,
    num_inputs: int,
    columns: int,
    num_sms: int,
    *,
    has_library: bool = True,
    hopper: bool = False,
    gated: bool = False,
) -> ScaledTiling:
    """``columns``: inputs that share a scale; ``has_library``: whether the library has the product; ``hopper``: whether
    that kernel may be taken; ``gated``: whether there are as many ups as outputs.

    The shapes of Llama-3.1-8B on an H100 chose the numbers (`docs/experiments/quantization.md`).
    """
    has_blocks = columns < num_inputs
    sizes = num_rows, num_outputs, num_inputs, num_sms
    if hopper and (product := scaled_hopper.hopper_product(*sizes, has_groups=has_blocks, gated=gated)):
        outputs, row_tile = 16 if gated else 16 * product.tiles, min(8, num_rows)
        return ScaledTiling("hopper", outputs, 128, row_tile, product.ahead, product.warps, product=product)
    inputs = min(128, columns & -columns) if has_blocks else 128
    if num_rows == 1 and has_blocks and inputs >= 64:
        # Smaller groups have more scales than loads in flight: with groups of 32, 6,144 outputs of 4,096 inputs took
        # 42.6 us on an H100 where 8 rows by the tensor cores take 25.5. With blocks of 128: 5,120 outputs of 2,048
        # inputs 7.1 (16 outputs by the tensor cores: 12.8), 2,048 of 4,096 6.4 (13.6), 12,288 of 2,048 15.2, 1,024 of
        # 2,048 3.5.
        is_small = num_inputs > 2048 and cdiv(num_outputs, 16) <= 2 * num_sms
        return ScaledTiling("few", 8, inputs, 1, 3, 8 if is_small else 4)
    if num_rows <= FEW_ROWS:
        row_tile, programs = 1 if num_rows == 1 and not has_blocks else 8, cdiv(num_outputs, 32)
        if programs <= num_sms:
            return ScaledTiling("few", 32, inputs, row_tile, 8)
        if programs > 4 * num_sms:
            return ScaledTiling("few", 16, inputs, row_tile, 4, 8 if num_rows == 1 else 4)
        return (
            ScaledTiling("few", 16, inputs, row_tile, 4, 8)
            if has_blocks
            else ScaledTiling("few", 16, inputs, row_tile, 6)
        )
    if num_rows > (WRITTEN_ROWS if has_blocks else LIBRARY_ROWS) and has_library:
        return ScaledTiling("library")
    row_tile = max(16, min(128, next_power_of_2(num_rows)))
    is_large = cdiv(num_outputs, 128) * cdiv(num_rows, row_tile) >= num_sms
    outputs = 128 if is_large and not (has_blocks and row_tile > 64) else 64
    programs = cdiv(num_outputs, outputs) * cdiv(num_rows, row_tile)
    splits = count_splits(programs, num_inputs, inputs, num_sms)
    if has_blocks:
        warps = 8 if programs <= num_sms else 4
        return ScaledTiling("tiled", outputs, inputs, row_tile, 3, warps, splits)
    if outputs == 128 or row_tile == 128:
        return ScaledTiling("tiled", outputs, inputs, row_tile, 3, 8, splits)
    return ScaledTiling("tiled", outputs, inputs, row_tile, 4, 4, splits)


def count_splits(programs: int, num_inputs: int, inputs: int, num_sms: int, most: int = 4) -> int:
    """Ranges of the inputs, so that ``programs`` keep the multiprocessors busy. ``inputs``: of a step of a program."""
    splits = 1
    while splits < most and programs * splits * 2 <= 2 * num_sms and num_inputs >= splits * 2 * 4 * inputs:
        splits *= 2
    return splits


def scaled_linear_triton(x: torch.Tensor, weight: ScaledMatrix) -> torch.Tensor:
    """See `Kernels.scaled_linear`. The reference multiplies weights with other sizes than multiples of 16."""
    if not supports(x.dtype, weight):
        return scaled_linear_torch(x, weight)
    num_rows, (num_outputs, num_inputs) = x.shape[0], weight.values.shape
    has_blocks = weight.columns < num_inputs
    has_library = bool(weight.activations) and weight.values.dtype is FP8 and x.device.type != "cpu"
    has_library = has_library and (has_blocks or (weight.rows == 1 and num_outputs % _LIBRARY_MULTIPLE == 0))
    sizes = num_rows, num_outputs, num_inputs, weight.columns, gpu_limits(x.device).num_sms
    tiling = scaled_tiling(*sizes, has_library=has_library, hopper=scaled_hopper.has_hopper_kernel(weight, x.dtype))
    x = x if x.stride(1) == 1 else x.contiguous()
    if not num_rows:
        return x.new_empty(0, num_outputs)
    if tiling.kernel == "library" and has_blocks:
        rounded = quantize_rows_triton(x, weight, is_written=True)[0]
        return multiply_written(rounded, weight.bias, num_outputs, partial(write_scaled, weight, x.dtype))
    if tiling.kernel == "library":
        values, scales = quantize_rows_triton(x, weight)
        scales = scales if len(scales) == num_rows else scales.expand(num_rows, 1).contiguous()
        return torch._scaled_mm(
            values, weight.values.t(), scales, weight.scales.t(), bias=weight.bias, out_dtype=x.dtype,
            use_fast_accum=num_rows >= _FAST_ROWS,
        )  # fmt: skip
    return launch_scaled(x, weight, tiling)


def multiply_written(
    x: torch.Tensor, bias: torch.Tensor | None, num_outputs: int, write: Callable[[slice], torch.Tensor]
) -> torch.Tensor:
    """The product of ``x [n, in]`` by the library. ``write``: returns some outputs of the weight, in the dtype of
    ``x``."""
    output = torch.empty(x.shape[0], num_outputs, dtype=x.dtype, device=x.device)
    for begin in range(0, num_outputs, WRITTEN_OUTPUTS):
        part = slice(begin, min(begin + WRITTEN_OUTPUTS, num_outputs))
        torch.mm(x, write(part).t(), out=output[:, part])
    return output if bias is None else output.add_(bias)


def write_scaled(weight: ScaledMatrix, dtype: torch.dtype, part: slice) -> torch.Tensor:
    """Some outputs of the weight, ``[n, in]`` in ``dtype``."""
    num_outputs, num_inputs = part.stop - part.start, weight.values.shape[1]
    written = torch.empty(num_outputs, num_inputs, dtype=dtype, device=weight.values.device)
    overlap = can_overlap(written.device)
    _write_scaled_kernel[(num_outputs, cdiv(num_inputs, 2048))](
        written, weight.values[part], weight.scales, part.start, num_inputs, weight.scales.shape[1],
        scale_rows=weight.rows, scale_columns=weight.columns, tile=2048, overlap=overlap, **launch_options(overlap),
    )  # fmt: skip
    return written


def supports(dtype: torch.dtype, weight: ScaledMatrix) -> bool:
    num_inputs, columns = weight.values.shape[1], weight.columns
    fits = num_inputs % 16 == 0 and (columns >= num_inputs or columns in (32, 64, 128))
    return dtype in (torch.bfloat16, torch.float16) and fits


def _kind(weight: ScaledMatrix) -> int:
    is_one_group = weight.activations == "group" and weight.columns >= weight.values.shape[1]
    return _KINDS["token" if is_one_group else weight.activations]


def launch_scaled(x: torch.Tensor, weight: ScaledMatrix, tiling: ScaledTiling) -> torch.Tensor:
    """The product ``[n, out]`` of ``x [n, in]`` by a kernel of this module."""
    num_rows, (num_outputs, num_inputs) = x.shape[0], weight.values.shape
    output = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if tiling.kernel in ("hopper", "few"):
        launch_scaled_few_rows(output, x, weight, tiling)
        return output
    overlap, kind = can_overlap(x.device), _kind(weight)
    source, scales = quantize_rows_triton(x, weight) if kind else (x, x)
    split_inputs = cdiv(cdiv(num_inputs, tiling.splits), tiling.inputs) * tiling.inputs
    target = output
    if tiling.splits > 1:
        target = torch.empty(tiling.splits, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    grid = cdiv(num_outputs, tiling.outputs), cdiv(num_rows, tiling.row_tile), tiling.splits
    _scaled_tiled_kernel[grid](
        target, source, scales, weight.values, weight.scales, output if weight.bias is None else weight.bias,
        num_rows, num_outputs, num_inputs, source.stride(0), weight.scales.shape[1], split_inputs,
        min(256, split_inputs),
        kind=kind, whole=split_inputs * tiling.splits == num_inputs, is_split=tiling.splits > 1,
        has_bias=weight.bias is not None, **_options(weight, tiling, kind, overlap),
    )  # fmt: skip
    if tiling.splits > 1:
        sum_splits(output, target, weight.bias)
    return output


def _options(weight: ScaledMatrix, tiling: ScaledTiling, kind: int, overlap: bool) -> dict[str, Any]:
    return {
        "outputs": tiling.outputs, "inputs": tiling.inputs, "row_tile": tiling.row_tile, "stages": tiling.stages,
        "scale_rows": weight.rows, "scale_columns": 0 if weight.columns >= weight.values.shape[1] else weight.columns,
        "x_scale_stride": 0 if kind == 3 else 1, "overlap": overlap, "num_warps": tiling.num_warps,
        **launch_options(overlap),
    }  # fmt: skip


def launch_scaled_few_rows(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: ScaledMatrix,
    tiling: ScaledTiling,
    epilogue: Epilogue = PLAIN_EPILOGUE,
) -> None:
    """Write the product of ``x [n, in]``, and what the epilogue makes of it, to ``output``."""
    num_rows, num_outputs, num_inputs = x.shape[0], output.shape[1], weight.values.shape[1]
    overlap, kind = can_overlap(x.device), _kind(weight)
    is_quantized = kind != 0 and (num_rows > 1 or (kind == 1 and num_inputs > _MOST_INPUTS))
    source, scales = x, x if weight.input_scale is None else weight.input_scale
    if is_quantized:
        source, scales = quantize_rows_triton(x, weight)
    if tiling.product is not None:
        of_rows = scales if num_rows > 1 else None
        scaled_hopper.launch_scaled_hopper(output, source, of_rows, weight, tiling.product, epilogue)
        return
    _scaled_few_rows_kernel[(cdiv(num_outputs, tiling.outputs),)](
        output, source, scales, weight.values, weight.scales, output if weight.bias is None else weight.bias,
        *epilogue.tensors(output), epilogue.num_parts, epilogue.eps,
        num_rows, num_outputs, num_inputs, source.stride(0), weight.scales.shape[1], min(_PREFETCHED, num_inputs),
        kind={2: 5}.get(kind, 4) if is_quantized else kind, slices=tiling.num_warps,
        padded_inputs=next_power_of_2(num_inputs),
        whole=num_inputs % (tiling.num_warps * tiling.inputs) == 0,
        **epilogue.options(has_bias=weight.bias is not None), **_options(weight, tiling, kind, overlap),
    )  # fmt: skip


def sum_splits(output: torch.Tensor, parts: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Write the sum of ``parts [splits, n, out]`` and the bias to ``output [n, out]``."""
    num_rows, num_outputs = output.shape
    overlap = can_overlap(output.device)
    _sum_splits_kernel[(num_rows, cdiv(num_outputs, 1024))](
        output, parts, output if bias is None else bias, num_rows, num_outputs,
        splits=len(parts), has_bias=bias is not None, tile=1024, overlap=overlap, **launch_options(overlap),
    )  # fmt: skip


def quantize_rows_triton(
    x: torch.Tensor, weight: ScaledMatrix, *, is_written: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `fleetfoot.kernels.quantized.scaled.quantize_rows`. ``is_written``: values times their scales, in the dtype
    of ``x``."""
    num_rows, num_inputs = x.shape
    kind = _kind(weight)
    size = weight.columns if kind == 2 else num_inputs
    values = torch.empty(num_rows, num_inputs, dtype=x.dtype if is_written else weight.values.dtype, device=x.device)
    if kind == 3:
        assert weight.input_scale is not None
        scales = weight.input_scale
    else:
        scales = torch.empty(num_rows, cdiv(num_inputs, size), dtype=torch.float32, device=x.device)
    overlap = can_overlap(x.device)
    tile = min(next_power_of_2(size), _MOST_INPUTS)
    groups = 1 if size >= num_inputs else max(1, 2048 // size)
    grid = num_rows, 1 if size >= num_inputs else cdiv(num_inputs, groups * size)
    _quantize_rows_kernel[grid](
        values, scales, x, num_inputs, x.stride(0), scales.shape[-1],
        size=size, tile=tile, groups=groups, is_static=kind == 3, is_integer=weight.values.dtype is torch.int8,
        is_written=is_written, overlap=overlap, num_warps=8 if tile > 4096 else 4, **launch_options(overlap),
    )  # fmt: skip
    return values, scales.view(1, 1) if kind == 3 else scales


@triton_kernel()
def _quantized(x, scale, dtype: tl.constexpr):
    """``x / scale`` as e4m3 or int8."""
    scaled = tl.div_rn(x, scale)
    if dtype == tl.int8:  # the sum has no bits for fractions
        rounded = (scaled + 12582912.0) - 12582912.0
        result = tl.minimum(tl.maximum(rounded, -128.0), 127.0).to(tl.int8)
    else:
        result = tl.minimum(tl.maximum(scaled, -448.0), 448.0).to(tl.float8e4nv)
    return result


@triton_kernel()
def widened(values, dtype: tl.constexpr):
    """Values of 8 bits in a float type that holds them. The instructions from float16 to bfloat16 are slow."""
    result = values
    if values.dtype != tl.int8:
        result = values.to(tl.float16)
    if values.dtype == tl.int8 or dtype != tl.float16:
        result = result.to(tl.float32).to(dtype)
    return result


@triton_kernel()
def _scale_of(largest, dtype: tl.constexpr):
    return tl.maximum(tl.div_rn(largest, 127.5 if dtype == tl.int8 else 448.0), 1e-12)


@triton_kernel()
def _quantize_rows_kernel(
    values_ptr, scales_ptr, x_ptr, num_inputs, x_stride, num_groups,
    size: tl.constexpr, tile: tl.constexpr, groups: tl.constexpr, is_static: tl.constexpr, is_integer: tl.constexpr,
    is_written: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """A row, or ``groups`` groups of a row with ``size`` inputs each."""
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    dtype: tl.constexpr = tl.int8 if is_integer else tl.float8e4nv
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, tile)[None, :]
    group = tl.program_id(1) * groups + tl.arange(0, groups)[:, None]
    index = group * size + column
    is_input = (column < size) & (index < num_inputs)
    first = tl.load(x_ptr + row * x_stride + index, mask=is_input, other=0.0).to(tl.float32)  # often all there is
    if is_static:
        scale = tl.load(scales_ptr + tl.zeros((groups, 1), tl.int32))
    else:
        largest = tl.abs(first)
        for begin in range(tile, size, tile):
            is_more = (begin + column < size) & (index + begin < num_inputs)
            x = tl.load(x_ptr + row * x_stride + index + begin, mask=is_more, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(x))
        scale = _scale_of(tl.max(largest, axis=1)[:, None], dtype)
        tl.store(scales_ptr + row * num_groups + group, scale, mask=group < num_groups)
    quantized = _quantized(first, scale, dtype)
    if is_written:
        written = (quantized.to(tl.float32) * scale).to(values_ptr.dtype.element_ty)
        tl.store(values_ptr + row * num_inputs + index, written, mask=is_input)
    else:
        tl.store(values_ptr + row * num_inputs + index, quantized, mask=is_input)
    for begin in range(tile, size, tile):
        is_more = (begin + column < size) & (index + begin < num_inputs)
        x = tl.load(x_ptr + row * x_stride + index + begin, mask=is_more, other=0.0).to(tl.float32)
        tl.store(values_ptr + row * num_inputs + index + begin, _quantized(x, scale, dtype), mask=is_more)


@triton_kernel()
def _write_scaled_kernel(
    written_ptr, values_ptr, scales_ptr, first, num_inputs, num_column_scales,
    scale_rows: tl.constexpr, scale_columns: tl.constexpr, tile: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    output = tl.program_id(0)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    is_input = column < num_inputs
    offset = output.to(tl.int64) * num_inputs + column
    scale_ptrs = scales_ptr + ((first + output) // scale_rows) * num_column_scales + column // scale_columns
    values = tl.load(values_ptr + offset, mask=is_input, other=0.0).to(tl.float32)
    values *= tl.load(scale_ptrs, mask=is_input, other=0.0)
    tl.store(written_ptr + offset, values.to(written_ptr.dtype.element_ty), mask=is_input)


@triton_kernel()
def _multiplied(weight, values, is_one: tl.constexpr):
    """The products of ``weight [slices, outputs, inputs]``: with ``values [slices, 1, inputs]`` of one row each, else
    with ``[slices, inputs, row_tile]`` their sums."""
    if is_one:
        result = widened(weight, tl.float16 if values.dtype != tl.bfloat16 else values.dtype).to(tl.float32)
        result *= values.to(tl.float32)
    else:
        result = tl.dot(widened(weight, values.dtype), values)
    return result


@triton_kernel(unspecialized=("num_rows",))
def _scaled_few_rows_kernel(
    output_ptr, x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr,
    squares_in_ptr, residual_ptr, norm_ptr, total_ptr, squares_ptr, num_parts, eps,
    num_rows, num_outputs, num_inputs, x_stride, num_column_scales, prefetched,
    kind: tl.constexpr, slices: tl.constexpr, padded_inputs: tl.constexpr, whole: tl.constexpr,
    parts_tile: tl.constexpr, has_deferred_norm: tl.constexpr, ends: tl.constexpr, gated: tl.constexpr,
    scale: tl.constexpr, has_bias: tl.constexpr,
    outputs: tl.constexpr, inputs: tl.constexpr, row_tile: tl.constexpr, stages: tl.constexpr,
    scale_rows: tl.constexpr, scale_columns: tl.constexpr, x_scale_stride: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """``kind``: 0: inputs are not quantized; 1, 2, 3: they are here, by token, by group, by the checkpoint's scale; 4:
    they have been, 5: by group."""
    launch_dependents(overlap)
    first = tl.program_id(0) * outputs
    num_valid = tl.minimum(outputs, num_outputs - first)
    tile_ptr = weight_ptr + first.to(tl.int64) * num_inputs
    up_distance = tl.cast(num_outputs, tl.int64) * num_inputs
    prefetch_rows(tile_ptr, num_inputs, num_valid, prefetched, overlap)
    if gated:
        prefetch_rows(tile_ptr + up_distance, num_inputs, num_valid, prefetched, overlap)
    output = tl.arange(0, outputs)
    in_tile = tl.minimum(output, num_valid - 1)
    weight_row = in_tile[None, :, None] * num_inputs
    slice_begin = tl.arange(0, slices)[:, None, None] * inputs
    in_slice = tl.arange(0, inputs)
    weight_column = slice_begin + in_slice[None, None, :]  # [slices, 1, inputs]
    # One row with scales of blocks is multiplied value by value: nothing is shared between threads.
    is_one: tl.constexpr = row_tile == 1 and scale_columns > 0
    x_column = weight_column if is_one else slice_begin + in_slice[None, :, None]
    x_row = tl.arange(0, row_tile)[None, None, :]
    chunk: tl.constexpr = slices * inputs
    scales_of_rows = scales_ptr + ((first + in_tile) // scale_rows) * num_column_scales  # [outputs]
    scales_of_ups = scales_ptr + ((num_outputs + first + in_tile) // scale_rows) * num_column_scales
    sums = tl.zeros((slices, outputs, inputs if is_one else row_tile), tl.float32)
    up_sums = tl.zeros_like(sums)
    is_row = x_row < num_rows
    norm_weight = output
    if ends == "sum":
        norm_weight = tl.load(norm_ptr + first + in_tile)
    wait_for_inputs(overlap)
    squares, residual = load_norm_inputs(
        squares_in_ptr, residual_ptr, output, first, num_valid, num_parts, num_rows, num_outputs,
        parts_tile, outputs, row_tile, has_deferred_norm, ends,
    )  # fmt: skip
    x_scale = tl.full((1, 1, row_tile), 1.0, tl.float32)
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    if kind == 1:
        all_inputs = tl.arange(0, padded_inputs)
        only_row = tl.load(x_ptr + all_inputs, mask=all_inputs < num_inputs, other=0.0).to(tl.float32)
        x_scale = tl.full((1, 1, row_tile), 1.0, tl.float32) * _scale_of(tl.max(tl.abs(only_row), axis=0), dtype)
    if kind == 3:
        x_scale = tl.load(x_scales_ptr + x_row * 0)
    if kind == 4:
        x_scale = tl.load(x_scales_ptr + x_row * x_scale_stride, mask=is_row, other=1.0)
    for begin in tl.range(0, num_inputs, chunk, num_stages=stages):
        x_ptrs = x_ptr + x_row * x_stride + begin + x_column
        weight_ptrs = tile_ptr + weight_row + weight_column + begin
        if whole:
            weight = tl.load(weight_ptrs)
            x = tl.load(x_ptrs, mask=is_row, other=0.0)
        else:
            weight = tl.load(weight_ptrs, mask=begin + weight_column < num_inputs, other=0.0)
            x = tl.load(x_ptrs, mask=is_row & (begin + x_column < num_inputs), other=0.0)
        own_scale = x_scale
        if kind == 0:
            values = x
        elif kind >= 4:
            values = x.to(tl.float16)
        else:
            wide = x.to(tl.float32)
            if kind == 2:
                own_scale = _scale_of(tl.max(tl.abs(wide), axis=2 if is_one else 1)[:, None], dtype)
                own_scale = tl.reshape(own_scale, (slices, 1, row_tile))
            values = _quantized(wide, own_scale, dtype).to(tl.float16)
        part = _multiplied(weight, values, is_one)
        if scale_columns > 0:
            column = tl.minimum((begin + slice_begin) // scale_columns, num_column_scales - 1)  # [slices, 1, 1]
            if kind == 5:
                own_scale = tl.load(x_scales_ptr + x_row * num_column_scales + column, mask=is_row, other=1.0)
            part *= tl.load(scales_of_rows[None, :, None] + column)
        if kind == 2 or kind == 5:
            part *= own_scale
        sums += part
        if gated:
            if whole:
                weight = tl.load(weight_ptrs + up_distance)
            else:
                weight = tl.load(weight_ptrs + up_distance, mask=begin + weight_column < num_inputs, other=0.0)
            part = _multiplied(weight, values, is_one)
            if scale_columns > 0:
                part *= tl.load(scales_of_ups[None, :, None] + column)
            if kind == 2 or kind == 5:
                part *= own_scale
            up_sums += part
    if is_one:
        sums = tl.sum(sums, 2)[:, :, None]
        up_sums = tl.sum(up_sums, 2)[:, :, None]
    if scale_columns == 0:
        sums *= tl.load(scales_of_rows)[None, :, None]
        if gated:
            up_sums *= tl.load(scales_of_ups)[None, :, None]
    if kind == 1 or kind == 3 or kind == 4:
        sums *= x_scale
        up_sums *= x_scale
    write_outputs(
        sums, up_sums, squares, residual, norm_weight, output_ptr, bias_ptr, total_ptr, squares_ptr, first, num_valid,
        num_rows, num_outputs, num_inputs, eps, output_ptr, (), output, output_ptr, 0, 1, 8, 0,
        outputs, row_tile, has_bias, scale, gated, has_deferred_norm, ends,
    )  # fmt: skip


@triton_kernel(unspecialized=("num_rows",))
def _scaled_tiled_kernel(
    output_ptr, x_ptr, x_scales_ptr, weight_ptr, scales_ptr, bias_ptr,
    num_rows, num_outputs, num_inputs, x_stride, num_column_scales, split_inputs, prefetched,
    kind: tl.constexpr, whole: tl.constexpr, is_split: tl.constexpr,
    outputs: tl.constexpr, inputs: tl.constexpr, row_tile: tl.constexpr, stages: tl.constexpr,
    scale_rows: tl.constexpr, scale_columns: tl.constexpr, x_scale_stride: tl.constexpr, has_bias: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    first = tl.program_id(0) * outputs
    split = tl.program_id(2)
    num_valid = tl.minimum(outputs, num_outputs - first)
    begin = split * split_inputs
    end = tl.minimum(begin + split_inputs, num_inputs)
    tile_ptr = weight_ptr + first.to(tl.int64) * num_inputs
    if whole:
        prefetch_rows(tile_ptr + begin, num_inputs, num_valid, prefetched, overlap)
    output = tl.arange(0, outputs)
    in_tile = tl.minimum(output, num_valid - 1)
    column = tl.arange(0, inputs)
    row = tl.program_id(1) * row_tile + tl.arange(0, row_tile)
    is_row = row < num_rows
    weight_ptrs = tile_ptr + in_tile[:, None] * num_inputs + column[None, :]  # [outputs, inputs]
    x_ptrs = x_ptr + row[None, :].to(tl.int64) * x_stride + column[:, None]  # [inputs, row_tile]
    row_scales_ptr = scales_ptr + ((first + in_tile) // scale_rows) * num_column_scales  # [outputs]
    x_scales_ptr += row.to(tl.int64) * (num_column_scales if kind == 2 else x_scale_stride)
    has_integers: tl.constexpr = kind != 0 and weight_ptr.dtype.element_ty == tl.int8
    sums = tl.zeros((outputs, row_tile), tl.int32 if has_integers and scale_columns == 0 else tl.float32)
    wait_for_inputs(overlap)
    for i in tl.range(begin, end, inputs, num_stages=stages):
        if whole:
            weight = tl.load(weight_ptrs + i)
            x = tl.load(x_ptrs + i, mask=is_row[None, :], other=0.0)
        else:
            weight = tl.load(weight_ptrs + i, mask=column[None, :] + i < end, other=0.0)
            x = tl.load(x_ptrs + i, mask=is_row[None, :] & (column[:, None] + i < end), other=0.0)
        if kind == 0:
            weight = widened(weight, x.dtype)
        if scale_columns > 0:
            part = tl.dot(weight, x, out_dtype=tl.int32 if has_integers else tl.float32)
            group = i // scale_columns
            factor = tl.load(row_scales_ptr + group)[:, None]
            if kind == 2:
                factor = factor * tl.load(x_scales_ptr + group, mask=is_row, other=1.0)[None, :]
            sums += part.to(tl.float32) * factor
        elif has_integers:
            sums = tl.dot(weight, x, sums, out_dtype=tl.int32)
        elif kind == 0:
            sums = tl.dot(weight, x, sums)
        else:
            sums = tl.dot(weight, x, sums, max_num_imprecise_acc=128)
    sums = sums.to(tl.float32)
    if scale_columns == 0:
        sums *= tl.load(row_scales_ptr)[:, None]
    if kind == 1 or kind == 3:
        sums *= tl.load(x_scales_ptr, mask=is_row, other=1.0)[None, :]
    if has_bias and not is_split:
        sums += tl.load(bias_ptr + first + in_tile).to(tl.float32)[:, None]
    is_written = (output[:, None] < num_valid) & is_row[None, :]
    out_ptrs = output_ptr + (split * num_rows + row[None, :]).to(tl.int64) * num_outputs + first + output[:, None]
    tl.store(out_ptrs, sums.to(output_ptr.dtype.element_ty), mask=is_written)


@triton_kernel(unspecialized=("num_rows",))
def _sum_splits_kernel(
    output_ptr, parts_ptr, bias_ptr, num_rows, num_outputs,
    splits: tl.constexpr, has_bias: tl.constexpr, tile: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    is_output = column < num_outputs
    offset = tl.program_id(0).to(tl.int64) * num_outputs + column
    total = tl.zeros((tile,), tl.float32)
    for split in tl.static_range(splits):
        part_ptr = parts_ptr + (num_rows * split).to(tl.int64) * num_outputs
        total += tl.load(part_ptr + offset, mask=is_output, other=0.0)
    if has_bias:
        total += tl.load(bias_ptr + column, mask=is_output, other=0.0).to(tl.float32)
    tl.store(output_ptr + offset, total.to(output_ptr.dtype.element_ty), mask=is_output)
