"""Linear layers with weights of 4 bits in Triton: see `fleetfoot.kernels.quantized.packed`.

A word has codes of 8 spans of inputs, and each is a product of its own: its codes become the low bits of bfloat16 (or
float16) numbers from 128 (1024) on, by two integer operations, and no code changes its place. Up to 8 rows, what that
adds is subtracted from the sums of a group, with the zero point: a product with ones has the sum of its inputs. So
weights are never rounded. From 9 rows on zero points are subtracted from the codes, and from some hundreds on a kernel
writes the weight, a part of the outputs at a time, for the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.quantized.packed import BLOCK, SPAN, PackedMatrix, packed_linear_torch
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
LIBRARY_ROWS = 384
"""Rows from which on the weight is written for the library."""
WRITTEN_OUTPUTS = 4096
"""Outputs of the weight that are written at a time."""
_PREFETCHED_WORDS = 128
"""Words of each output that are prefetched to L2 while the previous kernel still runs."""


@dataclass(frozen=True, slots=True)
class PackedTiling:
    """The kernel for a number of rows."""

    kernel: str
    """``few``, ``tiled`` or ``library``."""
    outputs: int = 0
    row_tile: int = 0
    stages: int = 0
    num_warps: int = 4
    splits: int = 1

    def __str__(self) -> str:
        if self.kernel == "library":
            return "packed_weight, library"
        splits = f" splits={self.splits}" * (self.splits > 1)
        return f"packed_{self.kernel} {self.outputs}x{BLOCK}x{self.row_tile} stages={self.stages}{splits}"


def packed_tiling(num_rows: int, num_outputs: int, num_inputs: int, num_sms: int) -> PackedTiling:
    if num_rows <= FEW_ROWS:
        return PackedTiling("few", 16, 8, 6, 4)
    if num_rows >= LIBRARY_ROWS:
        return PackedTiling("library")
    row_tile = max(16, min(128, next_power_of_2(num_rows)))
    outputs = 64
    programs, splits = cdiv(num_outputs, outputs) * cdiv(num_rows, row_tile), 1
    while splits < 8 and programs * splits * 2 <= 2 * num_sms and num_inputs >= splits * 2 * 4 * BLOCK:
        splits *= 2
    return PackedTiling("tiled", outputs, row_tile, 4 if row_tile <= 64 else 3, 4, splits)


def packed_linear_triton(x: torch.Tensor, weight: PackedMatrix) -> torch.Tensor:
    """See `Kernels.packed_linear`. The reference multiplies what has other groups than multiples of 16 inputs."""
    if not supports(x.dtype, weight):
        return packed_linear_torch(x, weight)
    num_rows, num_outputs = x.shape[0], len(weight.words)
    if weight.order is not None:
        x = x[:, weight.order]
    x = x if x.stride(1) == 1 else x.contiguous()
    if not num_rows:
        return x.new_empty(0, num_outputs)
    tiling = packed_tiling(num_rows, num_outputs, weight.num_inputs, gpu_limits(x.device).num_sms)
    if tiling.kernel == "library":
        return _multiply_written(x, weight)
    return launch_packed(x, weight, tiling)


def supports(dtype: torch.dtype, weight: PackedMatrix) -> bool:
    has_groups = weight.group >= weight.num_inputs or weight.group % SPAN == 0
    return dtype in (torch.bfloat16, torch.float16) and has_groups and weight.num_inputs % SPAN == 0


def _multiply_written(x: torch.Tensor, weight: PackedMatrix) -> torch.Tensor:
    num_outputs = len(weight.words)
    output = torch.empty(x.shape[0], num_outputs, dtype=x.dtype, device=x.device)
    for begin in range(0, num_outputs, WRITTEN_OUTPUTS):
        part = slice(begin, min(begin + WRITTEN_OUTPUTS, num_outputs))
        written = write_weight(weight, part, x.dtype)
        bias = None if weight.bias is None else weight.bias[part]
        if part == slice(0, num_outputs):
            return torch.nn.functional.linear(x, written, bias)
        output[:, part] = torch.nn.functional.linear(x, written, bias)
    return output


def write_weight(weight: PackedMatrix, part: slice, dtype: torch.dtype) -> torch.Tensor:
    """Some outputs of the weight, ``[n, in]`` in ``dtype``."""
    num_outputs, num_inputs = part.stop - part.start, weight.num_inputs
    written = torch.empty(num_outputs, num_inputs, dtype=dtype, device=weight.words.device)
    zeros = weight.words if weight.zeros is None else weight.zeros[part]
    overlap = can_overlap(written.device)
    tile = 8
    _write_weight_kernel[(cdiv(num_outputs, tile), weight.words.shape[1] // SPAN)](
        written, weight.words[part], weight.scales[part], zeros, num_outputs, num_inputs, weight.words.shape[1],
        weight.scales.shape[1],
        outputs=tile, span=SPAN, group=_group(weight), has_zeros=weight.zeros is not None, is_e2m1=weight.is_e2m1,
        overlap=overlap, **launch_options(overlap),
    )  # fmt: skip
    return written


def _group(weight: PackedMatrix) -> int:
    """0: one group with all inputs."""
    return 0 if weight.group >= weight.num_inputs else weight.group


def launch_packed(x: torch.Tensor, weight: PackedMatrix, tiling: PackedTiling) -> torch.Tensor:
    """The product ``[n, out]`` of ``x [n, in]``, in the order of the columns, by a kernel of this module."""
    num_rows, num_outputs, num_inputs = x.shape[0], len(weight.words), weight.num_inputs
    num_words, num_groups = weight.words.shape[1], weight.scales.shape[1]
    output = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    overlap = can_overlap(x.device)
    biases = output if weight.bias is None else weight.bias
    zeros = weight.words if weight.zeros is None else weight.zeros
    options = {
        "outputs": tiling.outputs, "row_tile": tiling.row_tile, "stages": tiling.stages, "span": SPAN,
        "group": _group(weight), "has_zeros": weight.zeros is not None, "is_e2m1": weight.is_e2m1,
        "has_bias": weight.bias is not None, "overlap": overlap, "num_warps": tiling.num_warps,
        **launch_options(overlap),
    }  # fmt: skip
    if tiling.kernel == "few":
        whole = num_inputs % (tiling.num_warps * BLOCK) == 0
        _packed_few_rows_kernel[(cdiv(num_outputs, tiling.outputs),)](
            output, x, weight.words, weight.scales, zeros, biases,
            num_rows, num_outputs, num_inputs, x.stride(0), num_words, num_groups,
            min(_PREFETCHED_WORDS, num_words) * 4,
            slices=tiling.num_warps, whole=whole, **options,
        )  # fmt: skip
        return output
    split_words = cdiv(cdiv(num_words, tiling.splits), SPAN) * SPAN
    target = output
    if tiling.splits > 1:
        target = torch.empty(tiling.splits, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    grid = cdiv(num_outputs, tiling.outputs), cdiv(num_rows, tiling.row_tile), tiling.splits
    _packed_tiled_kernel[grid](
        target, x, weight.words, weight.scales, zeros, biases,
        num_rows, num_outputs, num_inputs, x.stride(0), num_words, num_groups, split_words,
        min(64, split_words) * 4,
        whole=num_inputs % BLOCK == 0, is_split=tiling.splits > 1, **options,
    )  # fmt: skip
    if tiling.splits > 1:
        from fleetfoot.kernels.quantized.scaled_triton import sum_splits

        sum_splits(output, target, weight.bias)
    return output


@triton_kernel()
def _codes_of(words, place: tl.constexpr, dtype: tl.constexpr, is_e2m1: tl.constexpr):
    """The codes of a place as numbers of ``dtype``: from 128 on in bfloat16, from 1024 on in float16; e2m1: twice the
    values."""
    codes = (words >> (4 * place)) & 15
    if is_e2m1:
        exponent = (codes >> 1) & 3
        doubled = tl.where(exponent == 0, codes & 1, (2 + (codes & 1)) << tl.maximum(exponent - 1, 0))
        result = tl.where(codes >= 8, -doubled, doubled).to(tl.float32).to(dtype)
    elif dtype == tl.bfloat16:
        result = (codes | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        result = (codes | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
    return result


@triton_kernel(unspecialized=("num_rows",))
def _packed_few_rows_kernel(
    output_ptr, x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr,
    num_rows, num_outputs, num_inputs, x_stride, num_words, num_groups, prefetched_bytes,
    slices: tl.constexpr, whole: tl.constexpr,
    outputs: tl.constexpr, row_tile: tl.constexpr, stages: tl.constexpr, span: tl.constexpr, group: tl.constexpr,
    has_zeros: tl.constexpr, is_e2m1: tl.constexpr, has_bias: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    first = tl.program_id(0) * outputs
    num_valid = tl.minimum(outputs, num_outputs - first)
    tile_ptr = words_ptr + first.to(tl.int64) * num_words
    prefetch_rows(tile_ptr, num_words * 4, num_valid, prefetched_bytes, overlap)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    base: tl.constexpr = 0.0 if is_e2m1 else (128.0 if dtype == tl.bfloat16 else 1024.0)
    output = tl.arange(0, outputs)
    in_tile = tl.minimum(output, num_valid - 1)
    slice_index = tl.arange(0, slices)[:, None, None]
    in_span = tl.arange(0, span)
    word = in_tile[None, :, None] * num_words + slice_index * span + in_span[None, None, :]  # [slices, outputs, span]
    x_row = tl.arange(0, row_tile)[None, None, :]
    x_column = slice_index * (8 * span) + in_span[None, :, None]  # [slices, span, 1]
    group_row = (first + in_tile).to(tl.int64)[None, :, None] * num_groups  # [1, outputs, 1]
    is_row = x_row < num_rows
    sums = tl.zeros((slices, outputs, row_tile), tl.float32)
    ones = tl.full((slices, outputs, span), 1.0, tl.float32).to(dtype)
    wait_for_inputs(overlap)
    part = tl.zeros((slices, outputs, row_tile), tl.float32)
    total = tl.zeros((slices, outputs, row_tile), tl.float32)
    for begin in tl.range(0, num_words, slices * span, num_stages=stages):
        if whole:
            words = tl.load(tile_ptr + word + begin)
        else:
            words = tl.load(tile_ptr + word + begin, mask=begin + slice_index * span < num_words, other=0)
        for place in tl.static_range(8):
            column = begin * 8 + x_column + place * span
            if whole:
                x = tl.load(x_ptr + x_row * x_stride + column, mask=is_row, other=0.0)
            else:
                x = tl.load(x_ptr + x_row * x_stride + column, mask=is_row & (column < num_inputs), other=0.0)
            part = tl.dot(_codes_of(words, place, dtype, is_e2m1), x, part)
            if not is_e2m1:
                total = tl.dot(ones, x, total)
            if group > 0 and (place + 1) * span % min(group, 8 * span) == 0:
                index = (begin * 8 + slice_index * (8 * span) + place * span) // group  # [slices, 1, 1]
                index = group_row + tl.minimum(index, num_groups - 1)
                scale = tl.load(scales_ptr + index).to(tl.float32)
                if is_e2m1:
                    sums += part * (scale * 0.5)
                else:
                    zero = 8.0 + base
                    if has_zeros:
                        zero = tl.load(zeros_ptr + index).to(tl.float32) + base
                    sums += (part - total * zero) * scale
                part = tl.zeros((slices, outputs, row_tile), tl.float32)
                total = tl.zeros((slices, outputs, row_tile), tl.float32)
    if group == 0:
        scale = tl.load(scales_ptr + group_row).to(tl.float32)
        if is_e2m1:
            sums = part * (scale * 0.5)
        else:
            zero = 8.0 + base
            if has_zeros:
                zero = tl.load(zeros_ptr + group_row).to(tl.float32) + base
            sums = (part - total * zero) * scale
    result = tl.sum(sums, axis=0)  # [outputs, row_tile]
    if has_bias:
        result += tl.load(bias_ptr + first + in_tile).to(tl.float32)[:, None]
    row = tl.arange(0, row_tile)[None, :]
    out_ptrs = output_ptr + row.to(tl.int64) * num_outputs + first + output[:, None]
    tl.store(out_ptrs, result.to(dtype), mask=(output[:, None] < num_valid) & (row < num_rows))


@triton_kernel(unspecialized=("num_rows",))
def _packed_tiled_kernel(
    output_ptr, x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr,
    num_rows, num_outputs, num_inputs, x_stride, num_words, num_groups, split_words, prefetched_bytes,
    whole: tl.constexpr, is_split: tl.constexpr,
    outputs: tl.constexpr, row_tile: tl.constexpr, stages: tl.constexpr, span: tl.constexpr, group: tl.constexpr,
    has_zeros: tl.constexpr, is_e2m1: tl.constexpr, has_bias: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    first = tl.program_id(0) * outputs
    split = tl.program_id(2)
    num_valid = tl.minimum(outputs, num_outputs - first)
    begin_word = split * split_words
    end_word = tl.minimum(begin_word + split_words, num_words)
    tile_ptr = words_ptr + first.to(tl.int64) * num_words
    prefetch_rows(tile_ptr + begin_word, num_words * 4, tl.where(end_word > begin_word, num_valid, 0),
                  prefetched_bytes, overlap)  # fmt: skip
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    base: tl.constexpr = 0.0 if is_e2m1 else (128.0 if dtype == tl.bfloat16 else 1024.0)
    output = tl.arange(0, outputs)
    in_tile = tl.minimum(output, num_valid - 1)
    in_span = tl.arange(0, span)
    word = in_tile[:, None] * num_words + in_span[None, :]  # [outputs, span]
    row = tl.program_id(1) * row_tile + tl.arange(0, row_tile)
    is_row = row[None, :] < num_rows
    x_ptrs = x_ptr + row[None, :].to(tl.int64) * x_stride + in_span[:, None]  # [span, row_tile]
    group_row = (first + in_tile).to(tl.int64) * num_groups
    sums = tl.zeros((outputs, row_tile), tl.float32)
    part = tl.zeros((outputs, row_tile), tl.float32)
    wait_for_inputs(overlap)
    zero = tl.full((outputs,), 8.0 + base, tl.float32)
    if has_zeros and group == 0:
        zero = tl.load(zeros_ptr + group_row).to(tl.float32) + base
    for begin in tl.range(begin_word, end_word, span, num_stages=stages):
        words = tl.load(tile_ptr + word + begin)
        for place in tl.static_range(8):
            column = begin * 8 + place * span
            if group > 0 and place * span % min(group, 8 * span) == 0:
                index = tl.minimum(column // group, num_groups - 1)
                scale = tl.load(scales_ptr + group_row + index).to(tl.float32)
                if has_zeros:
                    zero = tl.load(zeros_ptr + group_row + index).to(tl.float32) + base
            if whole:
                x = tl.load(x_ptrs + column, mask=is_row, other=0.0)
            else:
                x = tl.load(x_ptrs + column, mask=is_row & (column + in_span[:, None] < num_inputs), other=0.0)
            weight = _codes_of(words, place, dtype, is_e2m1)
            if not is_e2m1:
                weight = weight - zero.to(dtype)[:, None]
            part = tl.dot(weight, x, part)
            if group > 0 and (place + 1) * span % min(group, 8 * span) == 0:
                sums += part * (scale * (0.5 if is_e2m1 else 1.0))[:, None]
                part = tl.zeros((outputs, row_tile), tl.float32)
    if group == 0:
        scale = tl.load(scales_ptr + group_row).to(tl.float32)
        sums = part * (scale * (0.5 if is_e2m1 else 1.0))[:, None]
    if has_bias and not is_split:
        sums += tl.load(bias_ptr + first + in_tile).to(tl.float32)[:, None]
    is_written = (output[:, None] < num_valid) & is_row
    out_ptrs = output_ptr + (split * num_rows + row[None, :]).to(tl.int64) * num_outputs + first + output[:, None]
    tl.store(out_ptrs, sums.to(output_ptr.dtype.element_ty), mask=is_written)


@triton_kernel(unspecialized=("num_outputs",))
def _write_weight_kernel(
    written_ptr, words_ptr, scales_ptr, zeros_ptr, num_outputs, num_inputs, num_words, num_groups,
    outputs: tl.constexpr, span: tl.constexpr, group: tl.constexpr, has_zeros: tl.constexpr, is_e2m1: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    output = tl.program_id(0) * outputs + tl.arange(0, outputs)
    is_output = output < num_outputs
    in_span = tl.arange(0, span)[None, :]
    begin = tl.program_id(1) * span
    word_ptrs = words_ptr + output.to(tl.int64)[:, None] * num_words + begin + in_span
    words = tl.load(word_ptrs, mask=is_output[:, None], other=0)  # [outputs, span]
    for place in tl.static_range(8):
        column = begin * 8 + place * span
        index = output.to(tl.int64) * num_groups
        if group > 0:
            index += tl.minimum(column // group, num_groups - 1)
        scale = tl.load(scales_ptr + index, mask=is_output, other=0.0).to(tl.float32)[:, None]
        codes = (words >> (4 * place)) & 15
        if is_e2m1:
            values = _codes_of(words, place, tl.bfloat16, True).to(tl.float32) * 0.5
        elif has_zeros:
            values = codes.to(tl.float32) - tl.load(zeros_ptr + index, mask=is_output, other=0).to(tl.float32)[:, None]
        else:
            values = codes.to(tl.float32) - 8.0
        written_ptrs = written_ptr + output.to(tl.int64)[:, None] * num_inputs + column + in_span
        is_written = is_output[:, None] & (column + in_span < num_inputs)
        tl.store(written_ptrs, (values * scale).to(written_ptr.dtype.element_ty), mask=is_written)
