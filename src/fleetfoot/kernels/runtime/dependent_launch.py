"""Kernels that start while the one before still runs: programmatic dependent launch, on NVIDIA GPUs from Hopper on.

A decode step is a chain of kernels of a few microseconds each, and between two of them memory would idle for about one.
Here every kernel allows the launch of the next one at its start (`launch_dependents`). The programs of that kernel use
the free multiprocessors, prefetch weights, which do not depend on the step, and wait at `wait_for_inputs` until all
earlier kernels have finished and their output is visible.

The rules for such a kernel:

- Every program calls `wait_for_inputs`. Before this call it reads only constants of the model: weights and tables that
  no kernel of the step writes. Earlier kernels than the previous one may be running too.
- Before this call a program writes nothing.
- Before this call it may also read the output of a step's preparation (lengths, block tables, slots, positions), unless
  it is the first kernel of the forward pass: that one is launched without overlap, so the preparation has finished
  before later kernels start.

A kernel without these calls may be anywhere in the chain, without overlap on its two sides. Source: CUDA Programming
Guide, "Programmatic Dependent Launch and Synchronization"; in a CUDA graph these become programmatic edges.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from fleetfoot.kernels.runtime.gpu_limits import gpu_limits
from fleetfoot.kernels.runtime.triton_support import triton_kernel

if TYPE_CHECKING:
    import triton.language as tl


@cache
def can_overlap(device: torch.device) -> bool:
    """Whether kernels on ``device`` can be launched so."""
    return torch.version.hip is None and gpu_limits(device).capability >= (9, 0)


def launch_options(overlap: bool) -> dict[str, Any]:
    """What a launch is given besides the kernel's arguments."""
    return {"launch_pdl": True} if overlap else {}


@triton_kernel()
def launch_dependents(overlap: tl.constexpr):
    """The next kernel may be launched once all programs have called this."""
    if overlap:
        tl.extra.cuda.gdc_launch_dependents()


@triton_kernel()
def wait_for_inputs(overlap: tl.constexpr):
    """Wait until every kernel before this one has finished and what it wrote can be read."""
    if overlap:
        tl.extra.cuda.gdc_wait()


@triton_kernel()
def prefetch_rows(pointer, row_bytes, num_rows, num_bytes, overlap: tl.constexpr):
    """Prefetch ``num_bytes`` of each row, ``row_bytes`` apart, to L2, without waiting.

    Each thread prefetches one row, so ``num_rows`` is at most the number of threads; below 1, none is prefetched.
    ``pointer`` is aligned to 16 bytes, and the two byte counts are multiples of 16.
    """
    if overlap:
        tl.inline_asm_elementwise(
            """{
            .reg .pred is_row;
            .reg .u32 row;
            .reg .u64 address;
            mov.u32 row, %tid.x;
            setp.lt.s32 is_row, row, $3;
            mad.wide.u32 address, row, $2, $1;
            @is_row cp.async.bulk.prefetch.L2.global [address], $4;
            mov.u32 $0, 0;
            }""",
            "=r,l,r,r,r",
            [pointer, row_bytes, num_rows, num_bytes],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton_kernel()
def prefetch(pointers, is_active, num_bytes: tl.constexpr):
    """Prefetch ``num_bytes``, a multiple of 16, at each of ``pointers [n]`` to L2, without waiting."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred active;
        setp.ne.s32 active, $2, 0;
        @active cp.async.bulk.prefetch.L2.global [$1], $3;
        mov.u32 $0, 0;
        }""",
        "=r,l,r,r",
        [pointers, is_active.to(tl.int32), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
