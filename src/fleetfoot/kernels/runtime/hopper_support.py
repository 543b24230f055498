"""Which GPUs run the kernels that are written in Gluon for Hopper."""

from __future__ import annotations

from functools import cache

import torch

from fleetfoot.kernels.runtime.gpu_limits import gpu_limits

_GLUON_VERSIONS = ("3.6.",)  # of Triton: Gluon is young, and its interface may change


@cache
def has_hopper_kernels(device: torch.device) -> bool:
    """Whether ``device`` is a Hopper GPU, and Triton a version that the kernels were tested with."""
    if torch.version.hip is not None or gpu_limits(device).capability != (9, 0):
        return False
    import triton

    return triton.__version__.startswith(_GLUON_VERSIONS)
