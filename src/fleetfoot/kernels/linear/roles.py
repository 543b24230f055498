"""Linear layers in the chain of kernels of a fused decoder: their roles, and what their kernels offer. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, overload

if TYPE_CHECKING:
    import torch

    from fleetfoot.kernels.elementwise import DeferredRMSNorm, DeferredSum
    from fleetfoot.kernels.linear.rank_sums import RankSums
    from fleetfoot.records.forward_context import AttentionMetadata, RotaryInputs


@dataclass(frozen=True, slots=True)
class InputRole:
    """A linear layer that begins a branch: it reads a norm."""

    kind: Literal["qkv", "gated"]
    head_dim: int = 0
    """Size of heads of q, k and v; 0: another kernel rotates and caches them."""
    activation: str = "silu"
    """Activation of a gated layer, which computes it too: see `MLPSpec.activation`."""


@dataclass(frozen=True, slots=True)
class OutputRole:
    """A linear layer that ends a branch. Its output is added to the residual stream, times ``scale``."""

    scale: float = 1.0


class ChainedInput(Protocol):
    """A linear layer in the chain of kernels of a fused decoder, with an `InputRole`."""

    def __call__(self, x: torch.Tensor | DeferredRMSNorm | DeferredSum) -> torch.Tensor:
        """``x``: ``[n, in]``, or a deferred norm or sum where it is supported."""

    def reads_deferred_norm(self, num_rows: int) -> bool:
        """Whether a deferred norm of so many rows is supported."""

    def reads_deferred_sum(self, num_rows: int) -> bool:
        """Whether a deferred sum of so many rows is supported."""

    def rotate_and_cache(
        self,
        x: torch.Tensor | DeferredRMSNorm | DeferredSum,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        num_heads: int,
        rotary: RotaryInputs,
    ) -> torch.Tensor | None:
        """The product of q, k and v, and `Kernels.rope_and_cache` of it, in one kernel; None: there is none."""


class ChainedOutput(Protocol):
    """The same with an `OutputRole`."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``x [n, in]`` -> ``[n, out]``, or partial sums ``[splits, n, out]`` float32 of it."""

    def weight(self) -> torch.Tensor:
        """``[out, in]``, which the kernel before may prefetch."""

    def add_to(self, x: torch.Tensor, residual: torch.Tensor) -> bool:
        """Add the product to ``residual [n, out]`` in place; False: nothing was done."""

    def add_and_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        rank_sums: RankSums | None = None,
    ) -> DeferredRMSNorm | None:
        """The sum with ``residual``, summed over ranks too, and its deferred norm; None: there is no such kernel."""

    def with_squares(
        self, x: torch.Tensor, rank_sums: RankSums | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The product, summed over ranks too, and the sums of its squares: `DeferredSum.output` and ``squares``; None:
        there is no such kernel."""


class ChainLinear(Protocol):
    """See `Kernels.linear_chain`."""

    @overload
    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None, role: InputRole) -> ChainedInput: ...

    @overload
    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None, role: OutputRole) -> ChainedOutput: ...
