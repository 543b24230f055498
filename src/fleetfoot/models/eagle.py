"""EAGLE (Li, Wei, Zhang, Zhang 2024): a decoder layer that carries on the target's last hidden states.

For each token the head reads the embedding of the token after it and the target's hidden state after the final norm,
and predicts that hidden state one token later. The target's own logits head maps the prediction to logits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import torch

from fleetfoot.config.model import BranchNorms, ModelConfig
from fleetfoot.layers.context import ModelContext, WeightTree
from fleetfoot.layers.decoder import DecoderStack
from fleetfoot.layers.linear import ColumnParallelLinear, VocabParallelEmbedding
from fleetfoot.records.forward_context import ForwardContext
from fleetfoot.records.weights import WeightSpec

INPUT_NORM = "layers.0.input_layernorm.weight"
FC_WEIGHT, FC_BIAS = "fc.weight", "fc.bias"
EMBEDDING = "embed_tokens.weight"
OF_THE_TARGET = (EMBEDDING, "lm_head.weight")
"""What a head's checkpoint may hold besides, as a copy of the target's."""
BASE_PREFIX = "model."
"""Before the names in some checkpoints."""


class EagleHead(WeightTree):
    """The whole head, on one rank.

    ``config``: of its decoder layers; ``hidden_size`` and ``vocab_size`` are the target's. ``names``: of the tensors in
    its checkpoint, without ``model.`` before them: a bias of ``fc`` and a norm before the first layer's attention are
    there or not (published heads have the bias and no norm, because the target has normalised their input).
    ``has_embedding``: hold the embedding too, where the target's is on another rank.
    """

    def __init__(
        self, config: ModelConfig, context: ModelContext, names: Collection[str] = (), *, has_embedding: bool = False
    ) -> None:
        super().__init__()
        size = config.hidden_size
        if INPUT_NORM not in names:
            first, *others = config.layers
            config = replace(config, layers=(replace(first, mixer_norms=BranchNorms(before=False)), *others))
        self.config = config
        self.embed_tokens = VocabParallelEmbedding(config, context) if has_embedding else None
        self.fc = ColumnParallelLinear(context, 2 * size, (("fc", size),), bias=FC_BIAS in names)
        self.layers = DecoderStack(config, context, range(config.num_layers))

    def forward(self, embeddings: torch.Tensor, hidden: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Predict the target's hidden states one token on, as its logits head reads them, and write K and V.

        Args:
            embeddings: ``[num_tokens, hidden_size]``, of the token after each token.
            hidden: ``[num_tokens, hidden_size]``: of each token, the target's hidden state or its prediction.
            ctx: with the KV caches of the head's layers.
        """
        return self.layers(self.fc(torch.cat((embeddings, hidden), dim=-1)), ctx)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Every tensor that it holds; a checkpoint may have ``model.`` before the names."""
        for spec in super().weight_specs():
            yield replace(spec, aliases=(BASE_PREFIX + spec.name,))
