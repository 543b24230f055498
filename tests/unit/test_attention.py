"""The torch attention backend against a float64 loop over single tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetfoot.kernels.attention import sdpa_backend as sdpa
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.records.forward_context import AttentionMetadata

BACKEND = SDPABackend()


def make_batch(
    requests: list[tuple[int, int]],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
    shuffled: bool = True,
    seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, AttentionMetadata]:
    """Query, KV cache and metadata for ``(query_len, seq_len)`` requests; unused slots in the cache are NaN."""
    generator = torch.Generator().manual_seed(seed)
    blocks_of = [-(-seq_len // block_size) for _, seq_len in requests]
    total = sum(blocks_of) + 3
    order = torch.randperm(total, generator=generator) if shuffled else torch.arange(total)
    kv_cache = torch.full((total, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    tables = torch.full((len(requests), max(blocks_of, default=0) + 2), 2**30, dtype=torch.int32)
    taken, positions, slots = 0, [], []
    for row, ((query_len, seq_len), count) in enumerate(zip(requests, blocks_of, strict=True)):
        mine = order[taken : taken + count]
        taken += count
        tables[row, :count] = mine.int()
        for position in range(seq_len):
            block = mine[position // block_size]
            kv = torch.randn(2, num_kv_heads, head_dim, generator=generator)
            kv_cache[block, :, :, position % block_size] = kv.to(dtype)
        query_positions = torch.arange(seq_len - query_len, seq_len)
        positions.append(query_positions)
        slots.append(mine[query_positions // block_size] * block_size + query_positions % block_size)
    query_lens = [query_len for query_len, _ in requests]
    num_decodes = next((i for i, n in enumerate(query_lens) if n != 1), len(query_lens))
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor([seq_len for _, seq_len in requests], dtype=torch.int32),
        block_tables=tables,
        slot_mapping=torch.cat([torch.zeros(0, dtype=torch.int64), *slots]),
        positions=torch.cat([torch.zeros(0, dtype=torch.int64), *positions]),
        num_decodes=num_decodes,
        max_query_len=max(query_lens, default=0),
        max_seq_len=max((seq_len for _, seq_len in requests), default=0),
    )
    query = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator).to(dtype)
    return query, kv_cache, metadata


def attend_64(
    query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata, scale: float, window: int | None
) -> torch.Tensor:
    """One token and one head at a time, by definition."""
    num_heads, num_kv_heads, block_size = query.shape[1], kv_cache.shape[2], kv_cache.shape[3]
    output = torch.zeros(query.shape, dtype=torch.float64)
    starts = metadata.query_start_loc.tolist()
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        blocks = metadata.block_tables[row, : -(-seq_len // block_size)].long()
        kv = kv_cache[blocks].double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len]  # [2, heads, seq_len, dim]
        for token in range(starts[row], starts[row + 1]):
            position = seq_len - (starts[row + 1] - token)
            first = 0 if window is None else max(0, position + 1 - window)
            for head in range(num_heads):
                keys, values = kv[:, head * num_kv_heads // num_heads, first : position + 1]
                weights = (keys @ query[token, head].double() * scale).softmax(0)
                output[token, head] = weights @ values
    return output


def check(requests: list[tuple[int, int]], window: int | None = None, **shape) -> None:
    query, kv_cache, metadata = make_batch(requests, **shape)
    scale = 1 / math.sqrt(query.shape[2])
    actual = BACKEND.forward(query, kv_cache, metadata, scale, window)
    assert actual.shape == query.shape
    assert actual.dtype == query.dtype
    bound = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[query.dtype]
    torch.testing.assert_close(actual.double(), attend_64(query, kv_cache, metadata, scale, window), rtol=0, atol=bound)


MIXED = [(1, 1), (1, 9), (1, 4), (3, 3), (5, 13), (8, 8), (1, 6), (4, 8)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 100])
def test_mixed_batch(dtype: torch.dtype, window: int | None) -> None:
    check(MIXED, window, dtype=dtype)


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (3, 1), (8, 1), (9, 3)])
@pytest.mark.parametrize("head_dim", [8, 40, 64])
def test_head_shapes(heads: tuple[int, int], head_dim: int) -> None:
    check(MIXED, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim)


@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
@pytest.mark.parametrize("shuffled", [False, True])
def test_block_sizes(block_size: int, shuffled: bool) -> None:
    check([(1, 16), (1, 17), (1, 15), (16, 32), (33, 33)], block_size=block_size, shuffled=shuffled)


@given(
    requests=st.lists(
        st.integers(1, 24).flatmap(lambda seq_len: st.tuples(st.integers(1, seq_len), st.just(seq_len))),
        min_size=1,
        max_size=6,
    ).map(lambda found: sorted(found, key=lambda request: request[0] != 1)),
    window=st.none() | st.integers(1, 30),
    block_size=st.integers(1, 9),
)
@settings(max_examples=40, deadline=None)
def test_ragged_batches(requests: list[tuple[int, int]], window: int | None, block_size: int) -> None:
    check(requests, window, block_size=block_size, head_dim=8)


@pytest.mark.parametrize("window", [None, 5])
def test_small_memory_bounds_change_nothing(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(sdpa, "MAX_GATHERED_ELEMENTS", 600)
    monkeypatch.setattr(sdpa, "MAX_MASK_ELEMENTS", 1)
    check([(1, 9), (1, 7), (1, 30), (1, 2), (70, 90)], window)


def test_empty_batch() -> None:
    query, kv_cache, metadata = make_batch([])
    assert BACKEND.forward(query, kv_cache, metadata, 1.0, None).shape == (0, 4, 16)


def test_padding_requests_and_tokens_are_zero_and_isolated() -> None:
    query, kv_cache, metadata = make_batch([(1, 5), (1, 1)])
    whole = BACKEND.forward(query, kv_cache, metadata, 0.25, None)
    metadata.seq_lens[1] = 0
    padded = BACKEND.forward(torch.cat((query, query)), kv_cache, metadata, 0.25, None)
    torch.testing.assert_close(padded[:1], whole[:1])
    assert not padded[1:].any()


def test_a_query_that_is_a_slice_of_the_fused_projection() -> None:
    query, kv_cache, metadata = make_batch(MIXED)
    fused = torch.cat((query, torch.full_like(query, float("nan"))), dim=1)
    expected = BACKEND.forward(query, kv_cache, metadata, 0.25, None)
    assert torch.equal(BACKEND.forward(fused[:, :4], kv_cache, metadata, 0.25, None), expected)
