"""What kernels in Gluon share: tensor descriptors, and the device functions of dependent launches, work descriptors in
shared memory and block ids.

This module imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


class _SharedLayout(gl.NVMMASharedLayout):
    """A layout with a text that is made once: a launch reads that of every descriptor."""

    @cached_property
    def _text(self) -> str:
        return repr(gl.NVMMASharedLayout(self.swizzle_byte_width, self.element_bitwidth, self.rank))

    def __repr__(self) -> str:
        return self._text


@cache
def _layout(width_bytes: int, rank: int) -> _SharedLayout:
    return _SharedLayout(swizzle_byte_width=width_bytes, element_bitwidth=16, rank=rank)


def tensor_descriptor(
    base: torch.Tensor, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], width_bytes: int = 128
) -> TensorDescriptor:
    """The descriptor of a tensor of 16-bit elements that is copied in boxes, to rows of ``width_bytes`` with swizzling.

    It is made for every launch, without the checks of ``TensorDescriptor``: ``base`` and all strides but the last one,
    which is 1, are multiples of 16 bytes, and the sizes of ``box`` are powers of 2.
    """
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base, descriptor.shape, descriptor.strides = base, list(shape), list(strides)
    descriptor.block_shape, descriptor.layout = list(box), _layout(width_bytes, len(box))
    descriptor.padding = "zero"
    return descriptor


@gluon.jit
def launch_dependents(overlap: gl.constexpr):
    """See `fleetfoot.kernels.runtime.dependent_launch.launch_dependents`."""
    if overlap:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def wait_for_inputs(overlap: gl.constexpr):
    """See `fleetfoot.kernels.runtime.dependent_launch.wait_for_inputs`."""
    if overlap:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def get_field(work, slot, field: gl.constexpr, num_fields: gl.constexpr, num_warps: gl.constexpr):
    """Read a 32-bit field of the work descriptor in a slot of shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    return gl.sum(work.index(slot * num_fields + field).load(layout), 0)


@gluon.jit
def put_field(work, slot, field: gl.constexpr, num_fields: gl.constexpr, value):
    """Write a field of a work descriptor. One warp calls this."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    work.index(slot * num_fields + field).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def wait_for_work(work, work_full, count, slots: gl.constexpr, num_fields: gl.constexpr, num_warps: gl.constexpr):
    """Wait until the descriptor of the ``count``-th work tile is written; return its first field."""
    slot = count % slots
    mbarrier.wait(work_full.index(slot), (count // slots) & 1)
    return get_field(work, slot, 0, num_fields, num_warps)


@gluon.jit
def block_ids(table_ptr, begin, kv_end, box_rows: gl.constexpr, tile: gl.constexpr, block_size: gl.constexpr):
    """The block of each TMA box of the KV tile that starts at position ``begin``; 0 for boxes from ``kv_end`` on."""
    blocks = ()
    for box in gl.static_range(tile // box_rows):
        position = begin + box * box_rows
        block = gl.load(table_ptr + position // block_size, mask=position < kv_end, other=0)
        blocks = blocks + (block,)  # type: ignore[assignment]  # noqa: RUF005
    return blocks
