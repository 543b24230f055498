"""OLMoE (Muennighoff et al. 2024): experts in every layer, and norms of q and k over all of their heads."""

from __future__ import annotations

from typing import ClassVar

from fleetfoot.layers.attention import Attention
from fleetfoot.layers.decoder import DecoderLayer
from fleetfoot.models.llama import LlamaForCausalLM
from fleetfoot.models.olmo2 import Olmo2Attention


class OlmoeDecoderLayer(DecoderLayer):
    """Attention as in OLMo 2, with the norms of a layer before attention and experts."""

    attention_class: ClassVar[type[Attention]] = Olmo2Attention


class OlmoeForCausalLM(LlamaForCausalLM):
    """The model of the OLMoE checkpoints."""

    layer_class: ClassVar[type[DecoderLayer]] = OlmoeDecoderLayer
