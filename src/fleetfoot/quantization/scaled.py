"""Weights of 8 bits with scales: FP8 (e4m3) and int8, by tensor, by output or in blocks.

Matrices that are one product have one storage. Scales are kept for each output, or for blocks that no part of a matrix
and no rank's share divides; those of the checkpoint stand beside them, as they came.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, overload

from fleetfoot.config.model import DTYPE_BYTES
from fleetfoot.config.quantization import WeightFormat
from fleetfoot.kernels.quantized import WRITTEN_OUTPUTS
from fleetfoot.quantization.base import ExpertMethod, LinearMethod, LinearShape
from fleetfoot.quantization.experts import QuantizedExpertMethod, StackWeight
from fleetfoot.records.weights import Rows, Span, WeightSpec, slices_of

if TYPE_CHECKING:
    import torch

    from fleetfoot.kernels.interface import Kernels
    from fleetfoot.kernels.linear.roles import ChainedInput, ChainedOutput, InputRole, OutputRole
    from fleetfoot.kernels.quantized.chain import ChainQuantized
    from fleetfoot.kernels.quantized.scaled import ScaledMatrix

_FLOAT32 = 4


class QuantizedWeight(StackWeight):
    """A quantized weight as one matrix, which its product and the kernels of a chain read."""

    _matrix: Any
    _multiply: Callable[[torch.Tensor, Any], torch.Tensor]
    _chain: ChainQuantized | None

    @property
    def matrix(self) -> Any:
        return self._matrix

    @overload
    def chain(self, role: InputRole) -> ChainedInput | None: ...

    @overload
    def chain(self, role: OutputRole) -> ChainedOutput | None: ...

    def chain(self, role: InputRole | OutputRole) -> ChainedInput | ChainedOutput | None:
        return None if self._chain is None else self._chain(self._matrix, role)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self._matrix)


class ScaledWeight(QuantizedWeight):
    """Values ``[out, in]`` and scales, as the checkpoint has them."""

    _matrix: ScaledMatrix

    def __init__(
        self, form: WeightFormat, shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        import torch  # a plan can be made where there is no torch

        self._form, self._shape, self._dtype, self._multiply = form, shape, dtype, ops.scaled_linear
        self._chain = ops.quantized_chain if dtype is torch.bfloat16 else None
        num_rows, num_inputs = shape.num_outputs + shape.padding, shape.num_inputs
        values = torch.empty(
            num_rows, num_inputs, dtype={"fp8": torch.float8_e4m3fn, "int8": torch.int8}[form.values], device=device
        )
        values[shape.num_outputs :].view(torch.uint8).zero_()
        rows, columns = _scale_sizes(form, shape)
        scales = torch.ones(-(-num_rows // rows), -(-num_inputs // columns), device=device)
        has_bias = shape.has_bias
        bias = torch.zeros(num_rows, dtype=dtype, device=device) if has_bias else None
        is_static = form.activations == "static"
        input_scale = torch.ones(1, device=device) if is_static else None
        from fleetfoot.kernels.quantized.scaled import ScaledMatrix

        self._matrix = ScaledMatrix(values, scales, rows, columns, form.activations, input_scale, bias)
        self._input_scales = torch.ones(len(shape.parts), device=device) if is_static else None
        self._own_scales = self._allocate_own_scales(device)
        self._block_scales = [*self._divided(self._own_scales)]

    def tensors(self) -> list[torch.Tensor]:
        import torch

        matrix = self._matrix
        found = [matrix.values.view(torch.uint8), matrix.scales]
        found += [] if self._own_scales is None or self._own_scales is matrix.scales else [self._own_scales]
        return found + [each for each in (matrix.bias, self._input_scales) if each is not None]

    def stored(self) -> Iterator[Span]:
        for tensor in self.tensors():
            if tensor is not self._input_scales and (tensor is not self._matrix.bias or self._shape.has_bias):
                yield tensor.data_ptr(), tensor.nbytes

    def weight_specs(self, prefix: str) -> Iterator[WeightSpec]:
        whole, matrix = self._shape, self._matrix
        kind: Literal["fp8", "integer"] = "fp8" if self._form.values == "fp8" else "integer"
        for index, (name, size, rows, span) in enumerate(whole.row_spans()):
            values = partial(matrix.values.__getitem__, span)
            part = (rows, whole.columns)
            scales = self._scale_spec(f"{prefix}{name}", size, rows, span, index)
            yield WeightSpec(
                f"{prefix}{name}.weight",
                (size, whole.in_features),
                values,
                kind=kind,
                part=part,
                dtype=matrix.values.dtype,
                quantize=partial(self._take_floats, rows, span, scales),
                patch=partial(self._patch_floats, index),
                patch_problem=partial(self._patch_problem, index),
                scales=(scales.name,),
            )
            yield scales
            if self._input_scales is not None:
                scale = partial(self._input_scales.__getitem__, slice(index, index + 1))
                yield WeightSpec(f"{prefix}{name}.input_scale", (1,), scale, init=0.02)
            yield from bias_specs(whole, matrix.bias, prefix, name, size, rows, span)

    def process_weights_after_loading(self) -> None:
        """Bring the checkpoint's scales into the form that kernels read."""
        if self._input_scales is not None:
            assert self._matrix.input_scale is not None
            self._matrix.input_scale.copy_(self._input_scales.max())  # q, k and v have the same input, and so scale
        for (_, _, rows, span), scales in zip(self._shape.row_spans(), self._block_scales, strict=True):
            if scales is not None and self._own_scales is not self._matrix.scales and span.start < span.stop:
                self._spread(scales, rows, span)

    def _take_floats(
        self, rows: Rows, span: slice, scale: WeightSpec, read: Callable[[tuple[Rows, ...]], torch.Tensor]
    ) -> None:
        """Quantize a whole tensor by its tensor, outputs or blocks, and keep this rank's part."""
        import torch
        import torch.nn.functional as F

        from fleetfoot.kernels.quantized.scaled import quantize, scales_of

        whole, values = read(()).to(self._matrix.values.device), self._matrix.values
        size, in_features = whole.shape
        block_rows, block_columns = (each or length for each, length in zip(self._form.block, whole.shape, strict=True))
        padded = F.pad(whole.abs(), (0, -in_features % block_columns, 0, -size % block_rows))
        blocks = padded.unflatten(1, (-1, block_columns)).unflatten(0, (-1, block_rows))
        scales = scales_of(blocks.amax(dim=(1, 3)), values.dtype)  # [blocks of outputs, blocks of inputs]
        target = scale.destination()
        target.copy_(_part_of(scales.reshape(scale.shape), scale.part).reshape(target.shape))
        row = torch.arange(size, device=scales.device) // block_rows
        column = torch.arange(in_features, device=scales.device)[self._shape.columns] // block_columns
        part = _part_of(whole, (rows, self._shape.columns))
        values[span] = quantize(part, _part_of(scales[row], (rows,))[:, column], values.dtype)

    def _patch_problem(self, index: int, indices: torch.Tensor, values: torch.Tensor) -> str:
        """Blocks are quantized as a whole, so the rank must have all of each block that it has some of."""
        if values.element_size() == 1:
            return ""  # as they are stored
        columns, num_inputs = self._shape.columns, self._shape.in_features
        block_columns = self._form.block[1] or num_inputs
        is_split = columns.start % block_columns or (columns.stop % block_columns and columns.stop != num_inputs)
        block_rows, size = self._form.block[0] or self._shape.parts[index][1], self._shape.parts[index][1]
        for run in slices_of(self._shape.rows[index]):
            is_split = is_split or run.start % block_rows or (run.stop % block_rows and run.stop != size)
        return "has blocks that ranks share; give it whole" if is_split else ""

    def _patch_floats(self, index: int, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Change single elements, and quantize the blocks that have them again."""
        import torch

        from fleetfoot.kernels.quantized.scaled import quantize, scales_of

        (_, size, rows, span), matrix, columns = [*self._shape.row_spans()][index], self._matrix, self._shape.columns
        stored = torch.cat([torch.arange(run.start, run.stop, device=indices.device) for run in slices_of(rows)])
        row, column = indices // self._shape.in_features, indices % self._shape.in_features
        place = torch.full((size,), -1, device=indices.device)
        place[stored] = torch.arange(len(stored), device=indices.device)
        if not len(stored):
            return
        is_held = (place[row] >= 0) & (columns.start <= column) & (column < columns.stop)
        plain = matrix.dequantized(span.start, span.stop)
        plain[place[row[is_held]], column[is_held] - columns.start] = values[is_held].float()
        block_rows, block_columns = (
            each or length for each, length in zip(self._form.block, (size, self._shape.in_features), strict=True)
        )
        ids = stored // block_rows
        of_row = torch.cat([ids.new_zeros(1), (ids[1:] != ids[:-1]).long()]).cumsum(0)
        of_column = torch.arange(plain.shape[1], device=plain.device) // block_columns
        block = of_row[:, None] * (int(of_column[-1]) + 1) + of_column  # [rows, inputs]
        largest = plain.new_zeros(int(block[-1, -1]) + 1)
        largest.scatter_reduce_(0, block.flatten(), plain.abs().flatten(), "amax")
        touched = torch.zeros_like(largest, dtype=torch.bool)
        touched[block[place[row[is_held]], column[is_held] - columns.start]] = True
        scales = scales_of(largest, matrix.values.dtype)
        target = self._block_scales[index]
        target = matrix.scales[span] if target is None else target
        target.copy_(torch.where(touched.view(target.shape), scales.view(target.shape), target))
        changed = touched[block]
        new = quantize(plain[changed], scales[block[changed]], matrix.values.dtype)
        matrix.values[span].view(torch.uint8)[changed] = new.view(torch.uint8)

    def _scale_spec(self, prefix: str, size: int, rows: Rows, span: slice, index: int) -> WeightSpec:
        block_rows, block_columns = self._form.block
        name = f"{prefix}.{'weight_scale_inv' if self._form.tensors == 'scale_inv' else 'weight_scale'}"
        init = _dummy_scale(self._form.values)
        scales = self._block_scales[index]
        if scales is None:
            own = partial(self._matrix.scales.__getitem__, (span, 0))
            return WeightSpec(name, (size,), own, part=(rows,), init=init)
        if block_rows == 0:
            return WeightSpec(name, (1,), lambda: scales.view(1), init=init)
        whole = -(-size // block_rows), -(-self._shape.in_features // block_columns)
        return WeightSpec(name, whole, lambda: scales, part=self._blocks(rows), init=init)

    def _blocks(self, rows: Rows) -> tuple[Rows, slice]:
        """The blocks of the checkpoint that hold some rows, and the columns of this rank."""
        block_rows, block_columns = self._form.block
        columns = self._shape.columns
        runs = tuple(slice(run.start // block_rows, -(-run.stop // block_rows)) for run in slices_of(rows))
        return runs, slice(columns.start // block_columns, -(-columns.stop // block_columns))

    def _allocate_own_scales(self, device: torch.device) -> torch.Tensor | None:
        """The checkpoint's scales of all parts, one below the other; `ScaledMatrix.scales` where those are the same;
        None: each of these is that of an output."""
        import torch

        form, shape, matrix = self._form, self._shape, self._matrix
        if form.block == (1, 0):
            return None
        if form.block == (0, 0):
            return torch.ones(len(shape.parts), 1, device=device)
        columns = self._blocks(shape.rows[0])[1]
        num_blocks = sum(self._num_blocks(rows) for rows in shape.rows)
        if form.block == (matrix.rows, matrix.columns) and len(matrix.scales) == num_blocks:
            return matrix.scales
        return torch.ones(num_blocks, columns.stop - columns.start, device=device)

    def _num_blocks(self, rows: Rows) -> int:
        """Blocks of outputs of a part."""
        return sum(run.stop - run.start for run in slices_of(self._blocks(rows)[0]))

    def _divided(self, scales: torch.Tensor | None) -> Iterator[torch.Tensor | None]:
        """Each part's of `_own_scales`."""
        first = 0
        for rows in self._shape.rows:
            count = 1 if self._form.block == (0, 0) or scales is None else self._num_blocks(rows)
            yield None if scales is None else scales[first : first + count]
            first += count

    def _spread(self, scales: torch.Tensor, rows: Rows, span: slice) -> None:
        """Write the scales of a part for each of the blocks that are stored."""
        matrix = self._matrix
        places = slice(span.start // matrix.rows, -(-span.stop // matrix.rows))
        if self._form.block == (0, 0):
            matrix.scales[places] = scales
            return
        block_rows, block_columns = self._form.block
        first, row_blocks = 0, []
        for run, blocks in zip(slices_of(rows), slices_of(self._blocks(rows)[0]), strict=True):
            row_blocks += [first + row // block_rows - blocks.start for row in range(run.start, run.stop, matrix.rows)]
            first += blocks.stop - blocks.start
        begin, end = self._shape.columns.start, self._shape.columns.stop
        first_column = begin // block_columns
        column_blocks = [column // block_columns - first_column for column in range(begin, end, matrix.columns)]
        matrix.scales[places] = scales[row_blocks][:, column_blocks]


def _part_of(tensor: torch.Tensor, part: tuple[Rows, ...]) -> torch.Tensor:
    """The part of a `WeightSpec`, of a whole tensor."""
    import torch

    if not part:
        return tensor
    rows, *columns = part
    return torch.cat([tensor[(run, *columns)] for run in slices_of(rows)])


def bias_specs(
    shape: LinearShape, bias: torch.Tensor | None, prefix: str, name: str, size: int, rows: Rows, span: slice
) -> Iterator[WeightSpec]:
    """The bias of a part of a quantized layer, which is not quantized."""
    if bias is not None and shape.has_bias:
        yield WeightSpec(f"{prefix}{name}.bias", (size,), partial(bias.__getitem__, span), part=(rows,))


def _dummy_scale(values: str) -> float:
    """Random values of this scale have a standard deviation of 0.02."""
    return 0.02 / {"fp8": 32.0, "int8": 74.0}[values]


def _scale_sizes(form: WeightFormat, shape: LinearShape) -> tuple[int, int]:
    """Outputs and inputs of a stored scale: the largest that divide each part, the rank's share and the blocks."""
    if form.block[1] == 0:
        return 1, max(1, shape.num_inputs)
    runs = [run for rows in shape.rows for run in slices_of(rows)]
    bounds = [number for run in runs for number in (run.start, run.stop - run.start)]
    last = runs[-1]
    if not shape.padding and last.stop == shape.parts[-1][1]:
        bounds.pop()  # the last block of all may be a part of one
    return math.gcd(form.block[0], *bounds), math.gcd(form.block[1], shape.columns.start)


class QuantizedWhileLoading(ScaledWeight):
    """The checkpoint's weights are not quantized: each part is once it is filled, and its plain values are dropped.

    A spec that is opened later gets the values that are stored. Of what is written to it, outputs that have changed are
    quantized again. The scale of an output is that of all its inputs, also where the rank has some of them.
    """

    def __init__(
        self, form: WeightFormat, shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(form, shape, ops, dtype, device)
        self._open: dict[int, torch.Tensor] = {}  # part -> its plain values, with all inputs
        self._filled: set[int] = set()

    def weight_specs(self, prefix: str) -> Iterator[WeightSpec]:
        shape = self._shape
        for index, (name, size, rows, span) in enumerate(shape.row_spans()):
            yield WeightSpec(
                f"{prefix}{name}.weight",
                (size, shape.in_features),
                partial(self._plain, index),
                part=(rows,),
                filled=partial(self._quantize, index),
                dtype=self._dtype,
                patch_problem=partial(self._patch_problem, index),
            )
            yield from bias_specs(shape, self._matrix.bias, prefix, name, size, rows, span)

    def process_weights_after_loading(self) -> None:
        for index in tuple(self._open):  # single elements may have been changed, which keep the scales
            self._quantize(index, keeps_scales=index in self._filled)

    def _patch_problem(self, index: int, indices: torch.Tensor, values: torch.Tensor) -> str:
        """What a row of the checkpoint that is changed would be quantized to is known as long as its largest magnitude
        stays: all others are multiples of its scale already."""
        import torch

        shape, before = self._shape, self._stored_values(index)
        changed = before.clone()
        runs, row_size = slices_of(shape.rows[index]), shape.in_features
        first = 0
        for run in runs:
            is_held = (indices // row_size >= run.start) & (indices // row_size < run.stop)
            row = indices[is_held] // row_size - run.start + first
            changed[row, indices[is_held] % row_size] = values[is_held].to(changed)
            first += run.stop - run.start
        columns = shape.columns
        old, new = (each[:, columns].abs().amax(dim=1) for each in (before, changed))
        others = changed.clone()
        others[:, columns] = 0  # what a rank does not hold, and the patch changes
        is_larger = torch.maximum(new, others.abs().amax(dim=1)) > self._largest(index)
        is_smaller = (old >= self._largest(index)) & (new < old)
        rows = (is_larger | is_smaller).nonzero().flatten().tolist()
        if not rows:
            return ""
        return f"changes the largest value of {len(rows)} rows, whose other values were rounded by it; give it whole"

    def _largest(self, index: int) -> torch.Tensor:
        """``[n]``: the largest magnitude of each output's weights, in their dtype."""
        from fleetfoot.kernels.quantized.scaled import LIMITS

        matrix = self._matrix
        return (matrix.scales[self._span(index), 0] * LIMITS[matrix.values.dtype][1]).to(self._dtype)

    def _span(self, index: int) -> slice:
        return next(span for number, (*_, span) in enumerate(self._shape.row_spans()) if number == index)

    def _plain(self, index: int) -> torch.Tensor:
        if index not in self._open:
            self._open[index] = self._stored_values(index)
        return self._open[index]

    def _stored_values(self, index: int) -> torch.Tensor:
        import torch

        span, device = self._span(index), self._matrix.values.device
        plain = torch.zeros(span.stop - span.start, self._shape.in_features, dtype=self._dtype, device=device)
        if index in self._filled:
            plain[:, self._shape.columns] = self._matrix.dequantized(span.start, span.stop)
        return plain

    def _quantize(self, index: int, *, keeps_scales: bool = False) -> None:
        import torch

        from fleetfoot.kernels.quantized.scaled import quantize, scales_of

        plain, span, matrix = self._open.pop(index), self._span(index), self._matrix
        rows: slice | torch.Tensor = slice(None)
        if index in self._filled:
            rows = (plain != self._stored_values(index)).any(dim=1).nonzero().squeeze(1)
            plain = plain[rows]
        self._filled.add(index)
        scales = scales_of(plain.abs().amax(dim=1, keepdim=True), matrix.values.dtype, is_exact=True)
        if keeps_scales:
            scales = matrix.scales[span][rows]
        matrix.scales[span][rows] = scales
        values = quantize(plain[:, self._shape.columns], scales, matrix.values.dtype)
        matrix.values.view(torch.uint8)[span][rows] = values.view(torch.uint8)  # a GPU cannot index e4m3


class Scaled(LinearMethod):
    """`ScaledWeight` in a format, or `QuantizedWhileLoading`."""

    def __init__(self, form: WeightFormat) -> None:
        self.form = form
        self.name = str(form)

    @property
    def experts(self) -> ExpertMethod:
        return QuantizedExpertMethod(self)

    def make_weight(
        self, shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device
    ) -> QuantizedWeight:
        kind = QuantizedWhileLoading if self.form.tensors == "float" else ScaledWeight
        return kind(self.form, shape, ops, dtype, device)

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: str) -> int:
        rows, columns = max(1, self.form.block[0]), self.form.block[1] or num_inputs
        num_scales = -(-num_outputs // rows) * -(-num_inputs // columns)
        return num_outputs * num_inputs + num_scales * _FLOAT32 * (1 if self.form.block == (1, 0) else 2)

    def workspace_bytes(self, num_outputs: int, num_inputs: int, num_rows: int, dtype: str) -> int:
        """The quantized input with its scales, and in blocks both factors in ``dtype``, the weight in part."""
        columns, size = self.form.block[1], DTYPE_BYTES[dtype]
        quantized = num_rows * (num_inputs + _FLOAT32 * (-(-num_inputs // columns) if columns else 1))
        return quantized + bool(columns) * (num_rows + min(num_outputs, WRITTEN_OUTPUTS)) * num_inputs * size
