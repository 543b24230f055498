"""Row-wise operations between matmuls: RMSNorm (Zhang and Sennrich, 2019), plain, fused with the residual sum and the
norm before that, or deferred to the matmul after it, and the gate of a SwiGLU or GeGLU MLP (Shazeer, 2020).

The references in torch, and Triton kernels. The kernel of the norms keeps a row in the registers of one program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.row_padding import empty_rows, padded_rows
from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl

MAX_SIZE = 65536
"""Maximum row size of the Triton kernel of the norms; longer rows use the reference."""
_ACTIVATION_TILE = 1024
GATES = {"": 0, "silu": 1, "gelu_tanh": 2}
"""Numbers of activations within kernels; 0: the layer is not gated."""


def rms_norm_torch(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * (weight + offset)`` over the last dimension.

    Args:
        x: ``[..., hidden]``.
        weight: ``[hidden]``.
        offset: 1 for Gemma: its checkpoints hold the difference of each weight from 1.

    Returns:
        ``[..., hidden]`` in the dtype of ``x``: computed in float32, rounded once at the end.
    """
    x32 = x.float()
    inverse_rms = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + eps)  # [..., 1]
    scale = weight.float() + offset if offset else weight.float()
    return (x32 * inverse_rms * scale).to(x.dtype)


def sum_parts(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """``x`` if it is shaped like ``residual``; partial sums ``[splits, *residual.shape]`` float32 are added up and
    rounded to the dtype of ``residual``."""
    return x if x.ndim == residual.ndim else x.sum(dim=0).to(residual.dtype)


def add_rms_norm_torch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    output_weight: torch.Tensor | None = None,
    *,
    rms_norm: Callable[..., torch.Tensor] = rms_norm_torch,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(total), total)``, both ``[num_tokens, hidden]``, where ``total = x + residual``.

    The sum is rounded to the dtype before it is normalized, as in two separate steps.

    Args:
        x: ``[num_tokens, hidden]``, or partial sums of it: see `sum_parts`.
        weight: ``[hidden]``; None: the first result is the sum itself.
        offset: of all norms: see `rms_norm_torch`.
        output_weight: ``[hidden]``, of a norm of ``x`` before it is added; None: there is none.
        rms_norm: an implementation of `rms_norm_torch`.
    """
    x = sum_parts(x, residual)
    total = residual + (x if output_weight is None else rms_norm(x, output_weight, eps, offset))
    return total if weight is None else rms_norm(total, weight, eps, offset), total


@dataclass(frozen=True, slots=True)
class DeferredRMSNorm:
    """RMSNorm of ``total`` without the 1/rms factor of each row; the next matmul applies it to its product:
    ``(total * weight * factor) @ w.T`` is ``(total * weight) @ w.T * factor``. This saves a kernel in a decode step.

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
        """An empty value for a sum with ``residual [n, hidden]``, to be written by ``num_parts`` programs."""
        squares = torch.empty((num_parts, len(residual)), dtype=torch.float32, device=residual.device)
        weighted = empty_rows(*residual.shape, like=residual)
        return cls(weighted, squares, torch.empty_like(residual), eps)

    def finished(self) -> torch.Tensor:
        """``[n, hidden]``: the complete norm, up to rounding."""
        mean_square = self.squares.sum(dim=0) / self.total.shape[1]
        return (self.weighted * torch.rsqrt(mean_square + self.eps)[:, None]).to(self.weighted.dtype)


@dataclass(frozen=True, slots=True)
class DeferredSum:
    """RMSNorm of ``total = residual + rms_norm(output)``, both norms deferred to the next matmul: the squares of the
    output's columns are summed by the kernel that computes them, and those of the total by each program that reads it.
    """

    output: torch.Tensor
    """``[n, hidden]``: of the branch before."""
    squares: torch.Tensor
    """``[parts, n]`` float32: of each row of ``output``, the squares of some of its columns, summed."""
    residual: torch.Tensor
    """``[n, hidden]``: the residual stream before the sum."""
    output_weight: torch.Tensor
    """``[hidden]``, of the norm of the output; ``weight``: of the norm of the total."""
    weight: torch.Tensor
    eps: float
    offset: float
    """Offset of both norms: see `rms_norm_torch`."""
    total: torch.Tensor
    """``[n, hidden]``: the residual stream, which the next matmul writes."""


