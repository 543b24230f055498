"""Triton kernels in modules that import without Triton.

A kernel is decorated with `triton_kernel`. Its module imports Triton's language for type checkers only::

    if TYPE_CHECKING:
        import triton.language as tl

Triton is imported, and ``tl`` bound in the kernel's module, when a kernel is first launched. An engine on a CPU
launches none, so it runs where Triton is not installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from fleetfoot.kernels.runtime.internals import direct_launch

if TYPE_CHECKING:
    import triton.language as tl

_Kernel = TypeVar("_Kernel", bound=Any)

Launch = Callable[..., Any]
"""Launches a kernel over a grid: ``launch(*arguments, **options)``."""

instead_of_launching: ContextVar[Callable[[Any, tuple[int, ...]], Launch] | None] = ContextVar(
    "instead_of_launching", default=None
)
"""``(jit, grid)`` -> what replaces the launch in this context; None: kernels are launched."""


def launcher(jit: Any, grid: tuple[int, ...]) -> Launch:
    """The launch of ``jit``, a function of ``triton.jit`` or ``gluon.jit``, over ``grid``.

    All launches use this: `TritonKernel` does, and launches of kernels in Gluon call it.
    """
    instead = instead_of_launching.get()
    return direct_launch(jit, grid) if instead is None else instead(jit, grid)


def compiles_slowly(kernel: _Kernel) -> _Kernel:
    """Decorate a `TritonKernel`, or a function of ``gluon.jit``, that takes seconds to compile: it is compiled before
    others, since a start ends with the last one."""
    kernel.compiles_slowly = True
    return kernel


class TritonKernel:
    """A function that is passed to ``triton.jit`` at the first launch: ``kernel[grid](*arguments, **options)``.

    It may call other functions that are decorated in the same way.
    """

    compiles_slowly = False

    def __init__(self, function: Callable[..., Any], specialize: bool, unspecialized: tuple[str, ...] = ()) -> None:
        self._function = function
        if not specialize:
            parameters = inspect.signature(function).parameters.values()
            unspecialized = tuple(value.name for value in parameters if "constexpr" not in str(value.annotation))
        self.unspecialized = unspecialized
        self.__doc__ = function.__doc__
        self.__name__ = function.__name__

    def __getitem__(self, grid: tuple[int, ...]) -> Launch:
        return launcher(self.jit, grid)

    def __call__(self, *arguments: Any) -> Any:
        raise TypeError(f"{self.__name__} is called within kernels; a kernel is launched as kernel[grid](...)")

    @cached_property
    def jit(self) -> Any:
        """The ``triton.JITFunction``, or, with ``TRITON_INTERPRET=1`` set before Triton's import, its interpreter."""
        import triton
        import triton.language as tl

        # Triton resolves the names in a kernel in the kernel's module.
        scope = self._function.__globals__
        scope["tl"] = tl
        for name in self._function.__code__.co_names:
            if isinstance(scope.get(name), TritonKernel):
                scope[name] = scope[name].jit
        jit: Any = triton.jit(self._function, do_not_specialize=list(self.unspecialized))
        jit.compiles_slowly = self.compiles_slowly
        return jit


def triton_kernel(
    *, specialize: bool = True, unspecialized: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], TritonKernel]:
    """Decorate a Triton kernel, or a device function that kernels call, without importing Triton.

    Args:
        specialize: True: Triton specializes the kernel for integers that are 1 or divisible by 16 and for pointers that
            are aligned to 16 bytes, which wide loads need. False: one compilation is valid for every integer and
            pointer, so that no step waits for a compiler because of another batch size.
        unspecialized: parameters of a specialized kernel that are excluded: those that vary with the batch.
    """
    return lambda function: TritonKernel(function, specialize, unspecialized)


def cdiv(count: int, size: int) -> int:
    """``ceil(count / size)``."""
    return -(-count // size)


def options_text(options: dict[str, int]) -> str:
    """Options of a launch, without those that are 1."""
    return "".join(f" {name}={value}" for name, value in options.items() if value != 1)


def next_power_of_2(count: int) -> int:
    """The smallest power of two >= ``count``, for ``count`` >= 1."""
    return 1 << (count - 1).bit_length()


def search_steps(length: int) -> int:
    """The number of halvings that `upper_bound` needs for ``length`` values."""
    return length.bit_length()


@triton_kernel(specialize=False)
def upper_bound(sorted_ptr, length, steps, value):
    """How many of the ``length`` sorted values at ``sorted_ptr`` are <= ``value``, for a tile of values at once."""
    low = tl.zeros_like(value)
    high = low + length
    while steps > 0:
        middle = (low + high) // 2
        # A finished search has low == high == middle, which may be past the last value.
        open_ = low < high
        goes_right = open_ & (tl.load(sorted_ptr + middle, mask=open_, other=0) <= value)
        low = tl.where(goes_right, middle + 1, low)
        high = tl.where(goes_right, high, middle)
        steps -= 1
    return low


# --- candidates for the argmax of a row -------------------------------------------------------------------------------
# A candidate is one int64 with the order of argmax: the value in the upper half, mapped to an integer of the same order
# (NaN above all, both zeros equal), and the index in the lower half, the lowest index above.


@triton_kernel()
def pack_candidates(value, index):
    """int64 of the order of argmax: by ``value`` (float32), NaN the highest, then by the lowest ``index``."""
    value = tl.where(value == 0.0, 0.0, value)  # -0.0 equals 0.0
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(value != value, 0x7FFFFFFF, key)
    return (key.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton_kernel()
def candidate_index(candidate):
    return 0x7FFFFFFF - (candidate & 0xFFFFFFFF)


@triton_kernel()
def candidate_value(candidate):
    """float32; NaN for NaN."""
    key = (candidate >> 32).to(tl.int32)
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton_kernel()
def best_candidate(candidates_ptr, num_candidates: tl.constexpr, padded: tl.constexpr):
    """The largest of ``num_candidates`` candidates; ``padded`` is a power of two."""
    slot = tl.arange(0, padded)
    smallest = -0x7FFFFFFFFFFFFFFF - 1
    return tl.max(tl.load(candidates_ptr + slot, mask=slot < num_candidates, other=smallest), axis=0)
