"""The arguments of `load_model`, for a runner that builds its model later."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fleetfoot.config.model import ModelConfig
from fleetfoot.layers.context import ModelContext
from fleetfoot.models.interface import CausalLM
from fleetfoot.weights.loading import load_model


@dataclass(frozen=True, slots=True)
class ModelLoader:
    """A model that is not built yet."""

    config: ModelConfig
    context: ModelContext
    folder: Path | None
    """With the safetensors files; None for dummy weights."""
    load_format: str = "auto"
    seed: int = 0
    layers: range | None = None
    """The layers of a pipeline rank; None: all."""

    def load(self) -> CausalLM:
        return load_model(self.config, self.context, self.folder, self.load_format, self.seed, self.layers)
