"""A norm that is left to the products before and behind it, which spares a decode step a kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PendingNorm:
    """What RMSNorm gives of ``total``, but for one factor in each row: whoever multiplies it next applies the factor to
    its product, where ``(total * weight * factor) @ w.T`` is ``(total * weight) @ w.T * factor``.

    Whoever makes the sum has a few of its columns, and cannot know the factor, but can add up the squares of those.
    """

    weighted: torch.Tensor
    """``[n, hidden]``: ``total`` times the norm's weight, in the dtype of both."""
    squares: torch.Tensor
    """``[parts, n]`` float32: of each row of ``total``, the squares of some of its columns, summed."""
    total: torch.Tensor
    """``[n, hidden]``: the residual stream."""
    eps: float

    @classmethod
    def empty(cls, residual: torch.Tensor, num_parts: int, eps: float) -> PendingNorm:
        """For a sum with ``residual [n, hidden]``, to be written by ``num_parts`` programs."""
        squares = torch.empty((num_parts, len(residual)), dtype=torch.float32, device=residual.device)
        return cls(torch.empty_like(residual), squares, torch.empty_like(residual), eps)

    def finished(self) -> torch.Tensor:
        """``[n, hidden]``: what the norm by itself would give, up to rounding."""
        mean_square = self.squares.sum(dim=0) / self.total.shape[1]
        return (self.weighted * torch.rsqrt(mean_square + self.eps)[:, None]).to(self.weighted.dtype)
