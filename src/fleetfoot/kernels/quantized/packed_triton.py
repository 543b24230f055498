"""Linear layers with weights of 4 bits in Triton: see `fleetfoot.kernels.quantized.packed`.

A word has codes of 8 spans of inputs: they become the low bits of bfloat16 (or float16) numbers from 128 (1024) on, by
integer operations, and no code changes its place. Up to 8 rows each span is a product of its own, and what that adds is
subtracted from the sums of a group, with the zero point: a product with ones has the sum of its inputs. So weights are
never rounded. From 9 rows on zero points are subtracted from the codes, and the spans of a group are one product, in
registers. From some hundreds on a kernel writes the weight, a part of the outputs at a time, for the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fleetfoot.kernels.linear.triton_kernels import write_outputs
from fleetfoot.kernels.quantized.epilogue import PLAIN_EPILOGUE, Epilogue, load_norm_inputs
from fleetfoot.kernels.quantized.packed import BLOCK, SPAN, PackedMatrix, packed_linear_torch
from fleetfoot.kernels.quantized.scaled_triton import FEW_ROWS, count_splits, multiply_written, sum_splits
from fleetfoot.kernels.runtime.dependent_launch import (
    can_overlap,
    launch_dependents,
    launch_options,
    prefetch_rows,
    wait_for_inputs,
)
from fleetfoot.kernels.runtime.gpu_limits import gpu_limits, has_hopper_kernels
from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl

LIBRARY_ROWS = 384
"""Rows from which on the weight is written for the library."""
_PREFETCHED_WORDS = 128
"""Words of each output that are prefetched to L2 while the previous kernel still runs."""


@dataclass(frozen=True, slots=True)
class PackedTiling:
    """The kernel for a number of rows."""

    kernel: str
    """``hopper``, ``few``, ``tiled`` or ``library``."""
    outputs: int = 0
    row_tile: int = 0
    stages: int = 0
    """hopper: blocks of inputs that a warp loads ahead."""
    num_warps: int = 4
    splits: int = 1

    def __str__(self) -> str:
        if self.kernel == "library":
            return "packed_weight, library"
        splits = f" splits={self.splits}" * (self.splits > 1)
        return f"packed_{self.kernel} {self.outputs}x{BLOCK}x{self.row_tile} stages={self.stages}{splits}"


def has_hopper_groups(group: int, num_inputs: int) -> bool:
    """Whether the kernel for Hopper GPUs supports groups of this size."""
    return group >= num_inputs or BLOCK % group == 0


def has_hopper_kernel(weight: PackedMatrix) -> bool:
    """Whether the kernel for Hopper GPUs multiplies this weight."""
    return has_hopper_kernels(weight.words.device) and has_hopper_groups(weight.group, weight.num_inputs)


def packed_tiling(num_rows: int, num_outputs: int, num_inputs: int, num_sms: int, *, hopper: bool) -> PackedTiling:
    """The shapes of Llama-3.1-8B on an H100 chose the numbers (`docs/experiments/quantization.md`).

    ``hopper``: whether that kernel may be taken.
    """
    if num_rows <= FEW_ROWS and hopper:
        if num_outputs <= 32 * num_sms:
            return PackedTiling("hopper", 16 if num_outputs <= 16 * num_sms else 32, 8, 2, 8)
        if num_outputs <= 64 * num_sms:
            return PackedTiling("hopper", 16, 8, 2, 4)
        return PackedTiling("hopper", 32, 8, 1 if num_rows <= 4 else 2, 4)
    if num_rows <= FEW_ROWS:
        programs = cdiv(num_outputs, 32)
        if programs <= num_sms:
            return PackedTiling("few", 16, 8, 8) if num_inputs >= 8192 else PackedTiling("few", 16, 8, 4, 2)
        return PackedTiling("few", 32, 8, 3 if programs > 4 * num_sms else 5)
    if num_rows >= LIBRARY_ROWS:
        return PackedTiling("library")
    row_tile = max(16, min(128, next_power_of_2(num_rows)))
    outputs, stages, warps = 128, 4 if row_tile <= 32 else 3, 8
    if row_tile == 64 and num_inputs < 8192:
        outputs, stages, warps = 64, 4, 4
    programs = cdiv(num_outputs, outputs) * cdiv(num_rows, row_tile)
    # Tiles of many rows are large enough to have a multiprocessor each.
    splits = count_splits(programs, num_inputs, BLOCK, num_sms // 2 if row_tile == 128 else num_sms, most=8)
    return PackedTiling("tiled", outputs, row_tile, stages, warps, splits)


def packed_linear_triton(x: torch.Tensor, weight: PackedMatrix) -> torch.Tensor:
    """See `Kernels.packed_linear`. The reference multiplies what has other groups."""
    if not supports(x.dtype, weight):
        return packed_linear_torch(x, weight)
    num_rows, num_outputs = x.shape[0], len(weight.words)
    if weight.order is not None:
        x = x[:, weight.order]
    x = x if x.stride(1) == 1 else x.contiguous()
    if not num_rows:
        return x.new_empty(0, num_outputs)
    num_sms, hopper = gpu_limits(x.device).num_sms, has_hopper_kernel(weight)
    tiling = packed_tiling(num_rows, num_outputs, weight.num_inputs, num_sms, hopper=hopper)
    if tiling.kernel == "library":
        return multiply_written(x, weight.bias, num_outputs, partial(write_weight, weight, x.dtype))
    return launch_packed(x, weight, tiling)


def supports(dtype: torch.dtype, weight: PackedMatrix) -> bool:
    has_groups = weight.group >= weight.num_inputs or weight.group % BLOCK == 0 or weight.group in (16, 32, 64)
    has_groups = weight.group == 32 if weight.is_e2m1 else has_groups
    return dtype in (torch.bfloat16, torch.float16) and has_groups and weight.num_inputs % SPAN == 0


def write_weight(weight: PackedMatrix, dtype: torch.dtype, part: slice) -> torch.Tensor:
    """Some outputs of the weight, ``[n, in]`` in ``dtype``."""
    num_outputs, num_inputs = part.stop - part.start, weight.num_inputs
    written = torch.empty(num_outputs, num_inputs, dtype=dtype, device=weight.words.device)
    scales, zeros = scale_words(weight), weight.words if weight.zeros is None else weight.zeros[part]
    overlap = can_overlap(written.device)
    tile = 8
    _write_weight_kernel[(cdiv(num_outputs, tile), weight.words.shape[1] // SPAN)](
        written, weight.words[part], scales[part], zeros, num_outputs, num_inputs, weight.words.shape[1],
        scales.shape[1],
        outputs=tile, span=SPAN, group=_group(weight), has_zeros=weight.zeros is not None, is_e2m1=weight.is_e2m1,
        overlap=overlap, **launch_options(overlap),
    )  # fmt: skip
    return written


def _group(weight: PackedMatrix) -> int:
    """0: one group with all inputs."""
    return 0 if weight.group >= weight.num_inputs and not weight.is_e2m1 else weight.group


def scale_words(weight: PackedMatrix) -> torch.Tensor:
    """Scales as kernels read them: exponents of e2m1 as words of 4."""
    return weight.scales.view(torch.int32) if weight.is_e2m1 else weight.scales


def launch_packed(x: torch.Tensor, weight: PackedMatrix, tiling: PackedTiling) -> torch.Tensor:
    """The product ``[n, out]`` of ``x [n, in]``, in the order of the columns, by a kernel of this module."""
    num_rows, num_outputs, num_inputs = x.shape[0], len(weight.words), weight.num_inputs
    output = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if tiling.kernel in ("hopper", "few"):
        launch_packed_few_rows(output, x, weight, tiling)
        return output
    scales, num_words, overlap = scale_words(weight), weight.words.shape[1], can_overlap(x.device)
    biases = output if weight.bias is None else weight.bias
    zeros = weight.words if weight.zeros is None else weight.zeros
    split_words = cdiv(cdiv(num_words, tiling.splits), SPAN) * SPAN
    target = output
    if tiling.splits > 1:
        target = torch.empty(tiling.splits, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    grid = cdiv(num_outputs, tiling.outputs), cdiv(num_rows, tiling.row_tile), tiling.splits
    _packed_tiled_kernel[grid](
        target, x, weight.words, scales, zeros, biases,
        num_rows, num_outputs, num_inputs, x.stride(0), num_words, scales.shape[1], split_words,
        min(64, split_words) * 4,
        whole=num_inputs % BLOCK == 0, is_split=tiling.splits > 1, has_bias=weight.bias is not None,
        **_options(weight, tiling, overlap),
    )  # fmt: skip
    if tiling.splits > 1:
        sum_splits(output, target, weight.bias)
    return output


def _options(weight: PackedMatrix, tiling: PackedTiling, overlap: bool) -> dict[str, Any]:
    return {
        "outputs": tiling.outputs, "row_tile": tiling.row_tile, "stages": tiling.stages, "span": SPAN,
        "group": _group(weight), "has_zeros": weight.zeros is not None, "is_e2m1": weight.is_e2m1,
        "overlap": overlap, "num_warps": tiling.num_warps, **launch_options(overlap),
    }  # fmt: skip


def launch_packed_few_rows(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: PackedMatrix,
    tiling: PackedTiling,
    epilogue: Epilogue = PLAIN_EPILOGUE,
) -> None:
    """Write the product of ``x [n, in]``, in the order of the columns, and what the epilogue makes of it."""
    if tiling.kernel == "hopper":
        from fleetfoot.kernels.quantized.packed_hopper import launch_packed_hopper

        sizes = {"outputs": tiling.outputs, "num_warps": tiling.num_warps, "depth": tiling.stages}
        launch_packed_hopper(output, x, weight, epilogue, **sizes)
        return
    num_rows, num_outputs, num_inputs = x.shape[0], output.shape[1], weight.num_inputs
    scales, num_words, overlap = scale_words(weight), weight.words.shape[1], can_overlap(x.device)
    zeros, biases = (output if each is None else each for each in (weight.zeros, weight.bias))
    _packed_few_rows_kernel[(cdiv(num_outputs, tiling.outputs),)](
        output, x, weight.words, scales, zeros, biases,
        *epilogue.tensors(output), epilogue.num_parts, epilogue.eps,
        num_rows, num_outputs, num_inputs, x.stride(0), num_words, scales.shape[1],
        min(_PREFETCHED_WORDS, num_words) * 4,
        slices=tiling.num_warps, whole=num_inputs % (tiling.num_warps * BLOCK) == 0,
        **epilogue.options(has_bias=weight.bias is not None), **_options(weight, tiling, overlap),
    )  # fmt: skip


@triton_kernel()
def codes_of(
    words, place: tl.constexpr, dtype: tl.constexpr, is_e2m1: tl.constexpr, is_hopper: tl.constexpr,
    is_small: tl.constexpr = False,
):  # fmt: skip
    """The codes of a place as numbers of ``dtype``: from 128 on in bfloat16, from 1024 on in float16; e2m1: the values.
    ``is_hopper``: two words at once, and bits of e2m1 become those of a number that is too small by a power of 2, which
    ``is_small`` keeps (2**126 in bfloat16)."""
    if is_hopper:
        is_bfloat16: tl.constexpr = dtype == tl.bfloat16
        halves: tl.constexpr = "prmt.b32 t, $1, $2, 0x5410; " if place < 4 else "prmt.b32 t, $1, $2, 0x7632; "
        if is_e2m1:
            if is_bfloat16:
                moves: tl.constexpr = ("shl.b32 m, t, 6;", "shl.b32 m, t, 2;", "shr.u32 m, t, 2;", "shr.u32 m, t, 6;")
                masked: tl.constexpr = "and.b32 m, m, 0x01c001c0; "
                scaled: tl.constexpr = (
                    "mov.b32 $0, t; }" if is_small else "mov.b32 m, 0x7e807e80; mul.rn.bf16x2 $0, t, m; }"
                )
            else:
                moves: tl.constexpr = ("shl.b32 m, t, 9;", "shl.b32 m, t, 5;", "shl.b32 m, t, 1;", "shr.u32 m, t, 3;")  # type: ignore[no-redef]
                masked: tl.constexpr = "and.b32 m, m, 0x0e000e00; "  # type: ignore[no-redef]
                scaled: tl.constexpr = "mov.b32 m, 0x74007400; mul.rn.f16x2 $0, t, m; }"  # type: ignore[no-redef]
            signs: tl.constexpr = ("shl.b32 t, t, 12; ", "shl.b32 t, t, 8; ", "shl.b32 t, t, 4; ", "")
            signed: tl.constexpr = signs[place % 4] + "lop3.b32 t, t, 0x80008000, m, 0xEA; "
            code: tl.constexpr = "{ .reg .b32 t, m; " + halves + moves[place % 4] + masked + signed + scaled
        else:
            shifts: tl.constexpr = ("", "shr.u32 t, t, 4; ", "shr.u32 t, t, 8; ", "shr.u32 t, t, 12; ")
            based: tl.constexpr = (
                "lop3.b32 $0, t, 0x000f000f, 0x43004300, 0xEA; }"
                if is_bfloat16
                else "lop3.b32 $0, t, 0x000f000f, 0x64006400, 0xEA; }"
            )
            code: tl.constexpr = "{ .reg .b32 t; " + halves + shifts[place % 4] + based  # type: ignore[no-redef]
        result = tl.inline_asm_elementwise(
            code, "=r,r,r", [words], dtype=tl.bfloat16 if is_bfloat16 else tl.float16, is_pure=True, pack=2
        )
    else:
        codes = (words >> (4 * place)) & 15
        if is_e2m1:
            exponent = (codes >> 1) & 3
            doubled = tl.where(exponent == 0, codes & 1, (2 + (codes & 1)) << tl.maximum(exponent - 1, 0))
            result = (tl.where(codes >= 8, -doubled, doubled).to(tl.float32) * 0.5).to(dtype)
        elif dtype == tl.bfloat16:
            result = (codes | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True)
        else:
            result = (codes | 0x6400).to(tl.int16).to(tl.float16, bitcast=True)
    return result


@triton_kernel()
def _add_group(sums, part, total, scale, zero, is_e2m1: tl.constexpr):
    """``sums`` and the product of a group, from the codes' products ``part`` and the sums ``total`` of their inputs."""
    if is_e2m1:
        result = sums + part * scale
    else:
        result = sums + (part - total * zero) * scale
    return result


