"""The kernels of the C library as typed functions.

Importing this module imports torch: the kernels run on the OpenMP threads that torch starts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from fleetfoot.native.loading import NativeUnavailableError, bind_functions, open_library, supported_variants

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The dtypes that the kernels support, and their codes."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The kernels of one variant, with the arguments of the C sources; pointers are integers."""

    variant: str
    rms_norm: Callable[..., None]
    add_rms_norm: Callable[..., None]
    silu_and_mul: Callable[..., None]
    rope_and_cache: Callable[..., int]
    paged_attention: Callable[..., int]
    prepare_decode: Callable[..., None]
    post_update: Callable[..., None]
    choose_tokens: Callable[..., int]
    linear: Callable[..., int]
    panel_width: Callable[[], int]
    pack_linear: Callable[..., None]
    unpack_linear: Callable[..., None]


@cache
def load_library(variant: str | None = None) -> NativeLibrary:
    """The kernels of ``variant``; None: of the best one for this processor.

    Raises:
        NativeUnavailableError: the library is missing, does not load, or has no such variant for this processor.
    """
    library = open_library()
    supported = supported_variants(library)
    if variant is not None and variant not in supported:
        raise NativeUnavailableError(f"no kernels of variant {variant} for this processor; there are {supported}")
    chosen = variant or supported[0]
    return NativeLibrary(variant=chosen, **bind_functions(library, chosen))


def check_status(status: int, kernel: str) -> None:
    """Raise the error of a kernel's return value."""
    if status == 1:
        raise MemoryError(f"{kernel}: no memory for the workspace")
    if status == 2:
        raise ValueError(
            f"{kernel}: the step's metadata is invalid: a block id, slot, position or length is outside of its tensor"
        )
