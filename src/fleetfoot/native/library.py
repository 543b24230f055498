"""Loads the native library and hands out its kernels as typed functions.

Importing this module needs torch: the kernels run on the OpenMP threads that torch has started.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The dtypes that kernels serve, and their codes."""

VARIANTS = ("v4_bf16", "v4", "v3", "v2", "generic")
"""Instruction sets, best first: x86-64-v4 with and without AVX512-BF16, v3 (AVX2), v2 (SSE4.2), anything else."""

_PATH = Path(__file__).with_name("libfleetfoot.so")

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
# Argument types in the order of each C function, where the arguments are named.
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "rms_norm": (None, (_P, _P, _P, _F, _L, _L, _I, _I)),
    "add_rms_norm": (None, (_P, _P, _P, _P, _P, _F, _L, _L, _I, _I)),
    "silu_and_mul": (None, (_P, _P, _L, _L, _I, _I)),
    "rope_and_cache": (
        _I,
        (_P, _P, _L, _P, _L, _L, _L, _L, _L, _P, _P, _P, _L, _P, _P, _F, _L, _I, _I, _I, _I, _I, _I),
    ),
    "prepare_decode": (None, (_P, _L, _L, _P, _P, _P, _P, _L, _P, _P, _L, _L, _P, _P, _P, _P, _P, _P, _P, _L, _L)),
    "post_update": (None, (_P, _L, _P, _P, _L, _P, _P, _L, _P, _P)),
    "choose_tokens": (_I, (_P, _P, _L, _L, _L, _P, _P, _P, _I, _I)),
    "linear": (_I, (_P, _P, _L, _P, _P, _L, _L, _L, _I, _I)),
    "panel_width": (_I, ()),
    "pack_linear": (None, (_P, _P, _L, _L, _L, _I)),
    "unpack_linear": (None, (_P, _P, _L, _L, _I)),
    "paged_attention": (
        _I,
        (_P, _P, _L, _L, _P, _L, _L, _L, _L, _L, _P, _P, _P, _L, _L, _I, _I, _I, _I, _I, _F, _I, _I, _I),
    ),
}


class NativeUnavailableError(RuntimeError):
    """The native library cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of one variant. Arguments are as in the C sources; pointers are passed as integers."""

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
def _load() -> ctypes.CDLL:
    if not _PATH.exists():
        raise NativeUnavailableError(
            f"{_PATH.name} was not built: installing Fleetfoot where a C compiler (gcc or clang) is present builds it"
        )
    try:
        _expose_openmp()
        library = ctypes.CDLL(str(_PATH))
        library.ff_supports.argtypes, library.ff_supports.restype = (ctypes.c_char_p,), _I
    except (OSError, AttributeError) as error:
        raise NativeUnavailableError(f"{_PATH} does not load: {error}") from error
    return library


def _expose_openmp() -> None:
    """Let the library find its OpenMP functions in the runtime that torch has loaded, whatever its file is called."""
    maps = Path("/proc/self/maps")
    loaded = maps.read_text() if maps.exists() else ""
    runtimes = re.findall(r"(/.*/lib(?:gomp|iomp5|omp)[^/\n]*\.so[^/\n]*)$", loaded, re.MULTILINE)
    if runtimes:
        # Other libraries of the process may have brought their own; torch's threads are the ones that are awake.
        ctypes.CDLL(max(runtimes, key=lambda path: "/torch/" in path), mode=ctypes.RTLD_GLOBAL)


def supported_variants() -> tuple[str, ...]:
    """The variants that are built in and that this processor runs, best first.

    Raises:
        NativeUnavailableError: the library is missing or does not load.
    """
    library = _load()
    return tuple(v for v in VARIANTS if hasattr(library, f"ff_{v}_rms_norm") and library.ff_supports(v.encode()))


@cache
def load_kernels(variant: str | None = None) -> Kernels:
    """The kernels of ``variant``; None: of the best one here.

    Raises:
        NativeUnavailableError: the library is missing, does not load, or has no such variant for this processor.
    """
    supported = supported_variants()
    if not supported or (variant is not None and variant not in supported):
        raise NativeUnavailableError(f"no kernels of variant {variant} for this processor; there are {supported}")
    chosen = variant or supported[0]
    functions = {}
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(_load(), f"ff_{chosen}_{name}", None)
        if function is None:
            raise NativeUnavailableError(f"{_PATH} is of another version: it has no {name}; install Fleetfoot again")
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    return Kernels(variant=chosen, **functions)


def check_status(status: int, kernel: str) -> None:
    """Raise what a kernel's return value stands for."""
    if status == 1:
        raise MemoryError(f"{kernel}: no memory for the workspace")
    if status == 2:
        raise ValueError(
            f"{kernel}: the step's metadata is not sound: a block id, slot, position or length is outside of its tensor"
        )


@cache  # asked at each step, and looking for a library that is not there costs a file access and an exception
def native_available() -> tuple[bool, str]:
    """Whether the native operations can be used here, and why: the variant that would run, or what is missing."""
    try:
        return True, f"native kernels, variant {load_kernels().variant}"
    except NativeUnavailableError as error:
        return False, str(error)
