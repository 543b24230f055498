"""Bring in what the host says of a step: the order of its requests, and changes to the runner's state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.runtime.triton_support import cdiv, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl


def take_in_writes(buffer: torch.Tensor, front: torch.Tensor, target: torch.Tensor, num_writes: int) -> None:
    """``front`` becomes the front of ``buffer``; behind it are pairs: ``target[index] = value``.

    On a GPU one kernel reads the host's memory. A copy is done by another engine of the GPU: from one captured step to
    the next on an H100, changing to it and back takes 18 us in which nothing runs.

    Args:
        buffer: ``[>= len(front) + 2 * num_writes]`` int32 in host memory, pinned if the others are on a GPU. It must
            stay as it is until the kernel has run.
        front: written, int32.
        target: written, ``[N]`` int32, N < 2^31: the arena that holds all of the runner's state, floats by their bits.
        num_writes: pairs of index and value. No index stands there twice.
    """
    if target.is_cuda:
        take_in_writes_triton(buffer, front, target, num_writes)
    else:
        take_in_writes_cpu(buffer, front, target, num_writes)


def take_in_writes_cpu(buffer: torch.Tensor, front: torch.Tensor, target: torch.Tensor, num_writes: int) -> None:
    """The twin of the kernel, for CPU tensors."""
    source, size = buffer.numpy(), len(front)
    front.numpy()[:] = source[:size]
    pairs = source[size : size + 2 * num_writes]
    target.numpy()[pairs[::2]] = pairs[1::2]


def take_in_writes_triton(buffer: torch.Tensor, front: torch.Tensor, target: torch.Tensor, num_writes: int) -> None:
    tile, size = 256, len(front)
    _take_in_writes_kernel[(cdiv(max(size, num_writes), tile),)](buffer, front, target, size, num_writes, tile=tile)


@triton_kernel(specialize=False)
def _take_in_writes_kernel(buffer_ptr, front_ptr, target_ptr, front_size, num_writes, tile: tl.constexpr):
    index = tl.program_id(0) * tile + tl.arange(0, tile)
    pairs_ptr = buffer_ptr + front_size + 2 * index
    is_write = index < num_writes
    front = tl.load(buffer_ptr + index, mask=index < front_size)
    where = tl.load(pairs_ptr, mask=is_write)
    value = tl.load(pairs_ptr + 1, mask=is_write)
    tl.store(front_ptr + index, front, mask=index < front_size)
    tl.store(target_ptr + where, value, mask=is_write)
