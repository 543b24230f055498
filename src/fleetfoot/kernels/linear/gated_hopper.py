"""The gate and up projections of many rows with their activation for Hopper GPUs: warp-specialized, in Gluon.

The vendor's library multiplies as fast, but its product is twice as wide as the result, and a second kernel reads it to
apply the activation: a quarter of the time with 1024 inputs, a twentieth with 4096.

A tile is 64 rows of the input per warp group by 128 outputs, gates and ups. The grid is persistent, and a program has

- one producer warp: it loads several stages ahead, also across tiles. Weights are loaded before the previous kernel has
  finished (see `fleetfoot.kernels.runtime.dependent_launch`);
- a consumer group of four warps for each 64 rows.

Gluon has no interpreter: a GPU test compares the kernel with the library. This module imports Triton.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_options
from fleetfoot.kernels.runtime.gluon_support import launch_dependents, tensor_descriptor, wait_for_inputs
from fleetfoot.kernels.runtime.row_padding import empty_rows
from fleetfoot.kernels.runtime.triton_support import cdiv, compiles_slowly, launcher

OUTPUTS = gl.constexpr(128)
"""Outputs of a tile: as many gates, and as many ups."""
INPUTS = gl.constexpr(64)  # multiplied at a time: the width of the shared memory swizzle
COLUMN_GROUP = gl.constexpr(4)  # columns of tiles that are processed together, rows first, so that reads hit L2
_STAGES = {2: 4, 3: 3}


def gated_linear_hopper(x: torch.Tensor, weight: torch.Tensor, groups: int, num_sms: int) -> torch.Tensor:
    """``x [n, in]`` -> ``silu(x @ gate.T) * (x @ up.T) [n, out]``.

    Args:
        x: float16 or bfloat16; rows are contiguous and begin at multiples of 16 bytes.
        weight: ``[2 * out, in]``, gates above ups, contiguous.
        groups: warp groups of 64 rows in a tile: 2 or 3.
        num_sms: the GPU's multiprocessors.
    """
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[0] // 2
    output = empty_rows(num_rows, num_outputs, like=x)
    outputs, inputs = OUTPUTS.value, INPUTS.value
    row_tiles, column_tiles = cdiv(num_rows, 64 * groups), cdiv(num_outputs, outputs)
    overlap = can_overlap(x.device)
    launcher(_gated_linear_kernel, (min(num_sms, row_tiles * column_tiles),))(
        tensor_descriptor(x, (num_rows, num_inputs), (x.stride(0), 1), (64, inputs)),
        tensor_descriptor(weight, weight.shape, (num_inputs, 1), (outputs, inputs)),
        tensor_descriptor(output, (num_rows, num_outputs), (num_outputs, 1), (64, outputs)),
        row_tiles, column_tiles, num_outputs, num_inputs, groups=groups, stages=_STAGES[groups], overlap=overlap,
        num_warps=4, **launch_options(overlap),
    )  # fmt: skip
    return output


@gluon.jit
def _tile_coordinates(tile, row_tiles, column_tiles):
    """The row and the column of a tile."""
    first = tile // (COLUMN_GROUP * row_tiles) * COLUMN_GROUP
    width = gl.minimum(column_tiles - first, COLUMN_GROUP)
    within = tile % (COLUMN_GROUP * row_tiles)
    return within // width, first + within % width


@gluon.jit
def _copy_weights(weight_desc, weights, stage, barrier, column, begin, num_outputs):
    """Start the copies of gates and ups, from input ``begin`` on."""
    gate = column * OUTPUTS
    tma.async_copy_global_to_shared(weight_desc, [gate, begin], barrier, weights.index(stage * 2))
    tma.async_copy_global_to_shared(weight_desc, [gate + num_outputs, begin], barrier, weights.index(stage * 2 + 1))


@gluon.jit
def _producer(
    x_desc, weight_desc, stages_of, row_tiles, column_tiles, num_outputs, num_inputs,
    groups: gl.constexpr, stages: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    """Fill the stages with inputs and weights as they become empty."""
    xs, weights, full, empty = stages_of
    stage_bytes: gl.constexpr = (groups * 64 + 2 * OUTPUTS) * INPUTS * 2
    tile = gl.program_id(0)
    # Weights do not depend on the previous kernel: fill all stages with those of the first tile.
    _, column = _tile_coordinates(tile, row_tiles, column_tiles)
    num_prefetched = gl.minimum((num_inputs + INPUTS - 1) // INPUTS, stages)
    for stage in range(num_prefetched):
        barrier = full.index(stage)
        mbarrier.expect(barrier, stage_bytes)
        _copy_weights(weight_desc, weights, stage, barrier, column, stage * INPUTS, num_outputs)
    wait_for_inputs(overlap)
    count = 0
    while tile < row_tiles * column_tiles:
        row, column = _tile_coordinates(tile, row_tiles, column_tiles)
        for begin in range(0, num_inputs, INPUTS):
            stage = count % stages
            barrier = full.index(stage)
            if count >= num_prefetched:
                mbarrier.wait(empty.index(stage), ((count // stages) & 1) ^ 1)
                mbarrier.expect(barrier, stage_bytes)
                _copy_weights(weight_desc, weights, stage, barrier, column, begin, num_outputs)
            for group in gl.static_range(groups):
                first_row = (row * groups + group) * 64
                tma.async_copy_global_to_shared(x_desc, [first_row, begin], barrier, xs.index(stage * groups + group))
            count += 1
        tile += gl.num_programs(0)


@gluon.jit
def _consumers(
    out_desc, outs, stages_of, row_tiles, column_tiles, num_inputs,
    group: gl.constexpr, groups: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    """64 rows of each tile, from row ``64 * group`` on."""
    xs, weights, full, empty = stages_of
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OUTPUTS, 16])
    dtype: gl.constexpr = out_desc.dtype
    out = outs.index(group)
    count = 0
    tile = gl.program_id(0)
    while tile < row_tiles * column_tiles:
        row, column = _tile_coordinates(tile, row_tiles, column_tiles)
        gate = gl.zeros([64, OUTPUTS], gl.float32, layout)
        up = gl.zeros([64, OUTPUTS], gl.float32, layout)
        mbarrier.wait(full.index(count % stages), (count // stages) & 1)
        for begin in range(0, num_inputs, INPUTS):
            stage = count % stages
            x = xs.index(stage * groups + group)
            gate_sums = warpgroup_mma(x, weights.index(stage * 2).permute((1, 0)), gate, is_async=True)
            up_sums = warpgroup_mma(x, weights.index(stage * 2 + 1).permute((1, 0)), up, is_async=True)
            count += 1
            is_more = begin + INPUTS < num_inputs
            mbarrier.wait(full.index(count % stages), (count // stages) & 1, pred=is_more)
            gate, up = warpgroup_mma_wait(0, deps=[gate_sums, up_sums])
            mbarrier.arrive(empty.index(stage), count=1)
        # Rounded like the product of the library.
        gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
        result = gate / (1.0 + gl.exp(-gate)) * up
        tma.store_wait(0)  # the previous tile has been copied out of this memory
        gl.thread_barrier()
        out.store(result.to(dtype))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out_desc, [(row * groups + group) * 64, column * OUTPUTS], out)
        tile += gl.num_programs(0)
    tma.store_wait(0)


@compiles_slowly
@gluon.jit(do_not_specialize=["row_tiles", "column_tiles"])
def _gated_linear_kernel(
    x_desc, weight_desc, out_desc, row_tiles, column_tiles, num_outputs, num_inputs,
    groups: gl.constexpr, stages: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    dtype: gl.constexpr = x_desc.dtype
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    xs = gl.allocate_shared_memory(dtype, [stages * groups, 64, INPUTS], tile_layout)
    weights = gl.allocate_shared_memory(dtype, [stages * 2, OUTPUTS, INPUTS], tile_layout)
    outs = gl.allocate_shared_memory(dtype, [groups, 64, OUTPUTS], tile_layout)
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], barrier_layout)
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], barrier_layout)
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=groups)
    fence_async_shared()
    stages_of = (xs, weights, full, empty)
    # Gluon needs literal lists of partitions, and of warps and registers per thread of all but the first, which gets
    # the remaining registers.
    # fmt: off
    if groups == 2:
        gl.warp_specialize([
            (_consumers, (out_desc, outs, stages_of, row_tiles, column_tiles, num_inputs, 0, groups, stages)),
            (_consumers, (out_desc, outs, stages_of, row_tiles, column_tiles, num_inputs, 1, groups, stages)),
            (_producer, (x_desc, weight_desc, stages_of, row_tiles, column_tiles, num_outputs, num_inputs, groups,
                         stages, overlap)),
        ], [4, 1], [232, 40])
    else:
        gl.warp_specialize([
            (_consumers, (out_desc, outs, stages_of, row_tiles, column_tiles, num_inputs, 0, groups, stages)),
            (_consumers, (out_desc, outs, stages_of, row_tiles, column_tiles, num_inputs, 1, groups, stages)),
            (_consumers, (out_desc, outs, stages_of, row_tiles, column_tiles, num_inputs, 2, groups, stages)),
            (_producer, (x_desc, weight_desc, stages_of, row_tiles, column_tiles, num_outputs, num_inputs, groups,
                         stages, overlap)),
        ], [4, 4, 1], [160, 160, 32])
    # fmt: on
