"""Builds a model and loads its weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from fleetfoot.config.model import ModelConfig
from fleetfoot.distributed.groups import SINGLE_TENSOR_GROUP
from fleetfoot.layers.context import ModelContext
from fleetfoot.models.interface import CausalLM
from fleetfoot.models.registry import model_class
from fleetfoot.weights.dummy import fill_dummy
from fleetfoot.weights.safetensors_loader import load_safetensors

LOAD_FORMATS = ("auto", "safetensors", "dummy")


def load_model(
    config: ModelConfig,
    context: ModelContext,
    folder: str | Path | None,
    load_format: str = "auto",
    seed: int = 0,
    layers: range | None = None,
) -> CausalLM:
    """Build the model, load its weights and process them.

    Args:
        folder: with the safetensors files; ignored for ``dummy``.
        load_format: ``auto`` (the same as ``safetensors``) or ``dummy``, random weights.
        seed: of the random weights.
        layers: the part of the model to hold; None: all.

    Raises:
        ValueError: an unknown load format or architecture, or no folder.
        WeightError: the checkpoint cannot be read or does not fit.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format is {load_format!r}; expected one of {', '.join(LOAD_FORMATS)}")
    model = model_class(config.architecture)(config, context, layers)
    if load_format == "dummy":
        fill_dummy(model.weight_specs(), seed)
        model.process_weights_after_loading()
    elif folder is None:
        raise ValueError(f"load_format {load_format!r} reads a folder and none was given; use dummy for random weights")
    else:
        reload_weights(model, context, folder)
    return model


def reload_weights(model: CausalLM, context: ModelContext, folder: str | Path) -> None:
    """Load all weights again from a checkpoint with the same shapes, while no step runs.

    Raises:
        WeightError: as `load_model`; the model keeps its old weights.
    """
    is_whole = model.is_first and model.is_last and context.tensor_group.size == 1
    elsewhere = () if is_whole else _all_names(model.config, context)
    load_safetensors(model.weight_specs(), Path(folder), elsewhere)
    model.process_weights_after_loading()


def _all_names(config: ModelConfig, context: ModelContext) -> set[str]:
    """The tensor names of the whole model, from a model on the ``meta`` device."""
    shapes_only = dataclasses.replace(
        context, device=torch.device("meta"), max_positions=1, tensor_group=SINGLE_TENSOR_GROUP
    )
    whole = model_class(config.architecture)(config, shapes_only)
    return {name for spec in whole.weight_specs() for name in (spec.name, *spec.aliases)}
