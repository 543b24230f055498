"""What all layers share: the context that they are built with, and how their weights are found in a module tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import nn

from fleetfoot.config.sharding import ExpertSplit
from fleetfoot.distributed.groups import SINGLE_RANK, Groups
from fleetfoot.kernels.attention import AttentionBackend
from fleetfoot.kernels.interface import Kernels
from fleetfoot.quantization.base import LinearMethods
from fleetfoot.quantization.unquantized import UNQUANTIZED
from fleetfoot.records.weights import Span, WeightSpec


@dataclass(frozen=True, slots=True)
class ModelContext:
    """Where and with what a model computes, handed down from the worker."""

    ops: Kernels
    attention: AttentionBackend
    dtype: torch.dtype
    """The dtype of weights and activations."""
    device: torch.device
    max_positions: int | None = None
    """Rows of the rotary table: the longest sequence that will be served. None: the model's own limit."""
    groups: Groups = SINGLE_RANK
    """The ranks that this one computes with: those that share each layer, and others."""
    linear_methods: LinearMethods = UNQUANTIZED
    """How linear layers store and apply their weights, by their names."""
    expert_split: ExpertSplit | None = None
    """How experts are spread over ``groups.expert``; None: each rank of the tensor group has a part of each."""
    first_placements: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """The expert in each slot of all ranks at the start, by layers; others: `ExpertSplit.first_placement`."""
    has_fp8_kv: bool = False
    """Whether the KV cache is in FP8."""
    prefix: str = ""
    """The path in the checkpoint of the module that is built, with a dot at the end."""

    def within(self, name: str) -> ModelContext:
        """The context for a module of this name in the one that is built."""
        return replace(self, prefix=f"{self.prefix}{name}.")


class WeightModule(nn.Module, ABC):
    """A module that holds tensors of the checkpoint."""

    @abstractmethod
    def own_weight_specs(self, prefix: str, name: str) -> Iterator[WeightSpec]:
        """Its tensors. ``prefix``: the path of the module around it, with a dot at the end. ``name``: its own there."""

    def own_stored_weights(self) -> Iterator[Span]:
        """The memory of its tensors as `forward` reads them."""
        for spec in self.own_weight_specs("", ""):
            tensor = spec.destination()
            if tensor.is_contiguous():
                yield tensor.data_ptr(), tensor.nbytes

    def process_own_weights(self) -> None:
        """Bring what was written to the specs' destinations into the form that `forward` reads."""


class WeightTree(nn.Module):
    """A model, or the part of it that this rank holds. A module has the path of its tensors in the checkpoint."""

    other_weights: tuple[str, ...] = ()
    """Beginnings of the names of tensors in its checkpoints that it does not read, such as a vision tower's."""
    checkpoint_names: ClassVar[Mapping[str, str]] = {}
    """Parts of the names of tensors, with dots around them, that are others in the checkpoint."""

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Every tensor of the checkpoint that it holds."""
        for path, module in self.named_modules():
            if isinstance(module, WeightModule):
                parent, _, name = path.rpartition(".")
                prefix = f"{parent}." if parent else ""
                for part, other in self.checkpoint_names.items():
                    prefix = prefix.replace(part, other)
                for spec in module.own_weight_specs(prefix, name):
                    tensor = spec.name
                    for part, other in self.checkpoint_names.items():
                        tensor = tensor.replace(part, other)
                    yield spec if tensor == spec.name else replace(spec, name=tensor)

    def stored_weights(self) -> Iterator[Span]:
        """The memory of all that a checkpoint gives, and nothing else."""
        for module in self.modules():
            if isinstance(module, WeightModule):
                yield from module.own_stored_weights()

    def process_weights_after_loading(self) -> None:
        """Call it after the first load and after each later update, while no step runs."""
        for module in self.modules():
            if isinstance(module, WeightModule):
                module.process_own_weights()
