"""Weights in the blocks of GGUF files, which a CPU reads where they lie: mapped files are not copied. A GPU has their
codes in the layout of its kernels.

The parts of a matrix, as q, k and v, may be stored in different ways.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, overload

from fleetfoot.config.model import DTYPE_BYTES, ExpertsSpec
from fleetfoot.config.quantization import WeightFormat
from fleetfoot.kernels.quantized import BLOCK_GROUP, WRITTEN_OUTPUTS, block_form
from fleetfoot.quantization.base import (
    ExpertMethod,
    ExpertsShape,
    ExpertWeight,
    LinearMethod,
    LinearShape,
    LinearWeight,
    PreparedEmbedding,
)
from fleetfoot.quantization.unquantized import Unquantized
from fleetfoot.records.weights import BLOCK_TYPES_BY_NAME, BlockType, Span, WeightSpec

if TYPE_CHECKING:
    import torch

    from fleetfoot.kernels.experts.experts import Routing
    from fleetfoot.kernels.interface import Kernels
    from fleetfoot.kernels.linear.roles import ChainedInput, ChainedOutput, InputRole, OutputRole
    from fleetfoot.kernels.quantized.blocks import BlockLinear


class _Slot:
    """The blocks of one tensor ``[rows, bytes of a row]``: the file's own memory, or what was written to a copy."""

    def __init__(
        self, name: str, num_rows: int, num_inputs: int, type_of: BlockType, changed: Callable[[], None]
    ) -> None:
        if num_inputs % type_of.size:
            raise ValueError(f"{name} has {num_inputs} inputs; {type_of.name} has blocks of {type_of.size}")
        self.type, self._changed = type_of, changed
        self._shape = num_rows, num_inputs // type_of.size * type_of.num_bytes
        self._name = name
        self.data: torch.Tensor | None = None
        self._opened: torch.Tensor | None = None

    def spec(self) -> WeightSpec:
        return WeightSpec(
            self._name, self._shape, self._open, kind="blocks", init=self._draw, adopt=self._adopt, filled=self._fill
        )

    def _adopt(self, data: torch.Tensor) -> None:
        self.data = data
        self._changed()

    def _open(self) -> torch.Tensor:
        """A copy: a mapped file is not written to."""
        import torch

        if self._opened is None:
            self._opened = torch.empty(self._shape, dtype=torch.uint8) if self.data is None else self.data.clone()
        return self._opened

    def _fill(self) -> None:
        assert self._opened is not None
        self._adopt(self._opened)

    def close(self) -> None:
        """Forget a copy that was not written to."""
        self._opened = None

    @staticmethod
    def _draw(target: torch.Tensor) -> None:
        """Dummy weights: bytes that are small and finite in all types."""
        target.random_(0, 32)


