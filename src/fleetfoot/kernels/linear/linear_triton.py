"""Linear layers on a GPU: Triton kernels for the few rows of a decode step, the vendor's library for more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fleetfoot.kernels.elementwise import DeferredRMSNorm, DeferredSum, gelu_and_mul_triton, silu_and_mul_triton
from fleetfoot.kernels.linear import decode_product, gated_product
from fleetfoot.kernels.linear.linear import PlainLinear
from fleetfoot.kernels.linear.product_tilings import (
    GatedTiling,
    ProductKind,
    ProductTiling,
    gated_tilings,
    product_tiling,
)
from fleetfoot.kernels.linear.rank_sums import RankSums
from fleetfoot.kernels.linear.roles import InputRole, OutputRole
from fleetfoot.kernels.linear.tilings import MOST_SUMMED_ROWS, Tiling, choose_tiling
from fleetfoot.kernels.linear.triton_kernels import launch_linear
from fleetfoot.kernels.runtime.cuda_source import can_compile
from fleetfoot.kernels.runtime.gpu_limits import gpu_limits, has_hopper_kernels
from fleetfoot.kernels.runtime.row_padding import empty_rows
from fleetfoot.kernels.runtime.triton_support import cdiv

if TYPE_CHECKING:
    from fleetfoot.records.forward_context import AttentionMetadata, RotaryInputs

_ACTIVATIONS = {"silu": silu_and_mul_triton, "gelu_tanh": gelu_and_mul_triton}
_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes that the kernels support."""


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether all rows begin at multiples of 16 bytes."""
    return x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


class TritonLinear(PlainLinear):
    """The weight keeps its layout. The number of rows, which the host has, selects the kernel.

    Args:
        weight: ``[out, in]``; bias: ``[out]``.
    """

    _activation = ""
    """Activation of a gated layer."""
    _scale = 1.0
    _may_split = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight.contiguous(), None if bias is None else bias.contiguous())
        num_rows, self._num_inputs = weight.shape
        self._num_outputs = num_rows // (2 if self._activation else 1)
        self._is_supported = weight.dtype in _DTYPES
        self._limits = gpu_limits(weight.device)
        self._is_hopper = self._is_supported and has_hopper_kernels(weight.device)
        self._has_hopper_kernel = bias is None and self._is_hopper
        self._has_products = self._is_hopper and weight.dtype is torch.bfloat16 and can_compile(weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Raises:
        ValueError: ``x`` is not ``[n, in]`` of the weight's dtype.
        """
        num_rows, num_inputs = x.shape
        if num_inputs != self._num_inputs or x.dtype is not self._weight.dtype:
            raise ValueError(
                f"x {list(x.shape)} {x.dtype} does not match a weight {list(self._weight.shape)} {self._weight.dtype}"
            )
        tiling = self._tiling(num_rows)
        return self._of_many_rows(x) if tiling is None else self.launch(x, tiling)

    def launch(
        self, x: torch.Tensor, tiling: Tiling, deferred: DeferredRMSNorm | DeferredSum | None = None
    ) -> torch.Tensor:
        """`__call__` with a given tiling. ``deferred``: the norm or sum of ``x``, if the tiling supports it."""
        if tiling.splits > 1:
            shape = tiling.splits, x.shape[0], self._num_outputs
            output = torch.empty(shape, dtype=torch.float32, device=x.device)
        else:
            output = empty_rows(x.shape[0], self._num_outputs, like=x)
        x = x if x.stride(1) == 1 else x.contiguous()
        if tiling.kernel == "hopper":
            from fleetfoot.kernels.linear.tiled_hopper import launch_linear_hopper

            x = x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)
            launch_linear_hopper(output, x, self._weight, tiling, self._limits.num_sms)
        else:
            launch_linear(output, x, self._weight, self._bias, self._activation, tiling, deferred, scale=self._scale)
        return output

    def _of_many_rows(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x)

    def _tiling(self, num_rows: int) -> Tiling | None:
        if not self._is_supported:
            return None
        hopper = self._has_hopper_kernel and self._scale == 1.0 and self._activation in ("", "silu")
        gated, may_split, limits = bool(self._activation), self._may_split, self._limits
        sizes = num_rows, self._num_outputs, self._num_inputs
        return choose_tiling(*sizes, gated=gated, may_split=may_split, limits=limits, hopper=hopper)


