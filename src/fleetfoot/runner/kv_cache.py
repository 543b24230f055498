"""Allocation of the KV cache."""

from __future__ import annotations

import math

import numpy as np
import torch

from fleetfoot.config.model import DTYPE_BYTES
from fleetfoot.records.kv_layout import KVLayout


def allocate_kv_cache(layout: KVLayout, device: torch.device) -> list[torch.Tensor]:
    """The tensors of all layers (`KVLayout.layer_shapes`), zeroed, because masking does not remove a NaN in a
    slot that was never written.

    On a CPU, pages of zeros take memory only when blocks are first written.
    """
    dtype = getattr(torch, layout.dtype)
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for shape in layout.layer_shapes]
    return [
        torch.from_numpy(np.zeros(math.prod(shape) * DTYPE_BYTES[layout.dtype], dtype=np.uint8)).view(dtype).view(shape)
        for shape in layout.layer_shapes
    ]
