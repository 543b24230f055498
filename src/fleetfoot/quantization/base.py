"""Linear methods: how a linear layer stores its weight, fills it from a checkpoint, and applies it. No torch.

A method is a `LinearWeight` with the storage and a `LinearMethod` that makes it. Layers, loading, live updates, fusion
and the memory plan use these two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fleetfoot.config.model import DTYPE_BYTES, LayerSpec
from fleetfoot.records.weights import Rows, Span, WeightSpec, count_rows, join_rows, slices_of

if TYPE_CHECKING:
    import torch

    from fleetfoot.kernels.interface import Kernels


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
    """Outputs behind the others that are always 0."""
    has_zero_bias: bool = False
    """Another rank has the bias of this layer, which is in a sum over the ranks once. A method with kernels that
    have variants with and without a bias adds zeros here, so that all ranks launch the same ones."""

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
        """For each part: its name, its outputs in the checkpoint, those of this rank, and where they lie here."""
        first = 0
        for (name, size), rows in zip(self.parts, self.rows, strict=True):
            span = slice(first, first + count_rows(rows))
            yield name, size, rows, span
            first = span.stop


class LinearWeight(ABC):
    """The storage of one linear layer."""

    @property
    def dense(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Weight ``[out, in]``, contiguous and at a fixed address, and bias ``[out]``, for fused kernels that read
        them in place; None: the weight is not stored so."""
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


class LinearMethod(ABC):
    """Makes the storage of linear layers."""

    name: str

    @abstractmethod
    def make_weight(self, shape: LinearShape, ops: Kernels, dtype: torch.dtype, device: torch.device) -> LinearWeight:
        """Allocate the storage, unset but for padding and biases, which are 0. ``dtype``: of activations."""

    @abstractmethod
    def num_bytes(self, num_outputs: int, num_inputs: int, dtype: str) -> int:
        """Bytes of a weight without its bias, for the memory plan. ``dtype``: of activations, by its name."""

    def layer_bytes(self, layer: LayerSpec, hidden_size: int, dtype: str, num_ranks: int = 1) -> int:
        """Bytes of a decoder layer on one of ``num_ranks``."""
        linears = layer.linears(hidden_size, num_ranks)
        others = layer.norm_parameters(hidden_size) + sum(outputs for outputs, _, has_bias in linears if has_bias)
        matrices = sum(self.num_bytes(outputs, inputs, dtype) for outputs, inputs, _ in linears)
        return matrices + others * DTYPE_BYTES[dtype]
