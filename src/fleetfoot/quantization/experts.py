"""Quantized experts: the matrices of a linear method, each with the rows of all experts, one below the other.

So experts have the formats of linear layers, with their files, splits over ranks, and updates. Inputs stay in the dtype
of the activations, also where a format says how linear layers quantize them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from fleetfoot.config.model import DTYPE_BYTES, ExpertsSpec
from fleetfoot.config.quantization import WeightFormat
from fleetfoot.quantization.base import ExpertMethod, ExpertsShape, ExpertWeight, LinearShape, LinearWeight
from fleetfoot.records.weights import Span, Stack, WeightSpec, join_rows

if TYPE_CHECKING:
    import torch

    from fleetfoot.kernels.experts.experts import Matrix, Routing, SharedExpert
    from fleetfoot.kernels.interface import Kernels


class StackWeight(LinearWeight):
    """A quantized matrix that can be a stack."""

    @property
    @abstractmethod
    def matrix(self) -> Any:
        """The matrix that products read."""

    @property
    def expert_matrix(self) -> Matrix | None:
        return self.matrix

    @abstractmethod
    def tensors(self) -> list[torch.Tensor]:
        """All that it stores, each with parts of the matrix in its first dimension."""


class StackMethod(Protocol):
    """The linear method of such matrices."""

    form: WeightFormat
    name: str

    def make_weight(
        self, shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device
    ) -> StackWeight: ...

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: str) -> int: ...


class QuantizedExperts(ExpertWeight):
    """Checkpoints have the layers of each expert, or stacks of them; those of GPT-OSS stay stacks, in which gates and
    ups alternate."""

    def __init__(
        self, method: StackMethod, shape: ExpertsShape, ops: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        from fleetfoot.kernels.experts.experts import ExpertSizes  # a plan can be made where there is no torch

        self._shape, spec, part = shape, shape.spec, shape.part
        self._held = shape.held
        self._is_stacked = is_stacked = _is_stacked(method.form, shape)
        make = _linear_of_stack if is_stacked else _linear_of_each
        self._weights: dict[str, StackWeight] = {
            matrix: method.make_weight(make(shape, matrix), ops, dtype, device) for matrix in ("gate_up", "down")
        }
        sizes = ExpertSizes(
            len(self._held), shape.hidden_size, part.stop - part.start, spec.has_bias,
            is_interleaved=is_stacked, activation=spec.activation, alpha=spec.alpha, limit=spec.limit,
        )  # fmt: skip
        stacks = {matrix: weight.matrix for matrix, weight in self._weights.items()}
        self._experts = ops.experts(sizes, dtype, device, stacks)

    def apply(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self._experts(x, routing)

    def can_join(self, num_rows: int, shared: SharedExpert) -> bool:
        return self._experts.can_join(num_rows, shared)

    def with_shared(self, x: torch.Tensor, routing: Routing, shared: SharedExpert) -> torch.Tensor:
        return self._experts.with_shared(x, routing, shared)

    def stacks(self) -> list[torch.Tensor]:
        tensors = [tensor for weight in self._weights.values() for tensor in weight.tensors()]
        return [tensor.unflatten(0, (len(self._held), -1)) for tensor in tensors]

    def hold(self, experts: tuple[int, ...]) -> None:
        self._held = experts

    def stored(self) -> Iterator[Span]:
        for weight in self._weights.values():
            yield from weight.stored()

    def process_weights_after_loading(self) -> None:
        for weight in self._weights.values():
            weight.process_weights_after_loading()

    def weight_specs(self, prefix: str) -> Iterator[WeightSpec]:
        specs_of = self._specs_of_stack if self._is_stacked else self._specs_of_each
        for matrix in self._weights:
            yield from specs_of(matrix, prefix)

    def _specs_of_each(self, matrix: str, prefix: str) -> Iterator[WeightSpec]:
        """Checkpoints may have a tensor with the weights of all experts, and one with their scales by blocks."""
        names, count = self._shape.names, self._shape.spec.num_experts
        layers = (names.gate, names.up) if matrix == "gate_up" else (names.down,)
        stacks = names.gate_up_stack if matrix == "gate_up" else names.down_stack
        for spec in self._weights[matrix].weight_specs(""):
            slot, number, suffix = spec.name.split(".")
            expert, index = self._held[int(slot)], int(number)
            layer = prefix + layers[index].format(expert)
            scales = tuple(f"{layer}.{name.split('.')[2]}" for name in spec.scales)
            spec = replace(spec, name=f"{layer}.{suffix}", scales=scales)
            if suffix not in ("weight", "weight_scale_inv"):
                yield spec
                continue
            rows, columns = spec.shape
            end = suffix.removeprefix("weight")
            whole = count, len(layers) * rows, columns
            place = slice(expert, expert + 1), slice(index * rows, (index + 1) * rows)
            yield replace(spec, stacks=tuple(Stack(f"{prefix}{stack}{end}", whole, place) for stack in stacks))

    def _specs_of_stack(self, matrix: str, prefix: str) -> Iterator[WeightSpec]:
        shape, count = self._shape, self._shape.spec.num_experts
        names = shape.names.gate_up_stack if matrix == "gate_up" else shape.names.down_stack
        is_whole = matrix == "down" or shape.part == slice(0, shape.spec.intermediate_size)
        every = join_rows(slice(expert, expert + 1) for expert in self._held)
        for spec in self._weights[matrix].weight_specs(prefix):
            suffix, view = spec.name.rpartition(".")[2], partial(_unstacked, spec.destination, len(self._held))
            rows, columns = spec.shape[0] // count, spec.shape[1:]
            own = slice(0, rows) if is_whole else slice(2 * shape.part.start, 2 * shape.part.stop)
            if suffix == "weight":
                yield replace(
                    spec,
                    name=f"{prefix}{names[0]}",
                    aliases=tuple(f"{prefix}{name}" for name in names[1:]),
                    shape=(count, *columns, rows),
                    destination=partial(_transposed, view),
                    part=(every, slice(0, columns[0]), own),
                    patch_problem=_refuse_patch,
                )
                continue
            end = {"weight_packed": "blocks", "weight_scale": "scales", "bias": "bias"}[suffix]
            held: Any = spec.part[1:]
            if suffix == "weight_packed":
                columns, held = (columns[0] // 16, 16), (slice(held[0].start // 16, held[0].stop // 16),)
                view = partial(_in_groups, view)
            place = f"{prefix}{names[0]}_{end}"
            yield replace(spec, name=place, shape=(count, rows, *columns), destination=view, part=(every, own, *held))


def _is_stacked(form: WeightFormat, shape: ExpertsShape) -> bool:
    return shape.names.are_transposed and form.tensors in ("float", "mxfp4")


def _linear_of_each(shape: ExpertsShape, matrix: str) -> LinearShape:
    """Parts are named by the slot, and the number of the layer in it."""
    spec, hidden, slots = shape.spec, shape.hidden_size, range(len(shape.held))
    if matrix == "down":
        parts = tuple((f"{slot}.0", hidden) for slot in slots)
        has_bias = spec.has_bias and shape.has_down_bias
        return LinearShape(spec.intermediate_size, parts, (slice(0, hidden),) * len(parts), shape.part, has_bias)
    parts = tuple((f"{slot}.{layer}", spec.intermediate_size) for slot in slots for layer in range(2))
    return LinearShape(hidden, parts, (shape.part,) * len(parts), slice(0, hidden), spec.has_bias)


def _linear_of_stack(shape: ExpertsShape, matrix: str) -> LinearShape:
    spec, names, hidden, size = shape.spec, shape.names, shape.hidden_size, shape.spec.intermediate_size
    rows, own, name = 2 * size, slice(2 * shape.part.start, 2 * shape.part.stop), names.gate_up_stack[0]
    if matrix == "down":
        rows, own, name = hidden, slice(0, hidden), names.down_stack[0]
    held = join_rows(slice(expert * rows + own.start, expert * rows + own.stop) for expert in shape.held)
    has_bias = spec.has_bias and (matrix == "gate_up" or shape.has_down_bias)
    inputs, columns = (size, shape.part) if matrix == "down" else (hidden, slice(0, hidden))
    return LinearShape(inputs, ((name, spec.num_experts * rows),), (held,), columns, has_bias)


def _unstacked(destination: Callable[[], torch.Tensor], count: int) -> torch.Tensor:
    return destination().unflatten(0, (count, -1))


def _transposed(view: Callable[[], torch.Tensor]) -> torch.Tensor:
    return view().transpose(1, 2)


def _in_groups(view: Callable[[], torch.Tensor]) -> torch.Tensor:
    return view().unflatten(2, (-1, 16))


def _refuse_patch(indices: torch.Tensor, values: torch.Tensor) -> str:
    return "is a stack whose matrices were quantized as a whole; give it whole"


class QuantizedExpertMethod(ExpertMethod):
    """`QuantizedExperts` with the storage of a linear method. Raises ValueError: it has none for experts."""

    def __init__(self, method: StackMethod) -> None:
        if method.form.is_ordered:
            raise ValueError(f"{method.name} with groups in another order (desc_act) is not supported for experts")
        self._method, self.name, self.form = method, method.name, method.form

    def make_weight(self, shape: ExpertsShape, ops: Kernels, dtype: torch.dtype, device: torch.device) -> ExpertWeight:
        return QuantizedExperts(self._method, shape, ops, dtype, device)

    def share(self, spec: ExpertsSpec, rank: int, num_ranks: int) -> slice:
        """The groups of a rank: of stacks as GPT-OSS has them whole ones, whose number the ranks need not divide."""
        if self.form.tensors != "mxfp4":
            return super().share(spec, rank, num_ranks)
        group, size = self.form.block[1], spec.intermediate_size
        num_groups = -(-size // group)
        return slice(rank * num_groups // num_ranks * group, min(size, (rank + 1) * num_groups // num_ranks * group))

    def num_bytes(self, spec: ExpertsSpec, hidden_size: int, dtype: str, num_ranks: int = 1) -> int:
        last = self.share(spec, num_ranks - 1, num_ranks)  # the largest one
        size = last.stop - last.start
        matrices = ((2 * size, hidden_size), (hidden_size, size))
        biases = (2 * size + hidden_size) * DTYPE_BYTES[dtype] * spec.has_bias
        return spec.num_experts * (
            biases + sum(self._method.num_bytes(rows, columns, dtype) for rows, columns in matrices)
        )
