"""Weights in the dtype of the activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from fleetfoot.config.model import DTYPE_BYTES, ExpertsSpec
from fleetfoot.quantization.base import (
    ExpertMethod,
    ExpertsShape,
    ExpertWeight,
    LinearMethod,
    LinearMethods,
    LinearShape,
    LinearWeight,
)
from fleetfoot.records.weights import Span, Stack, WeightSpec, join_rows

if TYPE_CHECKING:
    import torch

    from fleetfoot.kernels.experts.experts import Matrix, Routing, SharedExpert
    from fleetfoot.kernels.interface import Kernels
    from fleetfoot.kernels.linear.linear import PreparedLinear


class UnquantizedWeight(LinearWeight):
    """The weight is plain while its specs are written to. `process_weights_after_loading` then prepares it for the
    device (a CPU packs it) and drops the plain copy, and so does the last part of it that is filled. A spec that is
    opened later gets the plain values back; the next `process_weights_after_loading` puts them in the place of the
    prepared ones."""

    def __init__(self, shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        import torch  # a plan can be made where there is no torch

        self._shape = shape
        self._prepare, self._chain = ops.prepare_linear, ops.linear_chain
        size = shape.num_outputs + shape.padding, shape.num_inputs
        self._dtype = dtype
        self._allocate = partial(torch.empty, size, dtype=dtype, device=device)
        self._plain: torch.Tensor | None = None
        self._unfilled = self._part_names()
        self._bias = torch.zeros(size[0], dtype=dtype, device=device) if shape.has_bias else None
        self._prepared: PreparedLinear | None = None

    @property
    def dense(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        return (self._loaded.weight(), self._bias) if self._loaded.is_dense else None

    @property
    def expert_matrix(self) -> Matrix | None:
        return self._loaded.weight() if self._loaded.is_dense and self._bias is None else None

    def chain(self, role: Any) -> Any:
        chain = self._chain if self._loaded.is_dense else None
        return None if chain is None else chain(self._loaded.weight(), self._bias, role)

    def stored(self) -> Iterator[Span]:
        if not self._loaded.is_dense:
            yield self._loaded.stored()
            return
        for tensor in (self._loaded.weight(), self._bias if self._shape.has_bias else None):
            if tensor is not None:
                rows = tensor[: self._shape.num_outputs]  # without the padding, which stays 0
                yield rows.data_ptr(), rows.nbytes

    @property
    def product(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return self._loaded

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self._loaded(x)

    def apply_unrounded(self, x: torch.Tensor) -> torch.Tensor:
        return self._loaded.unrounded(x)

    def weight_specs(self, prefix: str) -> Iterator[WeightSpec]:
        columns, in_features = self._shape.columns, self._shape.in_features
        for name, size, rows, span in self._shape.row_spans():
            has_all_rows = rows == slice(0, size)
            is_whole = has_all_rows and columns == slice(0, in_features)
            weight = partial(self._plain_rows, span)
            part = () if is_whole else (rows, columns)
            filled = partial(self._mark_filled, name)
            shape = (size, in_features)
            yield WeightSpec(f"{prefix}{name}.weight", shape, weight, part=part, filled=filled, dtype=self._dtype)
            if self._bias is not None and self._shape.has_bias:
                bias = partial(self._bias.__getitem__, span)
                yield WeightSpec(f"{prefix}{name}.bias", (size,), bias, part=() if has_all_rows else (rows,))

    def process_weights_after_loading(self) -> None:
        if self._prepared is None:
            self._prepared = self._prepare(self._plain_rows(slice(None)), self._bias)
        elif self._plain is not None:  # else nothing was opened since; a bias is written where it is read
            self._prepared.replace(self._plain)
        self._plain = None
        self._unfilled = self._part_names()

    def _part_names(self) -> set[str]:
        return {name for name, _ in self._shape.parts}

    def _mark_filled(self, name: str) -> None:
        self._unfilled.discard(name)
        if not self._unfilled:
            self.process_weights_after_loading()

    def _plain_rows(self, span: slice) -> torch.Tensor:
        if self._plain is None and self._prepared is None:
            self._plain = self._allocate()
            self._plain[self._shape.num_outputs :] = 0
        elif self._plain is None:
            self._plain = self._loaded.weight()
        return self._plain[span]

    @property
    def _loaded(self) -> PreparedLinear:
        if self._prepared is None:
            raise RuntimeError("a linear layer was called before process_weights_after_loading")
        return self._prepared


class UnquantizedExperts(ExpertWeight):
    """The matrices of experts, which `Kernels.experts` stores. What the specs of an expert were written to is closed
    when all of it is filled."""

    def __init__(self, shape: ExpertsShape, ops: Kernels, dtype: torch.dtype, device: torch.device) -> None:
        from fleetfoot.kernels.experts.experts import ExpertSizes  # a plan can be made where there is no torch

        self._shape, spec, part = shape, shape.spec, shape.part
        self._held = shape.held
        sizes = ExpertSizes(
            len(self._held), shape.hidden_size, part.stop - part.start, spec.has_bias,
            is_interleaved=shape.names.are_transposed, activation=spec.activation, alpha=spec.alpha, limit=spec.limit,
        )  # fmt: skip
        self._stack, self._dtype = ops.experts(sizes, dtype, device), dtype
        self._unfilled: dict[int, set[str]] = {}

    def apply(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self._stack(x, routing)

    def can_join(self, num_rows: int, shared: SharedExpert) -> bool:
        return self._stack.can_join(num_rows, shared)

    def with_shared(self, x: torch.Tensor, routing: Routing, shared: SharedExpert) -> torch.Tensor:
        return self._stack.with_shared(x, routing, shared)

    def stacks(self) -> list[torch.Tensor]:
        return self._stack.tensors()

    def hold(self, experts: tuple[int, ...]) -> None:
        self._held = experts

    def stored(self) -> Iterator[Span]:
        return ((stack.data_ptr(), stack.nbytes) for stack in self.stacks())

    def process_weights_after_loading(self) -> None:
        self._stack.close()
        self._unfilled.clear()

    def weight_specs(self, prefix: str) -> Iterator[WeightSpec]:
        names, is_whole = self._shape.names, self._shape.part == slice(0, self._shape.spec.intermediate_size)
        # gates and ups of a rank are two parts of a stack in which all gates come first
        is_whole = is_whole and self._shape.first_held is None
        is_stacked = names.are_stacked and (is_whole or names.are_transposed)
        return self._stacked_specs(prefix) if is_stacked else self._specs_of_each(prefix)

    def _specs_of_each(self, prefix: str) -> Iterator[WeightSpec]:
        shape, names, size, part = self._shape, self._shape.names, self._shape.spec.intermediate_size, self._shape.part
        count, hidden, held = shape.spec.num_experts, shape.hidden_size, part.stop - part.start
        every, both = slice(0, hidden), slice(0, size)
        rows, columns = ((), ()) if held == size else ((part, every), (every, part))
        gate_up = [(prefix + name, (count, 2 * size, hidden)) for name in names.gate_up_stack]
        down = [(prefix + name, (count, hidden, size)) for name in names.down_stack]
        for slot, expert in enumerate(self._held):
            one = slice(expert, expert + 1)
            layers = (
                (names.gate, (size, hidden), "gate_up", slice(0, held), rows, gate_up, (one, both)),
                (
                    names.up,
                    (size, hidden),
                    "gate_up",
                    slice(held, 2 * held),
                    rows,
                    gate_up,
                    (one, slice(size, 2 * size)),
                ),
                (names.down, (hidden, size), "down", every, columns, down, (one,)),
            )
            for name, whole, matrix, span, own, stacks, index in layers:
                yield WeightSpec(
                    f"{prefix}{name.format(expert)}.weight",
                    whole,
                    partial(self._open, matrix, slot, span),
                    part=own,
                    stacks=tuple(Stack(stack, stacked, index) for stack, stacked in stacks),
                    filled=partial(self._mark_filled, slot, name),
                    dtype=self._dtype,
                )

    def _stacked_specs(self, prefix: str) -> Iterator[WeightSpec]:
        shape, names, size, part = self._shape, self._shape.names, self._shape.spec.intermediate_size, self._shape.part
        count, hidden = shape.spec.num_experts, shape.hidden_size
        alternating, every = slice(2 * part.start, 2 * part.stop), slice(0, hidden)
        for matrix, of_stack, whole, own, has_bias in (
            ("gate_up", names.gate_up_stack, (2 * size, hidden), (alternating, every), True),
            ("down", names.down_stack, (hidden, size), (every, part), shape.has_down_bias),
        ):
            first, *others = (prefix + name for name in of_stack)
            own_experts = join_rows(slice(expert, expert + 1) for expert in self._held)
            is_whole = part == slice(0, size) and own_experts == slice(0, count)
            yield WeightSpec(
                first,
                (count, *(whole[::-1] if names.are_transposed else whole)),
                partial(self._open_all, matrix),
                aliases=tuple(others),
                part=() if is_whole else (own_experts, *own[::-1]),
                dtype=self._dtype,
            )
            bias = self._stack.biases[matrix]
            if bias is not None and has_bias:
                rows = () if is_whole else (own_experts, own[0])
                yield WeightSpec(f"{first}_bias", (count, whole[0]), partial(_itself, bias), part=rows)

    def _open(self, matrix: str, slot: int, span: slice) -> torch.Tensor:
        return self._stack.open(matrix, slot)[span]

    def _open_all(self, matrix: str) -> torch.Tensor:
        stacked = self._stack.open(matrix)
        return stacked.transpose(1, 2) if self._shape.names.are_transposed else stacked

    def _mark_filled(self, slot: int, name: str) -> None:
        names = self._shape.names
        unfilled = self._unfilled.setdefault(slot, {names.gate, names.up, names.down})
        unfilled.discard(name)
        if not unfilled:
            self._stack.close(slot)
            del self._unfilled[slot]


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class UnquantizedExpertMethod(ExpertMethod):
    """`UnquantizedExperts` for every layer."""

    name = "unquantized"

    def make_weight(self, shape: ExpertsShape, ops: Kernels, dtype: torch.dtype, device: torch.device) -> ExpertWeight:
        return UnquantizedExperts(shape, ops, dtype, device)

    def num_bytes(self, spec: ExpertsSpec, hidden_size: int, dtype: str, num_ranks: int = 1) -> int:
        return spec.num_experts * spec.expert_parameters(hidden_size, num_ranks) * DTYPE_BYTES[dtype]


class Unquantized(LinearMethod):
    """`UnquantizedWeight` for every layer."""

    name = "unquantized"

    @property
    def experts(self) -> ExpertMethod:
        return UnquantizedExpertMethod()

    def make_weight(self, shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device) -> LinearWeight:
        return UnquantizedWeight(shape, ops, dtype, device)

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: str) -> int:
        return num_outputs * num_inputs * DTYPE_BYTES[dtype]

    def prepare_tied_head(self, ops: Kernels) -> Callable[[torch.Tensor], PreparedLinear]:
        return ops.prepare_linear


UNQUANTIZED = LinearMethods(Unquantized())
"""The method of every layer of a model without quantized ones."""
