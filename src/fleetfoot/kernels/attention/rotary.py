"""Norm and rotation of heads within an attention kernel: from a linear layer's output to the tensor cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetfoot.kernels.runtime.triton_support import triton_kernel

if TYPE_CHECKING:
    import triton.language as tl


@triton_kernel(specialize=False)
def angles(cos_sin_ptr, position, is_row, head_dim: tl.constexpr, padded_dim: tl.constexpr):
    """Cosines and signed sines ``[n, padded_dim]`` for ``position [n]``: an element and its partner half a head away
    become ``element * cos + partner * sin``."""
    column = tl.arange(0, padded_dim)
    half: tl.constexpr = head_dim // 2
    is_low = column < half
    angle_ptrs = cos_sin_ptr + tl.maximum(position, 0)[:, None] * head_dim + (column % half)[None, :]
    mask = is_row[:, None] & (column < head_dim)[None, :]
    cos = tl.load(angle_ptrs, mask=mask, other=1.0)
    sin = tl.load(angle_ptrs + half, mask=mask, other=0.0)
    return cos, tl.where(is_low[None, :], -sin, sin)


@triton_kernel(specialize=False)
def norm_and_rotate(
    head_ptrs,
    is_row,
    norm_ptr,
    eps,
    cos,
    sin,
    head_dim: tl.constexpr,
    padded_dim: tl.constexpr,
    has_norm: tl.constexpr,
):
    """``[n, padded_dim]`` float32: heads at ``head_ptrs [n]``, normed if there is a norm, and rotated."""
    column = tl.arange(0, padded_dim)
    half: tl.constexpr = head_dim // 2
    partner = tl.where(column < half, column + half, column - half)
    mask = is_row[:, None] & (column < head_dim)[None, :]
    x = tl.load(head_ptrs[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(head_ptrs[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if has_norm:
        is_column = column < head_dim
        weight = tl.load(norm_ptr + column, mask=is_column, other=0.0).to(tl.float32)
        partner_weight = tl.load(norm_ptr + partner, mask=is_column, other=0.0).to(tl.float32)
        inverse_rms = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / head_dim + eps)
        x = x * inverse_rms[:, None] * weight[None, :]
        y = y * inverse_rms[:, None] * partner_weight[None, :]
    return x * cos + y * sin
