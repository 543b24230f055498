"""The Triton operations compiled: against float64 and the references, in graphs, and overlapping one another."""

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from tests.helpers import ops_checks as checks
from tests.helpers.kernels import triton_kernels, waits_are_errors
from tests.helpers.ops_checks import REFERENCE

from fleetfoot.kernels.attention.rope_and_cache import rope_and_cache_torch
from fleetfoot.kernels.elementwise import DeferredRMSNorm
from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.linear.linear_triton import ChainedGateUp, ChainedLinear, ChainedResidual
from fleetfoot.kernels.linear.roles import ChainedInput, ChainedOutput, InputRole, OutputRole
from fleetfoot.kernels.linear.tilings import Tiling
from fleetfoot.kernels.quantized.epilogue import Epilogue
from fleetfoot.kernels.quantized.packed import packed_linear_torch
from fleetfoot.kernels.quantized.packed_triton import PackedTiling, launch_packed_few_rows
from fleetfoot.kernels.quantized.scaled import ScaledMatrix, quantize_rows
from fleetfoot.kernels.runtime.gpu_limits import has_hopper_kernels
from fleetfoot.kernels.sampling.filter_cuts_triton import filter_cuts_triton
from fleetfoot.kernels.sampling.sample import MAX_TOP_K, RandomRows, RowFilters, sample_torch
from fleetfoot.kernels.sampling.sample_triton import sample_triton
from fleetfoot.kernels_hopper.linear import gated_product
from fleetfoot.kernels_hopper.linear.linear import HopperGateUp, HopperInput, HopperResidual
from fleetfoot.kernels_hopper.linear.product_tilings import GatedTiling
from fleetfoot.records.forward_context import RotaryInputs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TRITON = triton_kernels()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DEFERRED_SHAPES = (
    *((2048, 1024, 4096), (3072, 1024, 3072), (14336, 4096, 6144)),
    *((4096, 4096, 14336), (8192, 2048, 3072), (1000, 640, 72)),
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


SIZES = [(1, 1024), (3, 100), (64, 4096), (2, 12288), (16384, 1024)]
CASES = [
    *checks.cases(checks.rms_norm, DTYPES, SIZES, ["cuda"]),
    *checks.cases(checks.norms_around_a_sum, DTYPES, SIZES, ["cuda"]),
    *checks.cases(checks.sum_of_parts, DTYPES, SIZES, ["cuda"]),
    *checks.cases(checks.activations, DTYPES, [(1, 3072), (7, 1001), (16384, 512)], ["cuda"]),
    *checks.cases(checks.rope_and_cache, DTYPES, [1, 33, 700], [64, 96, 128, 256], [None, 0.0, 1.0], ["cuda"]),
    *checks.cases(
        checks.rope_and_cache, DTYPES, [2048, 4301], [64, 96, 128], [None, 1.0], ["cuda"], [(16, 8), (28, 4), (32, 8)]
    ),
    *checks.cases(checks.random_samples, DTYPES, [(1, 151936), (5, 5), (64, 32003), (3, 262144)], [0.2, 4.0], ["cuda"]),
]


@pytest.mark.parametrize("check", CASES)
def test_operations(check: Callable[[Kernels], None]) -> None:
    check(TRITON)


def test_sample_from_rows_without_a_maximum() -> None:
    checks.samples(TRITON, checks.logits_without_a_maximum(10000, torch.bfloat16), "cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 2, 8, 9, 16, 17, 33, 64, 65, 129, 256])
@pytest.mark.parametrize(
    "shape", [(4096, 1024), (1000, 2048), (1024, 3072), (6144, 4096), (2048, 8192), (1152, 896), (640, 1000), (40, 72)]
)
def test_linear(dtype: torch.dtype, num_rows: int, shape: tuple[int, int]) -> None:
    for kind, bias in product((ChainedResidual, ChainedGateUp), (False, True)):
        error = checks.linear_error(kind, dtype, (num_rows, *shape), bias=bias, device="cuda")
        # A gate is rounded twice more on its way.
        assert error < (4 if kind is ChainedGateUp else 1) * 0.6 * torch.finfo(dtype).eps, (kind, bias)


@pytest.mark.parametrize("num_rows", [1, 2, 5, 8])
@pytest.mark.parametrize("shape", DEFERRED_SHAPES)
def test_a_norm_between_two_layers(num_rows: int, shape: tuple[int, int, int]) -> None:
    for kind, bias in product((ChainedLinear, ChainedGateUp), (False, True)):
        checks.deferred_norm(kind, (num_rows, *shape), bias=bias, device="cuda")


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("shape", [*DEFERRED_SHAPES, (1024, 1152, 6912), (6912, 1152, 1536)])
def test_norms_around_a_sum_between_two_layers(num_rows: int, shape: tuple[int, int, int]) -> None:
    for kind, bias in product((ChainedLinear, ChainedGateUp), (False, True)):
        checks.deferred_sum(kind, (num_rows, *shape), bias=bias, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("group", "kind"), [(128, "zeros"), (64, "bias"), (32, "mxfp4"), (16, "zeros"), (0, "")])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(4096, 4096), (4104, 528), (200, 1024)])
