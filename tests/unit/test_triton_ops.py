"""The Triton operations in the interpreter, the rules by which they are launched, and their compilation for a GPU."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.helpers import ops_checks as checks
from tests.helpers.interpreter import HAS_INTERPRETER, compiled, interpreted, run_python
from tests.helpers.kernels import triton_kernels
from tests.helpers.ops_checks import REFERENCE

from fleetfoot.kernels.attention import rope_and_cache
from fleetfoot.kernels.elementwise import MAX_SIZE, DeferredRMSNorm
from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.linear.linear_triton import ChainedGateUp, ChainedLinear, ChainedResidual
from fleetfoot.kernels.linear.tilings import Tiling, choose_tiling
from fleetfoot.kernels.runtime.gpu_limits import GPULimits
from fleetfoot.kernels.runtime.row_padding import readable_rows
from fleetfoot.kernels.sampling.sample import RandomRows
from fleetfoot.records.forward_context import RotaryInputs

TRITON = triton_kernels()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
H100 = GPULimits(num_sms=132, shared_bytes=227 * 1024, capability=(9, 0))
HOPPERS = (H100, replace(H100, num_sms=114), replace(H100, num_sms=78))
"""The SXM and the PCIe version, and an H20."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


SIZES = [(1, 64), (5, 100)]
CASES = [
    *checks.cases(checks.rms_norm, DTYPES, SIZES),
    *checks.cases(checks.norms_around_a_sum, DTYPES, SIZES),
    *checks.cases(checks.sum_of_parts, DTYPES, SIZES),
    *checks.cases(checks.activations, DTYPES, [(3, 50)]),
    *checks.cases(checks.rope_and_cache, DTYPES, [5], [64, 96], [None, 0.0, 1.0]),
    *checks.cases(checks.random_samples, DTYPES, [6], [(5, 1.0), (2048, 0.1), (5003, 4.0)]),
    *checks.cases(checks.random_samples, DTYPES[:1], [17], [(4096, 1.0), (4099, 1.0)]),
]


@interpreted
def test_rows_of_padding_are_zeros() -> None:
    """Products copy whole tiles of rows."""
    x, gate_up = torch.randn(20, 100), torch.randn(20, 200)
    outputs = [
        TRITON.rms_norm(x, torch.rand(100), 1e-5),
        *TRITON.add_rms_norm(x, x, torch.rand(100), 1e-5)[:1],
        TRITON.silu_and_mul(gate_up),
        TRITON.gelu_and_mul(gate_up),
    ]
    for output in outputs:
        assert output.shape == (20, 100) and readable_rows(output, 64) == 64
        assert output.all() and not output.as_strided((64, 100), (100, 1))[20:].any()


@interpreted
@pytest.mark.parametrize("check", CASES)
def test_operations(check: Callable[[Kernels], None]) -> None:
    check(TRITON)


@interpreted
@pytest.mark.parametrize(
    "check",
    checks.cases(
        checks.rope_and_cache, DTYPES, [1, 9], [64, 96], [None, 0.0, 1.0], ["cpu"], [(16, 8), (28, 4), (32, 1)]
    ),
)
def test_rotation_of_whole_tokens(check: Callable[[Kernels], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """As with many tokens: three to a program."""
    monkeypatch.setattr(rope_and_cache, "_MANY_TOKENS", 1)
    monkeypatch.setattr(rope_and_cache, "_WHOLE_PROGRAMS_PER_SM", 1)
    check(TRITON)


@interpreted
def test_rms_norm_of_many_dimensions_and_of_nothing() -> None:
    x, weight = torch.randn(2, 3, 4, 32).transpose(1, 2), torch.rand(32)
    torch.testing.assert_close(TRITON.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    assert TRITON.rms_norm(torch.empty(0, 32), weight, 1e-5).shape == (0, 32)


def test_rows_too_long_for_a_program_go_to_the_reference() -> None:
    x, weight = torch.randn(1, MAX_SIZE + 1), torch.rand(MAX_SIZE + 1)
    assert torch.equal(TRITON.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))
    actual, expected = (ops.add_rms_norm(x, x, weight, 1e-5) for ops in (TRITON, REFERENCE))
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))


@interpreted
@pytest.mark.parametrize("dtype", DTYPES)
def test_sample_from_rows_without_a_maximum(dtype: torch.dtype) -> None:
    checks.samples(TRITON, checks.logits_without_a_maximum(3000, dtype))
    assert TRITON.sample(torch.zeros(0, 4, dtype=dtype)).shape == (0,)


