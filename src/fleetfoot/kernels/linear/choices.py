"""Which kernel multiplies with a matrix, for every number of rows. A layer launches what its choices name, and the plan
prints those of the same object."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

from fleetfoot.kernels.linear.tilings import MOST_SUMMED_ROWS, Tiling, choose_tiling
from fleetfoot.kernels.runtime.gpu_limits import GPULimits
from fleetfoot.kernels.runtime.row_buckets import row_bucket

ProductKind = Literal["gated", "residual", "qkv"]
_DTYPES = ("bfloat16", "float16")
"""Dtypes that the kernels support."""


@dataclass(eq=False)
class LinearChoices:
    """The Triton kernels of a weight ``[num_rows, num_inputs]``."""

    kind: ProductKind | None
    """Its place in a chain, see `kernels.linear.roles`; None: it is alone."""
    num_rows: int
    num_inputs: int
    limits: GPULimits
    dtype: str = "bfloat16"
    has_bias: bool = False
    scale: float = 1.0
    """Factor of the output."""
    head_dim: int = 0
    """As in `InputRole`."""
    activation: str = "silu"
    """The activation of kind ``gated``."""

    def __post_init__(self) -> None:
        self._tilings = cache(self._tiling)  # asked several times in a step

    @property
    def is_gated(self) -> bool:
        """Whether the product has the activation of gate and up."""
        return self.kind == "gated"

    @property
    def num_outputs(self) -> int:
        return self.num_rows // (2 if self.is_gated else 1)

    def tiling(self, rows: int) -> Tiling | None:
        """The kernel without norms, or with norms where `Tiling.supports_norms`; None: that of the library."""
        return self._tilings(row_bucket(rows))

    def _tiling(self, rows: int) -> Tiling | None:
        sizes = rows, self.num_outputs, self.num_inputs
        if self.dtype not in _DTYPES:
            return None
        return choose_tiling(*sizes, gated=self.is_gated, may_split=self.kind == "residual", limits=self.limits)

    def reads_norm(self, rows: int) -> bool:
        """Whether a product reads a deferred norm. In float16, unscaled values may overflow."""
        tiling = self.tiling(rows)
        return tiling is not None and tiling.supports_norms and self.dtype == "bfloat16"

    def reads_sum(self, rows: int) -> bool:
        """Whether a product reads a deferred sum."""
        tiling = self.tiling(rows) if rows <= MOST_SUMMED_ROWS else None
        return tiling is not None and tiling.supports_norms and self.dtype == "bfloat16"

    def text(self, rows: int) -> str:
        """The kernel without norms before or after it."""
        tiling = self.tiling(rows)
        if tiling is not None:
            return tiling.text(self.num_inputs)
        return f"library, {self.activation.removesuffix('_tanh')}_and_mul" if self.is_gated else "library"

    def text_with_norms(self, rows: int) -> str:
        """The kernel that reads a deferred norm, or makes one, where `reads_norm`."""
        return f"{self.text(rows)} {'with the next norm' if self.kind == 'residual' else 'after a norm'}"

    def rotates(self, rows: int) -> bool:
        """Whether the product of q, k and v after a deferred norm rotates and caches heads."""
        return False
