"""Apply the host's changes to the runner's state: one scatter for all that one copy has brought."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.ops.triton_support import cdiv, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl


def scatter_writes(target: torch.Tensor, pairs: torch.Tensor, num_writes: torch.Tensor) -> None:
    """``target[index] = value`` for the first ``num_writes`` pairs.

    Args:
        target: written, ``[N]``, N < 2^31: the arena that holds all of the runner's state, floats by their bits.
        pairs: ``[2 * capacity]``: index, value, index, value, ... No index stands there twice.
        num_writes: ``[1]``: at most ``capacity``.
    """
    if target.is_cuda:
        scatter_writes_triton(target, pairs, num_writes)
    else:
        scatter_writes_cpu(target, pairs, num_writes)


def scatter_writes_cpu(target: torch.Tensor, pairs: torch.Tensor, num_writes: torch.Tensor) -> None:
    """The twin of the kernel, for CPU tensors."""
    written = pairs.numpy()[: 2 * int(num_writes)]
    target.numpy()[written[::2]] = written[1::2]


def scatter_writes_triton(target: torch.Tensor, pairs: torch.Tensor, num_writes: torch.Tensor) -> None:
    tile = 256
    _scatter_writes_kernel[(cdiv(pairs.shape[0] // 2, tile),)](target, pairs, num_writes, tile=tile)


@triton_kernel(specialize=False)
def _scatter_writes_kernel(target_ptr, pairs_ptr, num_writes_ptr, tile: tl.constexpr):
    write = tl.program_id(0) * tile + tl.arange(0, tile)
    is_write = write < tl.load(num_writes_ptr)
    index = tl.load(pairs_ptr + 2 * write, mask=is_write)
    value = tl.load(pairs_ptr + 2 * write + 1, mask=is_write)
    tl.store(target_ptr + index, value, mask=is_write)
