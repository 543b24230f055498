"""The products of experts on a GPU.

Weights are the first operand of every product and tokens the second one, so that few tokens need no padding to the
rows of a tensor core instruction. The first product ends with the activation and each token's weight of the expert, so
that the second one is only a sum.

One token's experts are read straight into registers, all loads of a program in flight at once: there is nothing to
share. Up to `FEW_ROWS` tokens, a program of either product reads some outputs of one slot, for all tokens: each chosen
expert is read once. What the second product makes of each pair of a token and an expert is added by the last program
that is done, in the order of the token's experts. More tokens are grouped by experts in tiles, and a last kernel adds
the outputs of each token's experts. No sum depends on which other experts are in the batch.

Grids are those of the most slots and tiles that there can be; programs without work end. So graphs can hold the
launches, and the host reads nothing.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fleetfoot.kernels.experts.experts import Matrix, Routing, SharedExpert, TorchExperts
from fleetfoot.kernels.experts.routing_triton import Groups, Slots, arrivals, group
from fleetfoot.kernels.experts.tilings import (
    FEW_ROWS,
    choose_few_tiling,
    choose_group_tiling,
    choose_one_tiling,
    is_one,
    padded_few_rows,
)
from fleetfoot.kernels.quantized import packed_triton, scaled_triton
from fleetfoot.kernels.quantized.packed import PackedMatrix
from fleetfoot.kernels.quantized.packed_triton import few_packed_step, packed_step, packed_sums
from fleetfoot.kernels.quantized.scaled import ScaledMatrix
from fleetfoot.kernels.quantized.scaled_triton import widened
from fleetfoot.kernels.runtime.dependent_launch import can_overlap, launch_dependents, launch_options, wait_for_inputs
from fleetfoot.kernels.runtime.gpu_limits import GPULimits, gpu_limits
from fleetfoot.kernels.runtime.triton_support import cdiv, compiles_slowly, next_power_of_2, triton_kernel

if TYPE_CHECKING:
    import triton.language as tl

_SUM_TILE = 1024
_SPAN = 128
"""Inputs of a span in products of one token; fewer where fewer share a scale."""


class ProductShape(NamedTuple):
    """The constants of the kernels."""

    num_outputs: int
    """Rows of an expert's matrix."""
    num_inputs: int
    stack_rows: int
    """Rows of an expert in the stack."""
    gate_stride: int
    """Rows of the stack between two gates; ``up_offset``: from a gate to its up."""
    up_offset: int
    form: str
    """``plain``; ``scaled``: values of 8 bits; ``packed``: words of `PackedMatrix`."""
    row_stride: int
    """Values, or words, between two rows of the stack."""
    num_scales: int
    """Scales of a row."""
    scale_rows: int
    """Rows that share a scale; ``group``: inputs that do, 0: all."""
    group: int
    has_zeros: bool
    is_e2m1: bool
    has_bias: bool
    is_clamped: bool
    alpha: float
    limit: float
    num_chosen: int
    """A shared expert is the last one."""
    num_experts: int
    """The number of a shared expert."""
    has_shared: bool
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
        if routing.grouping is None or x.dtype is not self.dtype or not self._is_supported:
            return super().__call__(x, routing)
        if isinstance(routing.grouping, Slots):
            return self._of_slots(x, routing, routing.grouping, None)
        return self._of_groups(x if x.stride(1) == 1 else x.contiguous(), routing)

    def can_join(self, num_rows: int, shared: SharedExpert) -> bool:
        """Where tokens are few, launches count: more tokens are multiplied faster by layers than in groups."""
        if not 0 < num_rows <= FEW_ROWS or not self._is_supported or self.sizes.activation != "silu":
            return False
        pairs = (("gate_up", shared.gate_up), ("down", shared.down))
        return not self.sizes.has_bias and all(self._has_form(name, matrix) for name, matrix in pairs)

    def _has_form(self, name: str, matrix: Matrix) -> bool:
        """Whether a matrix could be that of one of the experts."""
        if self.stacks is None:
            return (
                isinstance(matrix, torch.Tensor)
                and matrix.shape == self.shapes[name]
                and matrix.dtype is self.dtype
                and matrix.is_contiguous()
            )
        stack = self.stacks[name]
        if type(matrix) is not type(stack) or isinstance(matrix, torch.Tensor):
            return False
        if isinstance(matrix, PackedMatrix) and matrix.order is not None:
            return False
        own, other = _form_of(stack), _form_of(matrix)
        return own == other and matrix.bias is None and len(_stored(matrix)[0]) == self.shapes[name][0]

    def with_shared(self, x: torch.Tensor, routing: Routing, shared: SharedExpert) -> torch.Tensor:
        """See `TorchExperts`. At most `FEW_ROWS` tokens, where `can_join`."""
        if not isinstance(routing.grouping, Slots) or x.dtype is not self.dtype:
            return super().with_shared(x, routing, shared)
        return self._of_slots(x, routing, routing.grouping, shared)

    def _of_slots(self, x: torch.Tensor, routing: Routing, slots: Slots, shared: SharedExpert | None) -> torch.Tensor:
        """The products of at most `FEW_ROWS` tokens."""
        x = x if x.stride(1) == 1 else x.contiguous()
        if is_one(len(x), self._form("down")):
            return self._of_one(x, routing, shared)
        return self._of_few(x, routing, slots, shared)

    @cached_property
    def _is_supported(self) -> bool:
        sizes, stacks = self.sizes, (self.stacks or {}).values()
        has_kernels = all(
            packed_triton.supports(self.dtype, each)
            if isinstance(each, PackedMatrix)
            else scaled_triton.supports(self.dtype, each)
            for each in stacks
        )
        return sizes.size % 16 == 0 and sizes.hidden_size % 16 == 0 and has_kernels

    def _form(self, matrix: str) -> str:
        """See `ProductShape`."""
        stack = None if self.stacks is None else self.stacks[matrix]
        return "plain" if stack is None else "packed" if isinstance(stack, PackedMatrix) else "scaled"

    def _of_one(self, x: torch.Tensor, routing: Routing, shared: SharedExpert | None) -> torch.Tensor:
        sizes, num_chosen, has_shared = self.sizes, routing.experts.shape[1], shared is not None
        between, output = x.new_empty(num_chosen, sizes.size), x.new_empty(1, sizes.hidden_size)
        for name in ("gate_up", "down"):
            tiling, is_down = choose_one_tiling(is_down=name == "down"), name == "down"
            shape = self._shape(name, routing, tiling.outputs, _SPAN, tiling.spans, 1, has_shared=has_shared)
            programs = cdiv(shape.num_outputs, tiling.outputs)
            kernel = _one_down_kernel[(programs,)] if is_down else _one_gate_up_kernel[(programs, num_chosen)]
            kernel(
                output if is_down else between, between if is_down else x, *self._tensors(name),
                *self._shared_tensors(name, shared), routing.experts, routing.weights,
                padded_chosen=next_power_of_2(num_chosen - has_shared), shape=shape,
                num_warps=tiling.num_warps, **launch_options(shape.overlap),
            )  # fmt: skip
        return output

    def _of_few(self, x: torch.Tensor, routing: Routing, slots: Slots, shared: SharedExpert | None) -> torch.Tensor:
        (num_rows, num_chosen), (num_slots,) = routing.experts.shape, slots.experts.shape
        rows, shared_bytes = padded_few_rows(num_rows), gpu_limits(x.device).shared_bytes
        hidden, size = self.sizes.hidden_size, self.sizes.size
        between = x.new_empty(num_slots, num_rows, size)
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        gate_up, down = (
            choose_few_tiling(num_rows, self._form(name), x.element_size(), shared_bytes, is_down=name == "down")
            for name in ("gate_up", "down")
        )
        has_shared = shared is not None
        shape = self._shape(
            "gate_up", routing, gate_up.outputs, gate_up.inputs, gate_up.slices, rows, has_shared=has_shared
        )
        options = launch_options(shape.overlap)
        _few_gate_up_kernel[(cdiv(size, gate_up.outputs), num_slots)](
            between, x, *self._tensors("gate_up"), *self._shared_tensors("gate_up", shared),
            slots.experts, slots.weights, slots.count,
            num_rows, x.stride(0), shape=shape, num_stages=gate_up.num_stages, num_warps=gate_up.slices, **options,
        )  # fmt: skip
        shape = self._shape("down", routing, down.outputs, down.inputs, down.slices, rows, has_shared=has_shared)
        parts = torch.empty(num_rows * num_chosen, hidden, dtype=torch.float32, device=x.device)
        _few_down_kernel[(cdiv(hidden, down.outputs), num_slots)](
            output, parts, arrivals(x.device), between, *self._tensors("down"),
            *self._shared_tensors("down", shared), slots.experts, slots.count,
            routing.experts, routing.weights, num_rows, padded_chosen=next_power_of_2(num_chosen), shape=shape,
            num_stages=down.num_stages, num_warps=down.slices, **options,
        )  # fmt: skip
        return output

    def _of_groups(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        num_rows, num_chosen = routing.experts.shape
        sizes, num_pairs = self.sizes, num_rows * num_chosen
        limits: GPULimits = gpu_limits(x.device)
        form, down = self._form("down"), self.stacks and self.stacks["down"]
        if isinstance(down, PackedMatrix) and down.is_e2m1 and x.dtype is torch.bfloat16:
            form = "e2m1"
        tiling = choose_group_tiling(num_pairs, sizes, form, x.element_size(), limits.shared_bytes)
        groups: Groups = group(routing, sizes.num_experts, tiling.rows)
        num_tiles = len(groups.experts)
        between = x.new_empty(num_tiles * tiling.rows, sizes.size)
        # Sums of many tokens are of rounded outputs, as of separate layers.
        outputs = x.new_empty(num_pairs, sizes.hidden_size)
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        shape = self._shape("gate_up", routing, tiling.outputs, tiling.inputs, 1, tiling.rows)
        options = {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages, **launch_options(shape.overlap)}
        _grouped_gate_up_kernel[(cdiv(sizes.size, tiling.outputs), num_tiles)](
            between, x, *self._tensors("gate_up"), groups.pairs, groups.experts, routing.weights,
            num_pairs, x.stride(0), shape=shape, **options,
        )  # fmt: skip
        shape = self._shape("down", routing, tiling.down_outputs, tiling.inputs, 1, tiling.rows)
        _grouped_down_kernel[(cdiv(sizes.hidden_size, tiling.down_outputs), num_tiles)](
            outputs, between, *self._tensors("down"), groups.pairs, groups.experts, routing.weights,
            num_pairs, shape=shape, **options,
        )  # fmt: skip
        _sum_kernel[(num_rows, cdiv(sizes.hidden_size, _SUM_TILE))](
            output, outputs, routing.experts, sizes.hidden_size, num_chosen=num_chosen, tile=_SUM_TILE,
            overlap=shape.overlap, num_warps=4, **launch_options(shape.overlap),
        )  # fmt: skip
        return output

    def _tensors(self, matrix: str) -> tuple[torch.Tensor, ...]:
        """The weight, its scales, zero points and bias, or what stands in their places."""
        stack, bias = None if self.stacks is None else self.stacks[matrix], self.biases[matrix]
        weight, scales, zeros = _stored(self.matrices[matrix] if stack is None else stack)
        return weight, scales, zeros, weight if bias is None else bias

    def _shared_tensors(self, matrix: str, shared: SharedExpert | None) -> tuple[torch.Tensor, ...]:
        """The weight, the scales and the zero points of a shared expert."""
        if shared is None:
            return self._tensors(matrix)[:3]
        return _stored(shared.gate_up if matrix == "gate_up" else shared.down)

    def _shape(
        self,
        matrix: str,
        routing: Routing,
        outputs: int,
        inputs: int,
        slices: int,
        rows: int,
        *,
        has_shared: bool = False,
    ) -> ProductShape:
        sizes, stack = self.sizes, None if self.stacks is None else self.stacks[matrix]
        (stack_rows, num_inputs), is_down = self.shapes[matrix], matrix == "down"
        strides = (1, 0) if is_down else (2, 1) if sizes.is_interleaved else (1, sizes.size)
        stored: Any = (num_inputs, 0, 1, 0, False, False)
        if isinstance(stack, PackedMatrix):
            group = 0 if stack.group >= num_inputs and not stack.is_e2m1 else stack.group
            num_scales = packed_triton.scale_words(stack).shape[1]
            stored = stack.words.shape[1], num_scales, 1, group, stack.zeros is not None, stack.is_e2m1
        elif stack is not None:
            group = 0 if stack.columns >= num_inputs else stack.columns
            stored = num_inputs, stack.scales.shape[1], stack.rows, group, False, False
            inputs = min(inputs, group) if group else inputs
        return ProductShape(  # type: ignore[call-arg]
            sizes.hidden_size if is_down else sizes.size, num_inputs, stack_rows, *strides, self._form(matrix), *stored,
            sizes.has_bias, sizes.activation == "clamped", sizes.alpha, sizes.limit,
            routing.experts.shape[1], sizes.num_experts, has_shared, outputs, inputs, slices, rows, FEW_ROWS,
            can_overlap(self.device),
        )  # fmt: skip


def _stored(matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weight, its scales and zero points, or what stands in their places."""
    if isinstance(matrix, torch.Tensor):
        return matrix, matrix, matrix
    if isinstance(matrix, PackedMatrix):
        scales = packed_triton.scale_words(matrix)
        return matrix.words, scales, scales if matrix.zeros is None else matrix.zeros
    return matrix.values, matrix.scales, matrix.scales


def _form_of(matrix: ScaledMatrix | PackedMatrix) -> tuple[Any, ...]:
    """What rows of matrices have in common that a kernel multiplies alike."""
    stored = [(each.dtype, each.shape[1]) for each in _stored(matrix)]
    if isinstance(matrix, PackedMatrix):
        return *stored, matrix.group, matrix.num_inputs, matrix.is_e2m1, matrix.zeros is None
    return *stored, matrix.rows, matrix.columns


def add_shared_triton(output: torch.Tensor, shared: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """See `add_shared_torch`."""
    num_rows, hidden = x.shape
    if not num_rows:
        return output
    result = torch.empty_like(output)
    overlap = can_overlap(x.device)
    # Few rows have several programs each, which all make the factor.
    tile = max(16, next_power_of_2(cdiv(hidden, 8)) if num_rows <= FEW_ROWS else next_power_of_2(hidden))
    _add_shared_kernel[(num_rows, cdiv(hidden, tile))](
        result, output, shared, x, gate, x.stride(0), hidden=hidden, padded=next_power_of_2(hidden), tile=tile,
        overlap=overlap, num_warps=4, **launch_options(overlap),
    )  # fmt: skip
    return result


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
def _add_bias(sums, bias_ptr, row):
    """``sums [outputs, rows]`` with the bias of ``row [outputs]`` of the stack."""
    return sums + tl.load(bias_ptr + row).to(tl.float32)[:, None]


@triton_kernel()
def _tensors_of(
    expert, weight_ptr, scales_ptr, zeros_ptr, shared_ptr, shared_scales_ptr, shared_zeros_ptr, shape: tl.constexpr
):  # fmt: skip
    """Where an expert's rows are, and its number there."""
    if shape.has_shared:
        is_shared = expert == shape.num_experts
        weight_ptr = tl.where(is_shared, shared_ptr, weight_ptr)
        scales_ptr = tl.where(is_shared, shared_scales_ptr, scales_ptr)
        zeros_ptr = tl.where(is_shared, shared_zeros_ptr, zeros_ptr)
        expert = tl.where(is_shared, 0, expert)
    return expert, weight_ptr, scales_ptr, zeros_ptr


@triton_kernel()
def _rows_of(expert, output, shape: tl.constexpr):
    """The rows of some outputs of an expert in the stack; for those that are too many, that of the last one."""
    return expert.to(tl.int64) * shape.stack_rows + tl.minimum(output, shape.num_outputs - 1) * shape.gate_stride


@triton_kernel()
def _load_inputs(pointers, column, is_row, step: tl.constexpr, shape: tl.constexpr):
    """``step``: inputs of a step."""
    if shape.num_inputs % step == 0:
        x = tl.load(pointers + column, mask=is_row, other=0.0)
    else:
        x = tl.load(pointers + column, mask=(column < shape.num_inputs) & is_row, other=0.0)
    return x


@triton_kernel()
def _load_weights(pointers, column, step: tl.constexpr, shape: tl.constexpr):
    """``step``: inputs of a step."""
    if shape.row_stride % step == 0:
        weight = tl.load(pointers + column)
    else:
        weight = tl.load(pointers + column, mask=column < shape.row_stride, other=0.0)
    return weight


@triton_kernel()
def _few_step(
    sums, ups, x_ptrs, is_row, weight_ptr, scales_ptr, zeros_ptr, row, begin, gated: tl.constexpr, shape: tl.constexpr
):  # fmt: skip
    """Add the products of a step's inputs to ``sums [slices, outputs, rows]``, and with the ups to ``ups``.

    ``x_ptrs``, ``is_row [1, 1, rows]``; ``row [outputs]`` of the stack; ``begin``: the step's first input.
    """
    slices: tl.constexpr = shape.slices
    inputs: tl.constexpr = shape.inputs
    step: tl.constexpr = slices * inputs
    slice_begin = begin + tl.arange(0, slices)[:, None, None] * inputs
    row_ptrs = weight_ptr + (row * shape.row_stride)[None, :, None]
    scale_ptrs = scales_ptr + (row // shape.scale_rows * shape.num_scales)[None, :, None]
    up_distance: tl.constexpr = shape.up_offset * shape.row_stride
    up_scales: tl.constexpr = shape.up_offset // shape.scale_rows * shape.num_scales
    if shape.form == "packed":
        zero_ptrs = zeros_ptr + (row * shape.num_scales)[None, :, None]
        sums, ups = few_packed_step(
            sums, ups, x_ptrs, is_row, row_ptrs, up_distance, scale_ptrs, up_scales, zero_ptrs, begin, shape.num_inputs,
            shape.num_scales, gated, slices, shape.num_inputs % step == 0, shape.group, shape.has_zeros, shape.is_e2m1,
            shape.overlap,
        )  # fmt: skip
    else:
        column = slice_begin + tl.arange(0, inputs)[None, None, :]  # [slices, 1, inputs]
        x = _load_inputs(x_ptrs, slice_begin + tl.arange(0, inputs)[None, :, None], is_row, step, shape)
        weight = _load_weights(row_ptrs, column, step, shape)
        if shape.form == "plain":
            sums = tl.dot(weight, x, sums, input_precision="ieee")
            if gated:
                up = _load_weights(row_ptrs + up_distance, column, step, shape)
                ups = tl.dot(up, x, ups, input_precision="ieee")
        else:
            if shape.group > 0:
                scale_ptrs += tl.minimum(slice_begin // shape.group, shape.num_scales - 1)
            sums += tl.dot(widened(weight, x.dtype), x, input_precision="ieee") * tl.load(scale_ptrs)
            if gated:
                up = _load_weights(row_ptrs + up_distance, column, step, shape)
                ups += tl.dot(widened(up, x.dtype), x, input_precision="ieee") * tl.load(scale_ptrs + up_scales)
    return sums, ups


@triton_kernel(unspecialized=("num_rows",))
def _few_gate_up_kernel(
    output_ptr, x_ptr, weight_ptr, scales_ptr, zeros_ptr, bias_ptr,
    shared_ptr, shared_scales_ptr, shared_zeros_ptr, slot_experts_ptr, slot_weights_ptr, count_ptr,
    num_rows, x_stride,
    shape: tl.constexpr,
):  # fmt: skip
    """Some outputs of the expert of a slot, for all tokens; 0 for tokens that it was not chosen for."""
    launch_dependents(shape.overlap)
    outputs: tl.constexpr = shape.outputs
    rows: tl.constexpr = shape.rows
    slices: tl.constexpr = shape.slices
    slot = tl.program_id(1)
    output = tl.program_id(0) * outputs + tl.arange(0, outputs)
    row = tl.arange(0, rows)
    x_ptrs = x_ptr + row[None, None, :] * x_stride
    wait_for_inputs(shape.overlap)
    count = tl.load(count_ptr)
    expert = tl.load(slot_experts_ptr + slot)  # not set, and not used, beyond the count
    if slot < count:
        weight = tl.load(slot_weights_ptr + slot * shape.slot_rows + row)[None, :]
        of_expert, of_weight, of_scales, of_zeros = _tensors_of(
            expert, weight_ptr, scales_ptr, zeros_ptr, shared_ptr, shared_scales_ptr, shared_zeros_ptr, shape
        )  # fmt: skip
        stack_row = _rows_of(of_expert, output, shape)
        gates = tl.zeros((slices, outputs, rows), tl.float32)
        ups = tl.zeros((slices, outputs, rows), tl.float32)
        step: tl.constexpr = slices * shape.inputs
        for begin in tl.range(0, shape.num_inputs, step):
            gates, ups = _few_step(
                gates, ups, x_ptrs, (row < num_rows)[None, None, :], of_weight, of_scales, of_zeros, stack_row,
                begin, True, shape,
            )  # fmt: skip
        gate = tl.sum(gates, 0)  # [outputs, rows]
        up = tl.sum(ups, 0)
        if shape.has_bias:
            gate = _add_bias(gate, bias_ptr, stack_row)
            up = _add_bias(up, bias_ptr, stack_row + shape.up_offset)
        result = tl.where(weight == 0.0, 0.0, _activate(gate, up, shape) * weight)
        out_ptrs = output_ptr + (slot * num_rows + row[None, :]) * shape.num_outputs + output[:, None]
        mask = (output < shape.num_outputs)[:, None] & (row < num_rows)[None, :]
        tl.store(out_ptrs, result.to(output_ptr.dtype.element_ty), mask=mask)


@triton_kernel(unspecialized=("num_rows",))
def _few_down_kernel(
    output_ptr, parts_ptr, arrivals_ptr, between_ptr, weight_ptr, scales_ptr, zeros_ptr, bias_ptr,
    shared_ptr, shared_scales_ptr, shared_zeros_ptr, slot_experts_ptr,
    count_ptr, experts_ptr, weights_ptr, num_rows,
    padded_chosen: tl.constexpr, shape: tl.constexpr,
):  # fmt: skip
    """Some outputs of the expert of a slot, for the tokens that it was chosen for; the last slot's program adds."""
    launch_dependents(shape.overlap)
    outputs: tl.constexpr = shape.outputs
    rows: tl.constexpr = shape.rows
    slices: tl.constexpr = shape.slices
    num_chosen: tl.constexpr = shape.num_chosen
    slot = tl.program_id(1)
    output = tl.program_id(0) * outputs + tl.arange(0, outputs)
    row = tl.arange(0, rows)
    place = tl.arange(0, padded_chosen)
    is_place = (row < num_rows)[:, None] & (place < num_chosen)[None, :]
    offset = row[None, :] * shape.num_outputs + output[:, None]
    mask = (output < shape.num_outputs)[:, None] & (row < num_rows)[None, :]
    wait_for_inputs(shape.overlap)
    count = tl.load(count_ptr)
    expert = tl.load(slot_experts_ptr + slot)  # not set, and not used, beyond the count
    chosen = tl.load(
        experts_ptr + row[:, None] * num_chosen + place[None, :], mask=is_place, other=-1
    )  # [rows, places]
    if slot < count:
        of_expert, of_weight, of_scales, of_zeros = _tensors_of(
            expert, weight_ptr, scales_ptr, zeros_ptr, shared_ptr, shared_scales_ptr, shared_zeros_ptr, shape
        )  # fmt: skip
        stack_row = _rows_of(of_expert, output, shape)
        x_ptrs = between_ptr + (slot * num_rows + row)[None, None, :] * shape.num_inputs
        sums = tl.zeros((slices, outputs, rows), tl.float32)
        for begin in tl.range(0, shape.num_inputs, slices * shape.inputs):
            sums, _ = _few_step(
                sums, sums, x_ptrs, (row < num_rows)[None, None, :], of_weight, of_scales, of_zeros, stack_row,
                begin, False, shape,
            )  # fmt: skip
        is_here = (chosen == expert).to(tl.int32)
        pair = row * num_chosen + tl.sum(is_here * place[None, :], 1)  # [rows]
        part_ptrs = parts_ptr + pair[None, :] * shape.num_outputs + output[:, None]
        tl.store(part_ptrs, tl.sum(sums, 0), mask=mask & (tl.sum(is_here, 1) > 0)[None, :])
        tl.debug_barrier()  # all threads have written their sums before one signals it
        if tl.atomic_add(arrivals_ptr + tl.program_id(0), 1, sem="acq_rel") == count - 1:
            tl.store(arrivals_ptr + tl.program_id(0), 0)
            result = tl.zeros((outputs, rows), tl.float32)
            for j in tl.static_range(num_chosen):
                own = tl.load(experts_ptr + row * num_chosen + j, mask=row < num_rows, other=-1)
                part_ptrs = parts_ptr + (row * num_chosen + j)[None, :] * shape.num_outputs + output[:, None]
                result += tl.load(part_ptrs, mask=mask & (own >= 0)[None, :], other=0.0, cache_modifier=".cg")
                if shape.has_bias:
                    weight = tl.load(weights_ptr + row * num_chosen + j, mask=row < num_rows, other=0.0)
                    rows_of = own[None, :].to(tl.int64) * shape.stack_rows + output[:, None]
                    bias = tl.load(bias_ptr + rows_of, mask=mask & (own >= 0)[None, :], other=0.0)
                    result += bias.to(tl.float32) * weight[None, :]
            tl.store(output_ptr + offset, result.to(output_ptr.dtype.element_ty), mask=mask)
    if (slot == 0) & (count == 0):  # of a rank that has no chosen expert
        tl.store(output_ptr + offset, tl.zeros((outputs, rows), output_ptr.dtype.element_ty), mask=mask)


@triton_kernel()
def _wide(weight, shape: tl.constexpr):
    """A weight in float32."""
    if shape.form == "scaled":
        weight = widened(weight, tl.float16)
    return weight.to(tl.float32)


@triton_kernel()
def _one_gate_up_kernel(
    output_ptr, x_ptr, weight_ptr, scales_ptr, zeros_ptr, bias_ptr,
    shared_ptr, shared_scales_ptr, shared_zeros_ptr, experts_ptr, weights_ptr,
    padded_chosen: tl.constexpr, shape: tl.constexpr,
):  # fmt: skip
    """Some outputs of one of the experts of the only token."""
    launch_dependents(shape.overlap)
    outputs: tl.constexpr = shape.outputs
    spans: tl.constexpr = shape.slices
    span: tl.constexpr = shape.inputs
    step: tl.constexpr = spans * span
    num_steps: tl.constexpr = (shape.num_inputs + step - 1) // step
    at_once: tl.constexpr = min(num_steps, 8)
    up_distance: tl.constexpr = shape.up_offset * shape.row_stride
    up_scales: tl.constexpr = shape.up_offset // shape.scale_rows * shape.num_scales
    output = tl.program_id(0) * outputs + tl.arange(0, outputs)
    in_step = tl.arange(0, spans)
    wait_for_inputs(shape.overlap)
    expert = tl.load(experts_ptr + tl.program_id(1))
    factor = tl.load(weights_ptr + tl.program_id(1))
    if expert >= 0:
        of_expert, of_weight, of_scales, _ = _tensors_of(
            expert, weight_ptr, scales_ptr, zeros_ptr, shared_ptr, shared_scales_ptr, shared_zeros_ptr, shape
        )  # fmt: skip
        stack_row = _rows_of(of_expert, output, shape)
        row_ptrs = of_weight + (stack_row * shape.row_stride)[:, None, None]
        scale_ptrs = of_scales + (stack_row // shape.scale_rows * shape.num_scales)[:, None]
        gates = tl.zeros((outputs, spans, span), tl.float32)
        ups = tl.zeros((outputs, spans, span), tl.float32)
        for first in tl.range(0, num_steps, at_once, num_stages=1):
            for index in tl.static_range(at_once):
                place = (first + index) * spans + in_step  # [spans]
                column = (place[:, None] * span + tl.arange(0, span)[None, :])[None, :, :]
                x = _load_one(x_ptr + column, column, step * at_once, shape).to(tl.float32)
                gate = _wide(_load_one(row_ptrs + column, column, step * at_once, shape), shape) * x
                up = _wide(_load_one(row_ptrs + up_distance + column, column, step * at_once, shape), shape) * x
                if shape.group > 0:
                    group = tl.minimum(place * span // shape.group, shape.num_scales - 1)[None, :]
                    gate *= tl.load(scale_ptrs + group)[:, :, None]
                    up *= tl.load(scale_ptrs + up_scales + group)[:, :, None]
                gates += gate
                ups += up
        gate = tl.sum(tl.sum(gates, 2), 1)[:, None]
        up = tl.sum(tl.sum(ups, 2), 1)[:, None]
        gate = _scaled_sums(gate, of_scales, stack_row, x_ptr.dtype.element_ty, shape)
        up = _scaled_sums(up, of_scales, stack_row + shape.up_offset, x_ptr.dtype.element_ty, shape)
        if shape.has_bias:
            gate = _add_bias(gate, bias_ptr, stack_row)
            up = _add_bias(up, bias_ptr, stack_row + shape.up_offset)
        result = tl.where(factor == 0.0, 0.0, _activate(gate, up, shape) * factor)
        out_ptrs = output_ptr + tl.program_id(1) * shape.num_outputs + output[:, None]
        tl.store(out_ptrs, result.to(output_ptr.dtype.element_ty), mask=(output < shape.num_outputs)[:, None])


@triton_kernel()
def _load_one(pointers, column, step: tl.constexpr, shape: tl.constexpr):
    """``step``: inputs of a step."""
    if shape.num_inputs % step == 0:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=column < shape.num_inputs, other=0.0)
    return values


@triton_kernel()
def _one_down_kernel(
    output_ptr, between_ptr, weight_ptr, scales_ptr, zeros_ptr, bias_ptr,
    shared_ptr, shared_scales_ptr, shared_zeros_ptr, experts_ptr, weights_ptr,
    padded_chosen: tl.constexpr, shape: tl.constexpr,
):  # fmt: skip
    """Some outputs of the only token, of all its experts."""
    launch_dependents(shape.overlap)
    outputs: tl.constexpr = shape.outputs
    span: tl.constexpr = shape.inputs
    num_steps: tl.constexpr = (shape.num_inputs + span - 1) // span
    at_once: tl.constexpr = min(num_steps, 8)
    output = tl.program_id(0) * outputs + tl.arange(0, outputs)
    chosen = tl.arange(0, padded_chosen)
    wait_for_inputs(shape.overlap)
    num_chosen: tl.constexpr = shape.num_chosen - shape.has_shared
    expert = tl.load(experts_ptr + chosen, mask=chosen < num_chosen, other=-1)
    is_here = expert >= 0  # [chosen]
    stack_row = _rows_of(tl.where(is_here, expert, 0)[:, None], output[None, :], shape)  # [chosen, outputs]
    row_ptrs = weight_ptr + (stack_row * shape.row_stride)[:, :, None]
    scale_ptrs = scales_ptr + stack_row // shape.scale_rows * shape.num_scales
    x_ptrs = between_ptr + chosen[:, None, None] * shape.num_inputs
    sums = tl.zeros((padded_chosen, outputs, span), tl.float32)
    shared_row = _rows_of(tl.program_id(0) * 0, output, shape)  # [outputs]
    shared_sums = tl.zeros((1, outputs, span), tl.float32)
    for first in tl.range(0, num_steps, at_once, num_stages=1):
        for index in tl.static_range(at_once):
            begin = (first + index) * span
            column = (begin + tl.arange(0, span))[None, None, :]
            mask = is_here[:, None, None]
            if shape.num_inputs % (span * at_once) != 0:
                mask = mask & (column < shape.num_inputs)
            x = tl.load(x_ptrs + column, mask=mask, other=0.0).to(tl.float32)
            part = _wide(tl.load(row_ptrs + column, mask=mask, other=0.0), shape) * x
            if shape.group > 0:
                part *= tl.load(scale_ptrs + tl.minimum(begin // shape.group, shape.num_scales - 1))[:, :, None]
            sums += part
            if shape.has_shared:
                pointers = between_ptr + num_chosen * shape.num_inputs + column
                x = _load_one(pointers, column, span * at_once, shape).to(tl.float32)
                pointers = shared_ptr + (shared_row * shape.row_stride)[None, :, None] + column
                part = _wide(_load_one(pointers, column, span * at_once, shape), shape) * x
                if shape.group > 0:
                    group = tl.minimum(begin // shape.group, shape.num_scales - 1)
                    scales = shared_scales_ptr + shared_row // shape.scale_rows * shape.num_scales + group
                    part *= tl.load(scales)[None, :, None]
                shared_sums += part
    result = tl.sum(sums, 2)  # [chosen, outputs]
    if shape.form == "scaled" and shape.group == 0:
        result *= tl.load(scales_ptr + stack_row // shape.scale_rows)
    if shape.has_bias:
        factor = tl.load(weights_ptr + chosen, mask=chosen < shape.num_chosen, other=0.0)
        bias = tl.load(bias_ptr + stack_row, mask=is_here[:, None], other=0.0)
        result += bias.to(tl.float32) * factor[:, None]
    result = tl.sum(result, 0)
    if shape.has_shared:
        shared = tl.sum(tl.sum(shared_sums, 2), 0)
        if shape.form == "scaled" and shape.group == 0:
            shared *= tl.load(shared_scales_ptr + shared_row // shape.scale_rows)
        result += shared
    tl.store(output_ptr + output, result.to(output_ptr.dtype.element_ty), mask=output < shape.num_outputs)


@triton_kernel()
def _grouped_step(
    sums, ups, x_ptrs, weight_ptr, scales_ptr, zeros_ptr, row, begin, gated: tl.constexpr, shape: tl.constexpr
):  # fmt: skip
    """`_few_step` for ``sums [outputs, rows]``; without the scale of all inputs, where they have one."""
    inputs: tl.constexpr = shape.inputs
    up_distance: tl.constexpr = shape.up_offset * shape.row_stride
    up_scales: tl.constexpr = shape.up_offset // shape.scale_rows * shape.num_scales
    row_ptrs = weight_ptr + row * shape.row_stride
    scale_ptrs = scales_ptr + row // shape.scale_rows * shape.num_scales
    if shape.form == "packed":
        sums, ups = packed_step(
            sums, ups, x_ptrs, True, row_ptrs, up_distance, scale_ptrs, up_scales, zeros_ptr + row * shape.num_scales,
            begin, shape.num_inputs, shape.num_scales, gated, shape.num_inputs % inputs == 0, shape.group,
            shape.has_zeros, shape.is_e2m1, shape.overlap,
        )  # fmt: skip
    else:
        column = begin + tl.arange(0, inputs)
        x = _load_inputs(x_ptrs, column[:, None], True, inputs, shape)
        weight = _load_weights(row_ptrs[:, None], column[None, :], inputs, shape)
        up = weight
        if gated:
            up = _load_weights(row_ptrs[:, None] + up_distance, column[None, :], inputs, shape)
        if shape.form == "scaled":
            weight = widened(weight, x.dtype)
            up = widened(up, x.dtype)
        if shape.group > 0:
            index = begin // shape.group
            sums += tl.dot(weight, x, input_precision="ieee") * tl.load(scale_ptrs + index)[:, None]
            if gated:
                ups += tl.dot(up, x, input_precision="ieee") * tl.load(scale_ptrs + index + up_scales)[:, None]
        else:
            sums = tl.dot(weight, x, sums, input_precision="ieee")
            if gated:
                ups = tl.dot(up, x, ups, input_precision="ieee")
    return sums, ups


@triton_kernel()
def _scaled_sums(sums, scales_ptr, row, dtype: tl.constexpr, shape: tl.constexpr):
    """Sums times the scale of all inputs, where they have one."""
    if shape.form == "scaled" and shape.group == 0:
        sums = sums * tl.load(scales_ptr + row // shape.scale_rows)[:, None]
    if shape.form == "packed":
        sums = packed_sums(sums, shape.is_e2m1, dtype)
    return sums


@compiles_slowly
@triton_kernel(unspecialized=("num_pairs",))
def _grouped_gate_up_kernel(
    output_ptr, x_ptr, weight_ptr, scales_ptr, zeros_ptr, bias_ptr, pairs_ptr, tile_experts_ptr, weights_ptr,
    num_pairs, x_stride,
    shape: tl.constexpr,
):  # fmt: skip
    """Some outputs of a tile of pairs."""
    launch_dependents(shape.overlap)
    outputs: tl.constexpr = shape.outputs
    rows: tl.constexpr = shape.rows
    tile = tl.program_id(1)
    output = tl.program_id(0) * outputs + tl.arange(0, outputs)
    place = tile * rows + tl.arange(0, rows)
    wait_for_inputs(shape.overlap)
    expert = tl.load(tile_experts_ptr + tile)
    if expert >= 0:
        pair = tl.load(pairs_ptr + place)
        is_pair = pair < num_pairs
        stack_row = _rows_of(expert, output, shape)
        x_row = tl.where(is_pair, pair // shape.num_chosen, 0).to(tl.int64)
        x_ptrs = x_ptr + x_row[None, :] * x_stride
        gate = tl.zeros((outputs, rows), tl.float32)
        up = tl.zeros((outputs, rows), tl.float32)
        for begin in tl.range(0, shape.num_inputs, shape.inputs):
            gate, up = _grouped_step(
                gate, up, x_ptrs, weight_ptr, scales_ptr, zeros_ptr, stack_row, begin, True, shape
            )  # fmt: skip
        gate = _scaled_sums(gate, scales_ptr, stack_row, x_ptr.dtype.element_ty, shape)
        up = _scaled_sums(up, scales_ptr, stack_row + shape.up_offset, x_ptr.dtype.element_ty, shape)
        if shape.has_bias:
            gate = _add_bias(gate, bias_ptr, stack_row)
            up = _add_bias(up, bias_ptr, stack_row + shape.up_offset)
        weight = tl.load(weights_ptr + pair, mask=is_pair, other=0.0)[None, :]
        result = tl.where(weight == 0.0, 0.0, _activate(gate, up, shape) * weight)
        out_ptrs = output_ptr + place[None, :].to(tl.int64) * shape.num_outputs + output[:, None]
        tl.store(out_ptrs, result.to(output_ptr.dtype.element_ty), mask=(output < shape.num_outputs)[:, None])


@compiles_slowly
@triton_kernel(unspecialized=("num_pairs",))
def _grouped_down_kernel(
    output_ptr, between_ptr, weight_ptr, scales_ptr, zeros_ptr, bias_ptr, pairs_ptr, tile_experts_ptr, weights_ptr,
    num_pairs,
    shape: tl.constexpr,
):  # fmt: skip
    """Some outputs of a tile of pairs, each to the pair's own row."""
    launch_dependents(shape.overlap)
    outputs: tl.constexpr = shape.outputs
    rows: tl.constexpr = shape.rows
    tile = tl.program_id(1)
    output = tl.program_id(0) * outputs + tl.arange(0, outputs)
    place = tile * rows + tl.arange(0, rows)
    wait_for_inputs(shape.overlap)
    expert = tl.load(tile_experts_ptr + tile)
    if expert >= 0:
        pair = tl.load(pairs_ptr + place)
        stack_row = _rows_of(expert, output, shape)
        between_ptrs = between_ptr + place[None, :].to(tl.int64) * shape.num_inputs
        sums = tl.zeros((outputs, rows), tl.float32)
        for begin in tl.range(0, shape.num_inputs, shape.inputs):
            sums, _ = _grouped_step(
                sums, sums, between_ptrs, weight_ptr, scales_ptr, zeros_ptr, stack_row, begin, False, shape
            )  # fmt: skip
        sums = _scaled_sums(sums, scales_ptr, stack_row, between_ptr.dtype.element_ty, shape)
        if shape.has_bias:
            factor = tl.load(weights_ptr + pair, mask=pair < num_pairs, other=0.0)
            sums += tl.load(bias_ptr + stack_row).to(tl.float32)[:, None] * factor[None, :]
        out_ptrs = output_ptr + pair[None, :].to(tl.int64) * shape.num_outputs + output[:, None]
        mask = (output < shape.num_outputs)[:, None] & (pair < num_pairs)[None, :]
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


@triton_kernel()
def _add_shared_kernel(
    result_ptr, output_ptr, shared_ptr, x_ptr, gate_ptr, x_stride,
    hidden: tl.constexpr, padded: tl.constexpr, tile: tl.constexpr, overlap: tl.constexpr,
):  # fmt: skip
    """Some outputs of a row."""
    launch_dependents(overlap)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, padded)
    gate = tl.load(gate_ptr + column, mask=column < hidden, other=0.0).to(tl.float32)
    written = tl.program_id(1) * tile + tl.arange(0, tile)
    is_written = written < hidden
    wait_for_inputs(overlap)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < hidden, other=0.0).to(tl.float32)
    output = tl.load(output_ptr + row * hidden + written, mask=is_written, other=0.0).to(tl.float32)
    shared = tl.load(shared_ptr + row * hidden + written, mask=is_written, other=0.0).to(tl.float32)
    factor = 1.0 / (1.0 + tl.exp(-tl.sum(x * gate, 0)))
    result = output + shared * factor
    tl.store(result_ptr + row * hidden + written, result.to(result_ptr.dtype.element_ty), mask=is_written)
