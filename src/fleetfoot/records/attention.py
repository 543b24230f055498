"""What an attention backend must know about a step, beside queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RotaryInputs:
    """A layer's part in making queries, and K and V in the cache, of its ``qkv``; see `Kernels.rope_and_cache`."""

    cos_sin: torch.Tensor
    """``[max_positions, head_dim]`` float32, contiguous."""
    q_norm: torch.Tensor | None
    """``[head_dim]``; None: no norm. Likewise ``k_norm``."""
    k_norm: torch.Tensor | None
    eps: float


@dataclass(slots=True)
class AttentionMetadata:
    """One step's batch. Requests stand in batch order, decodes (one query token each) first.

    The KV cache of a layer is one tensor ``[num_blocks, 2, num_kv_heads, block_size, head_dim]``; index 0 of the
    second dimension is K, index 1 is V, so a block of a layer is one contiguous piece of memory. Token ``i`` of a
    request lies in block ``block_tables[row, i // block_size]`` at offset ``i % block_size``.
    """

    query_start_loc: torch.Tensor
    """``[num_reqs + 1]`` int32: where each request's query tokens begin in the flat token dimension."""
    seq_lens: torch.Tensor
    """``[num_reqs]`` int32: tokens in the KV cache once this step has written its own (context + query)."""
    block_tables: torch.Tensor
    """``[num_reqs, max_blocks]`` int32: KV block ids; entries past a request's last block are never read."""
    slot_mapping: torch.Tensor
    """``[num_tokens]`` int64: where each token's K and V go: block id * block_size + offset."""
    positions: torch.Tensor
    """``[num_tokens]`` int64: each token's position in its sequence."""
    num_decodes: int
    """How many requests, from the front of the batch, have exactly one query token."""
    max_query_len: int
    max_seq_len: int

    @property
    def num_reqs(self) -> int:
        return self.seq_lens.shape[0]
