"""RMS normalisation on a GPU: one program for each row, which is read once and stays in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.norm.rms_norm import add_rms_norm_torch, rms_norm_torch
from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl

MAX_SIZE = 65536
"""The longest row; beyond, the twin runs."""


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `rms_norm_torch`: ``x [..., hidden]`` -> the same shape.

    Raises:
        ValueError: the weight is of another size.
    """
    size = x.shape[-1]
    if size > MAX_SIZE:
        return rms_norm_torch(x, weight, eps)
    x = x.contiguous()
    output = torch.empty_like(x)
    num_rows = x.numel() // size if size else 0
    _launch(output, output, x, output, weight, eps, num_rows, size, num_parts=0, has_residual=False)
    return output


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `add_rms_norm_torch`; ``x`` is like ``residual [num_tokens, hidden]``, or partial sums of it.

    Raises:
        ValueError: shapes that do not fit together.
    """
    size = residual.shape[-1]
    if size > MAX_SIZE:
        return add_rms_norm_torch(x, residual, weight, eps)
    x, residual = x.contiguous(), residual.contiguous()
    output, total = torch.empty_like(residual), torch.empty_like(residual)
    num_rows = residual.numel() // size if size else 0
    num_parts = x.shape[0] if x.ndim > residual.ndim else 0
    _launch(output, total, x, residual, weight, eps, num_rows, size, num_parts=num_parts, has_residual=True)
    return output, total


def _launch(
    output: torch.Tensor,
    total: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    num_rows: int,
    size: int,
    *,
    num_parts: int,
    has_residual: bool,
) -> None:
    if weight.shape != (size,) or x.shape[x.ndim - residual.ndim :] != residual.shape:
        raise ValueError(
            f"rms_norm: tensors that do not fit together: x {list(x.shape)}, residual {list(residual.shape)}, "
            f"weight {list(weight.shape)}"
        )
    if num_rows == 0:
        return
    tile = next_power_of_2(size)
    overlap = can_overlap(x.device)
    _rms_norm_kernel[(num_rows,)](
        output,
        total,
        x,
        residual,
        weight,
        eps,
        num_rows,
        size,
        num_parts=num_parts,
        has_residual=has_residual,
        tile=tile,
        overlap=overlap,
        num_warps=min(16, max(4 if tile >= 1024 else 1, tile // 512)),
        **launch_options(overlap),
    )


@triton_kernel(unspecialized=("num_rows",))
def _rms_norm_kernel(
    output_ptr,
    total_ptr,
    x_ptr,
    residual_ptr,
    weight_ptr,
    eps,
    num_rows,
    size,
    num_parts: tl.constexpr,
    has_residual: tl.constexpr,
    tile: tl.constexpr,
    overlap: tl.constexpr,
):
    launch_dependents(overlap)
    column = tl.arange(0, tile)
    in_row = column < size
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)  # [tile], like all below
    wait_for_inputs(overlap)
    offset = tl.program_id(0).to(tl.int64) * size + column
    value = tl.load(x_ptr + offset, mask=in_row, other=0.0)
    if num_parts > 0:
        for part in tl.static_range(1, num_parts):
            value += tl.load(x_ptr + part * num_rows.to(tl.int64) * size + offset, mask=in_row, other=0.0)
        value = value.to(output_ptr.dtype.element_ty)
    if has_residual:
        residual = tl.load(residual_ptr + offset, mask=in_row, other=0.0)
        value = (value.to(tl.float32) + residual.to(tl.float32)).to(output_ptr.dtype.element_ty)
        tl.store(total_ptr + offset, value, mask=in_row)
    value = value.to(tl.float32)
    inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(value * value, axis=0) / size + eps)
    tl.store(output_ptr + offset, (value * inverse_rms * weight).to(output_ptr.dtype.element_ty), mask=in_row)
