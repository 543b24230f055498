"""Mixtral (Jiang et al. 2024): Mistral with experts in place of the MLP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from torch import nn

from fleetfoot.layers.decoder import DecoderLayer
from fleetfoot.layers.experts import SparseMLP
from fleetfoot.models.llama import LlamaForCausalLM
from fleetfoot.quantization.base import ExpertNames
from fleetfoot.records.weights import WeightSpec

_NEWER_NAMES = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}


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

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Every tensor of the checkpoint that it holds, also by the names of tools that quantize single experts."""
        for spec in super().weight_specs():
            newer = spec.name
            for old, new in _NEWER_NAMES.items():
                newer = newer.replace(old, new)
            names = dict.fromkeys((*spec.aliases, newer, newer.replace(".block_sparse_moe.", ".mlp.")))
            names.pop(spec.name, None)
            yield replace(spec, aliases=tuple(names))