def silu_and_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``.

    Args:
        gate_up: ``[num_tokens, 2 * intermediate]``, the gate in the first half of each row.

    Returns:
        ``[num_tokens, intermediate]``, computed in float32 and rounded once at the end.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    if gate_up.dtype == torch.float32:
        return F.silu(gate) * up
    return (F.silu(gate.float()) * up.float()).to(gate_up.dtype)


def gelu_and_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up``, with the approximation of GELU by tanh; see `silu_and_mul_torch`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)


def mul_sigmoid_torch(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``x * sigmoid(gate)``, both ``[num_tokens, width]``; the rows of the gate may be parts of longer ones."""
    return x * gate.sigmoid()


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
    """See `rms_norm_torch`: ``x [..., hidden]`` -> the same shape.

    Raises:
        ValueError: the size of the weight differs.
    """
    if x.shape[-1] > MAX_SIZE:
        return rms_norm_torch(x, weight, eps, offset)
    return _rms_norm(x, None, weight, eps, offset)[0]


def add_rms_norm_triton(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    output_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `add_rms_norm_torch`; ``x`` is like ``residual [num_tokens, hidden]``, or partial sums of it.

    Raises:
        ValueError: the shapes do not match.
    """
    is_long = residual.shape[-1] > MAX_SIZE
    return (add_rms_norm_torch if is_long else _rms_norm)(x, residual, weight, eps, offset, output_weight)


def _rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor | None,
    eps: float,
    offset: float = 0.0,
    output_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm, and the sum with the residual; the norm twice without one."""
    x = x.contiguous()
    like = x if residual is None else residual.contiguous()
    shape, num_values, extra = like.shape, like.numel(), x.ndim - like.ndim
    size = shape[-1]
    weights = [each for each in (weight, output_weight) if each is not None]
    if any(each.shape != (size,) for each in weights) or (x.shape[extra:] if extra else x.shape) != shape:
        raise ValueError(
            f"rms_norm: mismatched shapes: x {list(x.shape)}, residual {list(shape)}, "
            f"weights {[list(each.shape) for each in weights]}"
        )
    total = output = torch.empty_like(like)
    if weight is not None:
        output = empty_rows(*shape, like=like)
        total = output if residual is None else total
    if num_values:
        num_rows, tile, overlap = num_values // size, next_power_of_2(size), can_overlap(x.device)
        _rms_norm_kernel[(padded_rows(num_rows) if like.ndim == 2 and weight is not None else num_rows,)](
            output, total, x, like, like if weight is None else weight,
            like if output_weight is None else output_weight, eps, num_rows, size,
            num_parts=x.shape[0] if extra else 0, has_residual=residual is not None, has_norm=weight is not None,
            has_output_norm=output_weight is not None, offset=offset, tile=tile, overlap=overlap,
            num_warps=min(16, max(4 if tile >= 1024 else 1, tile // 512)), **launch_options(overlap),
        )  # fmt: skip
    return output, total


@triton_kernel(unspecialized=("num_rows",))
def _rms_norm_kernel(
    output_ptr, total_ptr, x_ptr, residual_ptr, weight_ptr, output_weight_ptr, eps, num_rows, size,
    num_parts: tl.constexpr, has_residual: tl.constexpr, has_norm: tl.constexpr, has_output_norm: tl.constexpr,
    offset: tl.constexpr, tile: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    column = tl.arange(0, tile)  # [tile], like all below
    weight, output_weight = column, column
    if has_norm:
        weight = _load_weight(weight_ptr, column, size, offset)
    if has_output_norm:
        output_weight = _load_weight(output_weight_ptr, column, size, offset)
    wait_for_inputs(overlap)
    row = tl.program_id(0).to(tl.int64)
    place = row * size + column
    in_row = (column < size) & (row < num_rows)  # the rows of padding are zeros
    dtype = output_ptr.dtype.element_ty
    value = tl.load(x_ptr + place, mask=in_row, other=0.0)
    if num_parts > 0:
        for part in tl.static_range(1, num_parts):
            value += tl.load(x_ptr + part * num_rows.to(tl.int64) * size + place, mask=in_row, other=0.0)
        value = value.to(dtype)
    if has_output_norm:
        # The selection keeps product and sum from being one instruction, which in float32 rounds once instead of twice.
        value = tl.where(in_row, _normed_row(value.to(tl.float32), output_weight, size, eps), 0.0).to(dtype)
    if has_residual:
        residual = tl.load(residual_ptr + place, mask=in_row, other=0.0)
        value = (value.to(tl.float32) + residual.to(tl.float32)).to(dtype)
        tl.store(total_ptr + place, value, mask=in_row)
    if has_norm:
        normed = _normed_row(value.to(tl.float32), weight, size, eps)
        tl.store(output_ptr + place, normed.to(dtype), mask=column < size)


@triton_kernel()
def _load_weight(weight_ptr, column, size, offset: tl.constexpr):
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    if offset != 0:
        weight += offset
    return weight


@triton_kernel(specialize=False)
def _normed_row(value, weight, size, eps):
    """The norm of one row, ``[tile]`` float32; 0 after the row."""
    return value * (1.0 / tl.sqrt_rn(tl.sum(value * value, axis=0) / size + eps)) * weight


def silu_and_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """See `silu_and_mul_torch`: ``[num_tokens, 2 * intermediate]`` -> ``[num_tokens, intermediate]``.

    Raises:
        ValueError: the number of columns is odd.
    """
    return _activate(gate_up, "silu")


def gelu_and_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """See `gelu_and_mul_torch`; raises ValueError like `silu_and_mul_triton`."""
    return _activate(gate_up, "gelu_tanh")


def mul_sigmoid_triton(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See `mul_sigmoid_torch`; rounded once."""
    num_rows, width = x.shape
    output = torch.empty_like(x)
    if output.numel() > 0:
        overlap = can_overlap(x.device)
        _mul_sigmoid_kernel[(num_rows, cdiv(width, _ACTIVATION_TILE))](
            output, x.contiguous(), gate, gate.stride(0), width, tile=_ACTIVATION_TILE, overlap=overlap,
            **launch_options(overlap),
        )  # fmt: skip
    return output


def _activate(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    num_rows, width = gate_up.shape
    if width % 2:
        raise ValueError(f"{activation}_and_mul: gate_up {list(gate_up.shape)} must have an even number of columns")
    output = empty_rows(num_rows, width // 2, like=gate_up)
    if output.numel() > 0:
        overlap = can_overlap(gate_up.device)
        _activation_kernel[(padded_rows(num_rows), cdiv(width // 2, _ACTIVATION_TILE))](
            output, gate_up.contiguous(), num_rows, width // 2,
            gate=GATES[activation], tile=_ACTIVATION_TILE, overlap=overlap, **launch_options(overlap),
        )  # fmt: skip
    return output


@triton_kernel()
def activate_and_mul(gate, up, activation: tl.constexpr):
    """``silu(gate) * up`` in float32, of tensors that are rounded to the dtype of the model; or with GELU:
    ``0.5 * x * (1 + tanh(y))`` is ``x * sigmoid(2 * y)``."""
    gate = gate.to(tl.float32)
    if activation == 1:
        exponent = -gate
    else:  # 2 * sqrt(2 / pi); no power overflows
        exponent = tl.minimum(-1.5957691216057308 * (gate + 0.044715 * gate * gate * gate), 80.0)
    return gate / (1.0 + tl.exp(exponent)) * up.to(tl.float32)


@triton_kernel(unspecialized=("num_rows",))
def _activation_kernel(
    output_ptr, gate_up_ptr, num_rows, width, gate: tl.constexpr, tile: tl.constexpr, overlap: tl.constexpr
):
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    in_row = (column < width) & (row < num_rows)  # the rows of padding are zeros
    gate_ptr = gate_up_ptr + row * 2 * width + column
    gates = tl.load(gate_ptr, mask=in_row, other=0.0)
    ups = tl.load(gate_ptr + width, mask=in_row, other=0.0)
    result = activate_and_mul(gates, ups, gate)
    tl.store(output_ptr + row * width + column, result.to(output_ptr.dtype.element_ty), mask=column < width)


@triton_kernel()
def _mul_sigmoid_kernel(output_ptr, x_ptr, gate_ptr, gate_stride, width, tile: tl.constexpr, overlap: tl.constexpr):
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    in_row = column < width
    x = tl.load(x_ptr + row * width + column, mask=in_row, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=in_row, other=0.0).to(tl.float32)
    result = x / (1.0 + tl.exp(-gate))
    tl.store(output_ptr + row * width + column, result.to(output_ptr.dtype.element_ty), mask=in_row)
