"""Linear layers on a Hopper GPU: kernels in Gluon and CUDA C++ beside those of `kernels.linear.linear_triton`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fleetfoot.kernels.elementwise import DeferredRMSNorm, DeferredSum
from fleetfoot.kernels.linear.linear_triton import ChainedGateUp, ChainedLinear, ChainedResidual, TritonLinear
from fleetfoot.kernels.linear.rank_sums import RankSums
from fleetfoot.kernels.linear.roles import InputRole, OutputRole
from fleetfoot.kernels.linear.tilings import Tiling
from fleetfoot.kernels.runtime.cuda_source import can_compile
from fleetfoot.kernels.runtime.row_padding import empty_rows
from fleetfoot.kernels_hopper.linear import decode_product, gated_product, tiled_hopper
from fleetfoot.kernels_hopper.linear.choices import HopperChoices
from fleetfoot.kernels_hopper.linear.product_tilings import GatedTiling, ProductTiling

if TYPE_CHECKING:
    from fleetfoot.records.forward_context import AttentionMetadata, RotaryInputs


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether all rows begin at multiples of 16 bytes, and have their elements side by side."""
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


class HopperLinear(TritonLinear):
    """See `TritonLinear`."""

    Choices = HopperChoices
    _choices: HopperChoices

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, **role: Any) -> None:
        super().__init__(weight, bias, **role)
        is_aligned = self._bias is None or self._bias.data_ptr() % 16 == 0
        self._choices.has_products = is_aligned and can_compile(weight.device)

    def launch(
        self, x: torch.Tensor, tiling: Tiling, deferred: DeferredRMSNorm | DeferredSum | None = None
    ) -> torch.Tensor:
        """See `TritonLinear.launch`."""
        if tiling.kernel != "hopper":
            return super().launch(x, tiling, deferred)
        num_rows, num_outputs = x.shape[0], self._num_outputs
        if tiling.splits > 1:
            output = torch.empty((tiling.splits, num_rows, num_outputs), dtype=torch.float32, device=x.device)
        else:
            output = empty_rows(num_rows, num_outputs, like=x)
        x = x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)
        tiled_hopper.launch_linear_hopper(output, x, self._weight, tiling, self._limits.num_sms)
        return output


class HopperInput(HopperLinear, ChainedLinear):
    """q, k and v."""

    def rotate_and_cache(
        self,
        x: torch.Tensor | DeferredRMSNorm | DeferredSum,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        num_heads: int,
        rotary: RotaryInputs,
    ) -> torch.Tensor | None:
        """See `ChainedInput.rotate_and_cache`."""
        if kv_cache.dtype is not self._weight.dtype or kv_cache.stride(4) != 1 or not isinstance(x, DeferredRMSNorm):
            return None
        tiling = self._choices.product(x.weighted.shape[0])
        if not isinstance(tiling, ProductTiling):
            return None
        return decode_product.rotate_and_cache(
            x, self._weight, self._bias, tiling, kv_cache, metadata, num_heads, rotary
        )


class HopperGateUp(HopperLinear, ChainedGateUp):
    """Gate and up, with the activation."""

    def __call__(self, x: torch.Tensor | DeferredRMSNorm | DeferredSum) -> torch.Tensor:
        """See `ChainedLinear`."""
        if isinstance(x, DeferredRMSNorm):
            product = self._choices.product(len(x.weighted))
            if product is None or x.weighted.shape[1] != self._num_inputs:
                return super().__call__(x)
            if isinstance(product, GatedTiling):
                return gated_product.multiply_gated_wide(x, self._weight, product)
            return decode_product.multiply_gated(x, self._weight, product)
        if isinstance(x, torch.Tensor) and x.shape[1] == self._num_inputs and x.dtype is self._weight.dtype:
            tiling = self._choices.gated(len(x))
            if tiling is not None and _is_aligned(x):
                return gated_product.multiply_gated_wide(x, self._weight, tiling, self._choices.activation)
        return super().__call__(x)


class HopperResidual(HopperLinear, ChainedResidual):
    """An output of a branch."""

    def add_and_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        rank_sums: RankSums | None = None,
    ) -> DeferredRMSNorm | None:
        """See `ChainedOutput.add_and_norm`."""
        product = self._choices.product(len(x)) if rank_sums is None else None
        if isinstance(product, ProductTiling) and x.dtype is self._weight.dtype and _is_aligned(x):
            return decode_product.add_and_norm(x, self._weight, product, residual.contiguous(), norm_weight, eps)
        return super().add_and_norm(x, residual, norm_weight, eps, rank_sums)


def linear_chain_hopper(weight: torch.Tensor, bias: torch.Tensor | None, role: InputRole | OutputRole) -> ChainedLinear:
    """See `Kernels.linear_chain`."""
    if isinstance(role, OutputRole):
        return HopperResidual(weight, bias, scale=role.scale)
    if role.kind == "gated":
        return HopperGateUp(weight, bias, activation=role.activation)
    return HopperInput(weight, bias, head_dim=role.head_dim)
