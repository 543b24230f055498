"""Linear layers on a GPU: Triton kernels for the few rows of a decode step, the vendor's library for more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fleetfoot.kernels.linear.few_rows import FusedAddNorm
from fleetfoot.kernels.linear.linear import check_replacement
from fleetfoot.kernels.linear.silu_and_mul import silu_and_mul_triton
from fleetfoot.kernels.linear.staged import StagedTiling, linear_staged
from fleetfoot.kernels.linear.streamed import StreamedTiling, linear_streamed
from fleetfoot.kernels.linear.tiled import TiledTiling, linear_tiled
from fleetfoot.kernels.linear.tilings import FewRowsTiling, Tiling, choose_tiling, gated_row_groups
from fleetfoot.kernels.norm.deferred_rms_norm import DeferredRMSNorm
from fleetfoot.kernels.runtime.gpu_limits import gpu_limits, has_hopper_kernels
from fleetfoot.kernels.runtime.triton_support import cdiv

_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes that the kernels support."""


class TritonLinear:
    """Implements `PreparedLinear`. The weight keeps its layout. The number of rows, which the host has, selects the
    kernel.

    Args:
        weight: ``[out, in]``; bias: ``[out]``.
    """

    is_dense = True
    _is_gated = False
    _may_split = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight.contiguous()
        self._bias = None if bias is None else bias.contiguous()
        self._limits = gpu_limits(weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Raises:
        ValueError: ``x`` is not ``[n, in]`` of the weight's dtype.
        """
        if x.shape[1] != self._weight.shape[1] or x.dtype is not self._weight.dtype:
            raise ValueError(
                f"x {list(x.shape)} {x.dtype} does not match a weight {list(self._weight.shape)} {self._weight.dtype}"
            )
        tiling = self._tiling(x.shape[0])
        if tiling is None:
            return self._of_many_rows(x)
        return self.launch(x if x.stride(1) == 1 else x.contiguous(), tiling)

    def launch(
        self,
        x: torch.Tensor,
        tiling: Tiling,
        *,
        deferred: DeferredRMSNorm | None = None,
        add_norm: FusedAddNorm | None = None,
    ) -> torch.Tensor:
        """`__call__` with a given tiling.

        Args:
            deferred: the norm of ``x``. add_norm: the sum and norm after the product. Both for few rows only.
        """
        shape: tuple[int, ...] = (x.shape[0], self._num_outputs)
        dtype = x.dtype
        if isinstance(tiling, TiledTiling) and tiling.splits > 1:
            shape, dtype = (tiling.splits, *shape), torch.float32
        output = torch.empty(shape, dtype=dtype, device=x.device) if add_norm is None else add_norm.result.weighted
        arguments = (output, x, self._weight, self._bias, self._is_gated)
        if isinstance(tiling, StagedTiling):
            linear_staged(*arguments, tiling, deferred, add_norm)
        elif isinstance(tiling, StreamedTiling):
            linear_streamed(*arguments, tiling, deferred, add_norm)
        else:
            linear_tiled(*arguments, tiling)
        return output

    def weight(self) -> torch.Tensor:
        return self._weight

    def replace(self, weight: torch.Tensor) -> None:
        """Copy another weight to the memory of this one, which captured graphs read."""
        check_replacement(weight, self._weight.shape, self._weight.dtype)
        if weight.data_ptr() != self._weight.data_ptr() or weight.device != self._weight.device:
            self._weight.copy_(weight)

    @property
    def _num_outputs(self) -> int:
        return self._weight.shape[0] // (2 if self._is_gated else 1)

    def _of_many_rows(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def _tiling(self, num_rows: int) -> Tiling | None:
        if self._weight.dtype not in _DTYPES:
            return None
        return choose_tiling(
            num_rows,
            self._num_outputs,
            self._weight.shape[1],
            gated=self._is_gated,
            may_split=self._may_split,
            limits=self._limits,
        )


class ChainedLinear(TritonLinear):
    """A linear layer in the chain of a fused decoder: norms before and after it, and the residual sum, are part of the
    product if the kernel supports that. It reads a weight that a layer owns."""

    def __call__(self, x: torch.Tensor | DeferredRMSNorm) -> torch.Tensor:
        """``x``: ``[n, in]``, or a deferred norm if `reads_deferred_norm`.

        Raises:
            ValueError: ``x`` is not ``[n, in]`` of the weight's dtype, or a deferred norm of too many rows.
        """
        if not isinstance(x, DeferredRMSNorm):
            return super().__call__(x)
        num_rows = len(x.weighted)
        tiling = self._tiling(num_rows)
        if not isinstance(tiling, FewRowsTiling) or x.weighted.shape[1] != self._weight.shape[1]:
            raise ValueError(f"a deferred norm {list(x.weighted.shape)} is not supported: see reads_deferred_norm()")
        return self.launch(x.weighted, tiling, deferred=x)

    def reads_deferred_norm(self, num_rows: int) -> bool:
        """Whether a deferred norm of this number of rows is supported. In float16, unscaled values may overflow."""
        return self._weight.dtype is torch.bfloat16 and isinstance(self._tiling(num_rows), FewRowsTiling)


class ChainedGateUp(ChainedLinear):
    """``x [n, in]`` -> ``silu(x @ gate.T) * (x @ up.T) [n, out / 2]``, with the rows of gate first."""

    _is_gated = True

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        has_kernel = bias is None and weight.dtype in _DTYPES
        self._has_hopper_kernel = has_kernel and has_hopper_kernels(weight.device)

    def _of_many_rows(self, x: torch.Tensor) -> torch.Tensor:
        if self._has_hopper_kernel and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0:
            num_sms = self._limits.num_sms
            groups = gated_row_groups(x.shape[0], self._num_outputs, x.shape[1], num_sms)
            if groups is not None:
                from fleetfoot.kernels.linear.gated_hopper import gated_linear_hopper

                return gated_linear_hopper(x, self._weight, groups, num_sms)
        return silu_and_mul_triton(F.linear(x, self._weight, self._bias))


class ChainedResidual(ChainedLinear):
    """A layer with an output that is added to the residual stream. `__call__` may return partial sums ``[splits, n,
    out]`` float32 for the next norm."""

    _may_split = True

    def add_to(self, x: torch.Tensor, residual: torch.Tensor) -> bool:
        """Add the product to ``residual [n, out]`` in place, if the library multiplies: it adds in the same pass. The
        sum is rounded once instead of twice. Returns False if nothing was done."""
        if self._bias is not None or self._tiling(x.shape[0]) is not None:
            return False
        residual.addmm_(x, self._weight.t())
        return True

    def add_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
    ) -> DeferredRMSNorm | None:
        """The sum with ``residual [n, out]`` and its deferred norm; None: not supported for this number of rows."""
        tiling = self._tiling(len(x))
        if not isinstance(tiling, FewRowsTiling) or not (x.dtype is self._weight.dtype is torch.bfloat16):
            return None
        residual = residual.contiguous()  # like the result
        result = DeferredRMSNorm.empty(residual, cdiv(residual.shape[1], tiling.outputs), eps)
        add_norm = FusedAddNorm(residual, norm_weight, result)
        self.launch(x if x.stride(1) == 1 else x.contiguous(), tiling, add_norm=add_norm)
        return result


@dataclass(frozen=True, slots=True)
class LinearChain:
    """The types of linear layers in a fused decoder's dependent launches. They read weight and bias in place."""

    linear: type[ChainedLinear]
    gate_up: type[ChainedGateUp]
    residual: type[ChainedResidual]


TRITON_CHAIN = LinearChain(ChainedLinear, ChainedGateUp, ChainedResidual)