@triton_kernel()
def _e2m1_scale(words, number: tl.constexpr):
    """The scale in a byte of ``words``: 2 to the power of what it is above 127."""
    return (((words >> (8 * number)) & 255) << 23).to(tl.float32, bitcast=True)


@triton_kernel()
def _zero_of(zero_ptrs, base: tl.constexpr, has_zeros: tl.constexpr):
    if has_zeros:
        zero = tl.load(zero_ptrs).to(tl.float32) + base
    else:
        zero = 8.0 + base
    return zero


@triton_kernel()
def few_packed_step(
    sums, ups, x_ptrs, is_row, word_ptrs, up_words, scale_ptrs, up_scales, zero_ptrs, begin, num_inputs, num_groups,
    gated: tl.constexpr, slices: tl.constexpr, whole: tl.constexpr, group: tl.constexpr, has_zeros: tl.constexpr,
    is_e2m1: tl.constexpr, is_hopper: tl.constexpr,
):  # fmt: skip
    """Add the products of ``slices`` blocks, from input ``begin`` on, to ``sums [slices, outputs, rows]``, and with the
    words and scales at the distances ``up_words`` and ``up_scales`` to ``ups``.

    ``x_ptrs``, ``is_row [1, 1, rows]``; ``word_ptrs``, ``scale_ptrs``, ``zero_ptrs [1, outputs, 1]``. Scales of e2m1
    are words with those of 4 groups.
    """
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    base: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
    span = tl.arange(0, 16)
    block = begin // 128 + tl.arange(0, slices)[:, None, None]
    is_block = block * 128 < num_inputs
    size: tl.constexpr = 128 if group == 0 else min(group, 128)
    of_block = tl.minimum(block, (num_inputs - 1) // 128) * 128  # of the last one beyond it
    index = tl.minimum(of_block // group, num_groups - 1) if group > 0 else of_block * 0
    scales = tl.load(scale_ptrs + (of_block // (4 * size) if is_e2m1 else index))
    scale = scales
    up_scale = scales
    up_scaling = scales
    zero = scales
    up_zero = scales
    if gated:
        up_scaling = tl.load(scale_ptrs + up_scales + (of_block // (4 * size) if is_e2m1 else index))
    if not is_e2m1:
        scale = scales.to(tl.float32)
        up_scale = up_scaling.to(tl.float32)
        zero = _zero_of(zero_ptrs + index, base, has_zeros)
        if gated:
            up_zero = _zero_of(zero_ptrs + up_scales + index, base, has_zeros)
    if whole:
        words = tl.load(word_ptrs + block * 16 + span[None, None, :])  # [slices, outputs, 16]
    else:
        words = tl.load(word_ptrs + block * 16 + span[None, None, :], mask=is_block, other=0)
    other_words = words
    if gated:
        if whole:
            other_words = tl.load(word_ptrs + up_words + block * 16 + span[None, None, :])
        else:
            other_words = tl.load(word_ptrs + up_words + block * 16 + span[None, None, :], mask=is_block, other=0)
    ones = tl.full(words.shape, 1.0, tl.float32).to(dtype)
    part = tl.zeros_like(sums)
    up_part = tl.zeros_like(sums)
    total = tl.zeros_like(sums)
    for place in tl.static_range(8):
        column = block * 128 + place * 16 + span[None, :, None]
        if whole:
            x = tl.load(x_ptrs + column, mask=is_row, other=0.0)
        else:
            x = tl.load(x_ptrs + column, mask=(column < num_inputs) & is_row, other=0.0)
        part = tl.dot(codes_of(words, place, dtype, is_e2m1, is_hopper), x, part)
        if gated:
            up_part = tl.dot(codes_of(other_words, place, dtype, is_e2m1, is_hopper), x, up_part)
        if not is_e2m1:
            total = tl.dot(ones, x, total)
        if (place + 1) * 16 % size == 0:
            if is_e2m1:
                scale = _e2m1_scale(scales, place * 16 // size)
                up_scale = _e2m1_scale(up_scaling, place * 16 // size)
            elif place * 16 >= size:
                of_group = tl.minimum(index + place * 16 // size, num_groups - 1)
                scale = tl.load(scale_ptrs + of_group).to(tl.float32)
                zero = _zero_of(zero_ptrs + of_group, base, has_zeros)
                if gated:
                    up_scale = tl.load(scale_ptrs + up_scales + of_group).to(tl.float32)
                    up_zero = _zero_of(zero_ptrs + up_scales + of_group, base, has_zeros)
            sums = _add_group(sums, part, total, scale, zero, is_e2m1)
            part = tl.zeros_like(sums)
            if gated:
                ups = _add_group(ups, up_part, total, up_scale, up_zero, is_e2m1)
                up_part = tl.zeros_like(sums)
            total = tl.zeros_like(sums)
    return sums, ups


@triton_kernel()
def packed_step(
    sums, ups, x_ptrs, is_row, word_ptrs, up_words, scale_ptrs, up_scales, zero_ptrs, begin, num_inputs, num_groups,
    gated: tl.constexpr, whole: tl.constexpr, group: tl.constexpr, has_zeros: tl.constexpr, is_e2m1: tl.constexpr,
    is_hopper: tl.constexpr,
):  # fmt: skip
    """`few_packed_step` with a block, for ``sums [outputs, rows]``, ``x_ptrs``, ``is_row [1, rows]`` and the other
    pointers ``[outputs]``: zero points are subtracted from the codes. See `packed_sums`."""
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    span = tl.arange(0, 16)
    size: tl.constexpr = 128 if group == 0 else min(group, 128)
    first = begin // (4 * size) if is_e2m1 else (tl.minimum(begin // group, num_groups - 1) if group > 0 else 0)
    scales = tl.load(scale_ptrs + first)
    up_scaling = scales
    words = tl.load(word_ptrs[:, None] + begin // 8 + span[None, :])  # [outputs, 16]
    other_words = words
    if gated:
        up_scaling = tl.load(scale_ptrs + up_scales + first)
        other_words = tl.load(word_ptrs[:, None] + up_words + begin // 8 + span[None, :])
    scale = scales
    up_scale = up_scaling
    # In bfloat16 scales of e2m1 are exact factors of the weights, so that a block is one product.
    is_exact: tl.constexpr = is_e2m1 and dtype == tl.bfloat16
    places: tl.constexpr = 8 if is_exact else size // 16
    in_group = tl.arange(0, places * 16)[:, None]
    for place in tl.static_range(0, 8, places):
        column = begin + place * 16 + in_group
        if whole:
            x = tl.load(x_ptrs + column, mask=is_row, other=0.0)
        else:
            x = tl.load(x_ptrs + column, mask=(column < num_inputs) & is_row, other=0.0)
        if is_exact:
            sums = tl.dot(_scaled_codes(words, scales, is_hopper), x, sums)
            if gated:
                ups = tl.dot(_scaled_codes(other_words, up_scaling, is_hopper), x, ups)
        else:
            of_group = tl.minimum(first + place // places, num_groups - 1)
            if is_e2m1:
                scale = _e2m1_scale(scales, place // places)
                up_scale = _e2m1_scale(up_scaling, place // places)
            elif place > 0:
                scale = tl.load(scale_ptrs + of_group)
                if gated:
                    up_scale = tl.load(scale_ptrs + up_scales + of_group)
            weight = _centred(words, place, places, zero_ptrs + of_group, dtype, has_zeros, is_e2m1, is_hopper)
            sums += tl.dot(weight, x) * scale.to(tl.float32)[:, None]
            if gated:
                other_zeros = zero_ptrs + up_scales + of_group
                other = _centred(other_words, place, places, other_zeros, dtype, has_zeros, is_e2m1, is_hopper)
                ups += tl.dot(other, x) * up_scale.to(tl.float32)[:, None]
    return sums, ups


@triton_kernel()
def _codes_of_block(
    words, first: tl.constexpr, places: tl.constexpr, dtype: tl.constexpr, is_e2m1: tl.constexpr,
    is_hopper: tl.constexpr,
):  # fmt: skip
    """``[outputs, places * span]``: the codes of ``places`` places (a power of 2) from the ``first`` on, in order."""
    result = codes_of(words, first, dtype, is_e2m1, is_hopper)
    if places >= 2:
        result = _in_order(result, codes_of(words, first + 1, dtype, is_e2m1, is_hopper))
    if places >= 4:
        third = codes_of(words, first + 2, dtype, is_e2m1, is_hopper)
        result = _in_order(result, _in_order(third, codes_of(words, first + 3, dtype, is_e2m1, is_hopper)))
    if places == 8:
        fifth = codes_of(words, 4, dtype, is_e2m1, is_hopper)
        sixth = codes_of(words, 5, dtype, is_e2m1, is_hopper)
        seventh = codes_of(words, 6, dtype, is_e2m1, is_hopper)
        eighth = codes_of(words, 7, dtype, is_e2m1, is_hopper)
        result = _in_order(result, _in_order(_in_order(fifth, sixth), _in_order(seventh, eighth)))
    return result


@triton_kernel()
def _in_order(low, high):
    """``[outputs, 2 * n]`` of two ``[outputs, n]``."""
    return tl.join(low, high).permute(0, 2, 1).reshape(low.shape[0], 2 * low.shape[1])


@triton_kernel()
def _scaled_codes(words, scales, is_hopper: tl.constexpr):
    """``[outputs, 128]`` bfloat16: the values of a block of e2m1, with the scales of its 4 groups in ``scales``, times
    2**-62. So one multiplication scales bits and makes them values."""
    first = _scaled_pair(words, scales, 0, is_hopper)
    third = _scaled_pair(words, scales, 4, is_hopper)
    return _in_order(
        _in_order(first, _scaled_pair(words, scales, 2, is_hopper)),
        _in_order(third, _scaled_pair(words, scales, 6, is_hopper)),
    )


@triton_kernel()
def packed_sums(sums, is_e2m1: tl.constexpr, dtype: tl.constexpr):
    """What the sums of `packed_step` stand for, with inputs of ``dtype``."""
    if is_e2m1 and dtype == tl.bfloat16:
        sums = sums * 4611686018427387904.0
    return sums


@triton_kernel()
def _scaled_pair(words, scales, place: tl.constexpr, is_hopper: tl.constexpr):
    """The values of a group of e2m1, which has two places, from ``place`` on."""
    low = codes_of(words, place, tl.bfloat16, True, is_hopper, True)  # [outputs, span]
    high = codes_of(words, place + 1, tl.bfloat16, True, is_hopper, True)
    exponents = ((scales >> (4 * place)) & 255)[:, None]
    return _in_order(_small_product(low, exponents, is_hopper), _small_product(high, exponents, is_hopper))


@triton_kernel()
def _small_product(values, exponents, is_hopper: tl.constexpr):
    """Values of e2m1 times 2 to the power of ``exponents`` less 127 + 62, as of `_scaled_codes`."""
    if is_hopper:  # the compiler would go by float32
        scale = (tl.minimum(exponents + 64, 254) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        values, scale = tl.broadcast(values, scale)
        result = tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [values, scale], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        scale = (tl.maximum(exponents - 62, 0) << 23).to(tl.float32, bitcast=True)
        result = (values.to(tl.float32) * scale).to(tl.bfloat16)
    return result


@triton_kernel()
def _centred(
    words, first: tl.constexpr, places: tl.constexpr, zero_ptrs, dtype: tl.constexpr, has_zeros: tl.constexpr,
    is_e2m1: tl.constexpr, is_hopper: tl.constexpr,
):  # fmt: skip
    """The codes of some places without their zero points, at ``zero_ptrs [outputs]``."""
    weight = _codes_of_block(words, first, places, dtype, is_e2m1, is_hopper)
    if not is_e2m1:
        base: tl.constexpr = 128.0 if dtype == tl.bfloat16 else 1024.0
        if has_zeros and zero_ptrs.dtype.element_ty == tl.uint8:
            weight = weight - (tl.load(zero_ptrs).to(tl.float32) + base).to(dtype)[:, None]
        elif has_zeros:  # with fractions, which numbers from 128 on do not have
            weight = weight - tl.full((1, 1), base, tl.float32).to(dtype)
            weight = weight - tl.load(zero_ptrs).to(dtype)[:, None]
        else:
            weight = weight - tl.full((1, 1), base + 8.0, tl.float32).to(dtype)
    return weight


@triton_kernel(unspecialized=("num_rows",))
def _packed_few_rows_kernel(
    output_ptr, x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr,
    squares_in_ptr, residual_ptr, norm_ptr, total_ptr, squares_ptr, num_parts, eps,
    num_rows, num_outputs, num_inputs, x_stride, num_words, num_groups, prefetched_bytes,
    slices: tl.constexpr, whole: tl.constexpr,
    parts_tile: tl.constexpr, has_deferred_norm: tl.constexpr, ends: tl.constexpr, gated: tl.constexpr,
    scale: tl.constexpr, has_bias: tl.constexpr,
    outputs: tl.constexpr, row_tile: tl.constexpr, stages: tl.constexpr, span: tl.constexpr, group: tl.constexpr,
    has_zeros: tl.constexpr, is_e2m1: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    first = tl.program_id(0) * outputs
    num_valid = tl.minimum(outputs, num_outputs - first)
    tile_ptr = words_ptr + first.to(tl.int64) * num_words
    up_distance = tl.cast(num_outputs, tl.int64) * num_words
    prefetch_rows(tile_ptr, num_words * 4, num_valid, prefetched_bytes, overlap)
    if gated:
        prefetch_rows(tile_ptr + up_distance, num_words * 4, num_valid, prefetched_bytes, overlap)
    output = tl.arange(0, outputs)
    in_tile = tl.minimum(output, num_valid - 1)
    word_ptrs = tile_ptr + in_tile[None, :, None] * num_words
    x_row = tl.arange(0, row_tile)[None, None, :]
    group_row = (first + in_tile).to(tl.int64)[None, :, None] * num_groups  # [1, outputs, 1]
    sums = tl.zeros((slices, outputs, row_tile), tl.float32)
    up_sums = tl.zeros((slices, outputs, row_tile), tl.float32)
    norm_weight = output
    if ends == "sum":
        norm_weight = tl.load(norm_ptr + first + in_tile)
    wait_for_inputs(overlap)
    squares, residual = load_norm_inputs(
        squares_in_ptr, residual_ptr, sums, first, num_valid, num_parts, num_rows, num_outputs,
        parts_tile, outputs, row_tile, has_deferred_norm, ends,
    )  # fmt: skip
    for begin in tl.range(0, num_inputs, slices * 8 * span, num_stages=stages):
        sums, up_sums = few_packed_step(
            sums, up_sums, x_ptr + x_row * x_stride, x_row < num_rows, word_ptrs, up_distance,
            scales_ptr + group_row, tl.cast(num_outputs, tl.int64) * num_groups, zeros_ptr + group_row,
            begin, num_inputs, num_groups, gated > 0, slices, whole, group, has_zeros, is_e2m1, overlap,
        )  # fmt: skip
    write_outputs(
        sums, up_sums, squares, residual, norm_weight, output_ptr, bias_ptr, total_ptr, squares_ptr, first, num_valid,
        num_rows, num_outputs, num_inputs, eps, output_ptr, (), output, output_ptr, 0, 1, 8, 0,
        outputs, row_tile, has_bias, scale, gated, has_deferred_norm, ends,
    )  # fmt: skip


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
    output = tl.arange(0, outputs)
    in_tile = tl.minimum(output, num_valid - 1)
    row = tl.program_id(1) * row_tile + tl.arange(0, row_tile)
    is_row = row[None, :] < num_rows
    x_ptrs = x_ptr + row[None, :].to(tl.int64) * x_stride  # [1, row_tile]
    group_row = (first + in_tile).to(tl.int64) * num_groups
    sums = tl.zeros((outputs, row_tile), tl.float32)
    wait_for_inputs(overlap)
    for begin in tl.range(begin_word * 8, end_word * 8, span * 8, num_stages=stages):
        sums, _ = packed_step(
            sums, sums, x_ptrs, is_row, tile_ptr + in_tile * num_words, 0, scales_ptr + group_row, 0,
            zeros_ptr + group_row, begin, num_inputs, num_groups, False, whole, group, has_zeros, is_e2m1, overlap,
        )  # fmt: skip
    sums = packed_sums(sums, is_e2m1, x_ptr.dtype.element_ty)
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
        if is_e2m1:
            index += column // (4 * group)
            exponents = tl.load(scales_ptr + index, mask=is_output, other=0)
            scale = _e2m1_scale(exponents, place * 16 // group % 4)[:, None]
        else:
            if group > 0:
                index += tl.minimum(column // group, num_groups - 1)
            scale = tl.load(scales_ptr + index, mask=is_output, other=0.0).to(tl.float32)[:, None]
        codes = (words >> (4 * place)) & 15
        if is_e2m1:
            values = codes_of(words, place, tl.bfloat16, True, False).to(tl.float32)
        elif has_zeros:
            values = codes.to(tl.float32) - tl.load(zeros_ptr + index, mask=is_output, other=0).to(tl.float32)[:, None]
        else:
            values = codes.to(tl.float32) - 8.0
        written_ptrs = written_ptr + output.to(tl.int64)[:, None] * num_inputs + column + in_span
        is_written = is_output[:, None] & (column + in_span < num_inputs)
        tl.store(written_ptrs, (values * scale).to(written_ptr.dtype.element_ty), mask=is_written)
