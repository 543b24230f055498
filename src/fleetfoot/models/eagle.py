"""EAGLE (Li, Wei, Zhang, Zhang 2024): a decoder layer that carries on the target's last hidden states.

For each token the head reads the embedding of the token behind it and the target's hidden state, after the final norm,
and yields what that hidden state will be one token later; the target's own logits head then says what is likely.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch

from fleetfoot.config.model import ModelConfig
from fleetfoot.kernels.norm.pending_norm import PendingNorm
from fleetfoot.kernels.norm.rms_norm import sum_parts
from fleetfoot.layers.attention import AttentionHeads
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.decoder import DecoderParts
from fleetfoot.layers.embedding import Embedding
from fleetfoot.layers.linear import Linear
from fleetfoot.layers.rotary import rotary_table
from fleetfoot.layers.slots import WeightSlot
from fleetfoot.records.attention import AttentionMetadata

INPUT_NORM = "layers.0.input_layernorm.weight"
FC_WEIGHT, FC_BIAS = "fc.weight", "fc.bias"
OF_THE_TARGET = ("embed_tokens.weight", "lm_head.weight")
"""What a head's checkpoint may hold besides, as a copy of the target's."""
_BASE_PREFIX = "model."


class EagleLayer(DecoderParts):
    """A decoder layer whose norm before attention may be missing; it makes its sums itself."""

    __slots__ = ()

    def __call__(
        self, hidden: torch.Tensor, positions: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` -> the same shape; what was given may be written to."""
        normed = hidden if self.attention_norm is None else self.attention_norm(hidden)
        attended = self.attention(normed, positions, kv_cache, metadata, hidden, then=self.before_mlp)
        unscaled, residual = self.mlp_norm.add(attended, hidden)
        output = self.mlp(unscaled)
        assert not isinstance(output, PendingNorm)  # no norm was named that follows
        return sum_parts(output, residual) + residual


class EagleHead:
    """The whole of it, on one rank.

    Args:
        config: of its decoder layers; ``hidden_size`` and ``vocab_size`` are the target's.
        names: of the tensors in its checkpoint, without ``model.`` before them. A bias of ``fc`` and a norm before the
            first layer's attention are there or not: published heads have the bias and no norm, for what they read has
            been normalised by the target.
        has_embedding: hold the embedding too, where the target's is on another rank.
    """

    def __init__(
        self, config: ModelConfig, context: ModelContext, names: Collection[str] = (), *, has_embedding: bool = False
    ) -> None:
        size = config.hidden_size
        max_positions = context.max_positions or config.max_position_embeddings
        cos_sin = rotary_table(config.rope, config.head_dim, max_positions, context.device)
        heads = AttentionHeads.of(config, context.tensor_group)
        self.config = config
        self.embedding = Embedding(config, context) if has_embedding else None
        self._fc = Linear(context, 2 * size, (("fc", size),), bias=FC_BIAS in names)
        self._layers = [
            EagleLayer(config, context, heads, cos_sin, layer, has_input_norm=layer > 0 or INPUT_NORM in names)
            for layer in range(config.num_layers)
        ]

    def forward(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Foresee the target's hidden states one token on, and write K and V.

        Args:
            embeddings: ``[num_tokens, hidden_size]``, of the token behind each token.
            hidden: ``[num_tokens, hidden_size]``: of each token, the target's or what was foreseen of it.
            kv_caches: of the head's layers.

        Returns:
            ``[num_tokens, hidden_size]``, as the target's logits head reads them.
        """
        hidden = self._fc(torch.cat((embeddings, hidden), dim=-1))  # [num_tokens, hidden_size]
        for layer, kv_cache in zip(self._layers, kv_caches, strict=True):
            hidden = layer(hidden, metadata.positions, kv_cache, metadata)
        return hidden

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every tensor that it holds; a checkpoint may have ``model.`` before the names."""
        for slot in self._slots():
            yield replace(slot, aliases=(_BASE_PREFIX + slot.name,))

    def _slots(self) -> Iterator[WeightSlot]:
        if self.embedding is not None:
            yield from self.embedding.weight_slots("embed_tokens.")
        yield from self._fc.weight_slots("")
        for number, layer in enumerate(self._layers):
            yield from layer.weight_slots(f"layers.{number}.")

    def finish_loading(self) -> None:
        self._fc.finish_loading()
        for layer in self._layers:
            layer.finish_loading()


def plain_name(name: str) -> str:
    """A tensor's name without ``model.`` before it."""
    return name.removeprefix(_BASE_PREFIX)


def not_of_the_head(names: Collection[str]) -> set[str]:
    """Those of a checkpoint's tensors that belong to the target, or are constants."""
    return {name for name in names if plain_name(name) in OF_THE_TARGET}
