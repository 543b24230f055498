"""Linear methods: how a linear layer stores its weight, fills it from a checkpoint, and applies it. No torch.

A method is a `LinearWeight` with the storage and a `LinearMethod` that makes it, and for the experts of a layer an
`ExpertWeight` and an `ExpertMethod`. Layers, loading, live updates, fusion
and the memory plan use these two.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar, overload

from fleetfoot.config.model import DTYPE_BYTES, ExpertsSpec, ModelConfig
from fleetfoot.config.sharding import ExpertSplit, even_span
from fleetfoot.records.weights import Rows, Span, WeightSpec, count_rows, join_rows, slices_of

if TYPE_CHECKING:
    import torch

    from fleetfoot.kernels.experts.experts import Matrix, Routing, SharedExpert
    from fleetfoot.kernels.interface import Kernels
    from fleetfoot.kernels.linear.linear import PreparedLinear
    from fleetfoot.kernels.linear.roles import ChainedInput, ChainedOutput, InputRole, OutputRole


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer on one rank: one or more of the checkpoint's, fused by rows into one matrix."""

    in_features: int
    """As in the checkpoint."""
    parts: tuple[tuple[str, int], ...]
    """Name and number of output features of each fused layer, as in the checkpoint."""
    rows: tuple[Rows, ...]
    """The outputs that this rank computes, of each part, in the order in which they are stored."""
    columns: slice
    """The inputs that this rank has."""
    has_bias: bool = False
    padding: int = 0
    """Outputs after the others that are always 0."""

    @property
    def num_outputs(self) -> int:
        """On this rank, without the padding."""
        return sum(map(count_rows, self.rows))

    @property
    def num_inputs(self) -> int:
        """On this rank."""
        return self.columns.stop - self.columns.start

    def merged(self, name: str) -> LinearShape:
        """The same layer of a checkpoint that has all parts in one tensor, ``name``."""
        first, runs = 0, []
        for (_, size), rows in zip(self.parts, self.rows, strict=True):
            runs += [slice(first + run.start, first + run.stop) for run in slices_of(rows)]
            first += size
        return replace(self, parts=((name, first),), rows=(join_rows(runs),))

    def row_spans(self) -> Iterator[tuple[str, int, Rows, slice]]:
        """Yield for each part its name, its outputs in the checkpoint, those of this rank, and where they lie here."""
        first = 0
        for (name, size), rows in zip(self.parts, self.rows, strict=True):
            span = slice(first, first + count_rows(rows))
            yield name, size, rows, span
            first = span.stop


