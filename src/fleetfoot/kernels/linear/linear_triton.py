"""Linear layers on a GPU: Triton kernels for the few rows of a decode step, the vendor's library for more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fleetfoot.kernels.elementwise import DeferredRMSNorm, DeferredSum, gelu_and_mul_triton, silu_and_mul_triton
from fleetfoot.kernels.linear.choices import LinearChoices, ProductKind
from fleetfoot.kernels.linear.linear import PlainLinear
from fleetfoot.kernels.linear.rank_sums import RankSums
from fleetfoot.kernels.linear.roles import InputRole, OutputRole
from fleetfoot.kernels.linear.tilings import Tiling
from fleetfoot.kernels.linear.triton_kernels import launch_linear
from fleetfoot.kernels.runtime.gpu_limits import gpu_limits
from fleetfoot.kernels.runtime.row_padding import empty_rows
from fleetfoot.kernels.runtime.triton_support import cdiv

if TYPE_CHECKING:
    from fleetfoot.records.forward_context import AttentionMetadata, RotaryInputs

_ACTIVATIONS = {"silu": silu_and_mul_triton, "gelu_tanh": gelu_and_mul_triton}


class TritonLinear(PlainLinear):
    """The weight keeps its layout. The number of rows, which the host has, selects the kernel.

    Args:
        weight: ``[out, in]``; bias: ``[out]``.
    """

    Choices: ClassVar[type[LinearChoices]] = LinearChoices
    _kind: ProductKind | None = None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, **role: Any) -> None:
        """``role``: other fields of `LinearChoices`."""
        super().__init__(weight.contiguous(), None if bias is None else bias.contiguous())
        self._limits, dtype = gpu_limits(weight.device), str(weight.dtype).removeprefix("torch.")
        self._choices = self.Choices(
            self._kind, weight.shape[0], weight.shape[1], self._limits, dtype, bias is not None, **role
        )
        self._num_outputs, self._num_inputs = self._choices.num_outputs, self._choices.num_inputs

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Raises:
        ValueError: ``x`` is not ``[n, in]`` of the weight's dtype.
        """
        num_rows, num_inputs = x.shape
        if num_inputs != self._num_inputs or x.dtype is not self._weight.dtype:
            raise ValueError(
                f"x {list(x.shape)} {x.dtype} does not match a weight {list(self._weight.shape)} {self._weight.dtype}"
            )
        tiling = self._choices.tiling(num_rows)
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
        choices = self._choices
        activation = choices.activation if choices.is_gated else ""
        launch_linear(output, x, self._weight, self._bias, activation, tiling, deferred, scale=choices.scale)
        return output

    def _of_many_rows(self, x: torch.Tensor) -> torch.Tensor:
        return super().__call__(x)


class ChainedLinear(TritonLinear):
    """A linear layer in the chain of a fused decoder: norms before and after it, and the residual sum, are part of the
    product if a kernel supports that. It reads a weight that a layer owns. This class computes q, k and v."""

    _kind: ProductKind = "qkv"

    def __call__(self, x: torch.Tensor | DeferredRMSNorm | DeferredSum) -> torch.Tensor:
        """``x``: ``[n, in]``, a deferred norm if `reads_deferred_norm`, or a deferred sum if `reads_deferred_sum`.

        Raises:
            ValueError: ``x`` is not ``[n, in]`` of the weight's dtype, or is deferred with too many rows.
        """
        if isinstance(x, DeferredSum):
            tiling = self._choices.tiling(len(x.output))
            if tiling is None or not self.reads_deferred_sum(len(x.output)) or x.output.shape[1] != self._num_inputs:
                raise ValueError(f"a deferred sum {list(x.output.shape)} is not supported: see reads_deferred_sum()")
            return self.launch(x.output, tiling, x)
        if not isinstance(x, DeferredRMSNorm):
            return super().__call__(x)
        num_rows, num_inputs = x.weighted.shape
        if not self.reads_deferred_norm(num_rows) or num_inputs != self._num_inputs:
            raise ValueError(f"a deferred norm {list(x.weighted.shape)} is not supported: see reads_deferred_norm()")
        tiling = self._choices.tiling(num_rows)
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
        return None

    def reads_deferred_norm(self, num_rows: int) -> bool:
        """Whether a deferred norm of this number of rows is supported."""
        return self._choices.reads_norm(num_rows)

    def reads_deferred_sum(self, num_rows: int) -> bool:
        """Whether a deferred sum of this number of rows is supported."""
        return self._choices.reads_sum(num_rows)


class ChainedGateUp(ChainedLinear):
    """``x [n, in]`` -> ``silu(x @ gate.T) * (x @ up.T) [n, out / 2]``, with the rows of gate first; or with GELU."""

    _kind = "gated"

    def _of_many_rows(self, x: torch.Tensor) -> torch.Tensor:
        return _ACTIVATIONS[self._choices.activation](super()._of_many_rows(x))


class ChainedResidual(ChainedLinear):
    """A layer with an output that is added to the residual stream, times ``scale``. `__call__` may return partial sums
    ``[splits, n, out]`` float32 for the next norm."""

    _kind = "residual"

    def _of_many_rows(self, x: torch.Tensor) -> torch.Tensor:
        output, scale = super()._of_many_rows(x), self._choices.scale
        return output if scale == 1.0 else output.mul_(scale)

    def add_to(self, x: torch.Tensor, residual: torch.Tensor) -> bool:
        """Add the product to ``residual [n, out]`` in place, if the library multiplies: it adds in the same pass. The
        sum is rounded once instead of twice. Returns False if nothing was done."""
        if self._bias is not None or self._choices.tiling(x.shape[0]) is not None:
            return False
        residual.addmm_(x, self._weight.t(), alpha=self._choices.scale)
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
        tiling = self._choices.tiling(num_rows)
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
        sums: dict[str, Any] = {"scale": self._choices.scale, "rank_sums": rank_sums}
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
        return ChainedResidual(weight, bias, scale=role.scale)
    if role.kind == "gated":
        return ChainedGateUp(weight, bias, activation=role.activation)
    return ChainedLinear(weight, bias, head_dim=role.head_dim)
