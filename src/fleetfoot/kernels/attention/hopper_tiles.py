"""What warps of a Hopper kernel pass to each other and share: fields of the items that they work on, and block ids.

This module imports Triton.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def get_field(items, slot, field: gl.constexpr, num_fields: gl.constexpr, num_warps: gl.constexpr):
    """A field, a 32-bit word of shared memory, of the item in a slot."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    return gl.sum(items.index(slot * num_fields + field).load(layout), 0)


@gluon.jit
def put_field(items, slot, field: gl.constexpr, num_fields: gl.constexpr, value):
    """Write a field, from one warp."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    items.index(slot * num_fields + field).store(gl.full([1], value, gl.int32, layout))


@gluon.jit
def block_ids(table_ptr, begin, kv_end, piece_rows: gl.constexpr, tile: gl.constexpr, block_size: gl.constexpr):
    """The block of each piece of a tile that begins at position ``begin``; 0 for pieces from ``kv_end`` on."""
    blocks = ()
    for piece in gl.static_range(tile // piece_rows):
        position = begin + piece * piece_rows
        block = gl.load(table_ptr + position // block_size, mask=position < kv_end, other=0)
        blocks = blocks + (block,)  # type: ignore[assignment]  # noqa: RUF005
    return blocks
