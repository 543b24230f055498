"""What a runner may ask of every model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from fleetfoot.config.model import ModelConfig
from fleetfoot.layers.attention import AttentionHeads
from fleetfoot.layers.context import ModelContext
from fleetfoot.layers.slots import WeightSlot
from fleetfoot.records.attention import AttentionMetadata, WantedTokens
from fleetfoot.records.intermediate import IntermediateTensors


class CausalLM(Protocol):
    """A decoder-only language model, or the consecutive layers of it that one pipeline rank holds."""

    config: ModelConfig
    heads: AttentionHeads
    """The attention heads of this rank, from which its KV cache is shaped."""
    layers: range
    """The decoder layers of this rank."""

    def __init__(self, config: ModelConfig, context: ModelContext, layers: range | None = None) -> None:
        """Allocate the weights, unset. ``layers``: the part to hold; None: all.

        Raises:
            ValueError: ``layers`` is empty, has gaps or reaches beyond the model.
        """
        ...

    @property
    def is_first(self) -> bool:
        """Whether this part embeds the token ids."""
        ...

    @property
    def is_last(self) -> bool:
        """Whether this part has the final norm and the logits head."""
        ...

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        metadata: AttentionMetadata,
        intermediate_tensors: IntermediateTensors | None = None,
        wanted: WantedTokens | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Run the step's tokens through the layers and write their K and V.

        Args:
            input_ids: ``[num_tokens]`` int64; read by the first part only.
            positions: ``[num_tokens]`` int64: each token's position in its sequence.
            kv_caches: one ``[num_blocks, 2, num_kv_heads, block_size, head_dim]`` for each of this part's layers.
            intermediate_tensors: the output of the part before; None for the first part.
            wanted: for the last part: the tokens whose hidden states the caller reads; None: all.

        Returns:
            The last part: hidden states ``[num_tokens, hidden_size]`` after the final norm, or those of the tokens that
            are wanted; others: the next input.
        """
        ...

    def shortened(self) -> tuple[CausalLM, list[int]]:
        """This part with as few of its layers as launch all the kernels that it launches: the same weights, and the
        indices of the layers within it. What it computes means nothing."""
        ...

    @property
    def has_embedding(self) -> bool:
        """Whether this part can embed token ids: the first one can, and one whose logits head is the same matrix."""
        ...

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``input_ids [num_tokens]`` int64 -> ``[num_tokens, hidden_size]``, where `has_embedding`."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden [n, hidden_size]`` -> logits ``[n, vocab_size]`` in the model's dtype, on the last part alone."""
        ...

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every tensor of the checkpoint that this part holds."""
        ...

    def finish_loading(self) -> None:
        """Make the values written to the slots count; call it after the first load and after each later change."""
        ...
