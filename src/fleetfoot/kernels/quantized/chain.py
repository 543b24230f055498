"""Quantized linear layers in the chain of kernels of a fused decoder, for few rows: see `kernels.linear.roles`.

A deferred norm lacks a factor for each row. It cancels in the values that FP8 by token or by group makes of a row, so
the product is multiplied by it afterwards, as with plain weights. More rows have norms as kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, overload

import torch

from fleetfoot.kernels.elementwise import (
    DeferredRMSNorm,
    DeferredSum,
    gelu_and_mul_triton,
    silu_and_mul_triton,
)
from fleetfoot.kernels.linear.roles import ChainedInput, ChainedOutput, InputRole, OutputRole
from fleetfoot.kernels.quantized import packed_triton, scaled_triton
from fleetfoot.kernels.quantized.epilogue import Epilogue
from fleetfoot.kernels.quantized.packed import PackedMatrix
from fleetfoot.kernels.quantized.scaled import ScaledMatrix
from fleetfoot.kernels.quantized.scaled_hopper import has_hopper_kernel
from fleetfoot.kernels.runtime.gpu_limits import gpu_limits
from fleetfoot.kernels.runtime.row_padding import empty_rows
from fleetfoot.kernels.runtime.triton_support import cdiv

if TYPE_CHECKING:
    from fleetfoot.kernels.linear.rank_sums import RankSums
    from fleetfoot.records.forward_context import AttentionMetadata, RotaryInputs

Matrix = ScaledMatrix | PackedMatrix
_ACTIVATIONS = {
    "silu": (1, silu_and_mul_triton),
    "gelu_tanh": (2, gelu_and_mul_triton),
}
_scaled = scaled_triton.scaled_linear_triton
_packed = packed_triton.packed_linear_triton


class ChainQuantized(Protocol):
    """See `Kernels.quantized_chain`."""

    @overload
    def __call__(self, weight: Matrix, role: InputRole) -> ChainedInput | None: ...

    @overload
    def __call__(self, weight: Matrix, role: OutputRole) -> ChainedOutput | None: ...


@overload
def quantized_chain_triton(weight: Matrix, role: InputRole) -> ChainedInput | None: ...


@overload
def quantized_chain_triton(weight: Matrix, role: OutputRole) -> ChainedOutput | None: ...


def quantized_chain_triton(weight: Matrix, role: InputRole | OutputRole) -> ChainedInput | ChainedOutput | None:
    """See `Kernels.quantized_chain`."""
    if isinstance(weight, ScaledMatrix):
        is_supported = scaled_triton.supports(torch.bfloat16, weight) and weight.activations != "static"
    else:
        is_supported = packed_triton.supports(torch.bfloat16, weight) and weight.order is None
    if not is_supported:
        return None
    return _Input(weight, role) if isinstance(role, InputRole) else _Output(weight, role)


class _Chained:
    def __init__(self, weight: Matrix) -> None:
        self._weight = weight
        self._stored = weight.values if isinstance(weight, ScaledMatrix) else weight.words
        self._num_inputs = weight.values.shape[1] if isinstance(weight, ScaledMatrix) else weight.num_inputs
        self._num_sms = gpu_limits(self._stored.device).num_sms
        if isinstance(weight, ScaledMatrix):
            # Without blocks, a chain of the others is as fast: they prefetch.
            self._hopper = weight.columns < self._num_inputs and has_hopper_kernel(weight, torch.bfloat16)
        else:
            self._hopper = packed_triton.has_hopper_kernel(weight)

    def rotate_and_cache(
        self,
        x: torch.Tensor | DeferredRMSNorm | DeferredSum,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        num_heads: int,
        rotary: RotaryInputs,
    ) -> torch.Tensor | None:
        return None

    def reads_deferred_sum(self, num_rows: int) -> bool:
        return False

    def with_squares(self, x: torch.Tensor, rank_sums: RankSums | None = None) -> None:
        return None

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        weight = self._weight
        return _scaled(x, weight) if isinstance(weight, ScaledMatrix) else _packed(x, weight)

    def _has_norms(self, num_rows: int, dtype: torch.dtype) -> bool:
        """Whether norms are part of the product. In float16, values without their factor may overflow."""
        return num_rows <= scaled_triton.FEW_ROWS and dtype is torch.bfloat16

    def _num_programs(self, num_rows: int, num_outputs: int) -> int:
        return cdiv(num_outputs, self._tiling(num_rows, num_outputs).outputs)

    def _tiling(
        self, num_rows: int, num_outputs: int, *, gated: bool = False
    ) -> scaled_triton.ScaledTiling | packed_triton.PackedTiling:
        sizes = num_rows, num_outputs, self._num_inputs
        if isinstance(self._weight, ScaledMatrix):
            options = {"hopper": self._hopper, "gated": gated}
            return scaled_triton.scaled_tiling(*sizes, self._weight.columns, self._num_sms, **options)
        return packed_triton.packed_tiling(*sizes, self._num_sms, hopper=self._hopper)

    def _launch(self, output: torch.Tensor, x: torch.Tensor, epilogue: Epilogue) -> None:
        x = x if x.stride(1) == 1 else x.contiguous()
        tiling = self._tiling(x.shape[0], output.shape[1], gated=epilogue.gated > 0)
        if epilogue.gated and tiling.kernel != "hopper":  # a stage has tiles of both halves
            tiling = replace(tiling, stages=max(2, tiling.stages // 2))
        if isinstance(self._weight, ScaledMatrix):
            assert isinstance(tiling, scaled_triton.ScaledTiling)
            scaled_triton.launch_scaled_few_rows(output, x, self._weight, tiling, epilogue)
        else:
            assert isinstance(tiling, packed_triton.PackedTiling)
            packed_triton.launch_packed_few_rows(output, x, self._weight, tiling, epilogue)


class _Input(_Chained):
    def __init__(self, weight: Matrix, role: InputRole) -> None:
        super().__init__(weight)
        self._gate = 0
        self._activate: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
        if role.kind == "gated":
            self._gate, self._activate = _ACTIVATIONS[role.activation]

    def reads_deferred_norm(self, num_rows: int) -> bool:
        return self._has_norms(num_rows, torch.bfloat16)

    def __call__(self, x: torch.Tensor | DeferredRMSNorm | DeferredSum) -> torch.Tensor:
        assert not isinstance(x, DeferredSum)
        deferred, given = (x, x.weighted) if isinstance(x, DeferredRMSNorm) else (None, x)
        num_rows = given.shape[0]
        if num_rows and (deferred is not None or (self._gate and num_rows <= scaled_triton.FEW_ROWS)):
            num_outputs = self._stored.shape[0] // (2 if self._gate else 1)
            output = empty_rows(num_rows, num_outputs, like=given)
            self._launch(output, given, Epilogue(deferred, gated=self._gate))
            return output
        return self._activate(self._multiply(given if deferred is None else deferred.finished()))


class _Output(_Chained):
    def __init__(self, weight: Matrix, role: OutputRole) -> None:
        super().__init__(weight)
        self._scale = role.scale

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        output = self._multiply(x)
        return output if self._scale == 1.0 else output * self._scale

    def weight(self) -> torch.Tensor:
        return self._stored

    def add_to(self, x: torch.Tensor, residual: torch.Tensor) -> bool:
        return False

    def add_and_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        rank_sums: RankSums | None = None,
    ) -> DeferredRMSNorm | None:
        num_rows = x.shape[0]
        if rank_sums is not None or not num_rows or not self._has_norms(num_rows, x.dtype):
            return None
        residual = residual.contiguous()
        result = DeferredRMSNorm.empty(residual, self._num_programs(num_rows, residual.shape[1]), eps)
        self._launch(result.weighted, x, Epilogue(add_norm=(residual, norm_weight, result), scale=self._scale))
        return result
