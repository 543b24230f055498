"""Linear layers of some dozens to some hundreds of rows for Hopper GPUs: warp-specialized, in Gluon.

As in the tiled Triton kernel, M of the tensor core instructions is outputs, and N the rows of the input, so that a tile
of all rows reads each weight once. A program has

- one producer: it copies weights and inputs several stages ahead, also across tiles. Weights are copied before the
  previous kernel has finished (see `fleetfoot.kernels.runtime.dependent_launch`);
- a consumer group of four warps for each 64 rows of the weight in a tile.

In a gated tile, gates and ups of the same output are 8 rows of shared memory apart: there, the layout of the sums has
both in the same thread. One copy with four dimensions arranges them so.

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

from fleetfoot.kernels.linear.tilings import Tiling
from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_options
from fleetfoot.kernels.runtime.gluon_support import launch_dependents, tensor_descriptor, wait_for_inputs
from fleetfoot.kernels.runtime.triton_support import cdiv, launcher

INPUTS = gl.constexpr(64)  # multiplied at a time: the width of the shared memory swizzle


def launch_linear_hopper(
    output: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, tiling: Tiling, num_sms: int
) -> None:
    """Write ``x [n, in] @ weight.T`` to ``output``; with ``weight [2 * out, in]``: ``silu(x @ gate.T) * (x @ up.T)``.

    Args:
        output: ``[n, out]`` of the dtype of ``x``; or ``[splits, n, out]`` float32, and their sum is the product.
        x: float16 or bfloat16; rows are contiguous and begin at multiples of 16 bytes.
        weight: contiguous; gated: gates above ups. ``in`` and ``out`` are multiples of 8.
        num_sms: the GPU's multiprocessors, each of which runs one program.
    """
    num_rows, num_outputs = output.shape[-2:]
    num_inputs = x.shape[1]
    gated, partial = weight.shape[0] != num_outputs, output.dim() == 3
    rows, inputs = tiling.row_tile, INPUTS.value
    x_desc = tensor_descriptor(x, (num_rows, num_inputs), (x.stride(0), 1), (rows, inputs))
    if gated:
        shape, strides = (num_outputs // 8, 2, 8, num_inputs), (8 * num_inputs, num_outputs * num_inputs, num_inputs, 1)
        weight_desc = tensor_descriptor(weight, shape, strides, (4, 2, 8, inputs))
    else:
        weight_desc = tensor_descriptor(weight, weight.shape, (num_inputs, 1), (64, inputs))
    out_desc = x_desc  # not used for partial sums
    if not partial:
        width = 32 if gated else 64
        out_desc = tensor_descriptor(output, (num_rows, num_outputs), (num_outputs, 1), (rows, width), 2 * width)
    chunks, splits = cdiv(num_inputs, inputs), tiling.splits
    row_tiles, columns = cdiv(num_rows, rows), cdiv(num_outputs, tiling.outputs // (2 if gated else 1))
    num_tiles = row_tiles * columns * splits
    overlap = can_overlap(x.device)
    launcher(_linear_hopper_kernel, (min(num_sms, num_tiles),))(
        x_desc, weight_desc, out_desc, output, row_tiles, columns, num_tiles, chunks, cdiv(chunks, splits),
        num_rows, num_outputs, gated=gated, partial=partial, rows=rows, groups=tiling.outputs // 64,
        stages=tiling.stages, overlap=overlap, num_warps=4, **launch_options(overlap),
    )  # fmt: skip


@gluon.jit
def _place(tile, row_tiles, columns, chunks, split_chunks, num_rows, rows: gl.constexpr):
    """The first row and the column of a tile, its split, and the range of its chunks of inputs.

    The last rows are in a whole tile, which has some of the rows of the tile before, with the same results: copies of
    rows out of bounds take longer than those of others.
    """
    rest = tile // row_tiles
    split = rest // columns
    begin = split * split_chunks
    row = gl.minimum(tile % row_tiles * rows, gl.maximum(num_rows - rows, 0))
    return row, rest % columns, split, begin, gl.minimum(begin + split_chunks, chunks)


@gluon.jit
def _copy_weights(weight_desc, weights, stage, barrier, column, chunk, gated: gl.constexpr, groups: gl.constexpr):
    for group in gl.static_range(groups):
        part = column * groups + group
        if gated:
            place = [part * 4, 0, 0, chunk * INPUTS]
        else:
            place = [part * 64, chunk * INPUTS]
        tma.async_copy_global_to_shared(weight_desc, place, barrier, weights.index(stage * groups + group))


@gluon.jit
def _producer(
    x_desc, weight_desc, stages_of, row_tiles, columns, num_tiles, chunks, split_chunks, num_rows,
    gated: gl.constexpr, rows: gl.constexpr, groups: gl.constexpr, stages: gl.constexpr, overlap: gl.constexpr,
):  # fmt: skip
    """Fill the stages with inputs and weights as they become empty."""
    xs, weights, full, empty = stages_of
    stage_bytes: gl.constexpr = (rows + 64 * groups) * INPUTS * 2
    tile = gl.program_id(0)
    # Weights do not depend on the previous kernel: fill all stages with those of the first tile.
    _, column, _, begin, end = _place(tile, row_tiles, columns, chunks, split_chunks, num_rows, rows)
    num_prefetched = gl.minimum(end - begin, stages)
    for stage in range(num_prefetched):
        barrier = full.index(stage)
        mbarrier.expect(barrier, stage_bytes)
        _copy_weights(weight_desc, weights, stage, barrier, column, begin + stage, gated, groups)
    wait_for_inputs(overlap)
    count = 0
    stage = 0
    phase = 1
    while tile < num_tiles:
        row, column, _, begin, end = _place(tile, row_tiles, columns, chunks, split_chunks, num_rows, rows)
        for chunk in range(begin, end):
            barrier = full.index(stage)
            if count >= num_prefetched:
                mbarrier.wait(empty.index(stage), phase)
                mbarrier.expect(barrier, stage_bytes)
                _copy_weights(weight_desc, weights, stage, barrier, column, chunk, gated, groups)
            tma.async_copy_global_to_shared(x_desc, [row, chunk * INPUTS], barrier, xs.index(stage))
            count += 1
            stage += 1
            if stage == stages:
                stage = 0
                phase ^= 1
        tile += gl.num_programs(0)


@gluon.jit
def _consumers(
    out_desc, out_ptr, outs, stages_of, row_tiles, columns, num_tiles, chunks, split_chunks, num_rows, num_outputs,
    group: gl.constexpr, gated: gl.constexpr, partial: gl.constexpr, rows: gl.constexpr, groups: gl.constexpr,
    stages: gl.constexpr,
):  # fmt: skip
    """64 rows of the weight of each tile, from row ``64 * group`` on."""
    xs, weights, full, empty = stages_of
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, rows, 16])
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    dtype: gl.constexpr = xs.dtype
    tile = gl.program_id(0)
    stage = 0
    phase = 0
    while tile < num_tiles:
        row, column, split, begin, end = _place(tile, row_tiles, columns, chunks, split_chunks, num_rows, rows)
        part = column * groups + group
        sums = gl.zeros([64, rows], gl.float32, layout)
        previous = 0
        for chunk in range(begin, end):
            mbarrier.wait(full.index(stage), phase)
            weight = weights.index(stage * groups + group)
            if gated:
                weight = weight._reinterpret(dtype, [64, INPUTS], flat)
            products = warpgroup_mma(weight, xs.index(stage).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(1, deps=[products])
            if chunk > begin:
                mbarrier.arrive(empty.index(previous), count=1)
            previous = stage
            stage += 1
            if stage == stages:
                stage = 0
                phase ^= 1
        sums = warpgroup_mma_wait(0, deps=[sums])
        mbarrier.arrive(empty.index(previous), count=1)
        if partial:
            output = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None] + part * 64
            out_row = gl.arange(0, rows, gl.SliceLayout(0, layout))[None, :] + row
            place = split.to(gl.int64) * num_rows * num_outputs + out_row * num_outputs + output
            gl.store(out_ptr + place, sums, mask=(out_row < num_rows) & (output < num_outputs))
        else:
            width: gl.constexpr = 32 if gated else 64
            if gated:
                gate, up = sums.to(dtype).reshape([4, 2, 8, rows]).permute((0, 2, 3, 1)).split()
                gate, up = gate.to(gl.float32), up.to(gl.float32)
                result = (gate / (1.0 + gl.exp(-gate)) * up).to(dtype).reshape([32, rows])
            else:
                result = sums.to(dtype)
            tma.store_wait(0)  # the previous tile has been copied out of this memory
            gl.thread_barrier()
            out = outs.index(group)
            out.permute((1, 0)).store(result)
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(out_desc, [row, part * width], out)
        tile += gl.num_programs(0)
    if not partial:
        tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "row_tiles", "columns", "num_tiles", "chunks", "split_chunks", "num_rows", "num_outputs",
    ]
)  # fmt: skip
def _linear_hopper_kernel(
    x_desc, weight_desc, out_desc, out_ptr, row_tiles, columns, num_tiles, chunks, split_chunks, num_rows, num_outputs,
    gated: gl.constexpr, partial: gl.constexpr, rows: gl.constexpr, groups: gl.constexpr, stages: gl.constexpr,
    overlap: gl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    dtype: gl.constexpr = x_desc.dtype
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    deep: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    narrow: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    barrier_layout: gl.constexpr = mbarrier.MBarrierLayout()
    xs = gl.allocate_shared_memory(dtype, [stages, rows, INPUTS], flat)
    outs = xs
    if gated:
        weights = gl.allocate_shared_memory(dtype, [stages * groups, 4, 2, 8, INPUTS], deep)
        outs = gl.allocate_shared_memory(dtype, [groups, rows, 32], narrow)
    else:
        weights = gl.allocate_shared_memory(dtype, [stages * groups, 64, INPUTS], flat)
        if not partial:
            outs = gl.allocate_shared_memory(dtype, [groups, rows, 64], flat)
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
    if groups == 1:
        gl.warp_specialize([
            (_consumers, (out_desc, out_ptr, outs, stages_of, row_tiles, columns, num_tiles, chunks, split_chunks,
                          num_rows, num_outputs, 0, gated, partial, rows, groups, stages)),
            (_producer, (x_desc, weight_desc, stages_of, row_tiles, columns, num_tiles, chunks, split_chunks,
                         num_rows, gated, rows, groups, stages, overlap)),
        ], [4], [40])
    else:
        gl.warp_specialize([
            (_consumers, (out_desc, out_ptr, outs, stages_of, row_tiles, columns, num_tiles, chunks, split_chunks,
                          num_rows, num_outputs, 0, gated, partial, rows, groups, stages)),
            (_consumers, (out_desc, out_ptr, outs, stages_of, row_tiles, columns, num_tiles, chunks, split_chunks,
                          num_rows, num_outputs, 1, gated, partial, rows, groups, stages)),
            (_producer, (x_desc, weight_desc, stages_of, row_tiles, columns, num_tiles, chunks, split_chunks,
                         num_rows, gated, rows, groups, stages, overlap)),
        ], [4, 4], [232, 40])
    # fmt: on
