"""What is part of a product of few rows with a quantized weight: norms on both sides, the residual sum, a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fleetfoot.kernels.elementwise import DeferredRMSNorm
from fleetfoot.kernels.runtime.triton_support import next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl


@dataclass(frozen=True, slots=True)
class Epilogue:
    """As of `fleetfoot.kernels.linear.triton_kernels.launch_linear`."""

    deferred: DeferredRMSNorm | None = None
    """The norm of the input."""
    add_norm: tuple[torch.Tensor, torch.Tensor, DeferredRMSNorm] | None = None
    """The residual, the weight of the next norm, and the result of that, with `DeferredRMSNorm.weighted` as output."""
    gated: int = 0
    """1: SiLU, 2: GELU, of the first half of the outputs, times the second; 0: neither."""
    scale: float = 1.0

    @property
    def num_parts(self) -> int:
        return 1 if self.deferred is None else len(self.deferred.squares)

    @property
    def eps(self) -> float:
        return 0.0 if self.deferred is None else self.deferred.eps

    def tensors(self, output: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Squares, residual, norm weight, total and squares of the result; ``output`` in the place of what is not
        there."""
        residual = norm_weight = total = squares = output
        if self.add_norm is not None:
            residual, norm_weight, result = self.add_norm
            total, squares = result.total, result.squares
        return output if self.deferred is None else self.deferred.squares, residual, norm_weight, total, squares

    def options(self, *, has_bias: bool) -> dict[str, Any]:
        return {
            "parts_tile": next_power_of_2(self.num_parts), "has_deferred_norm": self.deferred is not None,
            "ends": "product" if self.add_norm is None else "sum", "gated": self.gated, "scale": self.scale,
            "has_bias": has_bias,
        }  # fmt: skip


PLAIN_EPILOGUE = Epilogue()


@triton_kernel()
def load_norm_inputs(
    squares_ptr, residual_ptr, unused, first, num_valid, num_parts, num_rows, num_outputs,
    parts_tile: tl.constexpr, outputs: tl.constexpr, row_tile: tl.constexpr, has_deferred_norm: tl.constexpr,
    ends: tl.constexpr,
):  # fmt: skip
    """``squares [parts_tile, row_tile]`` and ``residual [outputs, row_tile]`` for `write_outputs`."""
    squares = unused
    row = tl.arange(0, row_tile)[None, :]
    if has_deferred_norm:
        part = tl.arange(0, parts_tile)[:, None]
        squares = tl.load(squares_ptr + part * num_rows + row, mask=(part < num_parts) & (row < num_rows), other=0.0)
    residual = unused
    if ends == "sum":
        output = tl.arange(0, outputs)[:, None]
        residual_ptrs = residual_ptr + row.to(tl.int64) * num_outputs + first + output
        residual = tl.load(residual_ptrs, mask=(output < num_valid) & (row < num_rows), other=0.0)
    return squares, residual
