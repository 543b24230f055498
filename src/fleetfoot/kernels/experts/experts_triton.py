"""The products of experts on a GPU.

Weights are the first operand of every product and tokens the second one, so that few tokens need no padding to the
rows of a tensor core instruction. The first product ends with the activation and each token's weight of the expert, so
that the second one is only a sum.

Up to `FEW_ROWS` tokens, a program of the first product reads some outputs of one slot, for all tokens, and one of the
second product some outputs of all slots: each chosen expert is read once, and the sum over experts is that of one
program. More tokens are grouped by experts in tiles, and a last kernel adds the outputs of each token's experts. All
sums have one order, which does not depend on the batch.

Grids are those of the most slots and tiles that there can be; programs without work end. So graphs can hold the
launches, and the host reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from fleetfoot.kernels.experts.experts import ExpertSizes, Routing, TorchExperts
from fleetfoot.kernels.experts.routing_triton import FEW_ROWS, Groups, Slots, group
from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.gpu_limits import GPULimits, gpu_limits
from fleetfoot.kernels.runtime.triton_support import cdiv, compiles_slowly, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl

_SUM_TILE = 1024


@dataclass(frozen=True, slots=True)
class FewTiling:
    """The steps of products of few tokens; see `choose_few_tiling`."""

    outputs: int
    """Outputs of a program."""
    inputs: int
    """Inputs of each of ``slices`` in a step."""
    slices: int
    num_stages: int


def choose_few_tiling(num_rows: int, element_size: int, shared: int, *, is_down: bool) -> FewTiling:
    """A step has 256 inputs. On an H100, us of the products of Qwen3-30B-A3B's experts for 1 and 8 tokens, with as many
    steps in flight: 6 of the first product 33.1 and 187.7, 10 of them 37.8 and 170.1, 3 of twice the size 37.5 and 186;
    6 of the second one 34.9 and 198.8, 10 of them 37.4 and 185.1.

    Args:
        shared: bytes of a program at most.
        is_down: of the second product.
    """
    step_bytes = (16 * (1 if is_down else 2) + padded_few_rows(num_rows)) * 4 * 64 * 2
    stages = min(6 if num_rows == 1 else 10, shared // step_bytes)
    return FewTiling(16, 64 * 2 // element_size, 4, max(2, stages))


def padded_few_rows(num_rows: int) -> int:
    """The tokens that a product of few computes."""
    return 1 if num_rows == 1 else 8 if num_rows <= 8 else FEW_ROWS


@dataclass(frozen=True, slots=True)
class GroupTiling:
    """The tiles of grouped products; see `choose_group_tiling`."""

    rows: int
    """Pairs of tokens and experts."""
    outputs: int
    """Outputs of the first product, each with a gate and an up."""
    down_outputs: int
    inputs: int
    num_warps: int
    num_stages: int


_TILINGS = (
    GroupTiling(16, 64, 128, 128, 4, 3),
    GroupTiling(32, 64, 128, 128, 4, 3),
    GroupTiling(64, 128, 128, 64, 8, 4),
    GroupTiling(128, 128, 256, 64, 8, 4),
)
_EFFICIENCY = (0.12, 0.22, 0.45, 0.75)
"""The part, for each tiling, of the arithmetic throughput that its products reach while weights come from L2."""
_FLOPS_PER_BYTE = 220.0
"""Operations on the tensor cores in the time of a byte from memory."""
_L2_RATE = 2.0
"""Bytes from L2 in the time of one from memory."""


@lru_cache(maxsize=4096)
def choose_group_tiling(num_pairs: int, sizes: ExpertSizes, element_size: int, shared: int) -> GroupTiling:
    """The tiling that takes the least time by estimate: the weights of all experts from memory, those of further tiles
    of an expert from L2, and the arithmetic with that of rows without a pair. ``shared``: bytes of a program at most.
    """
    active = min(sizes.num_experts, num_pairs)
    weights = 3 * sizes.size * sizes.hidden_size

    def cost(index: int) -> float:
        rows = _TILINGS[index].rows
        tiles = active * max(1.0, num_pairs / active / rows + 0.5)
        read = active * weights * element_size + (tiles - active) * weights * element_size / _L2_RATE
        computed = tiles * rows * weights * 2 / (_FLOPS_PER_BYTE * _EFFICIENCY[index])
        return max(read, computed)

    found = _TILINGS[min(range(len(_TILINGS)), key=cost)]
    inputs, stages = found.inputs * 2 // element_size, found.num_stages
    while stages > 2 and (2 * found.outputs + found.rows) * inputs * element_size * stages > shared:
        stages -= 1
    return GroupTiling(found.rows, found.outputs, found.down_outputs, inputs, found.num_warps, stages)


class ProductShape(NamedTuple):
    """The constants of the kernels."""

    size: int
    """Intermediate size."""
    hidden_size: int
    gate_stride: int
    """Elements between the rows of two gates; ``up_offset``: from a gate to its up."""
    up_offset: int
    bias_stride: int
    """The same of biases; ``up_bias_offset`` likewise."""
    up_bias_offset: int
    has_bias: bool
    is_clamped: bool
    alpha: float
    limit: float
    num_chosen: int
    outputs: int
    inputs: int
    """Inputs of a step; for few tokens, of each of ``slices`` in a step."""
    slices: int
    rows: int
    slot_rows: int
    overlap: bool


class TritonExperts(TorchExperts):
    """The same matrices, multiplied by kernels."""

    def __call__(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """See `TorchExperts`."""
        sizes = self.sizes
        if routing.grouping is None or x.dtype is not self.dtype or sizes.size % 16 or sizes.hidden_size % 16:
            return super().__call__(x, routing)
        x = x if x.stride(1) == 1 else x.contiguous()
        if isinstance(routing.grouping, Slots):
            return self._of_few(x, routing, routing.grouping)
        return self._of_groups(x, routing)

    def _of_few(self, x: torch.Tensor, routing: Routing, slots: Slots) -> torch.Tensor:
        num_rows, (num_slots,) = len(x), slots.experts.shape
        rows, shared = padded_few_rows(num_rows), gpu_limits(x.device).shared_bytes
        hidden, size = self.sizes.hidden_size, self.sizes.size
        between = x.new_empty(num_slots, num_rows, size)
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        gate_up, down = (
            choose_few_tiling(num_rows, x.element_size(), shared, is_down=is_down) for is_down in (False, True)
        )
        shape = self._shape(routing, gate_up.outputs, gate_up.inputs, gate_up.slices, rows)
        options = {"num_warps": 4, **launch_options(shape.overlap)}
        _few_gate_up_kernel[(cdiv(size, gate_up.outputs), num_slots)](
            between, x, self.matrices["gate_up"], self._bias("gate_up"), slots.experts, slots.weights, slots.count,
            num_rows, x.stride(0), shape=shape, num_stages=gate_up.num_stages, **options,
        )  # fmt: skip
        shape = self._shape(routing, down.outputs, down.inputs, down.slices, rows)
        _few_down_kernel[(cdiv(hidden, down.outputs),)](
            output, between, self.matrices["down"], self._bias("down"), slots.experts, slots.weights, slots.count,
            num_rows, shape=shape, num_stages=down.num_stages, **options,
        )  # fmt: skip
        return output

    def _of_groups(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        num_rows, num_chosen = routing.experts.shape
        sizes, num_pairs = self.sizes, num_rows * num_chosen
        limits: GPULimits = gpu_limits(x.device)
        tiling = choose_group_tiling(num_pairs, sizes, x.element_size(), limits.shared_bytes)
        groups: Groups = group(routing, sizes.num_experts, tiling.rows)
        num_tiles = len(groups.experts)
        between = x.new_empty(num_tiles * tiling.rows, sizes.size)
        # Sums of many tokens are of rounded outputs, as of separate layers.
        outputs = x.new_empty(num_pairs, sizes.hidden_size)
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        shape = self._shape(routing, tiling.outputs, tiling.inputs, 1, tiling.rows)
        options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages, **launch_options(shape.overlap)}
        _grouped_gate_up_kernel[(cdiv(sizes.size, tiling.outputs), num_tiles)](
            between, x, self.matrices["gate_up"], self._bias("gate_up"), groups.pairs, groups.experts, routing.weights,
            num_pairs, x.stride(0), shape=shape, **options,
        )  # fmt: skip
        shape = shape._replace(outputs=tiling.down_outputs)
        _grouped_down_kernel[(cdiv(sizes.hidden_size, tiling.down_outputs), num_tiles)](
            outputs, between, self.matrices["down"], self._bias("down"), groups.pairs, groups.experts, routing.weights,
            num_pairs, shape=shape, **options,
        )  # fmt: skip
        _sum_kernel[(num_rows, cdiv(sizes.hidden_size, _SUM_TILE))](
            output, outputs, routing.experts, sizes.hidden_size, num_chosen=num_chosen, tile=_SUM_TILE,
            overlap=shape.overlap, num_warps=4, **launch_options(shape.overlap),
        )  # fmt: skip
        return output

    def _bias(self, matrix: str) -> torch.Tensor:
        """The bias, or what stands in its place."""
        bias = self.biases[matrix]
        return self.matrices[matrix] if bias is None else bias

    def _shape(self, routing: Routing, outputs: int, inputs: int, slices: int, rows: int) -> ProductShape:
        sizes = self.sizes
        hidden = sizes.hidden_size
        strides = (2 * hidden, hidden, 2, 1) if sizes.is_interleaved else (hidden, sizes.size * hidden, 1, sizes.size)
        return ProductShape(
            sizes.size, hidden, *strides, sizes.has_bias, sizes.activation == "clamped", sizes.alpha, sizes.limit,
            routing.experts.shape[1], outputs, inputs, slices, rows, FEW_ROWS, can_overlap(self.device),
        )  # fmt: skip


@triton_kernel()
def _activate(gate, up, shape: tl.constexpr):
    """The activation in float32, before it is rounded."""
    if shape.is_clamped:
        gate = tl.minimum(gate, shape.limit)
        up = tl.minimum(tl.maximum(up, -shape.limit), shape.limit)
        return (up + 1.0) * gate / (1.0 + tl.exp(-gate * shape.alpha))
    else:
        return gate / (1.0 + tl.exp(-gate)) * up


@triton_kernel()
def _add_bias(gate, up, bias_ptr, output, shape: tl.constexpr):
    """``gate``, ``up [outputs, rows]`` with the biases of an expert."""
    place = output * shape.bias_stride
    mask = output < shape.size
    gate += tl.load(bias_ptr + place, mask=mask, other=0.0).to(tl.float32)[:, None]
    up += tl.load(bias_ptr + place + shape.up_bias_offset, mask=mask, other=0.0).to(tl.float32)[:, None]
    return gate, up


@triton_kernel(unspecialized=("num_rows",))
def _few_gate_up_kernel(
    output_ptr, x_ptr, weight_ptr, bias_ptr, slot_experts_ptr, slot_weights_ptr, count_ptr,
    num_rows, x_stride,
    shape: tl.constexpr,
):  # fmt: skip
    """Some outputs of the expert of a slot, for all tokens; 0 for tokens that it was not chosen for."""
    launch_dependents(shape.overlap)
    outputs: tl.constexpr = shape.outputs
    rows: tl.constexpr = shape.rows
    slices: tl.constexpr = shape.slices
    inputs: tl.constexpr = shape.inputs
    slot = tl.program_id(1)
    output = tl.program_id(0) * outputs + tl.arange(0, outputs)
    row = tl.arange(0, rows)
    slice_begin = tl.arange(0, slices)[:, None, None] * inputs
    column = slice_begin + tl.arange(0, inputs)[None, None, :]  # [slices, 1, inputs]
    x_column = slice_begin + tl.arange(0, inputs)[None, :, None]  # [slices, inputs, 1]
    wait_for_inputs(shape.overlap)
    count = tl.load(count_ptr)
    expert = tl.load(slot_experts_ptr + slot).to(tl.int64)  # not set, and not used, beyond the count
    if slot < count:
        weight = tl.load(slot_weights_ptr + slot * shape.slot_rows + row)[None, :]
        gate_ptr = weight_ptr + expert * (2 * shape.size * shape.hidden_size)
        weight_row = tl.minimum(output, shape.size - 1)[None, :, None] * shape.gate_stride
        gates = tl.zeros((slices, outputs, rows), tl.float32)
        ups = tl.zeros((slices, outputs, rows), tl.float32)
        chunk: tl.constexpr = shape.slices * inputs
        for begin in tl.range(0, shape.hidden_size, chunk):
            x_ptrs = x_ptr + row[None, None, :] * x_stride + x_column + begin
            weight_ptrs = gate_ptr + weight_row + column + begin
            is_row = (row < num_rows)[None, None, :]
            if shape.hidden_size % chunk == 0:
                x = tl.load(x_ptrs, mask=is_row, other=0.0)
                gate = tl.load(weight_ptrs)
                up = tl.load(weight_ptrs + shape.up_offset)
            else:
                in_row = column + begin < shape.hidden_size
                x = tl.load(x_ptrs, mask=is_row & (x_column + begin < shape.hidden_size), other=0.0)
                gate = tl.load(weight_ptrs, mask=in_row, other=0.0)
                up = tl.load(weight_ptrs + shape.up_offset, mask=in_row, other=0.0)
            gates = tl.dot(gate, x, gates, input_precision="ieee")
            ups = tl.dot(up, x, ups, input_precision="ieee")
        gate = tl.sum(gates, 0)  # [outputs, rows]
        up = tl.sum(ups, 0)
        if shape.has_bias:
            gate, up = _add_bias(gate, up, bias_ptr + expert * (2 * shape.size), output, shape)
        result = tl.where(weight == 0.0, 0.0, _activate(gate, up, shape) * weight)
        out_ptrs = output_ptr + (slot * num_rows + row[None, :]) * shape.size + output[:, None]
        mask = (output < shape.size)[:, None] & (row < num_rows)[None, :]
        tl.store(out_ptrs, result.to(output_ptr.dtype.element_ty), mask=mask)


@triton_kernel(unspecialized=("num_rows",))
def _few_down_kernel(
    output_ptr, between_ptr, weight_ptr, bias_ptr, slot_experts_ptr, slot_weights_ptr, count_ptr,
    num_rows,
    shape: tl.constexpr,
):  # fmt: skip
    """Some outputs of all slots, added."""
    launch_dependents(shape.overlap)
    outputs: tl.constexpr = shape.outputs
    rows: tl.constexpr = shape.rows
    slices: tl.constexpr = shape.slices
    inputs: tl.constexpr = shape.inputs
    output = tl.program_id(0) * outputs + tl.arange(0, outputs)
    row = tl.arange(0, rows)
    slice_begin = tl.arange(0, slices)[:, None, None] * inputs
    column = slice_begin + tl.arange(0, inputs)[None, None, :]  # [slices, 1, inputs]
    in_column = slice_begin + tl.arange(0, inputs)[None, :, None]  # [slices, inputs, 1]
    weight_row = tl.minimum(output, shape.hidden_size - 1)[None, :, None] * shape.size
    sums = tl.zeros((slices, outputs, rows), tl.float32)
    chunk: tl.constexpr = shape.slices * inputs
    steps: tl.constexpr = (shape.size + chunk - 1) // chunk
    wait_for_inputs(shape.overlap)
    num_slots = tl.load(count_ptr)
    for step in tl.range(0, num_slots * steps):
        slot = step // steps
        begin = step % steps * chunk
        expert = tl.load(slot_experts_ptr + slot).to(tl.int64)
        weight_ptrs = weight_ptr + expert * (shape.hidden_size * shape.size) + weight_row + column + begin
        between_ptrs = between_ptr + (slot * num_rows + row)[None, None, :] * shape.size + in_column + begin
        is_row = (row < num_rows)[None, None, :]
        if shape.size % chunk == 0:
            weight = tl.load(weight_ptrs)
            between = tl.load(between_ptrs, mask=is_row, other=0.0)
        else:
            weight = tl.load(weight_ptrs, mask=column + begin < shape.size, other=0.0)
            between = tl.load(between_ptrs, mask=is_row & (in_column + begin < shape.size), other=0.0)
        sums = tl.dot(weight, between, sums, input_precision="ieee")
    result = tl.sum(sums, 0)  # [outputs, rows]
    is_output = output < shape.hidden_size
    if shape.has_bias:
        for slot in tl.range(0, num_slots):
            expert = tl.load(slot_experts_ptr + slot).to(tl.int64)
            bias = tl.load(bias_ptr + expert * shape.hidden_size + output, mask=is_output, other=0.0)
            weight = tl.load(slot_weights_ptr + slot * shape.slot_rows + row)
            result += bias.to(tl.float32)[:, None] * weight[None, :]
    out_ptrs = output_ptr + row[None, :] * shape.hidden_size + output[:, None]
    mask = is_output[:, None] & (row < num_rows)[None, :]
    tl.store(out_ptrs, result.to(output_ptr.dtype.element_ty), mask=mask)


@compiles_slowly
@triton_kernel(unspecialized=("num_pairs",))
def _grouped_gate_up_kernel(
    output_ptr, x_ptr, weight_ptr, bias_ptr, pairs_ptr, tile_experts_ptr, weights_ptr,
    num_pairs, x_stride,
    shape: tl.constexpr,
):  # fmt: skip
    """Some outputs of a tile of pairs."""
    launch_dependents(shape.overlap)
    outputs: tl.constexpr = shape.outputs
    rows: tl.constexpr = shape.rows
    inputs: tl.constexpr = shape.inputs
    tile = tl.program_id(1)
    output = tl.program_id(0) * outputs + tl.arange(0, outputs)
    column = tl.arange(0, inputs)
    place = tile * rows + tl.arange(0, rows)
    wait_for_inputs(shape.overlap)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert >= 0:
        pair = tl.load(pairs_ptr + place)
        is_pair = pair < num_pairs
        gate_ptr = weight_ptr + expert * (2 * shape.size * shape.hidden_size)
        weight_row = tl.minimum(output, shape.size - 1)[:, None] * shape.gate_stride
        weight_ptrs = gate_ptr + weight_row + column[None, :]  # [outputs, inputs]
        x_row = tl.where(is_pair, pair // shape.num_chosen, 0).to(tl.int64)
        x_ptrs = x_ptr + x_row[None, :] * x_stride + column[:, None]  # [inputs, rows]
        gate = tl.zeros((outputs, rows), tl.float32)
        up = tl.zeros((outputs, rows), tl.float32)
        for begin in tl.range(0, shape.hidden_size, inputs):
            if shape.hidden_size % inputs == 0:
                x = tl.load(x_ptrs + begin)
                gate_weight = tl.load(weight_ptrs + begin)
                up_weight = tl.load(weight_ptrs + shape.up_offset + begin)
            else:
                in_row = column + begin < shape.hidden_size
                x = tl.load(x_ptrs + begin, mask=in_row[:, None], other=0.0)
                gate_weight = tl.load(weight_ptrs + begin, mask=in_row[None, :], other=0.0)
                up_weight = tl.load(weight_ptrs + shape.up_offset + begin, mask=in_row[None, :], other=0.0)
            gate = tl.dot(gate_weight, x, gate, input_precision="ieee")
            up = tl.dot(up_weight, x, up, input_precision="ieee")
        if shape.has_bias:
            gate, up = _add_bias(gate, up, bias_ptr + expert * (2 * shape.size), output, shape)
        weight = tl.load(weights_ptr + pair, mask=is_pair, other=0.0)[None, :]
        result = tl.where(weight == 0.0, 0.0, _activate(gate, up, shape) * weight)
        out_ptrs = output_ptr + place[None, :].to(tl.int64) * shape.size + output[:, None]
        tl.store(out_ptrs, result.to(output_ptr.dtype.element_ty), mask=(output < shape.size)[:, None])


@compiles_slowly
@triton_kernel(unspecialized=("num_pairs",))
def _grouped_down_kernel(
    output_ptr, between_ptr, weight_ptr, bias_ptr, pairs_ptr, tile_experts_ptr, weights_ptr,
    num_pairs,
    shape: tl.constexpr,
):  # fmt: skip
    """Some outputs of a tile of pairs, each to the pair's own row."""
    launch_dependents(shape.overlap)
    outputs: tl.constexpr = shape.outputs
    rows: tl.constexpr = shape.rows
    inputs: tl.constexpr = shape.inputs
    tile = tl.program_id(1)
    output = tl.program_id(0) * outputs + tl.arange(0, outputs)
    column = tl.arange(0, inputs)
    place = tile * rows + tl.arange(0, rows)
    wait_for_inputs(shape.overlap)
    expert = tl.load(tile_experts_ptr + tile).to(tl.int64)
    if expert >= 0:
        pair = tl.load(pairs_ptr + place)
        weight_row = tl.minimum(output, shape.hidden_size - 1)[:, None] * shape.size
        weight_ptrs = weight_ptr + expert * (shape.hidden_size * shape.size) + weight_row + column[None, :]
        between_ptrs = between_ptr + place[None, :].to(tl.int64) * shape.size + column[:, None]  # [inputs, rows]
        sums = tl.zeros((outputs, rows), tl.float32)
        for begin in tl.range(0, shape.size, inputs):
            if shape.size % inputs == 0:
                weight = tl.load(weight_ptrs + begin)
                between = tl.load(between_ptrs + begin)
            else:
                in_row = column + begin < shape.size
                weight = tl.load(weight_ptrs + begin, mask=in_row[None, :], other=0.0)
                between = tl.load(between_ptrs + begin, mask=in_row[:, None], other=0.0)
            sums = tl.dot(weight, between, sums, input_precision="ieee")
        is_output = output < shape.hidden_size
        if shape.has_bias:
            bias = tl.load(bias_ptr + expert * shape.hidden_size + output, mask=is_output, other=0.0)
            factor = tl.load(weights_ptr + pair, mask=pair < num_pairs, other=0.0)
            sums += bias.to(tl.float32)[:, None] * factor[None, :]
        out_ptrs = output_ptr + pair[None, :].to(tl.int64) * shape.hidden_size + output[:, None]
        mask = is_output[:, None] & (pair < num_pairs)[None, :]
        tl.store(out_ptrs, sums.to(output_ptr.dtype.element_ty), mask=mask)


@triton_kernel()
def _sum_kernel(
    output_ptr, outputs_ptr, experts_ptr, hidden_size,
    num_chosen: tl.constexpr, tile: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """The outputs of a token's experts, added, without those of other ranks."""
    launch_dependents(overlap)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * tile + tl.arange(0, tile)
    mask = column < hidden_size
    wait_for_inputs(overlap)
    total = tl.zeros((tile,), tl.float32)
    for index in tl.static_range(num_chosen):
        pair = row * num_chosen + index
        is_here = tl.load(experts_ptr + pair) >= 0
        total += tl.load(outputs_ptr + pair * hidden_size + column, mask=mask & is_here, other=0.0).to(tl.float32)
    tl.store(output_ptr + row * hidden_size + column, total.to(output_ptr.dtype.element_ty), mask=mask)
