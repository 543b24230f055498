"""Ragged batches for attention backends, on any device, whose unused cache slots and table entries are poison."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fleetfoot.attention.metadata import AttentionMetadata
from fleetfoot.attention.sdpa import SDPABackend

Requests = list[tuple[int, int]]
"""``(query_len, seq_len)`` of each request; those with one query token that are decodes stand first."""


@dataclass
class Batch:
    query: torch.Tensor
    kv_cache: torch.Tensor
    metadata: AttentionMetadata

    def expected(self, window: int | None = None) -> torch.Tensor:
        """What the twin computes in float32."""
        scale = self.query.shape[2] ** -0.5
        return SDPABackend().forward(self.query.float(), self.kv_cache.float(), self.metadata, scale, window)


def make_batch(
    requests: Requests,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    num_decodes: int | None = None,
    behind: int = 0,
    seed: int = 0,
) -> Batch:
    """``behind``: query tokens after the last request's. A request of length 0 pads the batch."""
    generator = torch.Generator(device=device).manual_seed(seed)
    blocks_of = [-(-seq_len // block_size) for _, seq_len in requests]
    num_blocks = sum(blocks_of) + 3
    order = torch.randperm(num_blocks, generator=generator, device=device).int()
    tables = torch.full((len(requests), max(blocks_of) + 2), 2**30, dtype=torch.int32, device=device)
    is_used = torch.zeros(num_blocks, block_size, dtype=torch.bool, device=device)
    taken = 0
    for row, ((_, seq_len), count) in enumerate(zip(requests, blocks_of, strict=True)):
        tables[row, :count] = order[taken : taken + count]
        taken += count
        position = torch.arange(seq_len, device=device)
        is_used[tables[row, position // block_size].long(), position % block_size] = True
    shape = (num_blocks, 2, num_kv_heads, block_size, head_dim)
    kv_cache = torch.randn(shape, generator=generator, device=device).to(dtype)
    kv_cache.masked_fill_(~is_used[:, None, None, :, None], float("nan"))
    query_lens = [query_len for query_len, _ in requests]
    if num_decodes is None:
        num_decodes = next((row for row, count in enumerate(query_lens) if count != 1), len(query_lens))
    query_shape = (sum(query_lens) + behind, num_heads, head_dim)
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens], device=device).cumsum(0).int(),
        seq_lens=torch.tensor([seq_len for _, seq_len in requests], dtype=torch.int32, device=device),
        block_tables=tables,
        slot_mapping=torch.zeros(query_shape[0], dtype=torch.int64, device=device),
        positions=torch.zeros(query_shape[0], dtype=torch.int64, device=device),
        num_decodes=num_decodes,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_len for _, seq_len in requests),
    )
    query = torch.randn(query_shape, generator=generator, device=device).to(dtype)
    return Batch(query, kv_cache, metadata)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``|actual - expected| / |expected|``; NaN where there is one."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm())