class ChainedLinear(TritonLinear):
    """A linear layer in the chain of a fused decoder: norms before and after it, and the residual sum, are part of the
    product if a kernel supports that. It reads a weight that a layer owns. This class computes q, k and v."""

    _kind: ProductKind = "qkv"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, head_dim: int = 0) -> None:
        """``head_dim``: as in `InputRole`."""
        super().__init__(weight, bias)
        self._head_dim = head_dim

    def __call__(self, x: torch.Tensor | DeferredRMSNorm | DeferredSum) -> torch.Tensor:
        """``x``: ``[n, in]``, a deferred norm if `reads_deferred_norm`, or a deferred sum if `reads_deferred_sum`.

        Raises:
            ValueError: ``x`` is not ``[n, in]`` of the weight's dtype, or is deferred with too many rows.
        """
        if isinstance(x, DeferredSum):
            tiling = self._tiling(len(x.output))
            if tiling is None or not self.reads_deferred_sum(len(x.output)) or x.output.shape[1] != self._num_inputs:
                raise ValueError(f"a deferred sum {list(x.output.shape)} is not supported: see reads_deferred_sum()")
            return self.launch(x.output, tiling, x)
        if not isinstance(x, DeferredRMSNorm):
            return super().__call__(x)
        num_rows, num_inputs = x.weighted.shape
        if not self.reads_deferred_norm(num_rows) or num_inputs != self._num_inputs:
            raise ValueError(f"a deferred norm {list(x.weighted.shape)} is not supported: see reads_deferred_norm()")
        tiling = self._tiling(num_rows)
        if tiling is not None and tiling.supports_norms:
            return self.launch(x.weighted, tiling, x)
        return super().__call__(x.finished())

    def rotate_and_cache(
        self,
        x: torch.Tensor | DeferredRMSNorm | DeferredSum,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        num_heads: int,
        rotary: RotaryInputs,
    ) -> torch.Tensor | None:
        """q, k and v of ``x``, and `Kernels.rope_and_cache` of them, in one kernel; None: not supported for these rows,
        or ``x`` is no deferred norm."""
        if kv_cache.dtype is not self._weight.dtype or kv_cache.stride(4) != 1 or not isinstance(x, DeferredRMSNorm):
            return None
        tiling = self._product_tiling(x.weighted.shape[0])
        if not isinstance(tiling, ProductTiling):
            return None
        return decode_product.rotate_and_cache(
            x, self._weight, self._bias, tiling, kv_cache, metadata, num_heads, rotary
        )

    def reads_deferred_norm(self, num_rows: int) -> bool:
        """Whether a deferred norm of this number of rows is supported. In float16, unscaled values may overflow."""
        if self._weight.dtype is not torch.bfloat16:
            return False
        tiling = self._tiling(num_rows)
        return (tiling is not None and tiling.supports_norms) or self._product_tiling(num_rows) is not None

    def reads_deferred_sum(self, num_rows: int) -> bool:
        """Whether a deferred sum of this number of rows is supported."""
        tiling = self._tiling(num_rows) if num_rows <= MOST_SUMMED_ROWS else None
        return tiling is not None and tiling.supports_norms and self._weight.dtype is torch.bfloat16

    def _product_tiling(self, num_rows: int) -> ProductTiling | GatedTiling | None:
        """The tiling of `decode_product`, or of `gated_product`; None: neither is used with norms."""
        if not self._has_products or self._scale != 1.0:
            return None
        if self._activation == "gelu_tanh":
            return None
        if self._bias is not None and (self._kind != "qkv" or self._bias.data_ptr() % 16):
            return None
        if self._kind == "qkv" and self._head_dim not in (64, 128):
            return None
        return product_tiling(num_rows, self._kind, *self._weight.shape, self._limits.num_sms)


class ChainedGateUp(ChainedLinear):
    """``x [n, in]`` -> ``silu(x @ gate.T) * (x @ up.T) [n, out / 2]``, with the rows of gate first; or with GELU."""

    _kind = "gated"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, activation: str = "silu") -> None:
        self._activation = activation
        super().__init__(weight, bias)

    def __call__(self, x: torch.Tensor | DeferredRMSNorm | DeferredSum) -> torch.Tensor:
        """See `ChainedLinear`."""
        if isinstance(x, DeferredSum):
            return super().__call__(x)
        if isinstance(x, DeferredRMSNorm):
            num_rows, num_inputs = x.weighted.shape
            product = self._product_tiling(num_rows)
            if product is not None and num_inputs == self._num_inputs:
                if isinstance(product, GatedTiling):
                    return gated_product.multiply_gated_wide(x, self._weight, product)
                return decode_product.multiply_gated(x, self._weight, product)
            return super().__call__(x)
        for tiling in self._gated_tilings(x)[:1]:
            return gated_product.multiply_gated_wide(x, self._weight, tiling, self._activation)
        return super().__call__(x)

    def _gated_tilings(self, x: torch.Tensor) -> Sequence[GatedTiling]:
        """Tilings of `gated_product`, the best first; none: that kernel is not used."""
        num_rows, num_inputs = x.shape
        is_supported = self._has_hopper_kernel and self._has_products and x.dtype is self._weight.dtype
        if not is_supported or num_inputs != self._num_inputs or x.stride(1) != 1 or not _is_aligned(x):
            return ()
        return gated_tilings(num_rows, *self._weight.shape, self._limits.num_sms)

    def _of_many_rows(self, x: torch.Tensor) -> torch.Tensor:
        return _ACTIVATIONS[self._activation](super()._of_many_rows(x))


