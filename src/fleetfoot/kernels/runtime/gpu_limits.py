"""What the attention kernels' launches are cut to: multiprocessors and shared memory of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class GPULimits:
    num_sms: int
    shared_bytes: int
    """Most shared memory of a program."""
    capability: tuple[int, int]


@cache
def gpu_limits(device: torch.device) -> GPULimits:
    """The limits of ``device``; for a CPU, where kernels are interpreted, those of a small made-up GPU."""
    if device.type != "cuda":
        return GPULimits(num_sms=4, shared_bytes=100 * 1024, capability=(0, 0))
    properties = torch.cuda.get_device_properties(device)
    return GPULimits(
        num_sms=properties.multi_processor_count,
        # What a program may ask for beyond the default; not every platform tells it apart.
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block),
        capability=(properties.major, properties.minor),
    )


def fit_tile(rows: int, tile: int, row_bytes: int, shared_bytes: int) -> tuple[int, int]:
    """The KV positions in a tile, at most ``tile``, and the pipeline's stages that fit in shared memory.

    Args:
        rows: of the query tile, which is there, too. row_bytes: of a head in K, V or Q.
    """
    stages = 3
    while (rows + 2 * stages * tile) * row_bytes > shared_bytes:
        if tile > 16:
            tile //= 2
        elif stages > 1:
            stages -= 1
        else:
            break
    return tile, stages