class LinearWeight(ABC):
    """The storage of one linear layer."""

    @property
    def dense(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Weight ``[out, in]``, contiguous and at a fixed address, and bias ``[out]``, for a router's kernel; None:
        the weight is not stored so."""
        return None

    @property
    def expert_matrix(self) -> Matrix | None:
        """The weight as kernels of experts may read it, at fixed addresses and without a bias; None: it is not stored
        so."""
        return None

    @overload
    def chain(self, role: InputRole) -> ChainedInput | None: ...

    @overload
    def chain(self, role: OutputRole) -> ChainedOutput | None: ...

    def chain(self, role: InputRole | OutputRole) -> ChainedInput | ChainedOutput | None:
        """Its kernels within a chain of dependent launches, which read the weight in place; None: there are none, and
        a fused branch calls `product`. Call it once weights are loaded."""
        return None

    def stored(self) -> Iterator[Span]:
        """The memory of all that a checkpoint gives, for sleep; what is left out of it stays."""
        return iter(())

    @property
    def product(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """What `apply` calls once weights are loaded. It stays the same object when weights are updated."""
        return self.apply

    @abstractmethod
    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """``x [n, in]`` -> ``x @ weight.T + bias [n, out]``"""

    def apply_unrounded(self, x: torch.Tensor) -> torch.Tensor:
        """`apply`, in float32 where the kernel can write it."""
        return self.apply(x)

    @abstractmethod
    def weight_specs(self, prefix: str) -> Iterator[WeightSpec]:
        """The checkpoint's tensors that it holds: ``{prefix}{part}.weight`` and so on."""

    @abstractmethod
    def process_weights_after_loading(self) -> None:
        """Bring what was written to the specs' destinations into the form that `apply` reads."""


class PreparedEmbedding(LinearWeight):
    """An embedding that is stored as a linear layer, and may be the matrix of a tied head too."""

    @abstractmethod
    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """Rows ``[n, in]`` of the weight. ``index [n]``: int64."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of the tensors of a layer's experts in a checkpoint, after the path of the layer's MLP."""

    gate: str = "experts.{}.gate_proj"
    """Name of an expert's layer, with its number in place of the braces; likewise ``up`` and ``down``."""
    up: str = "experts.{}.up_proj"
    down: str = "experts.{}.down_proj"
    gate_up_stack: tuple[str, ...] = ("experts.gate_up_proj",)
    """Name of one tensor for all experts, ``[num_experts, 2 * size, hidden]``; further ones are other names of it."""
    down_stack: tuple[str, ...] = ("experts.down_proj",)
    """``[num_experts, hidden, size]``"""
    are_stacked: bool = False
    """Whether checkpoints have the stacks; else they have the tensors of each expert, and may have the stacks."""
    are_transposed: bool = False
    """Whether the last two dimensions of stacks are exchanged, and gates and ups alternate (GPT-OSS)."""


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """The experts of a layer on one rank."""

    spec: ExpertsSpec
    hidden_size: int
    part: slice
    """What this rank has of the intermediate size of each expert."""
    names: ExpertNames = ExpertNames()
    has_down_bias: bool = True
    """Whether this rank has the biases of ``down``, which are in a sum over the ranks once."""
    first_held: tuple[int, ...] | None = None
    """The expert in each slot of this rank at the start; None: all, in order."""

    @property
    def held(self) -> tuple[int, ...]:
        """The expert in each slot at the start."""
        return tuple(range(self.spec.num_experts)) if self.first_held is None else self.first_held


class ExpertWeight(ABC):
    """The storage of the experts of a layer."""

    @abstractmethod
    def stacks(self) -> Sequence[torch.Tensor]:
        """All tensors of experts, each ``[slots, ...]``, in the form that `apply` reads. A slot's part of them is all
        that it takes to compute its expert there, or on a rank with the same kinds of stacks."""

    @abstractmethod
    def hold(self, experts: tuple[int, ...]) -> None:
        """The slots have the matrices of these experts now; `weight_specs` follow."""

    @abstractmethod
    def apply(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """``x [n, hidden]`` -> the weighted sum of the outputs of each token's experts, the same shape."""

    def can_join(self, num_rows: int, shared: SharedExpert) -> bool:
        """See `TorchExperts.can_join`."""
        return False

    def with_shared(self, x: torch.Tensor, routing: Routing, shared: SharedExpert) -> torch.Tensor:
        """`apply` with a shared expert as well, where it `can_join`."""
        raise NotImplementedError

    @abstractmethod
    def weight_specs(self, prefix: str) -> Iterator[WeightSpec]:
        """The checkpoint's tensors that it holds. ``prefix``: the path of the MLP, with a dot at the end."""

    @abstractmethod
    def stored(self) -> Iterator[Span]:
        """The memory of all that a checkpoint gives, for sleep; what is left out of it stays."""

    @abstractmethod
    def process_weights_after_loading(self) -> None:
        """Bring what was written to the specs' destinations into the form that `apply` reads."""


class ExpertMethod(ABC):
    """Makes the storage of experts."""

    name: str

    def share(self, spec: ExpertsSpec, rank: int, num_ranks: int) -> slice:
        """What a rank has of the intermediate size of each expert."""
        return even_span(spec.intermediate_size, rank, num_ranks)

    @abstractmethod
    def make_weight(self, shape: ExpertsShape, ops: Kernels, dtype: torch.dtype, device: torch.device) -> ExpertWeight:
        """Allocate the storage, unset but for biases, which are 0. ``dtype``: of activations."""

    @abstractmethod
    def num_bytes(self, spec: ExpertsSpec, hidden_size: int, dtype: str, num_ranks: int = 1) -> int:
        """Bytes of all experts of a layer on one of ``num_ranks``. ``dtype``: of activations, by its name."""


class LinearMethod(ABC):
    """Makes the storage of linear layers."""

    name: str

    @property
    def experts(self) -> ExpertMethod:
        """The same for experts. Raises ValueError: there is none."""
        raise ValueError(f"the linear method {self.name!r} has no form for experts")

    @abstractmethod
    def make_weight(self, shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device) -> LinearWeight:
        """Allocate the storage, unset but for padding and biases, which are 0. ``dtype``: of activations."""

    @abstractmethod
    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: str) -> int:
        """Bytes of a weight without its bias, for the memory plan. ``dtype``: of activations, by its name."""

    def join(self, methods: Sequence[LinearMethod]) -> LinearMethod | None:
        """One method for the parts of a matrix that have these; None: it knows none."""
        return None

    stores_embeddings: ClassVar[bool] = False
    """Whether embeddings with this method are stored by it; else they are plain tensors."""

    def make_embedding(
        self, name: str, vocab_size: int, hidden_size: int, ops: Kernels, dtype: torch.dtype
    ) -> PreparedEmbedding:
        """An embedding ``[vocab_size, hidden_size]``, where `stores_embeddings`."""
        raise NotImplementedError

    def workspace_bytes(self, num_outputs: int, num_inputs: int, num_rows: int, dtype: str) -> int:
        """What a product of ``num_rows`` needs beside its input and output at most."""
        return 0

    def prepare_tied_head(self, ops: Kernels) -> Callable[[torch.Tensor], PreparedLinear]:
        """What makes the matrix of a logits head that is the embedding. Raises ValueError: the method has none."""
        raise ValueError(f"lm_head has the method {self.name!r}, and is the embedding, which is not stored so")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))


