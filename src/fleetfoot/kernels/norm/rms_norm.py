"""RMS normalization (Zhang and Sennrich, 2019), plain and fused with the residual sum before it.

The references in torch, and a Triton kernel with one program per row, which keeps the row in registers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl

MAX_SIZE = 65536
"""Maximum row size of the Triton kernel; longer rows use the reference."""


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension.

    Args:
        x: ``[..., hidden]``.
        weight: ``[hidden]``.

    Returns:
        ``[..., hidden]`` in the dtype of ``x``: computed in float32, rounded once at the end.
    """
    x32 = x.float()
    inverse_rms = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)  # [..., 1]
    return (x32 * inverse_rms * weight.float()).to(x.dtype)


def sum_parts(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """``x`` if it is shaped like ``residual``; partial sums ``[splits, *residual.shape]`` float32 are added up and
    rounded to the dtype of ``residual``."""
    return x if x.ndim == residual.ndim else x.sum(dim=0).to(residual.dtype)


def add_rms_norm_torch(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(x + residual), x + residual)``, both ``[num_tokens, hidden]``.

    The sum is rounded to the dtype before it is normalized, as in two separate steps.

    Args:
        x: ``[num_tokens, hidden]``, or partial sums of it: see `sum_parts`.
    """
    total = sum_parts(x, residual) + residual
    return rms_norm_torch(total, weight, eps), total


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `rms_norm_torch`: ``x [..., hidden]`` -> the same shape.

    Raises:
        ValueError: the size of the weight differs.
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
        ValueError: the shapes do not match.
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
            f"rms_norm: mismatched shapes: x {list(x.shape)}, residual {list(residual.shape)}, "
            f"weight {list(weight.shape)}"
        )
    if num_rows == 0:
        return
    tile = next_power_of_2(size)
    overlap = can_overlap(x.device)
    _rms_norm_kernel[(num_rows,)](
        output, total, x, residual, weight, eps, num_rows, size,
        num_parts=num_parts, has_residual=has_residual, tile=tile, overlap=overlap,
        num_warps=min(16, max(4 if tile >= 1024 else 1, tile // 512)), **launch_options(overlap),
    )  # fmt: skip


@triton_kernel(unspecialized=("num_rows",))
def _rms_norm_kernel(
    output_ptr, total_ptr, x_ptr, residual_ptr, weight_ptr, eps, num_rows, size,
    num_parts: tl.constexpr, has_residual: tl.constexpr, tile: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
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