def test_mismatched_tensors_are_rejected() -> None:
    index, cache = torch.zeros(3, dtype=torch.int64), torch.zeros(1, 2, 1, 4, 8)
    rotary = RotaryInputs(torch.zeros(4, 8), None, None, 1e-6)
    with pytest.raises(ValueError, match="contiguous in memory"):
        TRITON.sample(torch.zeros(4, 4).T)
    with pytest.raises(ValueError, match="3 positions for 4 rows"):
        TRITON.sample(torch.zeros(4, 4), RandomRows(torch.ones(4), index, index))
    with pytest.raises(ValueError, match=r"x \[2, 8\], residual \[2, 8\], weights \[\[9\]\]"):
        TRITON.rms_norm(torch.zeros(2, 8), torch.zeros(9), 1e-6)
    with pytest.raises(ValueError, match=r"x \[2, 3, 9\], residual \[3, 8\]"):
        TRITON.add_rms_norm(torch.zeros(2, 3, 9), torch.zeros(3, 8), torch.zeros(8), 1e-6)
    with pytest.raises(ValueError, match=r"\[2, 7\] must have an even number of columns"):
        TRITON.silu_and_mul(torch.zeros(2, 7))
    with pytest.raises(ValueError, match=r"qkv \[3, 32\] with strides"):
        TRITON.rope_and_cache(torch.zeros(3, 32), cache, checks.at_slots(index, index), 1, rotary)
    with pytest.raises(ValueError, match=r"x \[2, 8\] torch.float32 does not match a weight \[4, 8\] torch.bfloat16"):
        TRITON.prepare_linear(torch.zeros(4, 8).bfloat16())(torch.zeros(2, 8))


TILINGS = [
    (1, Tiling("staged", 16, 16, 1, 3)),
    (3, Tiling("staged", 16, 16, 8, 3)),
    (1, Tiling("streamed", 16, 32, 1, 3)),
    (8, Tiling("streamed", 32, 16, 8, 2)),
    (9, Tiling("tiled", 64, 64, 16, 3)),
    (12, Tiling("tiled", 64, 64, 16, 3, splits=2)),
    (33, Tiling("tiled", 64, 32, 64, 3, splits=4)),
    (37, Tiling("tiled", 64, 32, 16, 3)),
]


both_kinds = pytest.mark.parametrize("kind", [ChainedLinear, ChainedGateUp])


@interpreted
@pytest.mark.parametrize(("num_rows", "tiling"), TILINGS)
@pytest.mark.parametrize("bias", [False, True])
@both_kinds
def test_linear(num_rows: int, tiling: Tiling, bias: bool, kind: type[ChainedLinear]) -> None:
    """36 outputs: not whole tiles; 192 inputs: not whole chunks for some."""
    if kind is ChainedGateUp and tiling.splits > 1:
        pytest.skip("a gate needs its whole sums")
    shape, activation = (num_rows, 36, 192), "gelu_tanh" if bias else "silu"
    assert checks.linear_error(kind, torch.float16, shape, bias=bias, tiling=tiling, activation=activation) < 1e-3


@interpreted
@pytest.mark.parametrize("num_rows", [1, 2, 16, 17])
def test_linear_selects_a_kernel(num_rows: int) -> None:
    for shape in ((num_rows, 64, 256), (num_rows, 1000, 64)):
        assert checks.linear_error(ChainedResidual, torch.bfloat16, shape, bias=False) < 1e-2


@interpreted
@pytest.mark.parametrize("num_rows", [1, 16, 257])
@pytest.mark.parametrize("bias", [False, True])
def test_a_factor_on_what_is_added_to_the_residual(num_rows: int, bias: bool) -> None:
    """Of every kernel, and of the library."""
    assert checks.linear_error(ChainedResidual, torch.bfloat16, (num_rows, 64, 32), bias=bias, scale=0.3) < 1e-2
    if num_rows <= 8:
        checks.deferred_norm(ChainedLinear, (num_rows, 72, 200, 64), bias=bias, scale=-0.3)


@interpreted
@both_kinds
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 256, 128, 64), (8, 256, 512, 40), (3, 200, 136, 72), (5, 72, 200, 64), (1, 1000, 72, 1000)]
)
def test_a_norm_between_two_layers(shape: tuple[int, int, int, int], kind: type[ChainedLinear], bias: bool) -> None:
    """Staged and streamed on either side, whole tiles and not."""
    checks.deferred_norm(kind, shape, bias=bias)


@interpreted
@both_kinds
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 256, 128, 64), (2, 200, 136, 72), (1, 1000, 72, 1000), (2, 72, 1152, 40)])
def test_norms_around_a_sum_between_two_layers(
    shape: tuple[int, int, int, int], kind: type[ChainedLinear], bias: bool
) -> None:
    checks.deferred_sum(kind, shape, bias=bias)


