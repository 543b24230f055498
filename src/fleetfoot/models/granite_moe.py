"""Granite-MoE (IBM 2024): Granite with experts in place of the MLP, which checkpoints hold in two tensors a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from fleetfoot.layers.decoder import DecoderLayer
from fleetfoot.layers.experts import SparseMLP
from fleetfoot.models.granite import GraniteForCausalLM
from fleetfoot.quantization.base import ExpertNames


class GraniteMoeSparseMLP(SparseMLP):
    """Experts in stacks."""

    names: ClassVar[ExpertNames] = ExpertNames(
        gate_up_stack=("input_linear.weight", "experts.gate_up_proj"),
        down_stack=("output_linear.weight", "experts.down_proj"),
        are_stacked=True,
    )
    router_name: ClassVar[str] = "router.layer"


class GraniteMoeDecoderLayer(DecoderLayer):
    """Attention and experts."""

    experts_class: ClassVar[type[nn.Module]] = GraniteMoeSparseMLP


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """The model of the PowerMoE and Granite-3-MoE checkpoints."""

    layer_class: ClassVar[type[DecoderLayer]] = GraniteMoeDecoderLayer
    checkpoint_names: ClassVar[Mapping[str, str]] = {".mlp.": ".block_sparse_moe."}
