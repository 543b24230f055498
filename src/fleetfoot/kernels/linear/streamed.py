"""Large weights, few rows: the weight streams through shared memory, several stages ahead of the multiplication.

Each program computes a few outputs over all inputs. Its warps process slices of the inputs, so that a tile of only 16
outputs, of which even narrow layers have enough, is a long read in each row of the weight. M of the tensor core
instructions is outputs, and N the rows of the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.linear.few_rows import (
    FusedAddNorm,
    load_residual,
    load_squares,
    norm_arguments,
    write_outputs,
)
from fleetfoot.kernels.norm.deferred_rms_norm import DeferredRMSNorm
from fleetfoot.kernels.runtime.dependent_launch import (
    can_overlap,
    launch_dependents,
    launch_options,
    prefetch_rows,
    wait_for_inputs,
)
from fleetfoot.kernels.runtime.triton_support import cdiv, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl

_PREFETCHED = 512
"""Inputs of each row of the weight that are prefetched to L2 while the previous kernel still runs."""


@dataclass(frozen=True, slots=True)
class StreamedTiling:
    """Compile and launch options of the kernel."""

    outputs: int
    num_stages: int
    row_tile: int
    """Rows of the input, rounded up: 1 or 8."""
    inputs: int = 128
    """Inputs that a warp multiplies at a time; the inputs of all warps are a chunk."""
    num_warps: int = 4


def linear_streamed(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
    tiling: StreamedTiling,
    deferred: DeferredRMSNorm | None = None,
    add_norm: FusedAddNorm | None = None,
) -> None:
    """Like `linear_staged`, for any ``in`` that is a multiple of 8."""
    num_rows, num_outputs = output.shape
    num_inputs = weight.shape[1]
    overlap = can_overlap(x.device)
    norm_tensors, norms = norm_arguments(weight, deferred, add_norm)
    _linear_streamed_kernel[(cdiv(num_outputs, tiling.outputs),)](
        output, x, weight, weight if bias is None else bias, *norm_tensors, num_rows, num_outputs, num_inputs,
        x.stride(0), min(_PREFETCHED, num_inputs) * 2,
        outputs=tiling.outputs, slices=tiling.num_warps, inputs=tiling.inputs, num_stages=tiling.num_stages,
        row_tile=tiling.row_tile, whole_chunks=num_inputs % (tiling.num_warps * tiling.inputs) == 0,
        has_bias=bias is not None, gated=gated, overlap=overlap, num_warps=tiling.num_warps, **norms,
        **launch_options(overlap),
    )  # fmt: skip


@triton_kernel(unspecialized=("num_rows",))
def _linear_streamed_kernel(
    output_ptr, x_ptr, weight_ptr, bias_ptr, squares_in_ptr, num_parts, eps, residual_ptr, norm_ptr, total_ptr,
    squares_ptr, num_rows, num_outputs, num_inputs, x_stride, prefetched_bytes,
    outputs: tl.constexpr, slices: tl.constexpr, inputs: tl.constexpr, num_stages: tl.constexpr, row_tile: tl.constexpr,
    whole_chunks: tl.constexpr, has_bias: tl.constexpr, gated: tl.constexpr, parts_tile: tl.constexpr,
    has_deferred_norm: tl.constexpr, fused_add_norm: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    first = tl.program_id(0) * outputs
    num_valid = tl.minimum(outputs, num_outputs - first)
    gate_ptr = weight_ptr + first.to(tl.int64) * num_inputs
    up_ptr = gate_ptr + num_outputs.to(tl.int64) * num_inputs
    prefetch_rows(gate_ptr, num_inputs * 2, num_valid, prefetched_bytes, overlap)
    if gated:
        prefetch_rows(up_ptr, num_inputs * 2, num_valid, prefetched_bytes, overlap)

    output = tl.arange(0, outputs)
    weight_row = tl.minimum(output, num_valid - 1)[None, :, None] * num_inputs
    slice_begin = tl.arange(0, slices)[:, None, None] * inputs
    in_slice = tl.arange(0, inputs)
    weight_column = slice_begin + in_slice[None, None, :]
    x_row = tl.arange(0, row_tile)[None, None, :]
    x_column = slice_begin + in_slice[None, :, None]
    sums = tl.zeros((slices, outputs, row_tile), tl.float32)
    up_sums = tl.zeros((slices, outputs, row_tile), tl.float32)
    norm_weight = weight_row
    if fused_add_norm:
        norm_weight = tl.load(norm_ptr + first + tl.minimum(output, num_valid - 1))
    wait_for_inputs(overlap)
    # Loaded before the product, so that they are available after it.
    squares = sums
    if has_deferred_norm:
        squares = load_squares(squares_in_ptr, num_parts, num_rows, parts_tile, row_tile)
    residual = sums
    if fused_add_norm:
        residual = load_residual(residual_ptr, first, num_valid, num_rows, num_outputs, outputs, row_tile)
    for begin in tl.range(0, num_inputs, slices * inputs, num_stages=num_stages):
        weight_offset = weight_row + weight_column + begin  # [slices, outputs, inputs]
        x_offset = x_row * x_stride + x_column + begin  # [slices, inputs, row_tile]
        if whole_chunks:
            x = tl.load(x_ptr + x_offset, mask=x_row < num_rows, other=0.0)
            sums = tl.dot(tl.load(gate_ptr + weight_offset), x, sums)
            if gated:
                up_sums = tl.dot(tl.load(up_ptr + weight_offset), x, up_sums)
        else:
            in_row = weight_column + begin < num_inputs
            x_mask = (x_row < num_rows) & (x_column + begin < num_inputs)
            x = tl.load(x_ptr + x_offset, mask=x_mask, other=0.0)
            sums = tl.dot(tl.load(gate_ptr + weight_offset, mask=in_row, other=0.0), x, sums)
            if gated:
                up_sums = tl.dot(tl.load(up_ptr + weight_offset, mask=in_row, other=0.0), x, up_sums)

    write_outputs(
        sums, up_sums, squares, residual, norm_weight, output_ptr, bias_ptr, total_ptr, squares_ptr, first, num_valid,
        num_rows, num_outputs, num_inputs, eps, outputs, row_tile, has_bias, gated, has_deferred_norm, fused_add_norm,
    )  # fmt: skip