class _BlockStorage(LinearWeight):
    """A matrix in blocks, of one or several parts."""

    def __init__(
        self, types: Sequence[BlockType], shape: LinearShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        import torch

        self._types = tuple(types) * (len(shape.parts) if len(types) == 1 else 1)
        self._shape, self._dtype = shape, dtype
        num_outputs = shape.num_outputs + shape.padding
        self._bias = torch.zeros(num_outputs, dtype=dtype, device=device) if shape.has_bias else None
        self._slots: list[_Slot] = []
        self._is_loaded = False

    def weight_specs(self, prefix: str) -> Iterator[WeightSpec]:
        parts = [*self._shape.row_spans()]
        if not self._slots:
            self._slots = [
                _Slot(f"{prefix}{name}.weight", size, self._shape.in_features, each, self._change)
                for each, (name, size, _, _) in zip(self._types, parts, strict=True)
            ]
        for slot, (name, size, _, span) in zip(self._slots, parts, strict=True):
            yield slot.spec()
            if self._bias is not None:
                yield WeightSpec(f"{prefix}{name}.bias", (size,), partial(self._bias.__getitem__, span))

    def _change(self) -> None:
        self._is_loaded = False

    def process_weights_after_loading(self) -> None:
        for slot in self._slots:
            slot.close()
        if not self._is_loaded:
            self._load()
            self._is_loaded = True

    def _load(self) -> None:
        """Read the slots."""
        raise NotImplementedError

    def stored(self) -> Iterator[Span]:
        if self._bias is not None:
            yield self._bias.data_ptr(), self._bias.nbytes


class BlockWeight(_BlockStorage, PreparedEmbedding):
    """Blocks that products read in place. It is also what an embedding looks up rows in."""

    def __init__(
        self, types: Sequence[BlockType], shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(types, shape, dtype, device)
        self._make = ops.block_linear
        self._linear_or_none: BlockLinear | None = None

    @property
    def product(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return self._linear

    @property
    def _linear(self) -> BlockLinear:
        if self._linear_or_none is None or not self._is_loaded:
            raise RuntimeError("a linear layer was called before process_weights_after_loading")
        return self._linear_or_none

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x)

    def apply_unrounded(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear.unrounded(x)

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """See `PreparedLinear.rows`."""
        return self._linear.rows(index)

    def _load(self) -> None:
        from fleetfoot.kernels.quantized.blocks import BlockRows

        parts = [BlockRows(slot.type.number, slot.data) for slot in self._slots if slot.data is not None]
        self._linear_or_none = self._make(parts, self._shape.in_features, self._dtype, self._bias)


class Blocks(LinearMethod):
    """`BlockWeight` of some types, one for each part of a matrix; one for all parts where they are equal."""

    stores_embeddings = True

    def __init__(self, types: tuple[BlockType, ...]) -> None:
        self.types = types
        self.name = ", ".join(dict.fromkeys(each.name for each in types))

    @property
    def experts(self) -> ExpertMethod:
        return BlockExperts(self.types)

    def join(self, methods: Sequence[LinearMethod]) -> LinearMethod | None:
        types = tuple(each.types[0] for each in methods if isinstance(each, Blocks | Floats))
        return type(self)(types) if len(types) == len(methods) else None

    def make_weight(self, shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device) -> LinearWeight:
        return BlockWeight(self.types, shape, ops, dtype, device)

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: str) -> int:
        """Bytes of the largest type, where there are several."""
        return num_outputs * max(-(-num_inputs // each.size) * each.num_bytes for each in self.types)

    def make_embedding(
        self, name: str, vocab_size: int, hidden_size: int, ops: Kernels, dtype: torch.dtype
    ) -> BlockWeight:
        shape = LinearShape(hidden_size, ((name, vocab_size),), (slice(0, vocab_size),), slice(0, hidden_size))
        import torch

        return BlockWeight(self.types, shape, ops, dtype, torch.device("cpu"))


class MatrixWeight(_BlockStorage):
    """Blocks as matrices of a GPU's kernels: one for parts that have codes of the same form."""

    def __init__(
        self, types: Sequence[BlockType], shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device
    ) -> None:
        import torch

        from fleetfoot.kernels.quantized.block_matrices import empty_matrix

        super().__init__(types, shape, dtype, device)
        self._ops = ops
        spans = [span for *_, span in shape.row_spans()]
        forms = [block_form(each.number) for each in self._types]
        firsts = [index for index, form in enumerate(forms) if not index or form != forms[index - 1]]
        self._places: list[tuple[int, int]] = []  # of each part: its matrix, and its first row there
        self._matrices: list[Any] = []
        self._biases: list[torch.Tensor | None] = []
        for index, end in zip(firsts, [*firsts[1:], len(forms)], strict=True):
            first, last = spans[index].start, spans[end - 1].stop
            last += shape.padding if end == len(forms) else 0
            bias = None if self._bias is None else self._bias[first:last]
            matrix = empty_matrix(forms[index], last - first, shape.in_features, dtype, device, bias)
            self._places += [(len(self._matrices), span.start - first) for span in spans[index:end]]
            self._matrices.append(matrix)
            self._biases.append(bias)
        self._chain = ops.quantized_chain if dtype is torch.bfloat16 and len(self._matrices) == 1 else None

    @overload
    def chain(self, role: InputRole) -> ChainedInput | None: ...

    @overload
    def chain(self, role: OutputRole) -> ChainedOutput | None: ...

    def chain(self, role: InputRole | OutputRole) -> ChainedInput | ChainedOutput | None:
        return None if self._chain is None else self._chain(self._matrices[0], role)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        import torch

        outputs = [*map(partial(self._multiply, x), self._matrices, self._biases)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _multiply(self, x: torch.Tensor, matrix: Any, bias: torch.Tensor | None) -> torch.Tensor:
        import torch
        import torch.nn.functional as F

        from fleetfoot.kernels.quantized.scaled import ScaledMatrix

        if isinstance(matrix, torch.Tensor):
            return F.linear(x, matrix, bias)
        return (self._ops.scaled_linear if isinstance(matrix, ScaledMatrix) else self._ops.packed_linear)(x, matrix)

    def _load(self) -> None:
        from fleetfoot.kernels.quantized.block_matrices import write_blocks

        for slot, (index, first) in zip(self._slots, self._places, strict=True):
            if slot.data is not None:
                write_blocks(self._matrices[index], first, slot.type.number, slot.data)

    def stored(self) -> Iterator[Span]:
        from fleetfoot.kernels.quantized.block_matrices import tensors_of

        for tensor in (tensor for matrix in self._matrices for tensor in tensors_of(matrix)):
            yield tensor.data_ptr(), tensor.nbytes
        yield from super().stored()


class Matrices(Blocks):
    """`MatrixWeight` of some types, as of `Blocks`. Embeddings and experts are dequantized while they are loaded."""

    stores_embeddings = False

    @property
    def experts(self) -> ExpertMethod:
        return Unquantized().experts

    def make_weight(self, shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device) -> LinearWeight:
        return MatrixWeight(self.types, shape, ops, dtype, device)

    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: str) -> int:
        """Bytes of the largest form, where there are several."""
        return num_outputs * max(_matrix_row_bytes(each, num_inputs, DTYPE_BYTES[dtype]) for each in self.types)

    def workspace_bytes(self, num_outputs: int, num_inputs: int, num_rows: int, dtype: str) -> int:
        """A part of the weight in ``dtype``, and outputs of the parts of a matrix."""
        written = min(num_outputs, WRITTEN_OUTPUTS) * num_inputs + num_rows * num_outputs * (len(self.types) > 1)
        return written * DTYPE_BYTES[dtype]


def _matrix_row_bytes(kind: BlockType, num_inputs: int, dtype_bytes: int) -> int:
    form, has_zeros = block_form(kind.number)
    if form == "float":
        return num_inputs * dtype_bytes
    if form == "int8":
        return num_inputs + num_inputs // BLOCK_GROUP * 4
    blocks = -(-num_inputs // 128)
    return blocks * 64 + (blocks * 4 if form == "e2m1" else num_inputs // BLOCK_GROUP * (dtype_bytes + 2 * has_zeros))


class Floats(Unquantized):
    """A matrix of floats in a GGUF file, which may be one product with others in blocks."""

    def __init__(self, types: tuple[BlockType, ...]) -> None:
        self.types = types

    @property
    def experts(self) -> ExpertMethod:
        return BlockExperts(self.types)

    def join(self, methods: Sequence[LinearMethod]) -> LinearMethod | None:
        return Floats(self.types) if all(isinstance(each, Floats) for each in methods) else None


def block_method(form: WeightFormat, method: type[Blocks]) -> Blocks | Floats:
    """The method of a layer, or of the gates, ups and downs of experts, with the types in ``form.values``."""
    types = tuple(BLOCK_TYPES_BY_NAME[name] for name in form.values.split("+"))
    return Floats(types) if len(types) == 1 and types[0].is_float else method(types)


class BlockExpertWeight(ExpertWeight):
    """The experts of a layer in blocks: gates, ups and downs of each."""

    def __init__(self, types: tuple[BlockType, ...], shape: ExpertsShape, ops: Kernels, dtype: torch.dtype) -> None:
        from fleetfoot.kernels.experts.block_experts import BlockStack
        from fleetfoot.kernels.experts.experts import ExpertSizes

        spec = shape.spec
        sizes = ExpertSizes(
            spec.num_experts, shape.hidden_size, spec.intermediate_size, spec.has_bias, activation=spec.activation,
            alpha=spec.alpha, limit=spec.limit,
        )  # fmt: skip
        self._shape, self._types = shape, types * 3 if len(types) == 1 else types
        self._stack = BlockStack(sizes, dtype, ops.block_linear)
        self._slots: dict[str, list[_Slot]] = {}

    def apply(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self._stack(x, routing)

    def weight_specs(self, prefix: str) -> Iterator[WeightSpec]:
        spec, hidden = self._shape.spec, self._shape.hidden_size
        size, count, biases = spec.intermediate_size, spec.num_experts, self._stack.biases
        places = (
            ("gate", size, hidden, "gate_up", 0),
            ("up", size, hidden, "gate_up", size),
            ("down", hidden, size, "down", 0),
        )
        for (part, rows, inputs, matrix, first), each in zip(places, self._types, strict=True):
            if part not in self._slots:
                self._slots[part] = [
                    _Slot(f"{prefix}experts.{expert}.{part}_proj.weight", rows, inputs, each, self._stack.forget)
                    for expert in range(count)
                ]
            for expert, slot in enumerate(self._slots[part]):
                yield slot.spec()
                if (bias := biases[matrix]) is not None:
                    place = partial(bias[expert].__getitem__, slice(first, first + rows))
                    yield WeightSpec(f"{prefix}experts.{expert}.{part}_proj.bias", (rows,), place)

    def stacks(self) -> list[torch.Tensor]:
        """Biases: the blocks are the file's."""
        return self._stack.tensors()

    def hold(self, experts: tuple[int, ...]) -> None:
        raise ValueError("experts in the blocks of a GGUF file are not moved between ranks")

    def stored(self) -> Iterator[Span]:
        return ((stack.data_ptr(), stack.nbytes) for stack in self.stacks())

    def process_weights_after_loading(self) -> None:
        from fleetfoot.kernels.quantized.blocks import BlockRows

        for slot in (slot for slots in self._slots.values() for slot in slots):
            slot.close()
        parts = {
            name: [BlockRows(slot.type.number, slot.data) for slot in slots if slot.data is not None]
            for name, slots in self._slots.items()
        }
        self._stack.fill(parts["gate"], parts["up"], parts["down"])


class BlockExperts(ExpertMethod):
    """`BlockExpertWeight` with the types of gates, ups and downs."""

    def __init__(self, types: tuple[BlockType, ...]) -> None:
        self.types = types
        self.name = ", ".join(dict.fromkeys(each.name for each in types))

    def make_weight(self, shape: ExpertsShape, ops: Kernels, dtype: torch.dtype, device: torch.device) -> ExpertWeight:
        return BlockExpertWeight(self.types, shape, ops, dtype)

    def num_bytes(self, spec: ExpertsSpec, hidden_size: int, dtype: str, num_ranks: int = 1) -> int:
        method = Blocks(self.types)
        size = spec.intermediate_size // num_ranks
        matrices = method.num_bytes(2 * size, hidden_size, dtype) + method.num_bytes(hidden_size, size, dtype)
        return spec.num_experts * (matrices + 4 * (2 * size + hidden_size) * spec.has_bias)