def test_norms_are_deferred_for_few_rows_in_bfloat16() -> None:
    weight, x, norm = torch.randn(64, 128).bfloat16(), torch.randn(9, 128).bfloat16(), torch.ones(64).bfloat16()
    layer, half = ChainedResidual(weight), ChainedResidual(weight.half())
    assert [layer.reads_deferred_norm(num_rows) for num_rows in (1, 8, 9)] == [True, True, False]
    assert ChainedGateUp(weight).reads_deferred_norm(8)
    assert not half.reads_deferred_norm(1)
    assert layer.add_and_norm(x, x[:, :64], norm, 1e-6) is None
    assert half.add_and_norm(x[:1].half(), x[:1, :64].half(), norm.half(), 1e-6) is None
    for rows in (x, x[:1, :64]):  # too many, and too narrow
        with pytest.raises(ValueError, match=rf"a deferred norm \[{len(rows)}, {rows.shape[1]}\] is not supported"):
            layer(DeferredRMSNorm.empty(rows, 1, 1e-6))


@pytest.mark.parametrize("num_rows", [0, 257])
@pytest.mark.parametrize("gated", [False, True])
def test_linear_leaves_other_batches_to_the_library(num_rows: int, gated: bool) -> None:
    weight, bias = torch.randn(64, 32).bfloat16(), torch.randn(64).bfloat16()
    assert choose_tiling(num_rows, 64, 32, gated=gated, may_split=True, limits=H100) is None
    x = torch.randn(num_rows, 32).bfloat16()
    if gated and num_rows and not HAS_INTERPRETER:
        pytest.skip("the gate needs Triton's interpreter")
    layer = (ChainedGateUp if gated else ChainedLinear)(weight, bias)
    expected = torch.nn.functional.linear(x, weight, bias)
    if gated:
        expected = REFERENCE.silu_and_mul(expected)
    torch.testing.assert_close(layer(x), expected, rtol=2e-2, atol=1e-3)


def test_the_library_adds_to_the_residual() -> None:
    weight, x, total = torch.randn(1024, 64).bfloat16(), torch.randn(300, 64).bfloat16(), torch.randn(300, 1024)
    for scale in (1.0, 0.3):
        summed = total.bfloat16()
        assert ChainedResidual(weight, None, scale=scale).add_to(x, summed)
        expected = total.bfloat16().float() + scale * (x.float() @ weight.float().t())
        torch.testing.assert_close(summed, expected.bfloat16(), rtol=1e-2, atol=1e-2)
    # Nothing is done if one of our kernels is faster, or with a bias.
    for rows, bias in ((16, None), (300, torch.ones(1024).bfloat16())):
        kept = total[:rows].bfloat16()
        assert not ChainedResidual(weight, bias).add_to(x[:rows], kept)
        assert torch.equal(kept, total[:rows].bfloat16())


def test_float32_is_for_the_library() -> None:
    weight, x = torch.randn(64, 32), torch.randn(3, 32)
    assert torch.equal(TRITON.prepare_linear(weight)(x), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("limits", [*HOPPERS, GPULimits(72, 99 * 1024, (8, 9))])
def test_tilings_fit_in_shared_memory(gated: bool, limits: GPULimits) -> None:
    sizes = (512, 896, 1024, 1536, 2048, 3584, 4096, 8192, 14336, 151936)
    kinds = set()
    for num_rows, num_outputs, num_inputs in itertools.product((1, 8, 16, 32, 64, 100, 200), sizes, sizes):
        tiling = choose_tiling(num_rows, num_outputs, num_inputs, gated=gated, may_split=not gated, limits=limits)
        if tiling is not None:
            kinds.add(tiling.kernel)
            assert tiling.shared_bytes(gated) <= limits.shared_bytes
            assert not (gated and tiling.splits > 1)
    assert "streamed" in kinds


def test_replace_writes_in_place() -> None:
    """A captured graph reads the weight where it was."""
    weight, other = torch.randn(32, 16).bfloat16(), torch.randn(32, 16).bfloat16()
    layer = TRITON.prepare_linear(weight)
    layer.replace(other)
    assert layer.weight() is weight
    assert torch.equal(weight, other)
    with pytest.raises(ValueError, match="cannot replace"):
        layer.replace(other[:4])


@compiled
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    output = run_python(
        "-m", "tests.helpers.compile_kernels", "operations", is_forked=True, TRITON_CACHE_DIR=str(tmp_path)
    )
    rotations = ("rope_and_cache", "rope_and_cache_whole_tokens")
    operations = ("rms_norm", "activation", *rotations, "row_max", "cuts", "draw", "draw_top_k", "pick")
    names = (*operations, "linear_few_rows", "linear_tiled")
    assert {line.split(":")[0] for line in output.splitlines()} == {f"_{name}_kernel" for name in names}
