"""Mixtral (Jiang et al. 2024): Mistral with experts in place of the MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from fleetfoot.layers.decoder import DecoderLayer
from fleetfoot.layers.experts import SparseMLP
from fleetfoot.models.llama import LlamaForCausalLM
from fleetfoot.quantization.base import ExpertNames


class MixtralSparseMLP(SparseMLP):
    """Experts with the names of Mistral's first release."""

    names: ClassVar[ExpertNames] = ExpertNames("experts.{}.w1", "experts.{}.w3", "experts.{}.w2")


class MixtralDecoderLayer(DecoderLayer):
    """Attention and experts."""

    experts_class: ClassVar[type[nn.Module]] = MixtralSparseMLP


class MixtralForCausalLM(LlamaForCausalLM):
    """The model of the Mixtral checkpoints."""

    layer_class: ClassVar[type[DecoderLayer]] = MixtralDecoderLayer
    checkpoint_names: ClassVar[Mapping[str, str]] = {".mlp.": ".block_sparse_moe."}
