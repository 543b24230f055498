"""Modules with weights of their own, and all weights of a module tree."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from torch import nn

from fleetfoot.records.weights import WeightSpec


class WeightModule(nn.Module, ABC):
    """A module that holds tensors of the checkpoint."""

    @abstractmethod
    def own_weight_specs(self, prefix: str, name: str) -> Iterator[WeightSpec]:
        """Its tensors.

        Args:
            prefix: the path of the module around it, with a dot at the end. name: its own in there.
        """

    def process_own_weights(self) -> None:
        """Bring what was written to the specs' destinations into the form that `forward` reads."""


def weight_specs(root: nn.Module) -> Iterator[WeightSpec]:
    """Of all modules below ``root``. A module has the path of its tensors in the checkpoint."""
    for path, module in root.named_modules():
        if isinstance(module, WeightModule):
            parent, _, name = path.rpartition(".")
            yield from module.own_weight_specs(f"{parent}." if parent else "", name)


def process_weights_after_loading(root: nn.Module) -> None:
    """Call it after the first load and after each later update, while no step runs."""
    for module in root.modules():
        if isinstance(module, WeightModule):
            module.process_own_weights()
