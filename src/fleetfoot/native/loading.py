"""Finds and opens the C library, binds its kernels, and reports why they cannot be used. No torch."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

from fleetfoot.config import env

PATH = Path(__file__).with_name("libfleetfoot.so")

VARIANTS = ("amx", "avx512_bf16", "avx512", "avx2", "sse4", "generic")
"""Instruction sets, in general best first: x86-64-v4 (AVX-512) with tiles and products of bfloat16, with products of
bfloat16, and without; v3 (AVX2), v2 (SSE4.2), anything else."""

_TYPES = {"P": ctypes.c_void_p, "L": ctypes.c_int64, "I": ctypes.c_int, "F": ctypes.c_float, "S": ctypes.c_char_p}
_SIGNATURES = {
    "rms_norm": "PPPFFLLII",
    "add_rms_norm": "PPPPPFLLII",
    "silu_and_mul": "PPLLIII",
    "rope_and_cache": "PPLPLLLLLPPPLPPFFLIIIIII -> I",
    "recurrence_steps": "PPPPLPPPPLPPPLLLLLLFIPLPFII",
    "convolution_steps": "PPLPPPLPPPLLLLLLFIIII",
    "prepare_decode": "PLLPPPPLPPLLPPPPPPPLL",
    "post_update": "PLPPLPPLPP",
    "sample": "PPLLLPPPII -> I",
    "linear_to": "PIPLPPLLLII -> I",
    "linear_rows": "PPPLLLI -> I",
    "decoder_layers": "PPP -> I",
    "panel_width": " -> I",
    "pack_linear": "PPLLLI",
    "unpack_linear": "PPLLI",
    "paged_attention": "PPLLPLLLLLPPPLLIIIIIFFIIIP -> I",
}
"""Argument types of each C function, in the order of the C sources, which name the arguments, and the result's type."""

_BLOCK_SIGNATURES = {"block_linear": "PIPLPIPLLLII -> I", "block_rows": "PPIPLLI -> I"}
"""The same of ``blocks.c``, which is compiled for other instruction sets."""

_DEVICE_SIGNATURES = {
    "open": "S -> I",
    "error": " -> S",
    "new_tag": " -> I",
    "set_tag": "I",
    "unmap": "I -> I",
    "map": "I -> I",
    "list": "IPL -> L",
    "host_alloc": "L -> P",
    "host_free": "PL",
    "copy": "PL -> I",
}
"""The same of ``device_memory.c``."""

_NUM_LOOKS = 200
"""How often `watch` looks without the library."""
_ELF_TABLE = ((40, 8), (58, 2), (60, 2))
"""Where a 64-bit header has the offset of its table of sections, the bytes of an entry, and their number: each with its
size. Source: System V ABI, "ELF-64 Object File Format"."""


class NativeUnavailableError(RuntimeError):
    """The C library cannot be used."""


class NativeLibrary(SimpleNamespace):
    """The functions of one variant, by the names of `_SIGNATURES`; pointers are integers."""

    variant: str


def native_problem() -> str:
    """Why the C kernels cannot be used on this machine; empty if they can."""
    return find_native()[1]


def find_native() -> tuple[str, str]:
    """The variant of the C kernels that runs on this machine, and why none does: one of them is empty."""
    try:
        _check_usable()  # also if the library is open: the environment may have changed
        library = open_library()
        return _bind(library, _best_variant(library)).variant, ""
    except NativeUnavailableError as error:
        return "", str(error)


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
    chosen = variant or _best_variant(library)
    kernels, blocks = _bind(library, chosen), _bind(library, _block_variant(library, chosen), _BLOCK_SIGNATURES)
    return NativeLibrary(**{**vars(blocks), **vars(kernels)})


def _block_variant(library: ctypes.CDLL, variant: str) -> str:
    """What `blocks.c` was compiled for and goes with a variant of the others."""
    if variant == "generic" and library.ff_supports(b"dotprod"):
        return "dotprod"
    if not variant.startswith(("avx512", "amx")):
        return variant
    return "avx512_vnni" if library.ff_supports(b"avx512_vnni") else "avx2"


def open_mappings() -> ctypes.CDLL:
    """The library with the functions of ``mappings.c``. Raises NativeUnavailableError: it does not load."""
    library = open_library()
    library.ff_guard.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
    library.ff_cut_at.restype = ctypes.c_int64
    return library


@cache
def open_library() -> ctypes.CDLL:
    """The library, opened once.

    Raises:
        NativeUnavailableError: the library is missing or does not load.
    """
    _check_usable()
    try:
        library = ctypes.CDLL(str(PATH))
    except OSError as error:
        raise _does_not_load(error) from error
    check_sources(library)
    return library