def test_few_rows_with_4_bits_on_hopper(
    num_outputs: int, num_inputs: int, group: int, kind: str, dtype: torch.dtype
) -> None:
    """Whole and partial blocks and groups, of all tilings."""
    if not has_hopper_kernels(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    weight = checks.packed_matrix(num_outputs, num_inputs, group, kind, dtype, "cuda")
    for num_rows, (outputs, num_warps, depth) in product((1, 5, 8), ((16, 8, 2), (32, 8, 2), (16, 4, 2), (32, 4, 1))):
        x = torch.randn(num_rows, num_inputs).cuda().to(dtype)
        output = torch.empty(num_rows, num_outputs, dtype=dtype, device="cuda")
        tiling = PackedTiling("hopper", outputs, 8, depth, num_warps)
        launch_packed_few_rows(output, x, weight, tiling)
        expected = packed_linear_torch(x, weight)
        assert (output - expected).float().norm() < 6e-3 * expected.float().norm()


@pytest.mark.parametrize("num_rows", [1, 8])
def test_norms_and_gates_with_4_bits_on_hopper(num_rows: int) -> None:
    """What Triton's kernel makes of the same sums."""
    if not has_hopper_kernels(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    output, gated = (checks.packed_matrix(n, 1024, 128, "zeros", device="cuda") for n in (512, 768))
    x, residual = (torch.randn(num_rows, n).cuda().bfloat16() for n in (1024, 512))
    deferred = DeferredRMSNorm(x, torch.rand(7, num_rows).cuda() * 100, x, 1e-5)
    results = []
    for tiling in (PackedTiling("hopper", 16, 8, 2, 4), PackedTiling("few", 16, 8, 2, 4)):
        norm = DeferredRMSNorm.empty(residual, 32, 1e-5)
        add_norm = residual, torch.linspace(0.5, 1.5, 512).cuda().bfloat16(), norm
        launch_packed_few_rows(norm.weighted, x, output, tiling, Epilogue(add_norm=add_norm, scale=0.5))
        results.append([norm.weighted, norm.total, norm.squares])
        for activation in (1, 2):
            product_ = torch.empty(num_rows, 384, dtype=torch.bfloat16, device="cuda")
            launch_packed_few_rows(product_, x, gated, tiling, Epilogue(deferred, gated=activation))
            results[-1].append(product_)
    for hopper, triton in zip(*results, strict=True):
        torch.testing.assert_close(hopper, triton, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("num_rows", [1, 2, 8, 16, 200])
@pytest.mark.parametrize(("kind", "rows"), [("group", 128), ("group", 1), ("token", 1), ("static", 1000)])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(12288, 2048), (1000, 4096), (4096, 1408), (256, 14336)])
def test_weights_in_fp8(num_rows: int, kind: str, rows: int, num_outputs: int, num_inputs: int) -> None:
    """Inputs are those that the reference quantizes on a CPU, where a division has one rounding."""
    columns = 128 if kind == "group" else num_inputs
    values = (torch.randn(num_outputs, num_inputs) * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = (torch.rand(-(-num_outputs // rows), num_inputs // columns) + 0.5) * 1e-3
    static, bias = torch.tensor([0.02]) if kind == "static" else None, torch.randn(num_outputs).bfloat16()
    weight = ScaledMatrix(values, scales, rows, columns, kind, static, bias)
    x = torch.randn(num_rows, num_inputs).bfloat16()
    quantized, of_rows = quantize_rows(x, weight)
    wide = of_rows.double().repeat_interleave(num_inputs // of_rows.shape[1], dim=1)
    expected = (quantized.double() * wide).cuda() @ weight.dequantized().double().cuda().T + bias.double().cuda()
    tensors = {name: getattr(weight, name) for name in ("values", "scales", "input_scale", "bias")}
    there = replace(weight, **{name: None if each is None else each.cuda() for name, each in tensors.items()})
    found = TRITON.scaled_linear(x.cuda(), there)
    assert float((found.double() - expected).norm() / expected.norm()) < 5e-3


def test_a_weight_past_32_bits() -> None:
    """The last rows of a head with more than 2**31 elements."""
    out, inputs = 160_000, 16_384
    if torch.cuda.mem_get_info()[0] < 3 * out * inputs:
        pytest.skip(f"needs {3 * out * inputs / 2**30:.0f} GiB of GPU memory")
    weight = torch.empty(out, inputs, dtype=torch.bfloat16, device="cuda").normal_(std=inputs**-0.5)
    for num_rows in (1, 16):
        x = torch.randn(num_rows, inputs, device="cuda").bfloat16()
        actual = TRITON.prepare_linear(weight)(x)[:, -1000:]
        expected = x.double() @ weight[-1000:].double().T
        assert float((actual.double() - expected).norm() / expected.norm()) < 4e-3


@pytest.mark.parametrize("kind", ["plain", "gated", "partial"])
@pytest.mark.parametrize(
    ("row_tile", "outputs", "stages", "dtype"),
    [
        (64, 64, 8, torch.bfloat16),
        (64, 128, 8, torch.float16),
        (128, 64, 8, torch.float16),
        (128, 128, 6, torch.bfloat16),
        (256, 128, 3, torch.bfloat16),
    ],
)
def test_tiled_layers_on_hopper(row_tile: int, outputs: int, stages: int, kind: str, dtype: torch.dtype) -> None:
    if not has_hopper_kernels(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    if kind == "gated" and outputs == 64:
        pytest.skip("gated tiles have 128 outputs")
    from fleetfoot.kernels_hopper.linear.tiled_hopper import launch_linear_hopper

    splits = 3 if kind == "partial" else 1
    tiling = Tiling("hopper", outputs, 64, row_tile, stages, splits=splits)
    for num_rows, num_outputs, num_inputs in ((256, 3072, 1024), (65, 1000, 520), (200, 136, 4096), (33, 40000, 512)):
        wide = torch.randn(num_rows, num_inputs + 16, device="cuda").to(dtype)
        x = wide[:, 8 : 8 + num_inputs]  # rows with something else between them
        num_weight_rows = 2 * num_outputs if kind == "gated" else num_outputs
        weight = (torch.randn(num_weight_rows, num_inputs, device="cuda") * num_inputs**-0.5).to(dtype)
        expected = x.double() @ weight.double().T
        if kind == "gated":
            gate, up = expected.chunk(2, dim=1)
            expected = torch.nn.functional.silu(gate) * up
        results = []
        for num_sms in (132, 7):  # for any assignment of tiles
            shape = (splits, num_rows, num_outputs) if kind == "partial" else (num_rows, num_outputs)
            output = torch.full(shape, torch.nan, dtype=torch.float32 if kind == "partial" else dtype, device="cuda")
            launch_linear_hopper(output, x, weight, tiling, num_sms)
            results.append(output)
        assert torch.equal(results[0], results[1])
        actual = results[0].double().sum(0) if kind == "partial" else results[0].double()
        assert float((actual - expected).norm() / expected.norm()) < (1e-5 if kind == "partial" else 5e-3)


@pytest.mark.parametrize("num_rows", [17, 33, 64, 65, 96, 128, 161, 200, 256])
@pytest.mark.parametrize(
    ("hidden", "intermediate", "head_dim"), [(1024, 3072, 128), (2048, 8192, 64), (4096, 14336, 128)]
)
def test_products_with_norms_on_hopper(num_rows: int, hidden: int, intermediate: int, head_dim: int) -> None:
    """Each against float64, with the same bits in each run, whatever is behind the rows."""
    if not has_hopper_kernels(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    if hidden == 4096 and num_rows > 128:
        pytest.skip("other kernels are faster")

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda") * scale).bfloat16()

    def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
        return float((actual.double() - expected).norm() / expected.norm())

    heads, kv_heads, eps = max(hidden, 2048) // head_dim, 8, 1e-6
    norm, head_norm = (torch.rand(size, device="cuda").bfloat16() + 0.5 for size in (hidden, head_dim))
    o, down = (HopperResidual(random(hidden, size, scale=size**-0.5)) for size in (heads * head_dim, intermediate))
    gate_up = HopperGateUp(random(2 * intermediate, hidden, scale=hidden**-0.5))
    width = (heads + 2 * kv_heads) * head_dim
    bias = random(width) if num_rows % 2 else None
    qkv = HopperInput(random(width, hidden, scale=hidden**-0.5), bias, head_dim=head_dim)
    has_qkv = num_rows > 64 or (
        hidden == 4096 and num_rows > 32
    )  # few heads are too few thread blocks for one tile of rows
    assert gate_up.reads_deferred_norm(num_rows) and qkv.reads_deferred_norm(num_rows) == has_qkv

    residual = random(num_rows, hidden)
    for layer in (o, down):
        x = random(num_rows, layer._weight.shape[1] + 16)[:, 8:-8]  # rows with something else between them
        deferred, again = (layer.add_and_norm(x, residual, norm, eps) for _ in range(2))
        assert deferred is not None and again is not None
        assert torch.equal(deferred.weighted, again.weighted) and torch.equal(deferred.squares, again.squares)
        expected = x.double() @ layer._weight.double().T + residual.double()
        assert error(deferred.total, expected) < 4e-3
        assert torch.equal(deferred.weighted, (deferred.total.float() * norm.float()).bfloat16())
        assert error(deferred.squares.sum(0), deferred.total.double().square().sum(1)) < 1e-5

    inputs = deferred.weighted.double()
    inputs /= (deferred.squares.double().sum(0) / hidden + eps).sqrt()[:, None]
    gate, up = (inputs @ gate_up._weight.double().T).chunk(2, dim=1)
    assert error(gate_up(deferred), torch.nn.functional.silu(gate) * up) < 5e-3

    if not has_qkv:
        return
    slots, positions = torch.arange(num_rows, device="cuda") * 3, torch.arange(num_rows, device="cuda") % 64
    slots[1] = -1
    rotary = RotaryInputs(torch.rand(64, head_dim, device="cuda"), head_norm, None, eps)
    caches = [
        torch.full((48, 2, kv_heads, 16, head_dim), 9.0, device="cuda").to(dtype) for dtype in (x.dtype, torch.float32)
    ]
    query = qkv.rotate_and_cache(deferred, caches[0], checks.at_slots(slots, positions), heads, rotary)
    assert query is not None
    product = (inputs @ qkv._weight.double().T + (0.0 if bias is None else bias.double())).float()
    expected = rope_and_cache_torch(product, caches[1], checks.at_slots(slots, positions), heads, rotary)
    assert error(query, expected.double()) < 5e-3
    is_written = caches[1] != 9.0
    assert error(caches[0][is_written], caches[1][is_written].double()) < 5e-3
    assert bool((caches[0][~is_written] == 9.0).all())


@pytest.mark.parametrize("tiling", [GatedTiling(256, 224), GatedTiling(192, 224), GatedTiling(256, 144, peers=1)])
@pytest.mark.parametrize("num_rows", [129, 200, 256, 450])
def test_gate_and_up_of_many_rows_on_hopper(
    num_rows: int, tiling: GatedTiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against float64, with the same bits for any number of tiles of a block."""
    if not has_hopper_kernels(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    for num_outputs, num_inputs in ((3080, 512), (1600, 4160)):
        x = torch.randn(num_rows, num_inputs + 16, device="cuda").bfloat16()[:, 8:-8]  # something else between rows
        weight = (torch.randn(2 * num_outputs, num_inputs, device="cuda") * num_inputs**-0.5).bfloat16()
        gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
        expected, results = torch.nn.functional.silu(gate) * up, []
        for num_sms in (132, 132, 6):
            monkeypatch.setattr(gated_product, "gpu_limits", lambda _, count=num_sms: SimpleNamespace(num_sms=count))
            results.append(gated_product.multiply_gated_wide(x, weight, tiling))
        assert all(torch.equal(results[0], each) for each in results[1:])
        assert float((results[0].double() - expected).norm() / expected.norm()) < 5e-3


@pytest.mark.parametrize(
    ("num_rows", "tiling"),
    [(17, GatedTiling(64, 224)), (64, GatedTiling(64, 96)), (70, GatedTiling(128, 224)), (128, GatedTiling(128, 144))],
    ids=str,
)
def test_gate_and_up_behind_a_deferred_norm_on_hopper(num_rows: int, tiling: GatedTiling) -> None:
    """Rows of padding end as zeros, whatever they were."""
    if not has_hopper_kernels(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    x = torch.full((128, 4096), torch.nan, device="cuda", dtype=torch.bfloat16)[:num_rows]
    x.copy_(torch.randn(num_rows, 4096, device="cuda"))
    squares = torch.rand(64, num_rows, device="cuda") * 128
    factor = (squares.double().sum(0) / 4096 + 1e-5).rsqrt()[:, None]
    weight = (torch.randn(2 * 9728, 4096, device="cuda") * 4096**-0.5).bfloat16()
    gate, up = ((x.double() * factor) @ weight.double().T).chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    output = gated_product.multiply_gated_wide(DeferredRMSNorm(x, squares, x, 1e-5), weight, tiling)
    assert float((output.double() - expected).norm() / expected.norm()) < 5e-3
    assert not output.as_strided((tiling.rows, 9728), output.stride())[num_rows:].any()


def test_gate_and_up_of_large_values_on_hopper() -> None:
    """SiLU of gates for which exponentials overflow: their reciprocals are computed in pairs."""
    if not has_hopper_kernels(torch.device("cuda")):
        pytest.skip("needs a Hopper GPU")
    gates = torch.tensor([-1e30, -300.0, -90.0, -41.0, -20.0, 0.0, 50.0, 1e30], device="cuda")
    x = torch.zeros(256, 512, device="cuda", dtype=torch.bfloat16)
    x[:, 0] = 1.0
    weight = torch.zeros(2 * 1024, 512, device="cuda", dtype=torch.bfloat16)
    weight[:1024, 0] = gates.repeat(128).bfloat16()
    weight[1024:, 0] = 1.0
    output = gated_product.multiply_gated_wide(x, weight, GatedTiling(256, 128))
    expected = torch.nn.functional.silu(weight[:1024, 0].double())
    torch.testing.assert_close(output.double(), expected.expand(256, 1024), rtol=0.01, atol=1e-12)


class Chain:
    """Some decoder layers without attention, with overlapping kernels."""

    def __init__(self, hidden: int, intermediate: int, num_layers: int) -> None:
        def weight(out: int, inputs: int) -> torch.Tensor:
            return (torch.randn(out, inputs, device="cuda") * inputs**-0.5).bfloat16()

        self.norm = torch.rand(hidden, device="cuda").bfloat16()
        self.layers = [
            (
                TRITON.linear_chain(weight(hidden + 2 * 128, hidden), None, InputRole("qkv")),
                TRITON.linear_chain(weight(hidden, hidden), None, OutputRole()),
                TRITON.linear_chain(weight(2 * intermediate, hidden), None, InputRole("gated")),
                TRITON.linear_chain(weight(hidden, intermediate), None, OutputRole()),
            )
            for _ in range(num_layers)
        ]
        self.head = TRITON.prepare_linear(weight(5000, hidden))
        self.heads = hidden // 128
        self.cos_sin = torch.rand(64, 128, device="cuda")

    def add_and_norm(
        self, layer: ChainedOutput, x: torch.Tensor, residual: torch.Tensor, next_layer: ChainedInput | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual, and the output of ``next_layer`` for its norm; None: the norm itself."""
        deferred = layer.add_and_norm(x, residual, self.norm, 1e-6)
        if deferred is not None and next_layer is not None:
            return deferred.total, next_layer(deferred)
        normed, total = TRITON.add_rms_norm(layer(x), residual, self.norm, 1e-6)
        return total, normed if next_layer is None else next_layer(normed)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = len(x)
        slots, positions = torch.arange(rows, device="cuda"), torch.arange(rows, device="cuda") % 64
        cache = torch.zeros(rows // 16 + 1, 2, 1, 16, 128, dtype=x.dtype, device="cuda")
        rotary, places = RotaryInputs(self.cos_sin, self.norm[:128], None, 1e-6), checks.at_slots(slots, positions)
        normed, residual = TRITON.rms_norm(x, self.norm, 1e-6), x
        for qkv, o, gate_up, down in self.layers:
            query = TRITON.rope_and_cache(qkv(normed), cache, places, self.heads, rotary)
            residual, between = self.add_and_norm(o, query.flatten(1), residual, gate_up)
            residual, normed = self.add_and_norm(down, between, residual, None)
        logits = self.head(normed)
        tokens = TRITON.sample(logits, RandomRows(torch.ones(rows, device="cuda"), positions, positions))
        return logits, cache, tokens


@pytest.mark.parametrize("num_rows", [1, 5, 16, 40, 64, 70, 250])
@pytest.mark.parametrize(("hidden", "intermediate"), [(1024, 3072), (2048, 8192)])
def test_a_graph_of_overlapping_kernels(
    num_rows: int, hidden: int, intermediate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replayed back to back, it computes what the kernels do one after the other, bit for bit."""
    chain, x = Chain(hidden, intermediate, 5), torch.zeros(num_rows, hidden, device="cuda").bfloat16()
    inputs = [torch.randn(num_rows, hidden, device="cuda").bfloat16() for _ in range(8)]
    chain(inputs[0])  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = chain(x)
    results = []
    for value in inputs * 4:
        x.copy_(value)
        graph.replay()
        results.append([output.clone() for output in outputs])
    for module in [module for name, module in sys.modules.items() if name.startswith("fleetfoot.kernels")]:
        if hasattr(module, "can_overlap"):
            monkeypatch.setattr(module, "can_overlap", lambda device: False)
    for index, value in enumerate(inputs * 4):
        for actual, expected in zip(results[index], chain(value), strict=True):
            assert torch.equal(actual, expected)


def test_no_synchronisation() -> None:
    """Every operation can be queued while the device is busy."""
    chain, x = Chain(1024, 3072, 1), torch.randn(3, 1024, device="cuda").bfloat16()
    chain(x)
    with waits_are_errors():
        chain(x)


def test_the_twins_run_on_the_device_too() -> None:
    x, weight = torch.randn(3, 64, device="cuda").bfloat16(), torch.rand(64, device="cuda").bfloat16()
    torch.testing.assert_close(TRITON.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("spread", [0.5, 3.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_filtered_draws(dtype: torch.dtype, spread: float) -> None:
    """Tokens are the reference's, and kept sets without top-k: exactly for min-p, but for rounding of exp for top-p."""
    num_rows, vocab_size = 48, 151_936
    generator = torch.Generator("cuda").manual_seed(7)
    logits = (torch.randn(num_rows, vocab_size, generator=generator, device="cuda") * spread).to(dtype)
    temperatures = torch.linspace(0.3, 2.0, num_rows, device="cuda")
    row = torch.arange(num_rows, device="cuda")
    filters = RowFilters(
        torch.where(row % 4 == 1, -3.0, -torch.inf),
        torch.where(row % 3 == 1, 40 + 100 * row, 0).int(),
        torch.where(row % 2 == 1, 0.1 + 0.018 * row, 1.0),
    )
    best = torch.empty(num_rows, 1, dtype=torch.int64, device="cuda")
    chosen = logits.float().argmax(dim=1)
    bits = logits.float().gather(1, chosen[:, None]).view(torch.int32).to(torch.int64)
    best[:] = (bits << 32) | (0x7FFFFFFF - chosen[:, None])
    random = RandomRows(temperatures, row * 31 + 1, row + 5, filters)
    cuts = filter_cuts_triton(logits, best, random, overlap=False)
    scores = logits.float()
    scores = (scores - scores.max(dim=1, keepdim=True).values) / temperatures[:, None]
    limits = -cuts[:, :1].contiguous().view(torch.float32)
    index = torch.arange(vocab_size, device="cuda")
    kept = (scores > limits) | ((scores == limits) & (index <= cuts[:, 1:]))
    filters.apply(scores)
    differing = (kept != (scores > -torch.inf)).sum(dim=1)
    is_cut = (filters.top_k == 0) | (filters.top_k > MAX_TOP_K)  # in the other rows candidates are drawn
    assert int(differing[is_cut].max()) <= 2 and int(differing[is_cut & (row % 2 == 0)].max()) == 0
    tokens = sample_triton(logits, random)
    assert int((tokens != sample_torch(logits, random)).sum()) <= 1
    assert bool(kept.gather(1, tokens[:, None])[is_cut].all())
    only = replace(random, filters=replace(filters, top_k_only=True))
    assert torch.equal(sample_triton(logits, only)[~is_cut], tokens[~is_cut])