class ChainedResidual(ChainedLinear):
    """A layer with an output that is added to the residual stream, times ``scale``. `__call__` may return partial sums
    ``[splits, n, out]`` float32 for the next norm."""

    _may_split = True
    _kind = "residual"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, scale: float = 1.0) -> None:
        super().__init__(weight, bias)
        self._scale = scale

    def _of_many_rows(self, x: torch.Tensor) -> torch.Tensor:
        output = super()._of_many_rows(x)
        return output if self._scale == 1.0 else output.mul_(self._scale)

    def add_to(self, x: torch.Tensor, residual: torch.Tensor) -> bool:
        """Add the product to ``residual [n, out]`` in place, if the library multiplies: it adds in the same pass. The
        sum is rounded once instead of twice. Returns False if nothing was done."""
        if self._bias is not None or self._tiling(x.shape[0]) is not None:
            return False
        residual.addmm_(x, self._weight.t(), alpha=self._scale)
        return True

    def with_squares(
        self, x: torch.Tensor, rank_sums: RankSums | None = None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The product ``[n, out]``, summed over ranks too, and the squares of its columns, summed by program; None: not
        supported for this number of rows."""
        num_rows, num_outputs = x.shape[0], self._num_outputs
        tiling = self._norm_tiling(num_rows, rank_sums)
        if tiling is None or x.dtype is not self._weight.dtype:
            return None
        output = empty_rows(num_rows, num_outputs, like=x)
        squares = torch.empty((cdiv(num_outputs, tiling.outputs), num_rows), dtype=torch.float32, device=x.device)
        self._launch_end(output, x, tiling, rank_sums, squares_out=squares)
        return output, squares

    def _norm_tiling(self, num_rows: int, rank_sums: RankSums | None) -> Tiling | None:
        """The tiling of the kernel for few rows; None: it does not support this step."""
        tiling = self._tiling(num_rows)
        if tiling is None or not tiling.supports_norms:
            return None
        if rank_sums is not None:
            is_supported = self._bias is None and rank_sums.fits(num_rows, self._num_outputs)
            if not is_supported or not tiling.fits_at_once(self._num_outputs, self._limits):
                return None
        return tiling

    def _launch_end(
        self, output: torch.Tensor, x: torch.Tensor, tiling: Tiling, rank_sums: RankSums | None, **ends: Any
    ) -> None:
        x = x if x.stride(1) == 1 else x.contiguous()
        sums: dict[str, Any] = {"scale": self._scale, "rank_sums": rank_sums}
        launch_linear(output, x, self._weight, self._bias, "", tiling, **sums, **ends)

    def add_and_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        rank_sums: RankSums | None = None,
    ) -> DeferredRMSNorm | None:
        """The sum with ``residual [n, out]`` and its deferred norm; None: not supported for this number of rows.
        ``rank_sums``: the product is also summed over ranks, each of which makes this call."""
        if not (x.dtype is self._weight.dtype is torch.bfloat16):
            return None
        num_rows, num_outputs = x.shape[0], self._num_outputs
        product = self._product_tiling(num_rows) if rank_sums is None else None
        if isinstance(product, ProductTiling) and x.stride(1) == 1 and _is_aligned(x):
            return decode_product.add_and_norm(x, self._weight, product, residual.contiguous(), norm_weight, eps)
        tiling = self._norm_tiling(num_rows, rank_sums)
        if tiling is None:
            return None
        residual = residual.contiguous()  # like the result
        result = DeferredRMSNorm.empty(residual, cdiv(num_outputs, tiling.outputs), eps)
        self._launch_end(result.weighted, x, tiling, rank_sums, add_norm=(residual, norm_weight, result))
        return result


def linear_chain_triton(weight: torch.Tensor, bias: torch.Tensor | None, role: InputRole | OutputRole) -> ChainedLinear:
    """See `Kernels.linear_chain`."""
    if isinstance(role, OutputRole):
        return ChainedResidual(weight, bias, role.scale)
    if role.kind == "gated":
        return ChainedGateUp(weight, bias, role.activation)
    return ChainedLinear(weight, bias, role.head_dim)
