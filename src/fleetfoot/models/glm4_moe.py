"""GLM-4.5 (Zeng et al. 2025): the router of DeepSeek-V3, an MLP for every token, and first layers without experts."""

from __future__ import annotations

from fleetfoot.config.model import ModelConfig
from fleetfoot.layers.context import ModelContext
from fleetfoot.models.llama import LlamaForCausalLM


class Glm4MoeForCausalLM(LlamaForCausalLM):
    """The model of the GLM-4.5 and GLM-4.6 checkpoints, without the layer that predicts a second token."""

    def __init__(self, config: ModelConfig, context: ModelContext, layers: range | None = None) -> None:
        super().__init__(config, context, layers)
        self.other_weights = (f"model.layers.{config.num_layers}.",)
