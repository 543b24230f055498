"""RMSNorm of groups of a row with a gate, after the recurrences: the reference in torch, and a Triton kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """The norm of a step's rows."""

    gate: torch.Tensor
    """``[num_tokens, size]``, rows may be strided; it goes through SiLU."""
    weight: torch.Tensor
    """``[size]``, or ``[group size]``, the same for all groups."""
    eps: float
    group_size: int
    """A group of consecutive elements has a norm of its own."""
    is_gate_last: bool
    """Whether the normed rows are gated (gated delta nets), or gated rows are normed (Mamba-2)."""


def gated_rms_norm_torch(x: torch.Tensor, norm: GatedNorm) -> torch.Tensor:
    """``x [num_tokens, size]`` -> the same shape, computed in float32 and rounded once at the end."""
    gate = F.silu(norm.gate.float())
    value = x.float() if norm.is_gate_last else x.float() * gate
    groups = value.unflatten(1, (-1, norm.group_size))  # [num_tokens, num_groups, group_size]
    groups = groups * torch.rsqrt(groups.square().mean(dim=-1, keepdim=True) + norm.eps)
    normed = (groups * norm.weight.float().reshape(-1, norm.group_size)).flatten(1)
    return (normed * gate if norm.is_gate_last else normed).to(x.dtype)


def gated_rms_norm_triton(x: torch.Tensor, norm: GatedNorm) -> torch.Tensor:
    """See `gated_rms_norm_torch`; ``x`` is contiguous."""
    num_rows, size = x.shape
    out = torch.empty_like(x)
    if num_rows:
        tile, overlap = next_power_of_2(norm.group_size), can_overlap(x.device)
        _gated_norm_kernel[(size // norm.group_size, num_rows)](
            out, x, norm.gate, norm.weight, norm.gate.stride(0), norm.eps, size,
            group_size=norm.group_size, has_one_weight=len(norm.weight) == norm.group_size,
            is_gate_last=norm.is_gate_last, tile=tile, overlap=overlap, num_warps=min(16, max(1, tile // 256)),
            **launch_options(overlap),
        )  # fmt: skip
    return out


@triton_kernel()
def _gated_norm_kernel(
    out_ptr, x_ptr, gate_ptr, weight_ptr, gate_stride, eps, size,
    group_size: tl.constexpr, has_one_weight: tl.constexpr, is_gate_last: tl.constexpr, tile: tl.constexpr,
    overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    element = tl.arange(0, tile)
    in_group = element < group_size
    column = tl.program_id(0) * group_size + element
    weight_place = element if has_one_weight else column
    weight = tl.load(weight_ptr + weight_place, mask=in_group, other=0.0).to(tl.float32)  # [tile], like all below
    wait_for_inputs(overlap)
    row = tl.program_id(1).to(tl.int64)
    value = tl.load(x_ptr + row * size + column, mask=in_group, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=in_group, other=0.0)
    normed = gated_norm(value, gate, weight, group_size, eps, is_gate_last)
    tl.store(out_ptr + row * size + column, normed.to(out_ptr.dtype.element_ty), mask=in_group)


@triton_kernel(specialize=False)
def gated_norm(value, gate, weight, group_size, eps, is_gate_last: tl.constexpr):
    """The gated norm of one group, ``value [tile]`` float32, 0 behind the group."""
    gate = gate.to(tl.float32)
    gate = gate / (1.0 + tl.exp(-gate))
    if not is_gate_last:
        value = value * gate
    normed = value * (1.0 / tl.sqrt_rn(tl.sum(value * value, axis=0) / group_size + eps)) * weight
    return normed * gate if is_gate_last else normed
