"""Candidates for the argmax of a row.

A candidate is one int64 with the order of argmax: the value in the upper half, mapped to an integer of the same order
(NaN above all, both zeros equal), and the index in the lower half, the lowest index above.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetfoot.kernels.runtime.triton_support import triton_kernel

if TYPE_CHECKING:
    import triton.language as tl


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
