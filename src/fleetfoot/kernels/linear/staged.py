"""Small weights, few rows: each program loads its whole part of the weight before the input is available.

A decode step of a small model is bound by the transitions between kernels rather than by memory. When the input
arrives, only a multiplication from shared memory is left: 16 outputs per program, with slices of the inputs distributed
over its warps. M of the tensor core instructions is outputs, and N the 1 to 8 rows of the input, padded to 8.
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


@dataclass(frozen=True, slots=True)
class StagedTiling:
    """Compile and launch options of the kernel."""

    inputs: int
    """Inputs that a warp multiplies at a time; the inputs of all warps are a chunk."""
    num_chunks: int
    row_tile: int
    """Rows of the input, rounded up: 1 or 8."""
    outputs: int = 16
    num_warps: int = 4


def linear_staged(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
    tiling: StagedTiling,
    deferred: DeferredRMSNorm | None = None,
    add_norm: FusedAddNorm | None = None,
) -> None:
    """Write ``x [n, in] @ weight.T + bias`` to ``output [n, out]``; gated: ``silu`` of its first half times the second.

    Args:
        weight: ``[out, in]``, contiguous, ``[2 * out, in]`` if gated; ``bias`` alike. ``in`` is a multiple of a chunk.
    """
    num_rows, num_outputs = output.shape
    overlap = can_overlap(x.device)
    norm_tensors, norms = norm_arguments(weight, deferred, add_norm)
    _linear_staged_kernel[(cdiv(num_outputs, tiling.outputs),)](
        output, x, weight, weight if bias is None else bias, *norm_tensors, num_rows, num_outputs, weight.shape[1],
        x.stride(0),
        outputs=tiling.outputs, slices=tiling.num_warps, inputs=tiling.inputs, num_chunks=tiling.num_chunks,
        row_tile=tiling.row_tile, has_bias=bias is not None, gated=gated, overlap=overlap, num_warps=tiling.num_warps,
        **norms, **launch_options(overlap),
    )  # fmt: skip


@triton_kernel(unspecialized=("num_rows",))
def _linear_staged_kernel(
    output_ptr, x_ptr, weight_ptr, bias_ptr, squares_in_ptr, num_parts, eps, residual_ptr, norm_ptr, total_ptr,
    squares_ptr, num_rows, num_outputs, num_inputs, x_stride,
    outputs: tl.constexpr, slices: tl.constexpr, inputs: tl.constexpr, num_chunks: tl.constexpr, row_tile: tl.constexpr,
    has_bias: tl.constexpr, gated: tl.constexpr, parts_tile: tl.constexpr, has_deferred_norm: tl.constexpr,
    fused_add_norm: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    # A program's rows of the weight are contiguous. Prefetching all of them at once hides the latency of the loads
    # below, of which registers hold a few at a time.
    first = tl.program_id(0) * outputs
    num_valid = tl.minimum(outputs, num_outputs - first)
    row_bytes = num_inputs * 2
    gate_ptr = weight_ptr + first.to(tl.int64) * num_inputs
    up_ptr = gate_ptr + num_outputs.to(tl.int64) * num_inputs
    prefetch_rows(gate_ptr, row_bytes, num_valid, row_bytes, overlap)
    if gated:
        prefetch_rows(up_ptr, row_bytes, num_valid, row_bytes, overlap)

    output = tl.arange(0, outputs)
    weight_row = tl.minimum(output, num_valid - 1)[None, :, None] * num_inputs
    slice_begin = tl.arange(0, slices)[:, None, None] * inputs
    in_slice = tl.arange(0, inputs)
    chunk: tl.constexpr = slices * inputs
    weight_offset = weight_row + slice_begin + in_slice[None, None, :]  # [slices, outputs, inputs]
    gates = ()
    ups = ()
    for i in tl.static_range(num_chunks):
        gates += (tl.load(gate_ptr + weight_offset + i * chunk),)  # type: ignore[assignment]
        if gated:
            ups += (tl.load(up_ptr + weight_offset + i * chunk),)  # type: ignore[assignment]

    norm_weight = weight_row
    if fused_add_norm:
        norm_weight = tl.load(norm_ptr + first + tl.minimum(output, num_valid - 1))
    wait_for_inputs(overlap)
    row = tl.arange(0, row_tile)[None, None, :]
    x_offset = row * x_stride + slice_begin + in_slice[None, :, None]  # [slices, inputs, row_tile]
    sums = tl.zeros((slices, outputs, row_tile), tl.float32)
    up_sums = tl.zeros((slices, outputs, row_tile), tl.float32)
    # Loaded before the product, so that they are available after it.
    squares = sums
    if has_deferred_norm:
        squares = load_squares(squares_in_ptr, num_parts, num_rows, parts_tile, row_tile)
    residual = sums
    if fused_add_norm:
        residual = load_residual(residual_ptr, first, num_valid, num_rows, num_outputs, outputs, row_tile)
    for i in tl.static_range(num_chunks):
        x = tl.load(x_ptr + x_offset + i * chunk, mask=row < num_rows, other=0.0)
        sums = tl.dot(gates[i], x, sums)
        if gated:
            up_sums = tl.dot(ups[i], x, up_sums)

    write_outputs(
        sums, up_sums, squares, residual, norm_weight, output_ptr, bias_ptr, total_ptr, squares_ptr, first, num_valid,
        num_rows, num_outputs, num_inputs, eps, outputs, row_tile, has_bias, gated, has_deferred_norm, fused_add_norm,
    )  # fmt: skip
