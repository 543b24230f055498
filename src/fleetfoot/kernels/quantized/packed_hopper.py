"""Products of up to 8 rows with weights of 4 bits for Hopper GPUs, in Gluon: see `fleetfoot.kernels.quantized.packed`.

With few rows, what a code costs decides, not its bytes: the Triton kernel takes 3.5 instructions for a code, and waits
for scales and barriers at every block of inputs. Here a program has some outputs, and each of its warps has every n-th
block of inputs:

- a thread loads the words that its part of a tensor core instruction needs into registers, some blocks ahead, the first
  ones before the previous kernel has finished. Nothing goes through shared memory, and warps meet at the end alone;
- the halves of two words are joined, and then a shift and a logic instruction make two codes numbers;
- scales and zero points of a block are loaded with its words.

Gluon has no interpreter: a GPU test compares the kernel with the reference. This module imports Triton.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from fleetfoot.kernels.quantized.epilogue import Epilogue
from fleetfoot.kernels.quantized.packed import BLOCK, SPAN, PackedMatrix
from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_options
from fleetfoot.kernels.runtime.gluon_support import launch_dependents, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import cdiv, launcher

ROWS = 8
"""Maximum rows: N of the tensor core instruction."""


def launch_packed_hopper(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: PackedMatrix,
    epilogue: Epilogue,
    *,
    outputs: int,
    num_warps: int,
    depth: int,
) -> None:
    """Write the product of ``x [n, in]``, in the order of the columns, and what the epilogue makes of it.

    Args:
        output: ``[n, out]``; with a gate half as many outputs as ``weight`` has.
        outputs: outputs of a program, 16 or 32.
        num_warps: warps of a program; each has every ``num_warps``-th block of inputs.
        depth: blocks that a warp loads ahead.
    """
    num_rows, num_outputs, num_inputs = x.shape[0], output.shape[1], weight.num_inputs
    if x.stride(0) % 8:
        x = x.contiguous()
    overlap = can_overlap(x.device)
    zeros, biases = (output if each is None else each for each in (weight.zeros, weight.bias))
    group = 0 if weight.group >= num_inputs and not weight.is_e2m1 else weight.group
    launcher(_packed_hopper_kernel, (cdiv(num_outputs, outputs),))(
        output, x, weight.words, weight.scales, zeros, biases,
        *epilogue.tensors(output), epilogue.num_parts, epilogue.eps,
        num_rows, num_outputs, num_inputs, x.stride(0), weight.words.shape[1], weight.scales.shape[1],
        slices=num_warps, outputs=outputs, rows=ROWS, depth=depth, span=SPAN, group=group,
        even=num_inputs % (BLOCK * num_warps * depth) == 0, has_zeros=weight.zeros is not None, is_e2m1=weight.is_e2m1,
        **epilogue.options(has_bias=weight.bias is not None), overlap=overlap,
        num_warps=num_warps, **launch_options(overlap),
    )  # fmt: skip


@gluon.jit
def _codes(words, place: gl.constexpr, dtype: gl.constexpr, is_e2m1: gl.constexpr):
    """The codes of a place as numbers of ``dtype``: from 128 on in bfloat16, from 1024 on in float16; e2m1: twice the
    values."""
    half: gl.constexpr = 0x5410 if place < 4 else 0x7632
    bit: gl.constexpr = 4 * (place % 4)
    is_bfloat16: gl.constexpr = dtype == gl.bfloat16
    if is_e2m1:
        # Exponent and mantissa go to the lowest bits of the number's exponent and to the highest of its mantissa, where
        # they are 2^-126 (2^-14) times the value; products of subnormal numbers are exact.
        magnitude: gl.constexpr = 6 if is_bfloat16 else 9
        mask: gl.constexpr = 0x01C001C0 if is_bfloat16 else 0x0E000E00
        factor: gl.constexpr = 0x7F007F00 if is_bfloat16 else 0x78007800
        left: gl.constexpr = max(magnitude - bit, 0)
        right: gl.constexpr = max(bit - magnitude, 0)
        kind: gl.constexpr = "bf16x2" if is_bfloat16 else "f16x2"
        result = gl.inline_asm_elementwise(
            f"{{ .reg .b32 t, m, f; prmt.b32 t, $1, $2, {half}; shl.b32 m, t, {left}; shr.u32 m, m, {right};"
            f" and.b32 m, m, {mask}; shl.b32 t, t, {12 - bit}; lop3.b32 t, t, 0x80008000, m, 234;"
            f" mov.b32 f, {factor}; mul.rn.{kind} $0, t, f; }}",
            "=r,r,r", [words], dtype=dtype.value, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        number: gl.constexpr = 0x43004300 if is_bfloat16 else 0x64006400
        result = gl.inline_asm_elementwise(
            f"{{ .reg .b32 t; prmt.b32 t, $1, $2, {half}; shr.u32 t, t, {bit};"
            f" lop3.b32 $0, t, 0x000f000f, {number}, 234; }}",
            "=r,r,r", [words], dtype=dtype.value, is_pure=True, pack=2,
        )  # fmt: skip
    return result


@gluon.jit
def _load_blocks(
    weight, step: gl.constexpr, is_word, is_group,
    slices: gl.constexpr, halves: gl.constexpr, span: gl.constexpr, group: gl.constexpr, has_zeros: gl.constexpr,
    even: gl.constexpr,
):  # fmt: skip
    """Each warp's block of the ``step``-th step from pointers on, of gates and of ups: words ``[slices, outputs,
    span]``, and scales and zero points ``[slices, outputs]`` for each group in it."""
    groups: gl.constexpr = 1 if group == 0 else 8 * span // group
    groups_of_slice: gl.constexpr = 0 if group == 0 else groups
    blocks = ()
    for half in gl.static_range(halves):
        words_ptrs, scales_ptrs, zeros_ptrs = weight[half]
        words_ptrs += step * (slices * span)
        if even:
            words = gl.load(words_ptrs, mask=is_word)
        else:
            words = gl.load(words_ptrs, mask=is_word, other=0)
        scales = ()
        zeros = ()
        for index in gl.static_range(groups):
            if even:
                scale = gl.load(scales_ptrs + (step * (slices * groups_of_slice) + index), mask=is_group)
            else:
                scale = gl.load(scales_ptrs + (step * (slices * groups_of_slice) + index), mask=is_group, other=0)
            scales = scales + (scale,)  # type: ignore[assignment]  # noqa: RUF005
            zero = scale
            if has_zeros:
                if even:
                    zero = gl.load(zeros_ptrs + (step * (slices * groups_of_slice) + index), mask=is_group)
                else:
                    zero = gl.load(zeros_ptrs + (step * (slices * groups_of_slice) + index), mask=is_group, other=0)
            zeros = zeros + (zero,)  # type: ignore[assignment]  # noqa: RUF005
        blocks = blocks + ((words, scales, zeros),)  # type: ignore[assignment]  # noqa: RUF005
    return blocks


@gluon.jit
def _moved(weight, step, slices: gl.constexpr, span: gl.constexpr, groups_of_slice: gl.constexpr):
    """The pointers of a weight at a step."""
    moved = ()
    for half in gl.static_range(len(weight)):
        words_ptrs, scales_ptrs, zeros_ptrs = weight[half]
        groups = step * (slices * groups_of_slice)
        moved = moved + ((words_ptrs + step * (slices * span), scales_ptrs + groups, zeros_ptrs + groups),)  # type: ignore[assignment]  # noqa: RUF005
    return moved


@gluon.jit
def _add_blocks(
    sums, blocks, x_ptrs, columns_left, ones, nothing,
    span: gl.constexpr, group: gl.constexpr, has_zeros: gl.constexpr, is_e2m1: gl.constexpr, even: gl.constexpr,
):  # fmt: skip
    """``sums`` and the products of a step's blocks, of gates and of ups."""
    dtype: gl.constexpr = x_ptrs.dtype.element_ty
    base: gl.constexpr = 0.0 if is_e2m1 else (128.0 if dtype == gl.bfloat16 else 1024.0)
    groups: gl.constexpr = 1 if group == 0 else 8 * span // group
    places: gl.constexpr = 8 // groups
    for index in gl.static_range(groups):
        total = nothing
        parts = ()
        for _half in gl.static_range(len(blocks)):
            parts = parts + (nothing,)  # type: ignore[assignment]  # noqa: RUF005
        for in_group in gl.static_range(places):
            pointers = x_ptrs + (index * places + in_group) * span
            if even:
                x = gl.load(pointers)
            else:
                x = gl.load(pointers, mask=columns_left > (index * places + in_group) * span, other=0.0)
            if not is_e2m1:
                total = mma_v2(ones, x, total)
            next_parts = ()
            for half in gl.static_range(len(blocks)):
                codes = _codes(blocks[half][0], index * places + in_group, dtype, is_e2m1)
                next_parts = next_parts + (mma_v2(codes, x, parts[half]),)  # type: ignore[assignment]  # noqa: RUF005
            parts = next_parts
        next_sums = ()
        for half in gl.static_range(len(blocks)):
            scale = gl.expand_dims(blocks[half][1][index], 2)
            if is_e2m1:
                scale = (scale.to(gl.int32) << 23).to(gl.float32, bitcast=True)
                added = sums[half] + parts[half] * (scale * 0.5)
            elif has_zeros:
                zero = gl.expand_dims(blocks[half][2][index].to(gl.float32) + base, 2)
                added = sums[half] + (parts[half] - total * zero) * scale.to(gl.float32)
            else:
                added = sums[half] + (parts[half] - total * (8.0 + base)) * scale.to(gl.float32)
            next_sums = next_sums + (added,)  # type: ignore[assignment]  # noqa: RUF005
        sums = next_sums
    return sums


