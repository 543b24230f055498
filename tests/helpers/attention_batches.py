"""Ragged batches for attention backends, on any device, with poison in unused cache slots and table entries."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from fleetfoot.kernels.attention import AttentionBackend, AttentionInputs
from fleetfoot.kernels.attention.decode import DecodeTiling, paged_attention_decode
from fleetfoot.kernels.attention.rope_and_cache import rope_and_cache_torch
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.kernels.attention.split_kv import AttentionWorkspace
from fleetfoot.records.forward_context import AttentionMetadata, RotaryInputs

Requests = list[tuple[int, int]]
"""``(query_len, seq_len)`` of each request; decodes come first."""


def ragged(max_seq_len: int, max_size: int = 6, min_size: int = 1) -> st.SearchStrategy[Requests]:
    """Requests of any lengths; the decodes first, or anywhere."""
    pair = st.integers(1, max_seq_len).flatmap(lambda seq_len: st.tuples(st.integers(1, seq_len), st.just(seq_len)))
    requests = st.lists(pair, min_size=min_size, max_size=max_size)
    return requests | requests.map(lambda found: sorted(found, key=lambda request: request[0] != 1))


@dataclass
class Batch:
    query: torch.Tensor
    kv_cache: torch.Tensor
    metadata: AttentionMetadata
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    kv_scales: torch.Tensor | None = None

    @property
    def _more(self) -> Any:
        return self.soft_cap, self.sinks, self.kv_scales

    def inputs(self, window: int | None = None) -> AttentionInputs:
        """What attention kernels read."""
        scale = self.query.shape[2] ** -0.5
        return AttentionInputs.of(self.query, self.kv_cache, self.metadata, scale, window, *self._more)

    def attend(self, backend: AttentionBackend, window: int | None = None) -> torch.Tensor:
        """The result of a backend."""
        scale = self.query.shape[2] ** -0.5
        return backend.forward(self.query, self.kv_cache, self.metadata, scale, window, *self._more)

    def expected(self, window: int | None = None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The result of the reference in another dtype."""
        kv_cache = plain_kv(self.kv_cache, self.kv_scales).to(dtype)
        batch = replace(self, query=self.query.to(dtype), kv_cache=kv_cache, kv_scales=None)
        return batch.attend(SDPABackend(), window)


def plain_kv(kv_cache: torch.Tensor, kv_scales: torch.Tensor | None) -> torch.Tensor:
    """What a cache, which may be in FP8, stands for."""
    return kv_cache if kv_scales is None else kv_cache.float() * kv_scales.view(1, 2, 1, 1, 1)


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
    shuffled: bool = True,
    soft_cap: float | None = None,
    has_sinks: bool = False,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Batch:
    """``behind``: query tokens after the last request's; ``kv_dtype``: of a cache in FP8. A request of length 0 pads
    the batch."""
    generator = torch.Generator(device=device).manual_seed(seed)
    query_lens, seq_lens = [query_len for query_len, _ in requests], [seq_len for _, seq_len in requests]
    blocks_of = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(blocks_of) + 3
    order = torch.arange(num_blocks, device=device).int()
    if shuffled:
        order = torch.randperm(num_blocks, generator=generator, device=device).int()
    tables = torch.full((len(requests), max(blocks_of, default=0) + 2), 2**30, dtype=torch.int32, device=device)
    is_used = torch.zeros(num_blocks, block_size, dtype=torch.bool, device=device)
    taken = 0
    for row, (seq_len, count) in enumerate(zip(seq_lens, blocks_of, strict=True)):
        tables[row, :count] = order[taken : taken + count]
        taken += count
        position = torch.arange(seq_len, device=device)
        is_used[tables[row, position // block_size].long(), position % block_size] = True
    shape = (num_blocks, 2, num_kv_heads, block_size, head_dim)
    kv_cache = torch.randn(shape, generator=generator, device=device).to(dtype)
    kv_cache.masked_fill_(~is_used[:, None, None, :, None], float("nan"))
    if num_decodes is None:
        num_decodes = next((row for row, count in enumerate(query_lens) if count != 1), len(query_lens))
    num_tokens = sum(query_lens) + behind
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens], device=device).cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_tables=tables,
        slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        num_decodes=num_decodes,
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
    )
    query = torch.randn(num_tokens, num_heads, head_dim, generator=generator, device=device).to(dtype)
    sinks = 2 * torch.randn(num_heads, generator=generator, device=device) if has_sinks else None
    scales = None
    if kv_dtype is not None:
        scales = torch.tensor([0.7, 1.6], device=device)
        kv_cache = (kv_cache.float() / scales.view(1, 2, 1, 1, 1)).to(kv_dtype)
    return Batch(query, kv_cache, metadata, soft_cap, sinks, scales)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """``|actual - expected| / |expected|``; NaN where there is one."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm())


def check_batch(actual: torch.Tensor, batch: Batch, bounds: dict[torch.dtype, float], window: int | None) -> None:
    """``actual`` is the reference's result up to a relative error, and exactly 0 for tokens of no request."""
    expected = batch.expected(window)
    assert actual.shape == expected.shape
    assert actual.dtype == batch.query.dtype
    assert relative_error(actual, expected) < bounds[batch.query.dtype]
    assert not actual[expected.abs().sum((1, 2)) == 0].any()


