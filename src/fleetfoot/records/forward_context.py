"""What a forward pass reads besides its input: one argument, handed from the runner to every layer. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fleetfoot.records.attention import AttentionMetadata

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LogitsMetadata:
    """The rows of which hidden states are read: the last token of a prompt, and every token of a decode.

    All other rows serve their K and V only. In a model's last layer nothing depends on them but the KV cache.
    """

    indices: torch.Tensor
    """``[num_logits]`` int64: in the step's flat token dimension."""
    attention: AttentionMetadata
    """Of a batch of these rows alone, with all K and V in the cache already."""

    def select(self, per_token: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, ...]`` -> ``[num_logits, ...]``"""
        return per_token.index_select(0, self.indices)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step, as the layers see it."""

    attention: AttentionMetadata
    kv_caches: Sequence[torch.Tensor]
    """Of this rank's layers in order, ``[num_blocks, 2, num_kv_heads, block_size, head_dim]`` each."""
    logits: LogitsMetadata | None = None
    """The rows that are read; None: all of them (EAGLE, prompt logprobs, pooling, and ranks that are not the last)."""
