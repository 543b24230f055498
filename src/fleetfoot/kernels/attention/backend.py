"""The protocol that every attention backend implements."""

from __future__ import annotations

from typing import Protocol

import torch

from fleetfoot.records.attention import AttentionMetadata, RotaryInputs


class AttentionBackend(Protocol):
    """Causal attention of a step's query tokens over the paged KV cache, which already holds the step's own K and V."""

    name: str
    is_capturable: bool
    """Whether `forward` only queues work that follows from its arguments' shapes, so that a graph can hold it."""

    def forward(
        self,
        query: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:  # [num_tokens, num_heads, head_dim]
        """Softmax attention of each query token over its own sequence up to and including itself.

        Args:
            scale: factor on the dot products, 1 / sqrt(head_dim) for every model here.
            window: how many of the last positions a token sees, itself included; None: all.
        """
        ...

    def forward_fused(
        self,
        qkv: torch.Tensor,  # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
        kv_cache: torch.Tensor,  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
        metadata: AttentionMetadata,
        num_heads: int,
        rotary: RotaryInputs,
        scale: float,
        window: int | None,
        prefetch_weight: torch.Tensor | None = None,
    ) -> torch.Tensor | None:  # [num_tokens, num_heads, head_dim]
        """``Kernels.rope_and_cache`` and `forward` at once; None where this batch has no kernel for that.

        Args:
            prefetch_weight: ``[out, in]`` contiguous, read by the next kernel; it may be prefetched into the cache.
        """
        ...
