"""Attention on a CPU, in torch and in C, against a float64 loop over single tokens; what the C kernel promises."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.attention_batches import Batch, Requests, make_batch, ragged
from tests.helpers.kernels import CPU_VARIANTS, NATIVE_VARIANTS

from fleetfoot.kernels.attention import AttentionBackend, sdpa_backend
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.kernels.native_ops import NativeBackend

DTYPES = (torch.float32, torch.bfloat16)
MIXED = [(1, 1), (1, 9), (1, 4), (3, 3), (5, 13), (8, 8), (1, 6), (4, 8)]
TILE = 256  # positions of one softmax of the C kernel; tests cover its boundaries


def backend_of(variant: str) -> AttentionBackend:
    return SDPABackend() if variant == "torch" else NativeBackend(variant)


@pytest.fixture(params=CPU_VARIANTS)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return backend_of(request.param)


@pytest.fixture(params=NATIVE_VARIANTS)
def native(request: pytest.FixtureRequest) -> AttentionBackend:
    return backend_of(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """After each test: some set two threads."""
    yield
    torch.set_num_threads(1)


def small_batch(requests: Requests, **shape: Any) -> Batch:
    return make_batch(requests, **{"block_size": 4} | shape)


def attend_64(batch: Batch, window: int | None) -> torch.Tensor:
    """One token and one head at a time, by definition."""
    query, kv_cache, metadata = batch.query.double(), batch.kv_cache.double(), batch.metadata
    num_heads, num_kv_heads, block_size = query.shape[1], kv_cache.shape[2], kv_cache.shape[3]
    output = torch.zeros_like(query)
    starts = metadata.query_start_loc.tolist()
    for row, seq_len in enumerate(metadata.seq_lens.tolist()):
        blocks = metadata.block_tables[row, : -(-seq_len // block_size)].long()
        kv = kv_cache[blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :seq_len]  # [2, heads, seq_len, dim]
        for token in range(starts[row], starts[row + 1]):
            position = seq_len - (starts[row + 1] - token)
            first = 0 if window is None else max(0, position + 1 - window)
            for head in range(num_heads):
                keys, values = kv[:, head * num_kv_heads // num_heads, first : position + 1]
                scores = keys @ query[token, head] * query.shape[2] ** -0.5
                if batch.soft_cap is not None:
                    scores = batch.soft_cap * (scores / batch.soft_cap).tanh()
                if batch.sinks is not None:
                    scores = torch.cat((scores, batch.sinks[head : head + 1].double()))
                output[token, head] = scores.softmax(0)[: len(values)] @ values
    return output


def check(backend: AttentionBackend, requests: Requests, window: int | None = None, **shape: Any) -> None:
    batch = small_batch(requests, **shape)
    actual = batch.attend(backend, window)
    assert actual.shape == batch.query.shape
    assert actual.dtype == batch.query.dtype
    # The reference itself, which is compared with the loop, for batches that are too large for the loop.
    is_small = backend.name == "sdpa" or batch.query[:, :, 0].numel() < 300
    expected = attend_64(batch, window) if is_small else batch.expected(window, torch.float64)
    bound = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2 if backend.name == "sdpa" else 2e-2}
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound[actual.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kv_in_fp8(native: AttentionBackend, dtype: torch.dtype) -> None:
    """What the bytes stand for, rounded to the dtype of queries."""
    requests = [(1, 300), (1, 0), (1, 17), (30, 290), (5, 5)]
    for kv_dtype, window in ((torch.float8_e4m3fn, None), (torch.float8_e5m2, 40)):
        batch = small_batch(requests, head_dim=32, kv_dtype=kv_dtype, dtype=dtype)
        actual, expected = batch.attend(native, window), batch.expected(window, torch.float64)
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol={4: 1e-5, 2: 3e-2}[dtype.itemsize])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 100])
def test_mixed_batch(backend: AttentionBackend, dtype: torch.dtype, window: int | None) -> None:
    check(backend, MIXED, window, dtype=dtype)


HEADS = [(1, 1), (2, 2), (4, 2), (9, 3), *((group, 1) for group in (3, 5, 6, 7, 8, 13))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 40, 48, 64, 80, 256])
def test_head_shapes(backend: AttentionBackend, dtype: torch.dtype, head_dim: int) -> None:
    for num_heads, num_kv_heads in HEADS if head_dim == 64 else HEADS[head_dim // 8 % 3 :: 3]:
        check(backend, MIXED, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5])
def test_sinks(backend: AttentionBackend, dtype: torch.dtype, window: int | None) -> None:
    check(backend, [*MIXED, (1, TILE + 20)], window, has_sinks=True, dtype=dtype)
    check(backend, [(1, 9), (1, 40)], window, has_sinks=True, dtype=dtype, head_dim=20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("soft_cap", [0.4, 50.0])
@pytest.mark.parametrize("window", [None, 5])
def test_soft_caps(backend: AttentionBackend, dtype: torch.dtype, soft_cap: float, window: int | None) -> None:
    check(backend, [*MIXED, (1, TILE + 20)], window, soft_cap=soft_cap, dtype=dtype)
    check(backend, [(1, 9), (1, 40)], window, soft_cap=soft_cap, dtype=dtype, head_dim=20)


@pytest.mark.parametrize("block_size", [1, 3, 16, 32])
@pytest.mark.parametrize("shuffled", [False, True])
def test_block_sizes(backend: AttentionBackend, block_size: int, shuffled: bool) -> None:
    requests = [(1, 16), (1, 17), (1, 15), (16, 32), (33, 33)]
    check(backend, requests, block_size=block_size, shuffled=shuffled)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 17, TILE])
@pytest.mark.parametrize("block_size", [1, 16, 24, 600])
def test_tile_borders(native: AttentionBackend, dtype: torch.dtype, window: int | None, block_size: int) -> None:
    lengths = [(1, length) for length in (1, 15, 16, 17, TILE - 1, TILE, TILE + 1, 2 * TILE)]
    chunks = [(16, 16), (17, TILE + 1), (2, TILE + 1), (40, 2 * TILE + 20)]
    check(native, [*lengths, *chunks], window, block_size=block_size, dtype=dtype, num_heads=6)


@given(requests=ragged(24), window=st.none() | st.integers(1, 30), block_size=st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_ragged_batches(requests: Requests, window: int | None, block_size: int) -> None:
    check(SDPABackend(), requests, window, block_size=block_size, head_dim=8)


@pytest.mark.slow
@pytest.mark.parametrize("variant", NATIVE_VARIANTS)
@given(
    requests=ragged(700, max_size=5, min_size=0),
    window=st.none() | st.integers(1, 700),
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_dim=st.sampled_from([16, 32, 64]),
    block_size=st.sampled_from([1, 7, 16, 64]),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=8, deadline=None)
def test_ragged_batches_in_c(
    variant: str, requests: Requests, window: int | None, num_kv_heads: int, group: int, **shape: Any
) -> None:
    heads = {"num_heads": num_kv_heads * group, "num_kv_heads": num_kv_heads}
    check(NativeBackend(variant), requests, window, **heads, **shape)


@pytest.mark.parametrize("window", [None, 5])
def test_small_memory_bounds_change_nothing(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(sdpa_backend, "MAX_GATHERED_ELEMENTS", 600)
    monkeypatch.setattr(sdpa_backend, "MAX_MASK_ELEMENTS", 1)
    check(SDPABackend(), [(1, 9), (1, 7), (1, 30), (1, 2), (70, 90)], window)


def test_empty_batch(backend: AttentionBackend) -> None:
    assert small_batch([]).attend(backend).shape == (0, 4, 16)


def test_padding_requests_and_tokens_are_zero_and_isolated(backend: AttentionBackend) -> None:
    batch = small_batch([(1, 5), (1, 1)])
    whole = batch.attend(backend)
    batch.metadata.seq_lens[1] = 0
    batch.query = torch.cat((batch.query, batch.query))
    padded = batch.attend(backend)
    assert torch.equal(padded[:1], whole[:1])
    assert not padded[1:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_is_a_slice_of_the_fused_projection(backend: AttentionBackend, dtype: torch.dtype) -> None:
    batch = small_batch(MIXED, dtype=dtype)
    expected = batch.attend(backend)
    batch.query = torch.cat((batch.query, torch.full_like(batch.query, float("nan"))), dim=1)[:, :4]
    assert torch.equal(batch.attend(backend), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 300])
def test_bits_depend_on_nothing_but_the_token(native: AttentionBackend, dtype: torch.dtype, window: int | None) -> None:
    """Whole, in chunks and token by token, on one thread and on two, alone and among others: the same bits."""
    length = 2 * TILE + 90
    batch = small_batch([(length, length)], num_heads=6, head_dim=32, dtype=dtype)
    metadata, table = batch.metadata, batch.metadata.block_tables

    def attend(rows: Requests, num_threads: int) -> torch.Tensor:
        """The tokens begin .. end of the prompt, for each pair as a request of its own over the same blocks."""
        metadata.query_start_loc = torch.tensor([0, *(end - begin for begin, end in rows)]).cumsum(0).int()
        metadata.seq_lens = torch.tensor([end for _, end in rows], dtype=torch.int32)
        metadata.block_tables = table.expand(len(rows), -1).contiguous()
        torch.set_num_threads(num_threads)
        query = torch.cat([batch.query[begin:end] for begin, end in rows])
        return Batch(query, batch.kv_cache, metadata).attend(native, window)

    whole = attend([(0, length)], 1)
    cuts = [0, 1, 60, 61, TILE - 1, TILE, TILE + 130, length]
    for rows in ([(0, length)], list(pairwise(cuts)), [(i, i + 1) for i in range(length)]):
        assert torch.equal(attend(rows, 2), whole)
    assert torch.equal(attend([(length - 1, length)], 2), whole[-1:])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_long_decode_is_shared_by_the_threads(native: AttentionBackend, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    check(native, [(1, 9000), (3, 5000)], num_heads=3, num_kv_heads=1, head_dim=64, block_size=16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_with_its_request(native: AttentionBackend, dtype: torch.dtype) -> None:
    batch = small_batch([(1, 9), (1, 30), (5, 5)], dtype=dtype)
    batch.kv_cache[batch.metadata.block_tables[1, 2], 0] = float("nan")
    output = batch.attend(native)
    assert bool(output[1].isnan().all())
    assert bool(output[[0, 2, 3, 4, 5, 6]].isfinite().all())


@pytest.mark.parametrize(
    ("name", "row", "value"), [("block_tables", (0, 0), 99), ("seq_lens", 0, 1000), ("query_start_loc", 2, 9)]
)
def test_metadata_that_points_outside_is_refused(native: AttentionBackend, name: str, row: Any, value: int) -> None:
    batch = small_batch([(1, 5), (3, 7)])
    getattr(batch.metadata, name)[row] = value
    with pytest.raises(ValueError, match="paged_attention: the step's metadata is invalid"):
        batch.attend(native)


def test_shapes_that_do_not_fit_together_are_refused(native: AttentionBackend) -> None:
    batch = small_batch([(1, 5)])
    batch.kv_cache = batch.kv_cache.bfloat16()
    with pytest.raises(ValueError, match=r"query \[1, 4, 16\] torch.float32 .* does not match the KV cache"):
        batch.attend(native)


@pytest.mark.parametrize("shape", [{"head_dim": 8}, {"head_dim": 272}, {"dtype": torch.float16}])
def test_unsupported_shapes_go_to_sdpa(native: AttentionBackend, shape: dict[str, Any]) -> None:
    batch = small_batch([(1, 5), (3, 7)], **shape)
    assert torch.equal(batch.attend(native), batch.attend(SDPABackend()))
