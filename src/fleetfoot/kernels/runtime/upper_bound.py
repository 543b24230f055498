"""Binary search in a sorted array, as a device function of kernels that find each token's request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetfoot.kernels.runtime.triton_support import triton_kernel

if TYPE_CHECKING:
    import triton.language as tl


def search_steps(length: int) -> int:
    """Halvings after which the search in ``length`` values is over."""
    return length.bit_length()


@triton_kernel(specialize=False)
def upper_bound(sorted_ptr, length, steps, value):
    """How many of the ``length`` values at ``sorted_ptr`` are at most ``value``, for a tile of values at once."""
    low = tl.zeros_like(value)
    high = low + length
    while steps > 0:
        middle = (low + high) // 2
        # A search that is over has low == high == middle, which may lie behind the last value.
        open_ = low < high
        goes_right = open_ & (tl.load(sorted_ptr + middle, mask=open_, other=0) <= value)
        low = tl.where(goes_right, middle + 1, low)
        high = tl.where(goes_right, high, middle)
        steps -= 1
    return low