@dataclass(frozen=True, slots=True)
class LinearMethods:
    """The method of each linear layer of a model, as the plan resolves it. Layers and the memory plan ask by name.

    A name is the layer's path in the checkpoint, as where q, k, v, gate and up have tensors of their own:
    ``model.layers.0.self_attn.q_proj``, ``lm_head``.
    """

    default: LinearMethod
    others: tuple[tuple[str, LinearMethod], ...] = ()
    """Patterns of names, each with its method; the first one that fits counts. ``*`` is any text, and what follows
    ``re:`` a regular expression for the beginning of a name."""

    def of(self, names: Iterable[str]) -> LinearMethod:
        """The method of layers that are one product. Raises ValueError, with each name's method: they differ."""
        found = {name: self._find(name) for name in names}
        if len(set(found.values())) > 1:
            methods = [found[name] for name in found]
            if (joined := next(filter(None, (each.join(methods) for each in methods)), None)) is not None:
                return joined
            listed = ", ".join(f"{name} {method.name}" for name, method in found.items())
            raise ValueError(f"layers that are one product have different linear methods: {listed}")
        return next(iter(found.values()))

    def embedding_bytes(self, name: str, num_rows: int, size: int, dtype: str) -> int:
        """Bytes of an embedding."""
        method = self._find(name)
        return (
            method.num_bytes(num_rows, size, dtype)
            if method.stores_embeddings
            else num_rows * size * DTYPE_BYTES[dtype]
        )

    def of_experts(self, name: str) -> ExpertMethod:
        """The method of a layer's experts, by their name or that of a layer of one. ``name``:
        ``model.layers.0.mlp.experts``."""
        names = name, f"{name}.0.gate_proj"
        found = (method for pattern, method in self.others if any(_fits(each, pattern) for each in names))
        return next(found, self.default).experts

    def _find(self, name: str) -> LinearMethod:
        return next((method for pattern, method in self.others if _fits(name, pattern)), self.default)

    def layer_bytes(
        self,
        model: ModelConfig,
        layers: Iterable[int],
        dtype: str,
        num_ranks: int = 1,
        prefix: str = "model.",
        split: ExpertSplit | None = None,
    ) -> int:
        """Bytes of decoder layers, by their numbers, on one of ``num_ranks``. ``prefix``: before ``layers.0``;
        ``split``: of experts; None: each rank has a part of each."""
        total, hidden_size = 0, model.hidden_size
        for number in layers:
            layer = model.layers[number]
            num_others = layer.norm_parameters(hidden_size)
            for linear in layer.linears(hidden_size, num_ranks):
                method = self.of(f"{prefix}layers.{number}.{part}" for part in linear.parts)
                total += method.num_bytes(linear.num_outputs, linear.num_inputs, dtype)
                num_others += linear.num_outputs * linear.has_bias
            if (experts := layer.experts) is not None:
                method_of_experts = self.of_experts(f"{prefix}layers.{number}.mlp.experts")
                num_parts = num_ranks if split is None else 1
                held = experts if split is None else replace(experts, num_experts=split.most_slots(experts.num_experts))
                total += method_of_experts.num_bytes(held, hidden_size, dtype, num_parts)
                total += 4 * experts.num_experts * experts.router.has_correction
            total += num_others * DTYPE_BYTES[dtype]
        return total


def _fits(name: str, pattern: str) -> bool:
    return bool(re.match(pattern[3:], name)) if pattern.startswith("re:") else fnmatchcase(name, pattern)
