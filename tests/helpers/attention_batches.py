"""Ragged batches for attention backends, on any device, with poison in unused cache slots and table entries."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fleetfoot.kernels.attention import AttentionInputs
from fleetfoot.kernels.attention.rope_and_cache import rope_and_cache_torch
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.records.forward_context import AttentionMetadata, RotaryInputs

Requests = list[tuple[int, int]]
"""``(query_len, seq_len)`` of each request; decodes come first."""


@dataclass
class Batch:
    query: torch.Tensor
    kv_cache: torch.Tensor
    metadata: AttentionMetadata

    def inputs(self, window: int | None = None) -> AttentionInputs:
        """What attention kernels read."""
        return AttentionInputs.of(self.query, self.kv_cache, self.metadata, self.query.shape[2] ** -0.5, window)

    def expected(self, window: int | None = None) -> torch.Tensor:
        """The result of the reference in float32."""
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


@dataclass
class FusedBatch:
    """A batch of decodes with its queries and its newest K and V still in the output of a linear layer."""

    qkv: torch.Tensor
    kv_cache: torch.Tensor
    metadata: AttentionMetadata
    num_heads: int
    rotary: RotaryInputs

    def inputs(self, window: int | None = None) -> AttentionInputs:
        """What the decode kernel reads; the query is ``[num_tokens, num_heads + 2 * num_kv_heads, head_dim]``."""
        head_dim = self.kv_cache.shape[4]
        heads = self.qkv.view(len(self.qkv), -1, head_dim)
        return AttentionInputs.of(heads, self.kv_cache, self.metadata, head_dim**-0.5, window)

    def expected(self, window: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The results of the references in float32: the output and the cache. The batch's own cache is not modified."""
        cache, rotary, metadata = self.kv_cache.float(), self.rotary, self.metadata
        query = rope_and_cache_torch(
            self.qkv.float(),
            cache,
            metadata.slot_mapping,
            metadata.positions,
            rotary.cos_sin,
            self.num_heads,
            None if rotary.q_norm is None else rotary.q_norm.float(),
            None if rotary.k_norm is None else rotary.k_norm.float(),
            rotary.eps,
        )
        scale = self.kv_cache.shape[4] ** -0.5
        return SDPABackend().forward(query, cache, metadata, scale, window), cache


def make_fused_batch(
    requests: Requests,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    has_norm: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> FusedBatch:
    """`make_batch` without the newest tokens in the cache. A request of length 0 pads the batch."""
    batch = make_batch(
        requests,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        num_decodes=len(requests) if requests[0][0] == 1 else 0,
    )
    block_size = batch.kv_cache.shape[3]
    generator = torch.Generator(device=device).manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    positions, slots = [], []
    for (query_len, seq_len), table in zip(requests, batch.metadata.block_tables.tolist(), strict=True):
        for position in range(seq_len - query_len, seq_len):
            positions.append(max(position, 0))
            slots.append(table[position // block_size] * block_size + position % block_size if position >= 0 else -1)
    metadata = replace(
        batch.metadata,
        positions=torch.tensor(positions, device=device),
        slot_mapping=torch.tensor(slots, device=device),
    )
    written = metadata.slot_mapping[metadata.slot_mapping >= 0]
    batch.kv_cache[written // block_size, :, :, written % block_size] = float("nan")
    angles = torch.rand(max(positions) + 1, head_dim // 2, generator=generator, device=device) * 6.3
    rotary = RotaryInputs(
        torch.cat((angles.cos(), angles.sin()), 1),
        1 + normal(head_dim) / 4 if has_norm else None,
        1 + normal(head_dim) / 4 if has_norm else None,
        1e-6,
    )
    qkv = normal(len(positions), (num_heads + 2 * num_kv_heads) * head_dim)
    return FusedBatch(qkv, batch.kv_cache, metadata, num_heads, rotary)
