"""An RMSNorm that is computed by the matmuls before and after it, which saves a kernel launch in a decode step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeferredRMSNorm:
    """RMSNorm of ``total`` without the 1/rms factor of each row; the next matmul applies it to its product:
    ``(total * weight * factor) @ w.T`` is ``(total * weight) @ w.T * factor``.

    A program of the kernel that computes the sum has a few of its columns only. It cannot compute the factor, but sums
    the squares of these columns.
    """

    weighted: torch.Tensor
    """``[n, hidden]``: ``total`` times the norm's weight, in the dtype of both."""
    squares: torch.Tensor
    """``[parts, n]`` float32: of each row of ``total``, the squares of some of its columns, summed."""
    total: torch.Tensor
    """``[n, hidden]``: the residual stream."""
    eps: float

    @classmethod
    def empty(cls, residual: torch.Tensor, num_parts: int, eps: float) -> DeferredRMSNorm:
        """For a sum with ``residual [n, hidden]``, to be written by ``num_parts`` programs."""
        squares = torch.empty((num_parts, len(residual)), dtype=torch.float32, device=residual.device)
        return cls(torch.empty_like(residual), squares, torch.empty_like(residual), eps)

    def finished(self) -> torch.Tensor:
        """``[n, hidden]``: the complete norm, up to rounding."""
        mean_square = self.squares.sum(dim=0) / self.total.shape[1]
        return (self.weighted * torch.rsqrt(mean_square + self.eps)[:, None]).to(self.weighted.dtype)
