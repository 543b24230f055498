"""Builds a model and loads its weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fleetfoot.config.model import ModelConfig
from fleetfoot.distributed.groups import SINGLE_RANK
from fleetfoot.layers.context import ModelContext
from fleetfoot.models.interface import CausalLM, model_class
from fleetfoot.weights.checkpoint import load_safetensors, names_of
from fleetfoot.weights.dummy import fill_dummy

LOAD_FORMATS = ("auto", "safetensors", "dummy")


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """A model that is not built yet."""

    config: ModelConfig
    context: ModelContext
    folder: str | Path | None
    """The folder of the safetensors files; ignored for ``dummy``."""
    load_format: str = "auto"
    """``auto`` (the same as ``safetensors``) or ``dummy``, random weights."""
    seed: int = 0
    """The seed of the random weights."""
    layers: range | None = None
    """The part of the model to hold; None: all."""

    def load(self) -> CausalLM:
        """Build the model, load its weights and process them. Raises ValueError if the load format or architecture is
        unknown or there is no folder, and WeightError if the checkpoint cannot be read or does not fit."""
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format is {self.load_format!r}; expected one of {', '.join(LOAD_FORMATS)}")
        model = model_class(self.config)(self.config, self.context, self.layers)
        self.fill(model)
        return model

    def fill(self, model: CausalLM) -> None:
        """Load the weights of a model that `load` has built, again. Raises as `load`."""
        if self.context.device.type == "meta":
            model.process_weights_after_loading()
        elif self.load_format == "dummy":
            fill_dummy(model.weight_specs(), self.seed)
            model.process_weights_after_loading()
        elif self.folder is None:
            raise ValueError(
                f"load_format {self.load_format!r} reads a folder and none was given; use dummy for random weights"
            )
        else:
            reload_weights(model, self.context, self.folder)


def reload_weights(model: CausalLM, context: ModelContext, folder: str | Path) -> None:
    """Load all weights again from a checkpoint with the same shapes, while no step runs. Raises WeightError: as
    `ModelLoader.load`; the model keeps its old weights."""
    # the other tensors of the whole model, named by a model on the `meta` device
    elsewhere = set() if model.config.head == "logits" else {"lm_head.weight"}
    if not (model.is_first and model.is_last and context.groups.tensor.size == context.groups.expert.size == 1):
        meta = replace(context, device=torch.device("meta"), max_positions=1, groups=SINGLE_RANK, expert_split=None)
        whole = model_class(model.config)(model.config, meta)
        elsewhere |= {name for spec in whole.weight_specs() for name in names_of(spec)}
    load_safetensors(model.weight_specs(), Path(folder), elsewhere, model.other_weights)
    model.process_weights_after_loading()
