"""The native kernels, every variant that this processor runs, against their torch references."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import MIXED, attend_64, make_batch
from tests.helpers.kernels import native_kernels, reference_kernels

from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.native_ops import NativeBackend, NativeLinear
from fleetfoot.kernels.sampling.sample import RandomRows
from fleetfoot.native import loading
from fleetfoot.native.loading import NativeUnavailableError, load_library, open_library, supported_variants

REASON = loading.native_problem()
pytestmark = [pytest.mark.skipif(bool(REASON), reason=REASON), pytest.mark.slow]

REFERENCE = reference_kernels()
DTYPES = (torch.float32, torch.bfloat16)
TILE = 256  # positions of one softmax of the kernel; tests cover its boundaries


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests set two threads explicitly: on a busy machine threads that wait for each other are slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=supported_variants(open_library()) if not REASON else ["none"])
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def ops(variant: str) -> Kernels:
    return native_kernels(variant)


def assert_equal_but_for_rounding(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Both compute in float32 and round once: they differ by the error of float32 sums, or by one step."""
    assert actual.dtype == expected.dtype
    step = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=max(step, 3e-6), atol=max(step / 64, 3e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 64), (1, 1), (1, 576), (3, 1024), (5, 67), (200, 100)])
def test_norms(ops: Kernels, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.rand(shape[1]).to(dtype)
    assert_equal_but_for_rounding(ops.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    normed_reference, total_reference = REFERENCE.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, total_reference)
    assert_equal_but_for_rounding(normed, normed_reference)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_threads(ops: Kernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(90, 400).to(dtype), torch.rand(400).to(dtype)
    logits, numbers = torch.randn(3, 50000).to(dtype), torch.arange(3)

    def run(num_threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(num_threads)
        drawn = ops.sample(logits, RandomRows(torch.ones(3), numbers, numbers))
        return [ops.rms_norm(x, weight, 1e-5), *ops.add_rms_norm(x, x, weight, 1e-5), ops.silu_and_mul(x), drawn]

    assert all(torch.equal(one, two) for one, two in zip(run(1), run(2), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_nan_is_nan(ops: Kernels, dtype: torch.dtype) -> None:
    x = torch.ones(2, 40, dtype=dtype)
    x[1, 39] = float("nan")
    normed = ops.rms_norm(x, torch.ones(40, dtype=dtype), 1e-5)
    assert bool(normed[0].isfinite().all())
    assert bool(normed[1].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (1, 3072), (3, 70), (64, 1000)])
def test_silu_and_mul(ops: Kernels, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(shape) * 20).to(dtype)
    assert_equal_but_for_rounding(ops.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_of_extremes(ops: Kernels, dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, -0.0, 0.0, 1e-30, 88.0, 1e30, float("inf"), float("nan")], dtype=dtype)
    gate_up = torch.cat((gate, torch.ones_like(gate))).unsqueeze(0).repeat(1, 1)
    actual, expected = ops.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("head_dim", [16, 40, 64, 128])
@pytest.mark.parametrize("num_tokens", [0, 1, 9, 120])
def test_rope_and_cache(ops: Kernels, dtype: torch.dtype, norm: bool, head_dim: int, num_tokens: int) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads, block_size = 6, 2, 4
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(num_tokens, width + 8).to(dtype)[:, :width]
    slots = torch.randperm(40 * block_size)[:num_tokens]
    slots[1::5] = -1
    positions = torch.randint(0, 500, (num_tokens,))
    angles = torch.rand(500, head_dim // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    weights = (torch.rand(head_dim).to(dtype), torch.rand(head_dim).to(dtype)) if norm else (None, None)
    cache = torch.randn(40, 2, num_kv_heads, block_size, head_dim).to(dtype)
    cache_reference = cache.clone()

    query = ops.rope_and_cache(qkv, cache, slots, positions, cos_sin, num_heads, *weights, 1e-6)
    contiguous = qkv.contiguous()
    expected = REFERENCE.rope_and_cache(
        contiguous, cache_reference, slots, positions, cos_sin, num_heads, *weights, 1e-6
    )

    assert_equal_but_for_rounding(query, expected)
    assert torch.equal(cache[:, 1], cache_reference[:, 1])
    assert_equal_but_for_rounding(cache[:, 0], cache_reference[:, 0])


def test_mismatched_tensors_are_rejected(ops: Kernels) -> None:
    with pytest.raises(ValueError, match=r"rms_norm.*x \[2, 8\] torch.float32, weight \[7\]"):
        ops.rms_norm(torch.ones(2, 8), torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match="add_rms_norm"):
        ops.add_rms_norm(torch.ones(2, 8), torch.ones(1, 8), torch.ones(8), 1e-5)
    cache = torch.zeros(2, 2, 1, 4, 16)
    arguments = (torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.zeros(9, 16), 1)
    with pytest.raises(ValueError, match=r"rope_and_cache.*qkv \[1, 47\]"):
        ops.rope_and_cache(torch.zeros(1, 47), cache, *arguments, None, None, 1e-6)
    for slot, position in ((8, 0), (0, 9), (0, -1)):
        places = (torch.tensor([slot]), torch.tensor([position]))
        with pytest.raises(ValueError, match="rope_and_cache: the step's metadata is invalid"):
            ops.rope_and_cache(torch.zeros(1, 48), cache, *places, *arguments[2:], None, None, 1e-6)


def test_float16_goes_to_the_references(ops: Kernels) -> None:
    x = torch.randn(3, 32).half()
    assert torch.equal(ops.rms_norm(x, x[0], 1e-5), REFERENCE.rms_norm(x, x[0], 1e-5))
    assert torch.equal(ops.silu_and_mul(x), REFERENCE.silu_and_mul(x))
    assert torch.equal(ops.sample(x), x.argmax(dim=-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 3, 64, 1000, 16384, 40007])
def test_argmax(ops: Kernels, dtype: torch.dtype, vocab_size: int) -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, vocab_size + 3).to(dtype)[:, :vocab_size]  # rows are not contiguous
    logits[1] = 0  # all equal: the lowest index
    logits[2] = -torch.inf
    logits[3, vocab_size // 2 :] = torch.inf
    logits[4, vocab_size - 1] = torch.nan
    logits[5, [vocab_size // 3, vocab_size - 1]] = 100.0
    assert ops.sample(logits).tolist() == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 37, 3000, 50001])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_gumbel_draws_equal_the_reference(ops: Kernels, dtype: torch.dtype, vocab_size: int, spread: float) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(24, vocab_size) * spread).to(dtype)
    temperatures = torch.tensor([0.0, 0.3, 1.0, 2.5]).repeat(6)
    seeds = torch.randint(-(2**63), 2**63 - 1, (24,))
    positions = torch.randint(0, 10**5, (24,))
    random = RandomRows(temperatures, seeds, positions)
    chosen = ops.sample(logits, random)
    assert chosen.tolist() == REFERENCE.sample(logits, random).tolist()
    assert chosen[::4].tolist() == logits[::4].argmax(dim=-1).tolist()


def test_a_draw_from_a_row_without_a_highest_logit(ops: Kernels) -> None:
    logits = torch.zeros(3, 100)
    logits[0, 7], logits[1, 8], logits[2] = torch.nan, torch.inf, -torch.inf
    numbers = torch.arange(3)
    assert ops.sample(logits, RandomRows(torch.ones(3), numbers, numbers)).tolist() == [7, 8, 0]


def test_draws_follow_the_softmax(ops: Kernels) -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    count = 4000
    numbers = torch.arange(count)
    logits = probabilities.log().repeat(count, 1) * 0.7
    drawn = ops.sample(logits, RandomRows(torch.full((count,), 0.7), numbers * 977, numbers))
    found = torch.bincount(drawn, minlength=4) / count
    torch.testing.assert_close(found, probabilities, rtol=0, atol=0.03)


# --- linear ---------------------------------------------------------------------------------------------------------


def make_linear(variant: str, weight: torch.Tensor, bias: torch.Tensor | None = None) -> NativeLinear:
    return NativeLinear(weight, bias, load_library(variant))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (33, 18), (64, 64), (50, 1026), (300, 700)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(variant: str, dtype: torch.dtype, shape: tuple[int, int], bias: bool) -> None:
    torch.manual_seed(0)
    weight, offset = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype) if bias else None
    linear = make_linear(variant, weight, offset)
    for num_rows in (0, 1, 2, 3, 4, 13, 40, 200):
        x = torch.randn(num_rows, shape[1]).to(dtype)
        expected = x.double() @ weight.double().T + (offset.double() if offset is not None else 0.0)
        actual = linear(x)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, rtol=torch.finfo(dtype).eps, atol=5e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(96, 1200), (70, 64)])
def test_a_row_has_the_same_bits_in_every_batch(variant: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    linear, x = make_linear(variant, torch.randn(shape).to(dtype)), torch.randn(400, shape[1]).to(dtype)
    whole = linear(x)
    torch.set_num_threads(2)
    for num_rows in (*range(1, 32), 61, 128, 169, 399, 400):
        assert torch.equal(linear(x[:num_rows]), whole[:num_rows])
        assert torch.equal(linear(x[-num_rows:]), whole[-num_rows:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (5, 6), (33, 18), (100, 130)])
def test_linear_gives_the_weight_back(variant: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, other = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    linear = make_linear(variant, weight)
    assert torch.equal(linear.weight(), weight)
    linear.replace(other.T.contiguous().T)  # any strides
    assert torch.equal(linear.weight(), other)
    with pytest.raises(ValueError, match="cannot replace"):
        linear.replace(torch.zeros(shape[0] + 1, shape[1], dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_strided_rows(variant: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear, x = make_linear(variant, torch.randn(40, 32).to(dtype)), torch.randn(9, 67).to(dtype)
    for view in (x[:, :32], x[:, 1:33], x[:, 2:34], x[::2, :32], x.T[:32].T, torch.randn(32, 9).to(dtype).T):
        assert torch.equal(linear(view), linear(view.clone(memory_format=torch.contiguous_format)))


def test_linear_rejects_mismatched_tensors(variant: str) -> None:
    linear = make_linear(variant, torch.zeros(8, 4))
    with pytest.raises(ValueError, match=r"x \[2, 5\] torch.float32 does not match a weight \[8, 4\]"):
        linear(torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"torch\.bfloat16 does not match"):
        linear(torch.zeros(2, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"bias \[4\]"):
        make_linear(variant, torch.zeros(8, 4), torch.zeros(4))


def test_prepare_linear_selects_an_implementation(ops: Kernels) -> None:
    assert isinstance(ops.prepare_linear(torch.zeros(8, 4)), NativeLinear)
    odd, half = torch.randn(8, 5).bfloat16(), torch.randn(8, 4).half()
    for weight in (odd, half):  # and a bias that is a column of something
        linear = ops.prepare_linear(weight, weight[:, 0])
        assert not isinstance(linear, NativeLinear)
        torch.testing.assert_close(linear(weight), weight @ weight.T + weight[:, 0], rtol=2e-2, atol=2e-2)


# --- attention -----------------------------------------------------------------------------------------------------


def check(variant: str, requests: list[tuple[int, int]], window: int | None = None, **shape) -> None:
    query, kv_cache, metadata = make_batch(requests, **shape)
    scale = 1 / math.sqrt(query.shape[2])
    actual = NativeBackend(variant).forward(query, kv_cache, metadata, scale, window)
    assert actual.dtype == query.dtype
    if query.shape[0] * query.shape[1] < 300:
        expected = attend_64(query, kv_cache, metadata, scale, window)
    else:
        expected = SDPABackend().forward(query.double(), kv_cache.double(), metadata, scale, window)
    bound = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[query.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 3, 4, 100])
def test_mixed_batch(variant: str, dtype: torch.dtype, window: int | None) -> None:
    check(variant, MIXED, window, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 2), (5, 1), (6, 1), (7, 1), (8, 1), (13, 1)])
@pytest.mark.parametrize("head_dim", [16, 48, 64, 80, 256])
def test_head_shapes(variant: str, dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> None:
    check(variant, MIXED, num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 17, TILE])
@pytest.mark.parametrize("block_size", [1, 16, 24, 600])
def test_borders_of_blocks_and_tiles(variant: str, dtype: torch.dtype, window: int | None, block_size: int) -> None:
    lengths = [(1, length) for length in (1, 15, 16, 17, TILE - 1, TILE, TILE + 1, 2 * TILE)]
    chunks = [(16, 16), (17, TILE + 1), (2, TILE + 1), (40, 2 * TILE + 20)]
    check(variant, [*lengths, *chunks], window, block_size=block_size, dtype=dtype, num_heads=6)


@given(
    seed=st.integers(0, 2**32 - 1),
    requests=st.lists(
        st.integers(1, 700).flatmap(
            lambda length: st.tuples(st.sampled_from([1, min(length, 3), (length + 1) // 2, length]), st.just(length))
        ),
        max_size=5,
    ).map(lambda found: sorted(found, key=lambda request: request[0] != 1)),
)
@settings(max_examples=25, deadline=None)
def test_ragged_batches(seed: int, requests: list[tuple[int, int]]) -> None:
    pick = random.Random(seed)
    num_kv_heads = pick.choice([1, 2, 3])
    check(
        pick.choice(supported_variants(open_library())),
        requests,
        pick.choice([None, None, pick.randint(1, 700)]),
        num_heads=num_kv_heads * pick.randint(1, 5),
        num_kv_heads=num_kv_heads,
        head_dim=pick.choice([16, 32, 64]),
        block_size=pick.choice([1, 7, 16, 64]),
        dtype=pick.choice(DTYPES),
        seed=seed,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 300])
def test_bits_depend_on_nothing_but_the_token(variant: str, dtype: torch.dtype, window: int | None) -> None:
    """Whole, in chunks and token by token, on one thread and on two, alone and among others: the same bits."""
    length, shape = 2 * TILE + 90, {"num_heads": 6, "head_dim": 32, "dtype": dtype}
    query, kv_cache, metadata = make_batch([(length, length)], **shape)
    backend = NativeBackend(variant)

    def attend(rows: list[tuple[int, int]], num_threads: int) -> torch.Tensor:
        """The tokens begin .. end of the prompt, for each pair as a request of its own over the same blocks."""
        metadata.query_start_loc = torch.tensor([0, *(end - begin for begin, end in rows)]).cumsum(0).int()
        metadata.seq_lens = torch.tensor([end for _, end in rows], dtype=torch.int32)
        metadata.block_tables = table.expand(len(rows), -1).contiguous()
        torch.set_num_threads(num_threads)
        return backend.forward(torch.cat([query[begin:end] for begin, end in rows]), kv_cache, metadata, 0.2, window)

    table = metadata.block_tables
    whole = attend([(0, length)], 1)
    assert torch.equal(attend([(0, length)], 2), whole)
    cuts = [0, 1, 60, 61, TILE - 1, TILE, TILE + 130, length]
    assert torch.equal(attend(list(pairwise(cuts)), 2), whole)
    assert torch.equal(attend([(i, i + 1) for i in range(length)], 2), whole)
    assert torch.equal(attend([(length - 1, length)], 2), whole[-1:])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_long_decode_is_shared_by_the_threads(variant: str, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    check(variant, [(1, 9000), (3, 5000)], num_heads=3, num_kv_heads=1, head_dim=64, block_size=16)


def test_empty_batch_and_padding(variant: str) -> None:
    backend = NativeBackend(variant)
    query, kv_cache, metadata = make_batch([])
    assert backend.forward(query, kv_cache, metadata, 1.0, None).shape == (0, 4, 16)
    query, kv_cache, metadata = make_batch([(1, 5), (1, 1)])
    whole = backend.forward(query, kv_cache, metadata, 0.25, None)
    metadata.seq_lens[1] = 0
    padded = backend.forward(torch.cat((query, query)), kv_cache, metadata, 0.25, None)
    assert torch.equal(padded[:1], whole[:1])
    assert not padded[1:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_that_is_a_slice_of_the_fused_projection(variant: str, dtype: torch.dtype) -> None:
    query, kv_cache, metadata = make_batch(MIXED, dtype=dtype)
    fused = torch.cat((query, torch.full_like(query, float("nan"))), dim=1)
    backend = NativeBackend(variant)
    expected = backend.forward(query, kv_cache, metadata, 0.25, None)
    assert torch.equal(backend.forward(fused[:, :4], kv_cache, metadata, 0.25, None), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_with_its_request(variant: str, dtype: torch.dtype) -> None:
    query, kv_cache, metadata = make_batch([(1, 9), (1, 30), (5, 5)], dtype=dtype)
    kv_cache[metadata.block_tables[1, 2], 0] = float("nan")
    output = NativeBackend(variant).forward(query, kv_cache, metadata, 0.25, None)
    assert bool(output[1].isnan().all())
    assert bool(output[[0, 2, 3, 4, 5, 6]].isfinite().all())


def test_metadata_that_points_outside_is_refused(variant: str) -> None:
    backend = NativeBackend(variant)
    for name, row, value in (("block_tables", (0, 0), 99), ("seq_lens", 0, 1000), ("query_start_loc", 2, 9)):
        query, kv_cache, metadata = make_batch([(1, 5), (3, 7)])
        getattr(metadata, name)[row] = value
        with pytest.raises(ValueError, match="paged_attention: the step's metadata is invalid"):
            backend.forward(query, kv_cache, metadata, 0.25, None)


def test_shapes_that_do_not_fit_together_are_refused(variant: str) -> None:
    query, kv_cache, metadata = make_batch([(1, 5)])
    with pytest.raises(ValueError, match=r"query \[1, 4, 16\] torch.float32 .* does not match the KV cache"):
        NativeBackend(variant).forward(query, kv_cache.bfloat16(), metadata, 0.25, None)


def test_unserved_shapes_go_to_sdpa(variant: str) -> None:
    for shape in ({"head_dim": 8}, {"head_dim": 272}, {"dtype": torch.float16}):
        query, kv_cache, metadata = make_batch([(1, 5), (3, 7)], **shape)
        expected = SDPABackend().forward(query, kv_cache, metadata, 0.25, None)
        assert torch.equal(NativeBackend(variant).forward(query, kv_cache, metadata, 0.25, None), expected)


# --- the library ---------------------------------------------------------------------------------------------------


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(NativeUnavailableError, match="no kernels of variant v9"):
        load_library("v9")


def test_one_openmp_runtime() -> None:
    """The kernels run on the threads of torch's own runtime; a second one would keep its own threads spinning."""
    with open("/proc/self/maps") as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line or "libomp" in line}
    assert len(runtimes) == 1


PROBE = """
import sys
from pathlib import Path
from fleetfoot.native import loading
loading.PATH = Path(sys.argv[1])
print(loading.native_problem())
assert "torch" not in sys.modules
"""


def probe(path: Path) -> str:
    """The problem with a library, found by a process without torch."""
    command = [sys.executable, "-c", PROBE, str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()


def test_problems_are_found_without_torch(tmp_path: Path) -> None:
    assert probe(loading.PATH) == loading.native_problem() == ""
    assert "libfleetfoot.so was not built" in probe(tmp_path / "libfleetfoot.so")
    (tmp_path / "broken.so").write_bytes(b"not a library")
    assert f"{tmp_path / 'broken.so'} does not load: " in probe(tmp_path / "broken.so")


def test_a_library_of_another_version_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loading._SIGNATURES, "newer_kernel", "")
    assert "is of another version: it has no newer_kernel; install Fleetfoot again" in loading.native_problem()