@gluon.jit
def _activate_and_mul(gate, up, activation: gl.constexpr):
    """See `fleetfoot.kernels.elementwise.activate_and_mul`."""
    gate = gate.to(gl.float32)
    if activation == 1:
        exponent = -gate
    else:
        exponent = gl.minimum(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate), 80.0)
    return gate / (1.0 + gl.exp(exponent)) * up.to(gl.float32)


@gluon.jit(
    do_not_specialize=["num_parts", "num_rows", "num_outputs", "num_inputs", "x_stride", "num_words", "num_groups"]
)
def _packed_hopper_kernel(
    output_ptr, x_ptr, words_ptr, scales_ptr, zeros_ptr, bias_ptr,
    squares_in_ptr, residual_ptr, norm_ptr, total_ptr, squares_ptr, num_parts, eps,
    num_rows, num_outputs, num_inputs, x_stride, num_words, num_groups,
    slices: gl.constexpr, outputs: gl.constexpr, rows: gl.constexpr, depth: gl.constexpr, span: gl.constexpr,
    group: gl.constexpr, even: gl.constexpr, has_zeros: gl.constexpr, is_e2m1: gl.constexpr,
    parts_tile: gl.constexpr, has_deferred_norm: gl.constexpr, ends: gl.constexpr, gated: gl.constexpr,
    scale: gl.constexpr, has_bias: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    halves: gl.constexpr = 2 if gated else 1
    groups_of_slice: gl.constexpr = 0 if group == 0 else 8 * span // group
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [slices, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    flat: gl.constexpr = gl.SliceLayout(0, mma)  # [outputs, rows]

    first = gl.program_id(0) * outputs
    num_valid = gl.minimum(outputs, num_outputs - first)
    num_blocks = num_words // span
    num_steps = (num_blocks + slices - 1) // slices
    word_output = gl.minimum(gl.arange(0, outputs, gl.SliceLayout(0, gl.SliceLayout(2, left))), num_valid - 1)
    word_slice = gl.expand_dims(gl.expand_dims(gl.arange(0, slices, gl.SliceLayout(1, gl.SliceLayout(2, left))), 1), 2)
    in_span = gl.arange(0, span, gl.SliceLayout(0, gl.SliceLayout(1, left)))
    word = gl.expand_dims(gl.expand_dims(word_output, 0), 2) * num_words + word_slice * span
    word += gl.expand_dims(gl.expand_dims(in_span, 0), 1)
    sum_slice = gl.expand_dims(gl.arange(0, slices, gl.SliceLayout(1, gl.SliceLayout(2, mma))), 1)
    sum_output = gl.minimum(gl.arange(0, outputs, gl.SliceLayout(0, gl.SliceLayout(2, mma))), num_valid - 1)
    place = gl.expand_dims(sum_output, 0) * num_groups + sum_slice * groups_of_slice
    weight = ()
    for half in gl.static_range(halves):
        row = (first + half * num_outputs).to(gl.int64)
        group_row = row * num_groups
        words_ptrs = gl.multiple_of(words_ptr + row * num_words + word, [1, 1, 16])
        pointers = words_ptrs, scales_ptr + group_row + place, zeros_ptr + group_row + place
        weight = weight + (pointers,)  # type: ignore[assignment]  # noqa: RUF005

    # Weights do not depend on the previous kernel.
    ahead = ()
    for step in gl.static_range(depth):
        is_word, is_group = word_slice + step * slices < num_blocks, sum_slice + step * slices < num_blocks
        blocks = _load_blocks(weight, step, is_word, is_group, slices, halves, span, group, has_zeros, even)
        ahead = ahead + (blocks,)  # type: ignore[assignment]  # noqa: RUF005
    wait_for_inputs(overlap)

    x_row = gl.minimum(gl.arange(0, rows, gl.SliceLayout(0, gl.SliceLayout(1, right))), num_rows - 1)
    x_slice = gl.expand_dims(gl.expand_dims(gl.arange(0, slices, gl.SliceLayout(1, gl.SliceLayout(2, right))), 1), 2)
    x_column = gl.expand_dims(gl.expand_dims(gl.arange(0, span, gl.SliceLayout(0, gl.SliceLayout(2, right))), 0), 2)
    x_column += x_slice * (8 * span)
    x_ptrs = x_ptr + (gl.expand_dims(gl.expand_dims(x_row, 0), 1) * x_stride + x_column)
    x_ptrs = gl.multiple_of(x_ptrs, [1, 16, 1])  # [slices, span, rows]
    ones = gl.full([slices, outputs, span], 1.0, dtype, left)
    nothing = gl.zeros([slices, outputs, rows], gl.float32, mma)
    sums = (nothing, nothing) if gated else (nothing,)
    factor = 1.0
    if has_deferred_norm:
        parts_layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // rows, rows], [slices, 1], [1, 0])
        part = gl.expand_dims(gl.arange(0, parts_tile, gl.SliceLayout(1, parts_layout)), 1)
        part_row = gl.expand_dims(gl.arange(0, rows, gl.SliceLayout(0, parts_layout)), 0)
        is_part = (part < num_parts) & (part_row < num_rows)
        squares = gl.load(squares_in_ptr + part * num_rows + part_row, mask=is_part, other=0.0)
        squares = gl.convert_layout(gl.sum(squares, 0), gl.SliceLayout(0, flat))
        factor = gl.expand_dims(1.0 / gl.sqrt_rn(squares / num_inputs + eps), 0)
    for begin in range(0, num_steps, depth):
        later = begin + depth
        moved = _moved(weight, later, slices, span, groups_of_slice)
        next_ahead = ()
        for step in gl.static_range(depth):
            is_word = word_slice + (later + step) * slices < num_blocks
            is_group = sum_slice + (later + step) * slices < num_blocks
            loaded = _load_blocks(moved, step, is_word, is_group, slices, halves, span, group, has_zeros, even)
            next_ahead = next_ahead + (loaded,)  # type: ignore[assignment]  # noqa: RUF005
            sums = _add_blocks(
                sums, ahead[step], x_ptrs + (begin + step) * slices * 8 * span,
                num_inputs - (begin + step) * slices * 8 * span - x_column, ones, nothing,
                span, group, has_zeros, is_e2m1, even,
            )  # fmt: skip
        ahead = next_ahead

    output = gl.arange(0, outputs, gl.SliceLayout(1, flat))
    row = gl.expand_dims(gl.arange(0, rows, gl.SliceLayout(0, flat)), 0)
    is_output = output < num_valid
    is_written = gl.expand_dims(is_output, 1) & (row < num_rows)
    offset = row.to(gl.int64) * num_outputs + first + gl.expand_dims(output, 1)
    results = ()
    for half in gl.static_range(halves):
        result = gl.sum(sums[half], 0)
        if has_deferred_norm:
            result *= factor
        if has_bias:
            bias = gl.load(bias_ptr + half * num_outputs + first + output, mask=is_output, other=0.0)
            result += gl.expand_dims(bias.to(gl.float32), 1)
        if scale != 1.0:
            result *= scale
        results = results + (result,)  # type: ignore[assignment]  # noqa: RUF005
    result = results[0]  # type: ignore[misc]
    if gated:
        gate, up = results  # type: ignore[misc]
        result = _activate_and_mul(gate.to(dtype), up.to(dtype), gated)
    if ends == "sum":
        # Rounded at the same places as separate kernels.
        residual = gl.load(residual_ptr + offset, mask=is_written, other=0.0)
        total = (result.to(dtype).to(gl.float32) + residual.to(gl.float32)).to(dtype)
        gl.store(total_ptr + offset, total, mask=is_written)
        total = gl.where(is_written, total.to(gl.float32), 0.0)
        square_row = gl.arange(0, rows, gl.SliceLayout(0, flat))
        square_ptrs = squares_ptr + gl.program_id(0) * num_rows + square_row
        gl.store(square_ptrs, gl.sum(total * total, 0), mask=square_row < num_rows)
        weights = gl.load(norm_ptr + first + output, mask=is_output, other=0.0)
        result = total * gl.expand_dims(weights.to(gl.float32), 1)
    gl.store(output_ptr + offset, result.to(dtype), mask=is_written)
