"""From 9 rows on: tiles of 64 outputs by 16 to 128 rows, with the inputs split over programs where tiles are few.

M of the tensor core instructions is outputs (at least 64 for Hopper's wgmma), and N the rows of the input. The kernel
that reads the output adds the partial sums of a split, which costs less than a second kernel or a wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.linear.silu_and_mul import silu_and_mul
from fleetfoot.kernels.runtime.dependent_launch import (
    can_overlap,
    launch_dependents,
    launch_options,
    prefetch_rows,
    wait_for_inputs,
)
from fleetfoot.kernels.runtime.triton_support import cdiv, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl

_PREFETCHED = 256
"""Inputs of each row of the weight that are prefetched to L2 while the previous kernel still runs."""


@dataclass(frozen=True, slots=True)
class TiledTiling:
    """Compile and launch options of the kernel."""

    row_tile: int
    """Rows of the input in a tile: 16, 32, 64 or 128."""
    num_stages: int
    splits: int = 1
    """Programs that share a tile of outputs, each with a range of the inputs."""
    outputs: int = 64
    """Rows of the weight in a tile: gates and ups, half and half, if gated."""
    inputs: int = 128
    """Inputs that are multiplied at a time."""
    num_warps: int = 4


def linear_tiled(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gated: bool,
    tiling: TiledTiling,
) -> None:
    """Like `linear_staged`, for any ``in`` that is a multiple of 8.

    Args:
        output: ``[n, out]`` without splits; otherwise ``[splits, n, out]`` float32, and their sum is the product.
    """
    num_rows, num_outputs = output.shape[-2:]
    num_inputs = weight.shape[1]
    split_inputs = cdiv(cdiv(num_inputs, tiling.splits), tiling.inputs) * tiling.inputs
    overlap = can_overlap(x.device)
    outputs = tiling.outputs // 2 if gated else tiling.outputs
    _linear_tiled_kernel[(cdiv(num_outputs, outputs), cdiv(num_rows, tiling.row_tile), tiling.splits)](
        output, x, weight, weight if bias is None else bias, num_rows, num_outputs, num_inputs, x.stride(0),
        split_inputs, min(_PREFETCHED, split_inputs),
        outputs=outputs, inputs=tiling.inputs, num_stages=tiling.num_stages, row_tile=tiling.row_tile,
        whole_chunks=split_inputs * tiling.splits == num_inputs, has_bias=bias is not None, gated=gated,
        overlap=overlap, num_warps=tiling.num_warps, **launch_options(overlap),
    )  # fmt: skip


@triton_kernel(unspecialized=("num_rows",))
def _linear_tiled_kernel(
    output_ptr, x_ptr, weight_ptr, bias_ptr, num_rows, num_outputs, num_inputs, x_stride, split_inputs, prefetched,
    outputs: tl.constexpr, inputs: tl.constexpr, num_stages: tl.constexpr, row_tile: tl.constexpr,
    whole_chunks: tl.constexpr, has_bias: tl.constexpr, gated: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    first = tl.program_id(0) * outputs
    split = tl.program_id(2)
    num_valid = tl.minimum(outputs, num_outputs - first)
    begin = split * split_inputs
    if not whole_chunks:
        split_inputs = tl.maximum(tl.minimum(split_inputs, num_inputs - begin), 0)
        prefetched = tl.minimum(prefetched, split_inputs)
    tile_ptr = weight_ptr + first.to(tl.int64) * num_inputs + begin
    prefetch_rows(tile_ptr, num_inputs * 2, num_valid, prefetched * 2, overlap)
    up_distance = num_outputs.to(tl.int64) * num_inputs
    if gated:
        prefetch_rows(tile_ptr + up_distance, num_inputs * 2, num_valid, prefetched * 2, overlap)

    # If gated, the tile's first half are gates and its second half the ups of the same outputs.
    tile_rows: tl.constexpr = outputs * 2 if gated else outputs
    tile_row = tl.arange(0, tile_rows)
    weight_row = tl.minimum(tile_row % outputs, num_valid - 1) * num_inputs
    if gated:
        weight_row += (tile_row // outputs) * up_distance
    column = tl.arange(0, inputs)
    row = tl.program_id(1) * row_tile + tl.arange(0, row_tile)
    weight_ptrs = tile_ptr + weight_row[:, None] + column[None, :]  # [tile_rows, inputs]
    x_ptrs = x_ptr + begin + row[None, :].to(tl.int64) * x_stride + column[:, None]  # [inputs, row_tile]
    is_row = row[None, :] < num_rows
    sums = tl.zeros((tile_rows, row_tile), tl.float32)
    wait_for_inputs(overlap)
    for i in tl.range(0, split_inputs, inputs, num_stages=num_stages):
        if whole_chunks:
            weight = tl.load(weight_ptrs + i)
            x = tl.load(x_ptrs + i, mask=is_row, other=0.0)
        else:
            weight = tl.load(weight_ptrs + i, mask=column[None, :] + i < split_inputs, other=0.0)
            x = tl.load(x_ptrs + i, mask=is_row & (column[:, None] + i < split_inputs), other=0.0)
        sums = tl.dot(weight, x, sums)

    dtype = output_ptr.dtype.element_ty
    if has_bias:
        bias_ptrs = bias_ptr + first + tile_row % outputs + (tile_row // outputs) * num_outputs
        bias = tl.load(bias_ptrs, mask=(tile_row % outputs < num_valid) & (split == 0), other=0.0)
        sums += bias.to(tl.float32)[:, None]
    if gated:
        halves = tl.permute(tl.reshape(sums.to(dtype), (2, outputs, row_tile)), (1, 2, 0))
        gate, up = tl.split(halves)
        sums = silu_and_mul(gate, up)
    output = tl.arange(0, outputs)[:, None]
    out_ptrs = output_ptr + (split * num_rows + row[None, :]).to(tl.int64) * num_outputs + first + output
    tl.store(out_ptrs, sums.to(dtype), mask=(output < num_valid) & is_row)
