"""The epilogue that the linear kernels for few rows share.

A deferred norm may precede or follow the product (`fleetfoot.kernels.norm.deferred_rms_norm`). In the first case the
inputs lack a factor per row, which is applied to the sums. In the second case the outputs are added to the residual and
multiplied by the weight of the next norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fleetfoot.kernels.linear.silu_and_mul import silu_and_mul
from fleetfoot.kernels.norm.deferred_rms_norm import DeferredRMSNorm
from fleetfoot.kernels.runtime.triton_support import next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl


class FusedAddNorm(NamedTuple):
    """The residual sum and norm after a product."""

    residual: torch.Tensor
    """``[n, out]``, contiguous."""
    norm_weight: torch.Tensor
    """``[out]``, of the next norm."""
    result: DeferredRMSNorm
    """The output: ``parts`` are the programs of the kernel."""


def norm_arguments(
    unused: torch.Tensor, deferred: DeferredRMSNorm | None, add_norm: FusedAddNorm | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments and constexprs of a kernel for a deferred norm before and after the product."""
    squares, eps = (unused, 0.0) if deferred is None else (deferred.squares, deferred.eps)
    num_parts = 1 if deferred is None else len(squares)
    add_norm_tensors = (unused,) * 4
    if add_norm is not None:
        result = add_norm.result
        add_norm_tensors = (add_norm.residual, add_norm.norm_weight, result.total, result.squares)
    options = {
        "parts_tile": next_power_of_2(num_parts),
        "has_deferred_norm": deferred is not None,
        "fused_add_norm": add_norm is not None,
    }
    return (squares, num_parts, eps, *add_norm_tensors), options


@triton_kernel()
def load_squares(squares_ptr, num_parts, num_rows, parts_tile: tl.constexpr, row_tile: tl.constexpr):
    """``[parts_tile, row_tile]``: see `DeferredRMSNorm.squares`."""
    part = tl.arange(0, parts_tile)[:, None]
    row = tl.arange(0, row_tile)[None, :]
    return tl.load(squares_ptr + part * num_rows + row, mask=(part < num_parts) & (row < num_rows), other=0.0)


@triton_kernel()
def load_residual(residual_ptr, first, num_valid, num_rows, num_outputs, outputs: tl.constexpr, row_tile: tl.constexpr):
    """``[outputs, row_tile]``: the residual of a program's outputs."""
    output = tl.arange(0, outputs)[:, None]
    row = tl.arange(0, row_tile)[None, :]
    pointers = residual_ptr + row.to(tl.int64) * num_outputs + first + output
    return tl.load(pointers, mask=(output < num_valid) & (row < num_rows), other=0.0)


@triton_kernel()
def write_outputs(
    sums, up_sums, squares, residual, norm_weight, output_ptr, bias_ptr, total_ptr, squares_ptr, first, num_valid,
    num_rows, num_outputs, num_inputs, eps,
    outputs: tl.constexpr, row_tile: tl.constexpr, has_bias: tl.constexpr, gated: tl.constexpr,
    has_deferred_norm: tl.constexpr, fused_add_norm: tl.constexpr,
):  # fmt: skip
    """Write a program's ``num_valid`` outputs from ``first`` on.

    Args:
        sums: ``[slices, outputs, row_tile]`` float32, partial sums of the slices; ``up_sums`` alike, if gated.
        squares: `load_squares`, if has_deferred_norm. residual: `load_residual`, and ``norm_weight [outputs]``, if
            fused_add_norm.
    """
    dtype = output_ptr.dtype.element_ty
    output = tl.arange(0, outputs)
    is_output = output < num_valid
    row = tl.arange(0, row_tile)[None, :]
    is_written = is_output[:, None] & (row < num_rows)
    offset = row.to(tl.int64) * num_outputs + first + output[:, None]
    result = tl.sum(sums, axis=0)  # [outputs, row_tile]
    if has_deferred_norm:
        factor = (1.0 / tl.sqrt_rn(tl.sum(squares, axis=0) / num_inputs + eps))[None, :]
        result *= factor
    if has_bias:
        result += tl.load(bias_ptr + first + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    if gated:
        up = tl.sum(up_sums, axis=0)
        if has_deferred_norm:
            up *= factor
        if has_bias:
            up_bias_ptr = bias_ptr + num_outputs + first
            up += tl.load(up_bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
        result = silu_and_mul(result.to(dtype), up.to(dtype))
    if fused_add_norm:
        # Rounded at the same places as separate kernels.
        total = (result.to(dtype).to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + offset, total, mask=is_written)
        total = tl.where(is_written, total.to(tl.float32), 0.0)
        part_ptr = squares_ptr + tl.program_id(0) * num_rows + tl.arange(0, row_tile)
        tl.store(part_ptr, tl.sum(total * total, axis=0), mask=tl.arange(0, row_tile) < num_rows)
        result = total * norm_weight.to(tl.float32)[:, None]
    tl.store(output_ptr + offset, result.to(dtype), mask=is_written)
