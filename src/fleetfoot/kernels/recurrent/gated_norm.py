"""RMSNorm of groups of a row with a gate, after the recurrences: the reference in torch, and a Triton kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl


_TILE = 1024
"""Elements of a program, of several groups where these are smaller."""


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
        tile, overlap, num_groups = next_power_of_2(norm.group_size), can_overlap(x.device), size // norm.group_size
        together = max(1, _TILE // tile)
        _gated_norm_kernel[(cdiv(num_rows * num_groups, together),)](
            out, x, norm.gate, norm.weight, norm.gate.stride(0), norm.eps, num_rows,
            num_groups=num_groups, group_size=norm.group_size, has_one_weight=len(norm.weight) == norm.group_size,
            is_gate_last=norm.is_gate_last, tile=tile, together=together, overlap=overlap,
            num_warps=min(16, max(4, tile // 512)), **launch_options(overlap),
        )  # fmt: skip
    return out


@triton_kernel(unspecialized=("num_rows",))
def _gated_norm_kernel(
    out_ptr, x_ptr, gate_ptr, weight_ptr, gate_stride, eps, num_rows,
    num_groups: tl.constexpr, group_size: tl.constexpr, has_one_weight: tl.constexpr, is_gate_last: tl.constexpr,
    tile: tl.constexpr, together: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    element = tl.arange(0, tile)[None, :]
    index = (tl.program_id(0).to(tl.int64) * together + tl.arange(0, together))[:, None]  # groups of all rows
    in_group = (element < group_size) & (index < num_rows.to(tl.int64) * num_groups)  # [together, tile], like all below
    column = index % num_groups * group_size + element
    weight_place = tl.broadcast_to(element, (together, tile)) if has_one_weight else column
    weight = tl.load(weight_ptr + weight_place, mask=in_group, other=0.0).to(tl.float32)
    wait_for_inputs(overlap)
    place = index * group_size + element
    value = tl.load(x_ptr + place, mask=in_group, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + index // num_groups * gate_stride + column, mask=in_group, other=0.0)
    normed = gated_norm(value, gate, weight, group_size, eps, is_gate_last, 1)
    tl.store(out_ptr + place, normed.to(out_ptr.dtype.element_ty), mask=in_group)


@triton_kernel(specialize=False)
def gated_norm(value, gate, weight, group_size, eps, is_gate_last: tl.constexpr, axis: tl.constexpr):
    """The gated norm of groups along ``axis``, float32; ``value`` is 0 after a group."""
    gate = gate.to(tl.float32)
    gate = gate / (1.0 + tl.exp(-gate))
    if not is_gate_last:
        value = value * gate
    mean_square = tl.sum(value * value, axis=axis, keep_dims=True) / group_size
    normed = value * (1.0 / tl.sqrt_rn(mean_square + eps)) * weight
    return normed * gate if is_gate_last else normed
