"""Finds and opens the C library, and reports why it cannot be used. No torch.

The library is not linked against an OpenMP runtime. It uses the one that torch loads, so its OpenMP functions can only
be resolved in a process that has imported torch.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

from fleetfoot.config import env

PATH = Path(__file__).with_name("libfleetfoot.so")

VARIANTS = ("v4_bf16", "v4", "v3", "v2", "generic")
"""Instruction sets, best first: x86-64-v4 with and without AVX512-BF16, v3 (AVX2), v2 (SSE4.2), anything else."""

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
# Result and argument types of each C function, in the order of the C sources, which name the arguments.
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

_OPENMP_SYMBOL = re.compile(r"undefined symbol: (GOMP|omp|__kmpc)_")


class NativeUnavailableError(RuntimeError):
    """The C library cannot be used."""


def native_problem() -> str:
    """Why the C kernels cannot be used on this machine; empty if they can.

    Without torch in the process the library is opened with lazy binding and closed again: every check but that of the
    OpenMP runtime is made.
    """
    try:
        if "torch" in sys.modules:
            _check(open_library())
        else:
            _probe()
    except NativeUnavailableError as error:
        return str(error)
    return ""


@cache
def open_library() -> ctypes.CDLL:
    """The library, opened once; torch must have been imported.

    Raises:
        NativeUnavailableError: the library is missing or does not load.
    """
    _check_usable()
    try:
        _expose_openmp()
        return ctypes.CDLL(str(PATH))
    except OSError as error:
        raise _does_not_load(error) from error


def supported_variants(library: ctypes.CDLL) -> tuple[str, ...]:
    """The variants that are built in and that this processor runs, best first; at least one.

    Raises:
        NativeUnavailableError: there is none.
    """
    try:
        supports = library.ff_supports
    except AttributeError as error:
        raise _does_not_load(error) from error
    supports.argtypes, supports.restype = (ctypes.c_char_p,), ctypes.c_int
    found = tuple(name for name in VARIANTS if hasattr(library, f"ff_{name}_rms_norm") and supports(name.encode()))
    if not found:
        raise NativeUnavailableError(f"{PATH} has no kernels for this processor")
    return found


def bind_functions(library: ctypes.CDLL, variant: str) -> dict[str, Any]:
    """The C functions of a variant by name, with their argument types.

    Raises:
        NativeUnavailableError: one is missing.
    """
    functions = {}
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, f"ff_{variant}_{name}", None)
        if function is None:
            raise NativeUnavailableError(f"{PATH} is of another version: it has no {name}; install Fleetfoot again")
        function.restype, function.argtypes = result, arguments
        functions[name] = function
    return functions


def _check(library: ctypes.CDLL) -> None:
    bind_functions(library, supported_variants(library)[0])


def _probe() -> None:
    _check_usable()
    dl = ctypes.CDLL(None)
    dl.dlopen.argtypes, dl.dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    dl.dlclose.argtypes = (ctypes.c_void_p,)
    dl.dlerror.restype = ctypes.c_char_p
    handle = dl.dlopen(os.fsencode(PATH), os.RTLD_LAZY)
    if not handle:
        error = (dl.dlerror() or b"").decode(errors="replace")
        if _OPENMP_SYMBOL.search(error):
            return  # linked for immediate binding: everything else was found
        raise _does_not_load(error)
    try:
        _check(ctypes.CDLL(str(PATH), handle=handle))
    finally:
        dl.dlclose(handle)


def _check_usable() -> None:
    if not env.use_native_kernels():
        raise NativeUnavailableError(f"{env.USE_NATIVE_KERNELS}=0 excludes them")
    if not PATH.exists():
        raise NativeUnavailableError(
            f"{PATH.name} was not built: installing Fleetfoot where a C compiler (gcc or clang) is present builds it"
        )


def _does_not_load(error: object) -> NativeUnavailableError:
    return NativeUnavailableError(f"{PATH} does not load: {error}")


def _expose_openmp() -> None:
    """Let the library find its OpenMP functions in the runtime that torch has loaded, whatever the file's name is."""
    maps = Path("/proc/self/maps")
    loaded = maps.read_text() if maps.exists() else ""
    runtimes = re.findall(r"(/.*/lib(?:gomp|iomp5|omp)[^/\n]*\.so[^/\n]*)$", loaded, re.MULTILINE)
    if runtimes:
        # other libraries may have loaded another runtime; the threads of torch's are already running
        ctypes.CDLL(max(runtimes, key=lambda path: "/torch/" in path), mode=ctypes.RTLD_GLOBAL)
