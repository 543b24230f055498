"""The Triton kernels of linear layers for the rows of a decode step, and their launch.

M of the tensor core instructions is outputs, and N the rows of the input. Up to 8 rows, padded to 1 or 8, each program
computes a few outputs over all inputs. Its warps process slices of the inputs, so that a tile of only 16 outputs, of
which even narrow layers have enough, is a long read in each row of the weight. The weight is

- *staged* if it is small: a program loads its whole part before the input is available. A decode step of a small model
  is bound by the transitions between kernels rather than by memory. When the input arrives, only a multiplication from
  shared memory is left;
- *streamed* otherwise, through shared memory, several stages ahead of the multiplication.

A deferred norm may precede or follow this product (`DeferredRMSNorm`). In the first case the inputs lack a factor per
row, which is applied to the sums. In the second case the outputs are added to the residual and multiplied by the weight
of the next norm; before that they may be summed over the ranks of a tensor group (`RankSums`).

From 9 rows on the product is *tiled*: 64 outputs, the minimum for Hopper's wgmma, by 16 to 128 rows, with the inputs
split over programs where tiles are few. The kernel that reads the output adds the partial sums of a split, which costs
less than a second kernel or a wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fleetfoot.kernels.elementwise import GATES, DeferredRMSNorm, DeferredSum, activate_and_mul
from fleetfoot.kernels.linear.rank_sums import RANK_SUM_ROWS, RankSums, peers_of, sum_over_ranks
from fleetfoot.kernels.linear.tilings import Tiling
from fleetfoot.kernels.runtime.dependent_launch import (
    can_overlap,
    launch_dependents,
    launch_options,
    prefetch_rows,
    wait_for_inputs,
)
from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl

_PREFETCHED, _TILED_PREFETCHED = 512, 256
"""Inputs of each row of the weight that are prefetched to L2 while the previous kernel still runs: streamed, tiled."""


def launch_linear(
    output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    tiling: Tiling,
    deferred: DeferredRMSNorm | DeferredSum | None = None,
    add_norm: tuple[torch.Tensor, torch.Tensor, DeferredRMSNorm] | None = None,
    squares_out: torch.Tensor | None = None,
    scale: float = 1.0,
    rank_sums: RankSums | None = None,
) -> None:
    """Write ``x [n, in] @ weight.T + bias`` times ``scale`` to ``output``; gated: the activation of its first half
    times the second.

    Args:
        activation: of a gated layer, a key of GATES.
        output: ``[n, out]``; tiled with splits: ``[splits, n, out]`` float32, and their sum is the product.
        weight: ``[out, in]``, contiguous, ``[2 * out, in]`` if gated; ``bias`` alike. ``in`` is a multiple of 8, and of
            a chunk if staged.
        deferred: the norm of ``x``. add_norm: the residual, the weight of the next norm, and the result of that, with
            `DeferredRMSNorm.weighted` as output; its parts are the programs. squares_out: ``[programs, n]``, for the
            squares of the output, as in `DeferredSum`. All for up to 8 rows only.
        rank_sums: sums the product over the ranks, before it is rounded and added to the residual. All ranks make this
            call, without a bias.
    """
    num_rows, num_outputs = output.shape[-2:]
    num_inputs, gated = weight.shape[1], GATES[activation]
    overlap = can_overlap(x.device)
    biases = weight if bias is None else bias
    options = {
        "inputs": tiling.inputs, "stages": tiling.stages, "row_tile": tiling.row_tile, "has_bias": bias is not None,
        "scale": scale, "gated": gated, "overlap": overlap, "num_warps": tiling.num_warps, **launch_options(overlap),
    }  # fmt: skip
    if tiling.kernel == "tiled":
        split_inputs = cdiv(cdiv(num_inputs, tiling.splits), tiling.inputs) * tiling.inputs
        outputs = tiling.outputs // 2 if gated else tiling.outputs
        _linear_tiled_kernel[(cdiv(num_outputs, outputs), cdiv(num_rows, tiling.row_tile), tiling.splits)](
            output, x, weight, biases, num_rows, num_outputs, num_inputs, x.stride(0), split_inputs,
            min(_TILED_PREFETCHED, split_inputs),
            outputs=outputs, whole_chunks=split_inputs * tiling.splits == num_inputs, **options,
        )  # fmt: skip
        return
    squares, eps = (weight, 0.0) if deferred is None else (deferred.squares, deferred.eps)
    num_parts = 1 if deferred is None else len(squares)
    residual = norm_weight = output_norm = total = weight
    has_sum, ends, offset = isinstance(deferred, DeferredSum), "product", 0.0
    if isinstance(deferred, DeferredSum):
        residual, norm_weight, total = deferred.residual, deferred.weight, deferred.total
        output_norm, offset = deferred.output_weight, deferred.offset
    if squares_out is not None:
        ends = "squares"
    elif add_norm is not None:
        residual, norm_weight, result = add_norm
        total, squares_out, ends = result.total, result.squares, "sum"
    words = addresses = num_calls = weight
    rank, num_ranks, width = 0, 1, 0
    if rank_sums is not None:
        words, addresses, num_calls = rank_sums.words, rank_sums.addresses, rank_sums.num_calls
        rank, num_ranks, width = rank_sums.rank, rank_sums.num_ranks, rank_sums.width
    _linear_few_rows_kernel[(cdiv(num_outputs, tiling.outputs),)](
        output, x, weight, biases, squares, num_parts, eps, residual, norm_weight, output_norm, total,
        weight if squares_out is None else squares_out, words, addresses, num_calls, rank,
        num_rows, num_outputs, num_inputs, x.stride(0), min(_PREFETCHED, num_inputs) * 2,
        num_ranks=num_ranks, max_rows=RANK_SUM_ROWS, width=width,
        outputs=tiling.outputs, slices=tiling.num_warps, staged=tiling.kernel == "staged",
        whole_chunks=num_inputs % (tiling.num_warps * tiling.inputs) == 0, parts_tile=next_power_of_2(num_parts),
        has_deferred_norm=deferred is not None, has_sum=has_sum, offset=offset, ends=ends, **options,
    )  # fmt: skip


@triton_kernel(unspecialized=("num_rows", "rank"))
def _linear_few_rows_kernel(
    output_ptr, x_ptr, weight_ptr, bias_ptr, squares_in_ptr, num_parts, eps, residual_ptr, norm_ptr, output_norm_ptr,
    total_ptr, squares_ptr, words_ptr, addresses_ptr, num_calls_ptr, rank,
    num_rows, num_outputs, num_inputs, x_stride, prefetched_bytes,
    num_ranks: tl.constexpr, max_rows: tl.constexpr, width: tl.constexpr,
    outputs: tl.constexpr, slices: tl.constexpr, inputs: tl.constexpr, stages: tl.constexpr, row_tile: tl.constexpr,
    staged: tl.constexpr, whole_chunks: tl.constexpr, has_bias: tl.constexpr, scale: tl.constexpr, gated: tl.constexpr,
    parts_tile: tl.constexpr, has_deferred_norm: tl.constexpr, has_sum: tl.constexpr, offset: tl.constexpr,
    ends: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    launch_dependents(overlap)
    # A program's rows of the weight are contiguous. If staged, prefetching all of them at once hides the latency of the
    # loads below, of which registers hold a few at a time.
    first = tl.program_id(0) * outputs
    num_valid = tl.minimum(outputs, num_outputs - first)
    if staged:
        prefetched_bytes = num_inputs * 2
    gate_ptr = weight_ptr + first.to(tl.int64) * num_inputs
    up_ptr = gate_ptr + tl.cast(num_outputs, tl.int64) * num_inputs
    prefetch_rows(gate_ptr, num_inputs * 2, num_valid, prefetched_bytes, overlap)
    if gated:
        prefetch_rows(up_ptr, num_inputs * 2, num_valid, prefetched_bytes, overlap)

    output = tl.arange(0, outputs)
    weight_row = tl.minimum(output, num_valid - 1)[None, :, None] * num_inputs
    slice_begin = tl.arange(0, slices)[:, None, None] * inputs
    in_slice = tl.arange(0, inputs)
    weight_column = slice_begin + in_slice[None, None, :]
    chunk: tl.constexpr = slices * inputs
    gates = ()
    ups = ()
    if staged:
        weight_offset = weight_row + slice_begin + in_slice[None, None, :]  # [slices, outputs, inputs]
        for i in tl.static_range(stages):
            gates += (tl.load(gate_ptr + weight_offset + i * chunk),)  # type: ignore[assignment]
            if gated:
                ups += (tl.load(up_ptr + weight_offset + i * chunk),)  # type: ignore[assignment]
    x_row = tl.arange(0, row_tile)[None, None, :]
    x_column = slice_begin + in_slice[None, :, None]
    sums = tl.zeros((slices, outputs, row_tile), tl.float32)
    up_sums = tl.zeros((slices, outputs, row_tile), tl.float32)
    norm_weight = weight_row
    if ends == "sum":
        norm_weight = tl.load(norm_ptr + first + tl.minimum(output, num_valid - 1))
    peers = ()
    if num_ranks > 1:
        peers = peers_of(addresses_ptr, rank, num_ranks)
    wait_for_inputs(overlap)
    # Loaded before the product, so that they are available after it.
    squares = sums
    if has_deferred_norm:
        part = tl.arange(0, parts_tile)[:, None]
        row = tl.arange(0, row_tile)[None, :]
        is_square = (part < num_parts) & (row < num_rows)
        squares = tl.load(squares_in_ptr + part * num_rows + row, mask=is_square, other=0.0)  # [parts_tile, row_tile]
    residual = sums
    if ends == "sum":
        row = tl.arange(0, row_tile)[None, :]
        residual_ptrs = residual_ptr + row.to(tl.int64) * num_outputs + first + output[:, None]
        residual = tl.load(residual_ptrs, mask=(output[:, None] < num_valid) & (row < num_rows), other=0.0)
    call = output
    if num_ranks > 1:
        call = tl.load(num_calls_ptr + first + output, mask=output < num_valid, other=0) + 1
    factor = 0.0
    summed = tl.zeros((slices, row_tile), tl.float32)  # squares of the sum
    if has_sum:
        factor = (1.0 / tl.sqrt_rn(tl.sum(squares, axis=0) / num_inputs + eps))[None, None, :]
    if staged:
        for i in tl.static_range(stages):
            x, summed = _load_inputs(
                x_ptr, residual_ptr, norm_ptr, output_norm_ptr, total_ptr, x_row, x_column + i * chunk, x_stride,
                num_rows, num_inputs, factor, summed, True, has_sum, offset,
            )  # fmt: skip
            sums = tl.dot(gates[i], x, sums)
            if gated:
                up_sums = tl.dot(ups[i], x, up_sums)
    else:
        for begin in tl.range(0, num_inputs, chunk, num_stages=stages):
            x, summed = _load_inputs(
                x_ptr, residual_ptr, norm_ptr, output_norm_ptr, total_ptr, x_row, x_column + begin, x_stride,
                num_rows, num_inputs, factor, summed, whole_chunks, has_sum, offset,
            )  # fmt: skip
            weight_offset = weight_row + weight_column + begin  # [slices, outputs, inputs]
            if whole_chunks:
                sums = tl.dot(tl.load(gate_ptr + weight_offset), x, sums)
                if gated:
                    up_sums = tl.dot(tl.load(up_ptr + weight_offset), x, up_sums)
            else:
                in_row = weight_column + begin < num_inputs
                sums = tl.dot(tl.load(gate_ptr + weight_offset, mask=in_row, other=0.0), x, sums)
                if gated:
                    up_sums = tl.dot(tl.load(up_ptr + weight_offset, mask=in_row, other=0.0), x, up_sums)
    if has_sum:
        squares = summed

    write_outputs(
        sums, up_sums, squares, residual, norm_weight, output_ptr, bias_ptr, total_ptr, squares_ptr, first, num_valid,
        num_rows, num_outputs, num_inputs, eps, words_ptr, peers, call, num_calls_ptr, rank,
        num_ranks, max_rows, width,
        outputs, row_tile, has_bias, scale, gated, has_deferred_norm, ends,
    )  # fmt: skip


@triton_kernel()
def _load_inputs(
    x_ptr, residual_ptr, norm_ptr, output_norm_ptr, total_ptr, row, column, stride, num_rows, num_inputs,
    factor, summed, is_whole: tl.constexpr, has_sum: tl.constexpr, offset: tl.constexpr,
):  # fmt: skip
    """Inputs ``[slices, inputs, row_tile]``. ``has_sum``: of a `DeferredSum`, where ``factor`` is 1/rms of each row of
    the output, and the squares of the total are added to ``summed [slices, row_tile]``."""
    place = row * stride + column
    mask = row < num_rows
    if not is_whole:
        mask = mask & (column < num_inputs)
    x = tl.load(x_ptr + place, mask=mask, other=0.0)
    if has_sum:
        dtype = x.dtype
        residual = tl.load(residual_ptr + place, mask=mask, other=0.0).to(tl.float32)
        is_input = column < num_inputs  # [slices, inputs, 1]: all rows have the same weights
        output_weight = tl.load(output_norm_ptr + column, mask=is_input, other=0.0).to(tl.float32) + offset
        weight = tl.load(norm_ptr + column, mask=is_input, other=0.0).to(tl.float32) + offset
        # Rounded at the same places as separate kernels.
        normed = (x.to(tl.float32) * factor * output_weight).to(dtype).to(tl.float32)
        total = (residual + normed).to(dtype)
        tl.store(total_ptr + place, total, mask=mask & (tl.program_id(0) == 0))
        total = total.to(tl.float32)
        summed += tl.sum(total * total, axis=1)
        x = (total * weight).to(dtype)
    return x, summed


@triton_kernel()
def write_outputs(
    sums, up_sums, squares, residual, norm_weight, output_ptr, bias_ptr, total_ptr, squares_ptr, first, num_valid,
    num_rows, num_outputs, num_inputs, eps, words_ptr, peers, call, num_calls_ptr, rank,
    num_ranks: tl.constexpr, max_rows: tl.constexpr, width: tl.constexpr,
    outputs: tl.constexpr, row_tile: tl.constexpr, has_bias: tl.constexpr, scale: tl.constexpr, gated: tl.constexpr,
    has_deferred_norm: tl.constexpr, ends: tl.constexpr,
):  # fmt: skip
    """Add up the slices ``[slices, outputs, row_tile]``, and write a program's ``num_valid`` outputs."""
    dtype = output_ptr.dtype.element_ty
    output = tl.arange(0, outputs)
    is_output = output < num_valid
    row = tl.arange(0, row_tile)[None, :]
    is_written = is_output[:, None] & (row < num_rows)
    offset = row.to(tl.int64) * num_outputs + first + output[:, None]
    result = tl.sum(sums, axis=0)  # [outputs, row_tile]
    if has_deferred_norm:
        factor = (1.0 / tl.sqrt_rn(tl.sum(squares, axis=0) / num_inputs + eps))[None, :]
        result *= factor
    if has_bias:
        result += tl.load(bias_ptr + first + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    if scale != 1.0:
        result *= scale
    if gated:
        up = tl.sum(up_sums, axis=0)
        if has_deferred_norm:
            up *= factor
        if has_bias:
            up_bias_ptr = bias_ptr + num_outputs + first
            up += tl.load(up_bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
        result = activate_and_mul(result.to(dtype), up.to(dtype), gated)
    if num_ranks > 1:
        column = first + output
        result = sum_over_ranks(
            result, words_ptr, peers, call, column, is_written, rank, num_ranks, width, max_rows, row_tile
        )
        tl.store(num_calls_ptr + column, call, mask=is_output)
    if ends != "product":
        # Rounded at the same places as separate kernels.
        total = result.to(dtype)
        if ends == "sum":
            total = (total.to(tl.float32) + residual.to(tl.float32)).to(dtype)
            tl.store(total_ptr + offset, total, mask=is_written)
        total = tl.where(is_written, total.to(tl.float32), 0.0)
        part_ptr = squares_ptr + tl.program_id(0) * num_rows + tl.arange(0, row_tile)
        tl.store(part_ptr, tl.sum(total * total, axis=0), mask=tl.arange(0, row_tile) < num_rows)
        result = total
        if ends == "sum":
            result = total * norm_weight.to(tl.float32)[:, None]
    tl.store(output_ptr + offset, result.to(dtype), mask=is_written)


@triton_kernel(unspecialized=("num_rows",))
def _linear_tiled_kernel(
    output_ptr, x_ptr, weight_ptr, bias_ptr, num_rows, num_outputs, num_inputs, x_stride, split_inputs, prefetched,
    outputs: tl.constexpr, inputs: tl.constexpr, stages: tl.constexpr, row_tile: tl.constexpr,
    whole_chunks: tl.constexpr, has_bias: tl.constexpr, scale: tl.constexpr, gated: tl.constexpr, overlap: tl.constexpr,
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
    up_distance = tl.cast(num_outputs, tl.int64) * num_inputs
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
    for i in tl.range(0, split_inputs, inputs, num_stages=stages):
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
    if scale != 1.0:
        sums *= scale
    if gated:
        halves = tl.permute(tl.reshape(sums.to(dtype), (2, outputs, row_tile)), (1, 2, 0))
        gate, up = tl.split(halves)
        sums = activate_and_mul(gate, up, gated)
    output = tl.arange(0, outputs)[:, None]
    out_ptrs = output_ptr + (split * num_rows + row[None, :]).to(tl.int64) * num_outputs + first + output
    tl.store(out_ptrs, sums.to(dtype), mask=(output < num_valid) & is_row)
