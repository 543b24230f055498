"""The gate of a SwiGLU MLP (Shazeer, 2020): the reference in torch, and the Triton kernel for a separate launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import cdiv, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl

_TILE = 1024


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


def silu_and_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """See `silu_and_mul_torch`: ``[num_tokens, 2 * intermediate]`` -> ``[num_tokens, intermediate]``.

    Raises:
        ValueError: the number of columns is odd.
    """
    num_rows, width = gate_up.shape
    if width % 2:
        raise ValueError(f"silu_and_mul: gate_up {list(gate_up.shape)} must have an even number of columns")
    gate_up = gate_up.contiguous()
    output = torch.empty((num_rows, width // 2), dtype=gate_up.dtype, device=gate_up.device)
    if output.numel() > 0:
        overlap = can_overlap(gate_up.device)
        _silu_and_mul_kernel[(num_rows, cdiv(width // 2, _TILE))](
            output, gate_up, width // 2, tile=_TILE, overlap=overlap, **launch_options(overlap)
        )
    return output


@triton_kernel()
def silu_and_mul(gate, up):
    """``silu(gate) * up`` in float32, of tensors that are rounded to the dtype of the model."""
    gate = gate.to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)


@triton_kernel()
def _silu_and_mul_kernel(output_ptr, gate_up_ptr, width, tile: tl.constexpr, overlap: tl.constexpr):
    launch_dependents(overlap)
    wait_for_inputs(overlap)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    in_row = column < width
    gate_ptr = gate_up_ptr + row * 2 * width + column
    gate = tl.load(gate_ptr, mask=in_row, other=0.0)
    up = tl.load(gate_ptr + width, mask=in_row, other=0.0)
    result = silu_and_mul(gate, up)
    tl.store(output_ptr + row * width + column, result.to(output_ptr.dtype.element_ty), mask=in_row)