@dataclass
class FusedBatch:
    """A batch of decodes with its queries and its newest K and V still in the output of a linear layer."""

    qkv: torch.Tensor
    kv_cache: torch.Tensor
    metadata: AttentionMetadata
    num_heads: int
    rotary: RotaryInputs
    soft_cap: float | None = None

    def inputs(self, window: int | None = None) -> AttentionInputs:
        """What the decode kernel reads; the query is ``[num_tokens, num_heads + 2 * num_kv_heads, head_dim]``."""
        head_dim = self.kv_cache.shape[4]
        heads = self.qkv.view(len(self.qkv), -1, head_dim)
        more = self.soft_cap, None, self.rotary.kv_scales
        return AttentionInputs.of(heads, self.kv_cache, self.metadata, head_dim**-0.5, window, *more)

    def decode(
        self, workspace: AttentionWorkspace, window: int | None, tiling: DecodeTiling | None, weight: torch.Tensor
    ) -> torch.Tensor:
        """By the decode kernel, which prefetches ``weight``."""
        out = self.qkv.new_full((len(self.qkv), self.num_heads, self.kv_cache.shape[4]), float("nan"))
        fused = {"rotary": self.rotary, "slot_mapping": self.metadata.slot_mapping, "prefetch_weight": weight}
        paged_attention_decode(self.inputs(window), workspace=workspace, out=out, tiling=tiling, **fused)
        return out

    def check(self, run: Any, bound: float, window: int | None = None) -> torch.Tensor:
        """``run()`` returns and caches what the references of the two operations do in float32."""
        rotary, metadata = self.rotary, self.metadata
        if rotary.kv_scales is not None:
            return self._check_fp8(run, bound, window)
        cache = self.kv_cache.float()
        norms = (None if norm is None else norm.float() for norm in (rotary.q_norm, rotary.k_norm))
        in_float32 = RotaryInputs(rotary.cos_sin, *norms, rotary.eps, rotary.norm_offset)
        query = rope_and_cache_torch(self.qkv.float(), cache, metadata, self.num_heads, in_float32)
        expected = Batch(query, cache, metadata, self.soft_cap).attend(SDPABackend(), window)
        actual, live, written = run(), metadata.slot_mapping >= 0, ~cache.isnan()
        assert relative_error(actual[live], expected[live]) < bound
        assert torch.equal(written, ~self.kv_cache.isnan())
        assert relative_error(self.kv_cache[written], cache[written]) < bound
        return actual

    def _check_fp8(self, run: Any, bound: float, window: int | None) -> torch.Tensor:
        """New tokens are quantized as the reference does, but for roundings near the middle."""
        scales, metadata, before = self.rotary.kv_scales, self.metadata, self.kv_cache.clone()
        actual, live = run(), metadata.slot_mapping >= 0
        query = rope_and_cache_torch(self.qkv, before, metadata, self.num_heads, self.rotary)
        batch = Batch(query, self.kv_cache, metadata, self.soft_cap, kv_scales=scales)
        assert relative_error(actual[live], batch.expected(window)[live]) < bound
        found, expected = self.kv_cache.float(), before.float()
        written = ~expected.isnan()
        assert torch.equal(written, ~found.isnan())
        step = 2 * torch.finfo(before.dtype).eps  # the interpreter loses the carry into the exponent
        torch.testing.assert_close(found[written], expected[written], rtol=step, atol=1e-3)
        return actual


def make_fused_batch(
    requests: Requests,
    *,
    num_heads: int = 4,
    has_norm: bool = True,
    norm_offset: float = 0.0,
    soft_cap: float | None = None,
    **shape: Any,
) -> FusedBatch:
    """`make_batch` without the newest tokens in the cache. A request of length 0 pads the batch."""
    num_decodes = len(requests) if requests[0][0] == 1 else 0
    batch = make_batch(requests, num_heads=num_heads, num_decodes=num_decodes, **shape)
    _, _, num_kv_heads, block_size, head_dim = batch.kv_cache.shape
    device = batch.query.device
    generator = torch.Generator(device=device).manual_seed(1)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(batch.query.dtype)

    positions, slots = [], []
    for (query_len, seq_len), table in zip(requests, batch.metadata.block_tables.tolist(), strict=True):
        for position in range(seq_len - query_len, seq_len):
            positions.append(max(position, 0))
            slots.append(table[position // block_size] * block_size + position % block_size if position >= 0 else -1)
    places = {"positions": torch.tensor(positions, device=device), "slot_mapping": torch.tensor(slots, device=device)}
    metadata = replace(batch.metadata, **places)
    written = metadata.slot_mapping[metadata.slot_mapping >= 0]
    batch.kv_cache[written // block_size, :, :, written % block_size] = torch.tensor(
        float("nan"), dtype=batch.kv_cache.dtype
    )
    angles = torch.rand(max(positions) + 1, head_dim // 2, generator=generator, device=device) * 6.3
    norms = (1 + normal(head_dim) / 4, 1 + normal(head_dim) / 4) if has_norm else (None, None)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    rotary = RotaryInputs(cos_sin, *norms, 1e-6, norm_offset, batch.kv_scales)
    qkv = normal(len(positions), (num_heads + 2 * num_kv_heads) * head_dim)
    return FusedBatch(qkv, batch.kv_cache, metadata, num_heads, rotary, soft_cap)
