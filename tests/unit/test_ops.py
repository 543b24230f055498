"""The operations on a CPU, in torch and in C, against float64; what the C kernels promise, and their library."""

import ctypes
import gc
import os
import shutil
import subprocess
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.helpers import ops_checks as checks
from tests.helpers.interpreter import run_python
from tests.helpers.kernels import CPU_VARIANTS, NATIVE_VARIANTS, native_kernels
from tests.helpers.ops_checks import REFERENCE

from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.linear.linear import PackedLinear, PlainLinear, can_pack, prepare_linear_torch
from fleetfoot.kernels.native_ops import NativeLinear
from fleetfoot.kernels.sampling.sample import RandomRows
from fleetfoot.native import loading
from fleetfoot.native.loading import NativeUnavailableError, load_library
from fleetfoot.records.forward_context import RotaryInputs

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NATIVE_DTYPES = DTYPES[:2]
needs_library = pytest.mark.skipif(bool(loading.native_problem()), reason="needs the C library")


@pytest.fixture(params=CPU_VARIANTS)
def ops(request: pytest.FixtureRequest) -> Kernels:
    return REFERENCE if request.param == "torch" else native_kernels(request.param)


@pytest.fixture(params=NATIVE_VARIANTS)
def native(request: pytest.FixtureRequest) -> Kernels:
    return native_kernels(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tests set two threads explicitly: on a busy machine threads that wait for each other are slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


SIZES = [(0, 64), (1, 1), (1, 576), (3, 1024), (5, 67), (7, 50), (200, 100)]
CASES = [
    *checks.cases(checks.rms_norm, DTYPES, SIZES),
    *checks.cases(checks.norms_around_a_sum, DTYPES, SIZES),
    *checks.cases(checks.activations, DTYPES, [(0, 4), (1, 1), (3, 96), (3, 35), (64, 500), (1, 1536)]),
]
NATIVE_CASES = [
    *checks.cases(checks.rope_and_cache, NATIVE_DTYPES, [0, 1, 9, 120], [16, 40, 64, 128], [None, 0.0, 1.0]),
    *checks.cases(checks.random_samples, NATIVE_DTYPES, [24], [1, 37, 3000, 50001], [0.5, 4.0]),
]


@pytest.mark.parametrize("check", CASES)
def test_operations(ops: Kernels, check: Callable[[Kernels], None]) -> None:
    check(ops)


@pytest.mark.parametrize("check", NATIVE_CASES)
def test_operations_in_c(native: Kernels, check: Callable[[Kernels], None]) -> None:
    check(native)


def test_the_reference_adds_up_partial_sums() -> None:
    parts, residual, weight = torch.randn(3, 2, 8), torch.randn(2, 8).bfloat16(), torch.rand(8).bfloat16()
    actual = REFERENCE.add_rms_norm(parts, residual, weight, 1e-5)
    expected = REFERENCE.add_rms_norm(parts.sum(0).bfloat16(), residual, weight, 1e-5)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_norm_of_nan_is_nan(ops: Kernels, dtype: torch.dtype) -> None:
    x = torch.ones(2, 40, dtype=dtype)
    x[1, 39] = float("nan")
    normed = ops.rms_norm(x, torch.ones(40, dtype=dtype), 1e-5)
    assert bool(normed[0].isfinite().all())
    assert bool(normed[1].isnan().all())


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_silu_of_extremes(native: Kernels, dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e30, -200.0, -88.0, -0.0, 0.0, 1e-30, 88.0, 1e30, float("inf"), float("nan")], dtype=dtype)
    gate_up = torch.cat((gate, torch.ones_like(gate))).unsqueeze(0)
    actual, expected = native.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reference_of_rope_and_cache(dtype: torch.dtype, norm: bool) -> None:
    """Against complex numbers in float64, and a loop over tokens."""
    num_tokens, num_heads, num_kv_heads, head_dim, block_size = 6, 4, 2, 16, 4
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    cache = torch.full((5, 2, num_kv_heads, block_size, head_dim), 7.0, dtype=dtype)
    slots, positions = torch.tensor([0, 19, -1, 5, 6, 7]), torch.tensor([0, 3, 4, 100, 101, 102])
    angles = torch.outer(torch.arange(128.0), 10.0 ** -torch.arange(0.0, head_dim // 2))
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    norms = [torch.rand(head_dim).to(dtype) if norm else None for _ in range(2)]
    query, key, value = heads.double().split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    rotation = torch.complex(*cos_sin[positions].double().chunk(2, dim=1))[:, None]
    rotated = []
    for x, weight in zip((query, key), norms, strict=True):
        pairs = torch.complex(*(x if weight is None else checks.rms_norm_64(x, weight)).chunk(2, dim=2)) * rotation
        rotated.append(torch.cat((pairs.real, pairs.imag), dim=2))
    expected_cache = cache.double()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected_cache[slot // block_size, 0, :, slot % block_size] = rotated[1][token]
            expected_cache[slot // block_size, 1, :, slot % block_size] = value[token]

    rotary, places = RotaryInputs(cos_sin, *norms, checks.EPS), checks.at_slots(slots, positions)
    actual = REFERENCE.rope_and_cache(heads.flatten(1), cache, places, num_heads, rotary)
    checks.assert_near(actual, rotated[0])
    checks.assert_near(cache, expected_cache)
    assert torch.equal(cache[:, 1].double(), expected_cache[:, 1])


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_results_do_not_depend_on_threads(native: Kernels, dtype: torch.dtype) -> None:
    x, weight = torch.randn(90, 400).to(dtype), torch.rand(400).to(dtype)
    logits, numbers = torch.randn(3, 50000).to(dtype), torch.arange(3)

    def run(num_threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(num_threads)
        drawn = native.sample(logits, RandomRows(torch.ones(3), numbers, numbers))
        normed = (native.rms_norm(x, weight, 1e-5), *native.add_rms_norm(x, x, weight, 1e-5))
        return [*normed, native.silu_and_mul(x), drawn]

    assert all(torch.equal(one, two) for one, two in zip(run(1), run(2), strict=True))


def test_mismatched_tensors_are_rejected(native: Kernels) -> None:
    with pytest.raises(ValueError, match=r"rms_norm.*x \[2, 8\] torch.float32, weight \[7\]"):
        native.rms_norm(torch.ones(2, 8), torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match="add_rms_norm"):
        native.add_rms_norm(torch.ones(2, 8), torch.ones(1, 8), torch.ones(8), 1e-5)
    cache = torch.zeros(2, 2, 1, 4, 16)
    rotary, index = RotaryInputs(torch.zeros(9, 16), None, None, 1e-6), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"rope_and_cache.*qkv \[1, 47\]"):
        native.rope_and_cache(torch.zeros(1, 47), cache, checks.at_slots(index, index), 1, rotary)
    for slot, position in ((8, 0), (0, 9), (0, -1)):
        places = checks.at_slots(torch.tensor([slot]), torch.tensor([position]))
        with pytest.raises(ValueError, match="rope_and_cache: the step's metadata is invalid"):
            native.rope_and_cache(torch.zeros(1, 48), cache, places, 1, rotary)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [1, 3, 64, 1000, 16384, 40007])
def test_argmax(native: Kernels, dtype: torch.dtype, vocab_size: int) -> None:
    logits = torch.randn(7, vocab_size + 3).to(dtype)[:, :vocab_size]  # rows are not contiguous
    logits[1] = 0  # all equal: the lowest index
    logits[2] = -torch.inf
    logits[3, vocab_size // 2 :] = torch.inf
    logits[4, vocab_size - 1] = torch.nan
    logits[5, [vocab_size // 3, vocab_size - 1]] = 100.0
    assert native.sample(logits).tolist() == logits.argmax(dim=-1).tolist()


def test_draws_from_rows_without_a_maximum(native: Kernels) -> None:
    checks.samples(native, checks.logits_without_a_maximum(3000, torch.float32))


def test_draws_follow_the_softmax(native: Kernels) -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    count = 4000
    numbers = torch.arange(count)
    logits = probabilities.log().repeat(count, 1) * 0.7
    drawn = native.sample(logits, RandomRows(torch.full((count,), 0.7), numbers * 977, numbers))
    found = torch.bincount(drawn, minlength=4) / count
    torch.testing.assert_close(found, probabilities, rtol=0, atol=0.03)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (8, 5), (33, 18), (50, 72), (64, 64), (50, 1026), (300, 700)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(ops: Kernels, dtype: torch.dtype, shape: tuple[int, int], bias: bool) -> None:
    weight = torch.randn(shape).to(dtype)
    offset = torch.randn(shape[0], 2).to(dtype)[:, 1] if bias else None  # not contiguous
    linear = ops.prepare_linear(weight, offset)
    for num_rows in (0, 1, 2, 3, 4, 13, 40, 200):
        x = torch.randn(num_rows, shape[1]).to(dtype)
        expected = x.double() @ weight.double().T + (offset.double() if offset is not None else 0.0)
        actual = linear(x)
        assert actual.dtype == dtype
        assert actual.shape == expected.shape
        is_native = isinstance(linear, NativeLinear)
        bounds = {"rtol": torch.finfo(dtype).eps * (1 if is_native else 2), "atol": 5e-4 if is_native else 1e-2}
        torch.testing.assert_close(actual.double(), expected, **bounds)
        unrounded = linear.unrounded(x)
        if isinstance(linear, PlainLinear):
            assert torch.equal(unrounded, actual)
            continue
        assert unrounded.dtype is torch.float32
        best = unrounded.argmax(dim=1, keepdim=True)  # rounded to bfloat16, many of these rows are tied
        torch.testing.assert_close(expected.gather(1, best), expected.amax(1, keepdim=True), rtol=1e-5, atol=5e-4)
        if is_native:
            assert torch.equal(unrounded.to(dtype), actual)
            torch.testing.assert_close(unrounded.double(), expected, rtol=1e-5, atol=5e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (5, 6), (33, 17), (33, 18), (64, 64), (100, 130), (576, 1536)])
def test_linear_gives_the_weight_back(ops: Kernels, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, other = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    linear = ops.prepare_linear(weight)
    assert torch.equal(linear.weight(), weight)
    index = torch.randint(shape[0], (40,))
    assert torch.equal(linear.rows(index), weight[index])
    for wrong in (-1, shape[0]):
        with pytest.raises(IndexError, match="out of range"):
            linear.rows(torch.tensor([0, wrong]))
    linear.replace(other.T.contiguous().T)  # any strides
    assert torch.equal(linear.weight(), other)
    x = torch.randn(2, shape[1]).to(dtype)
    assert torch.equal(linear(x), ops.prepare_linear(other)(x))


@pytest.mark.parametrize("wrong", [torch.zeros(8, 4), torch.zeros(4, 8, dtype=torch.float64)])
@pytest.mark.parametrize("kind", [PlainLinear, PackedLinear, NativeLinear])
def test_replace_refuses_another_shape_or_dtype(kind: type, wrong: torch.Tensor) -> None:
    if (kind is PackedLinear and not can_pack(torch.float32)) or (kind is NativeLinear and loading.native_problem()):
        pytest.skip("the library is not there")
    library = (load_library(),) if kind is NativeLinear else ()
    with pytest.raises(ValueError, match=r"cannot replace \[4, 8\] torch.float32"):
        kind(torch.zeros(4, 8), None, *library).replace(wrong)


def test_packing_releases_the_plain_weight() -> None:
    if not can_pack(torch.float32):
        pytest.skip("oneDNN is not there")
    weight = torch.randn(64, 64)
    alive = weakref.ref(weight)
    linear = prepare_linear_torch(weight)
    del weight
    gc.collect()
    assert isinstance(linear, PackedLinear)
    assert alive() is None


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("shape", [(96, 1200), (70, 64)])
def test_a_row_has_the_same_bits_in_every_batch(native: Kernels, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    linear, x = native.prepare_linear(torch.randn(shape).to(dtype)), torch.randn(400, shape[1]).to(dtype)
    whole = linear(x)
    torch.set_num_threads(2)
    for num_rows in (*range(1, 32), 61, 128, 169, 399, 400):
        assert torch.equal(linear(x[:num_rows]), whole[:num_rows])
        assert torch.equal(linear(x[-num_rows:]), whole[-num_rows:])


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> loading.NativeLibrary:
    """The linear layers on tiles, which few processors have, with the tiles in plain C."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or loading.native_problem():
        pytest.skip("needs a C compiler and the C library")
    path = tmp_path_factory.mktemp("tiles") / "emulated.so"
    sources = [loading.PATH.with_name(name) for name in ("linear.c", "threads.c")]
    flags = ["-O1", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-shared", "-fPIC", "-std=gnu11"]
    subprocess.run([compiler, *flags, "-DFF_EMULATE_TILES", "-DFF_VARIANT=emulated", "-o", path, *sources], check=True)
    names = ("linear_to", "linear_rows", "panel_width", "pack_linear", "unpack_linear")
    return loading._bind(ctypes.CDLL(str(path)), "emulated", {name: loading._SIGNATURES[name] for name in names})


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 6), (33, 18), (131, 96), (50, 1026), (300, 700)])
def test_linear_on_tiles(emulated: loading.NativeLibrary, shape: tuple[int, int]) -> None:
    """One row, a few, tiles that are not full, inputs that fill no tile, and several blocks: the same bits."""
    weight, bias = torch.randn(shape).bfloat16(), torch.randn(shape[0]).bfloat16()
    x = torch.randn(200, shape[1] + 2).bfloat16()[:, : shape[1]]
    linear = NativeLinear(weight, bias, emulated)
    whole = linear.unrounded(x)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().T + bias.double(), rtol=1e-5, atol=5e-4)
    assert torch.equal(linear(x), whole.bfloat16())
    for num_rows in (*range(1, 35), 48, 63, 100, 199):
        assert torch.equal(linear.unrounded(x[:num_rows]), whole[:num_rows])
        assert torch.equal(linear.unrounded(x[-num_rows:]), whole[-num_rows:])


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
def test_linear_of_strided_rows(native: Kernels, dtype: torch.dtype) -> None:
    linear, x = native.prepare_linear(torch.randn(40, 32).to(dtype)), torch.randn(9, 67).to(dtype)
    for view in (x[:, :32], x[:, 1:33], x[:, 2:34], x[::2, :32], x.T[:32].T, torch.randn(32, 9).to(dtype).T):
        assert torch.equal(linear(view), linear(view.clone(memory_format=torch.contiguous_format)))


def test_prepared_linear(native: Kernels) -> None:
    """The implementation that is selected, and the tensors that it refuses."""
    for weight in (torch.zeros(8, 5).bfloat16(), torch.zeros(8, 4).half()):  # odd pairs, and no such kernel
        assert not isinstance(native.prepare_linear(weight), NativeLinear)
    linear = native.prepare_linear(torch.zeros(8, 4))
    assert isinstance(linear, NativeLinear)
    with pytest.raises(ValueError, match=r"x \[2, 5\] torch.float32 does not match a weight \[8, 4\]"):
        linear(torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"torch\.bfloat16 does not match"):
        linear(torch.zeros(2, 4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"bias \[4\]"):
        native.prepare_linear(torch.zeros(8, 4), torch.zeros(4))


@needs_library
def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(NativeUnavailableError, match="no kernels of variant v9"):
        load_library("v9")


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
    return run_python("-c", PROBE, str(path)).strip()


@needs_library
@pytest.mark.slow
def test_problems_are_found_without_torch(tmp_path: Path) -> None:
    assert probe(loading.PATH) == loading.native_problem() == ""
    assert "libfleetfoot.so was not built" in probe(tmp_path / "libfleetfoot.so")
    (tmp_path / "broken.so").write_bytes(b"not a library")
    assert f"{tmp_path / 'broken.so'} does not load: " in probe(tmp_path / "broken.so")
    copied = Path(shutil.copy(loading.PATH, tmp_path / "libfleetfoot.so"))
    assert probe(copied) == ""  # without sources beside it
    Path(shutil.copy(loading.PATH.with_name("dispatch.c"), tmp_path)).write_text("/* of another version */")
    assert f"{copied} was not built from the C sources beside it; install Fleetfoot again" in probe(copied)
    os.truncate(copied, copied.stat().st_size - 100)
    assert f"{copied} is truncated" in probe(copied)


@needs_library
def test_a_library_of_another_version_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(loading._SIGNATURES, "newer_kernel", "")
    assert "is of another version: it has no newer_kernel; install Fleetfoot again" in loading.native_problem()
