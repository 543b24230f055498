"""RMS normalisation (Zhang and Sennrich 2019), plain and fused with the residual sum before it."""

from __future__ import annotations

import torch


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

    The sum is rounded to the dtype before it is normalised, as it is when the two steps are done apart.

    Args:
        x: ``[num_tokens, hidden]``, or partial sums of it: see `sum_parts`.
    """
    total = sum_parts(x, residual) + residual
    return rms_norm_torch(total, weight, eps), total
