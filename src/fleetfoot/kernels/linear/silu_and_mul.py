"""The gate of a SwiGLU MLP (Shazeer 2020)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


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