def supported_variants(library: ctypes.CDLL) -> tuple[str, ...]:
    """The variants that are built in and that this processor runs, best first; at least one. Last is one that is slower
    than another with fewer instructions.

    Raises:
        NativeUnavailableError: there is none.
    """
    try:
        supports = library.ff_supports
    except AttributeError as error:
        raise _does_not_load(error) from error
    supports.argtypes, supports.restype = (ctypes.c_char_p,), ctypes.c_int
    built = (name for name in VARIANTS if hasattr(library, f"ff_{name}_rms_norm"))
    found = {name: level for name in built if (level := supports(name.encode()))}
    if not found:
        raise NativeUnavailableError(f"{PATH} has no kernels for this processor")
    return tuple(sorted(found, key=lambda name: found[name]))


def _best_variant(library: ctypes.CDLL) -> str:
    """The one that the environment names, or else the best one. Raises NativeUnavailableError: it is not there."""
    supported, named = supported_variants(library), env.native_variant(VARIANTS)
    if named is not None and named not in supported:
        raise NativeUnavailableError(
            f"{env.NATIVE_VARIANT} is {named!r}, and this processor runs {', '.join(supported)}"
        )
    return named or supported[0]


def check_sources(library: ctypes.CDLL) -> None:
    """Raises NativeUnavailableError if the library was not built from the sources beside it, as after an update of a
    checkout. Without sources there is nothing to compare."""
    sources = sorted([*PATH.parent.glob("*.c"), *PATH.parent.glob("*.h")])
    checksum = 0
    for source in sources:
        checksum = zlib.crc32(source.read_bytes(), checksum)
    built_from = getattr(library, "ff_sources", lambda: None)()
    if sources and (built_from is None or built_from & 0xFFFFFFFF != checksum):
        raise NativeUnavailableError(f"{PATH} was not built from the C sources beside it; install Fleetfoot again")


def load_device_memory(driver: str = "libcuda.so.1") -> NativeLibrary:
    """The functions of ``device_memory.c``, with the driver's library opened.

    Raises:
        NativeUnavailableError: the library is missing or does not load, or the driver does not have the calls.
    """
    functions = _bind(open_library(), "device", _DEVICE_SIGNATURES)
    if functions.open(driver.encode()):
        raise NativeUnavailableError(functions.error().decode(errors="replace"))
    return functions


def _bind(library: ctypes.CDLL, variant: str, signatures: dict[str, str] = _SIGNATURES) -> NativeLibrary:
    functions: dict[str, Callable[..., int]] = {}
    for name, signature in signatures.items():
        function = getattr(library, f"ff_{variant}_{name}", None)
        if function is None:
            raise NativeUnavailableError(f"{PATH} is of another version: it has no {name}; install Fleetfoot again")
        arguments, _, result = signature.partition(" -> ")
        function.argtypes, function.restype = [_TYPES[letter] for letter in arguments], _TYPES.get(result)
        functions[name] = function
    return NativeLibrary(variant=variant, **functions)


def watch(address: int) -> Callable[[int, int], bool]:
    """Returns a function that looks at the int32 at ``address``, aligned and in memory that processes share, until it
    differs from the first argument, or for as many nanoseconds as the second one; and returns whether it differs.

    It pauses between its looks, which leaves the core to its other thread. Without the library it looks a few times.
    """
    try:
        _check_usable()
        function = getattr(ctypes.PyDLL(str(PATH)), "ff_watch", None)  # it keeps Python's lock
    except (NativeUnavailableError, OSError):
        function = None
    if function is None:
        word = ctypes.c_int32.from_address(address)
        return lambda value, _: any(word.value != value for _ in range(_NUM_LOOKS))
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64), ctypes.c_int
    return partial(function, address)


def _check_usable() -> None:
    if not env.use_native_kernels():
        raise NativeUnavailableError(f"{env.USE_NATIVE_KERNELS}=0 excludes them")
    if not PATH.exists():
        raise NativeUnavailableError(
            f"{PATH.name} was not built: installing Fleetfoot where a C compiler (gcc or clang) is present builds it"
        )
    with PATH.open("rb") as file:
        header = file.read(64)
    if header[:6] == b"\x7fELF\x02\x01":  # the table of sections is last, and a loader reads past a truncated end
        offset, entry_size, num_entries = (int.from_bytes(header[at : at + size], "little") for at, size in _ELF_TABLE)
        if PATH.stat().st_size < offset + entry_size * num_entries:
            raise NativeUnavailableError(f"{PATH} is truncated; install Fleetfoot again")


def _does_not_load(error: object) -> NativeUnavailableError:
    return NativeUnavailableError(f"{PATH} does not load: {error}")
