"""The products in CUDA C++: their source on a CPU against float64."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.helpers.cuda_on_cpu import ProductOnCpu, encode_tensor_map
from tests.helpers.ops_checks import at_slots

from fleetfoot.kernels.attention.rope_and_cache import rope_and_cache_torch
from fleetfoot.kernels.elementwise import DeferredRMSNorm
from fleetfoot.kernels.linear.roles import InputRole
from fleetfoot.kernels.quantized import chain, scaled_hopper
from fleetfoot.kernels.quantized.epilogue import PLAIN_EPILOGUE, Epilogue
from fleetfoot.kernels.quantized.scaled import FP8, ScaledMatrix, quantize_rows
from fleetfoot.kernels.quantized.scaled_hopper import ScaledProduct, launch_scaled_hopper
from fleetfoot.kernels.runtime.cuda_source import CudaKernel
from fleetfoot.kernels.runtime.row_padding import padded_rows
from fleetfoot.kernels_hopper.linear import decode_product, gated_product, tensor_maps
from fleetfoot.kernels_hopper.linear.product_tilings import GatedTiling, ProductTiling
from fleetfoot.records.forward_context import RotaryInputs

ACTIVATIONS = {"silu": torch.nn.functional.silu, "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh")}

pytestmark = [pytest.mark.kernels, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[CudaKernel, torch.device], ProductOnCpu]:
    folder: Path = tmp_path_factory.mktemp("products")
    kernels: dict[CudaKernel, ProductOnCpu] = {}

    def load(kernel: CudaKernel, device: torch.device) -> ProductOnCpu:
        if kernel not in kernels:
            kernels[kernel] = ProductOnCpu(kernel, folder)
        return kernels[kernel]

    return load


@pytest.fixture(autouse=True)
def _on_cpu(compiled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_maps, "driver_call", encode_tensor_map)
    for module in (decode_product, gated_product, scaled_hopper):
        monkeypatch.setattr(module, "load", compiled)
    for module in (decode_product, gated_product):
        module._weight_map.cache_clear()  # of memory that may be other tensors' now
    torch.manual_seed(0)


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).bfloat16()


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


def deferred(num_rows: int, size: int) -> tuple[DeferredRMSNorm, torch.Tensor]:
    """A deferred norm, and what it is in float64."""
    weighted, squares = random(num_rows, size), torch.rand(3, num_rows) * size
    factor = (squares.double().sum(0) / size + 1e-5).rsqrt()[:, None]
    return DeferredRMSNorm(weighted, squares, weighted, 1e-5), weighted.double() * factor


def behind(x: torch.Tensor) -> torch.Tensor:
    """The rows of padding."""
    return x.as_strided((padded_rows(len(x)), x.shape[1]), x.stride())[len(x) :]


GATED = {
    "one tile of rows": (40, ProductTiling(64, 256)),
    "narrow": (64, ProductTiling(64, 64)),
    "two blocks share weights": (100, ProductTiling(64, 128, peers=2)),
    "256 rows": (200, ProductTiling(256, 128)),
}


@pytest.mark.parametrize(("num_rows", "tiling"), GATED.values(), ids=GATED)
def test_gate_and_up(num_rows: int, tiling: ProductTiling) -> None:
    x, normed = deferred(num_rows, 512)
    weight = random(512, 512, scale=512**-0.5)
    gate, up = (normed @ weight.double().T).chunk(2, dim=1)
    output = decode_product.multiply_gated(x, weight, tiling)
    assert error(output, torch.nn.functional.silu(gate) * up) < 5e-3
    assert not behind(output).any()


@pytest.mark.parametrize(
    ("num_rows", "tiling"),
    [
        (17, ProductTiling(64, 64, splits=2)),
        (33, ProductTiling(64, 64, splits=2)),
        (64, ProductTiling(64, 64, splits=4)),
        (40, ProductTiling(64, 128, splits=4)),
        (129, ProductTiling(128, 64, splits=2)),
        (70, ProductTiling(128, 64, splits=4)),
    ],
    ids=str,
)
def test_residual_sums_with_their_norm(num_rows: int, tiling: ProductTiling) -> None:
    x, residual = random(num_rows, 1024 + 16)[:, 8:-8], random(num_rows, 256)
    weight, norm = random(256, 1024, scale=1024**-0.5), torch.rand(256).bfloat16() + 0.5
    result = decode_product.add_and_norm(x, weight, tiling, residual, norm, 1e-6)
    assert error(result.total, x.double() @ weight.double().T + residual.double()) < 4e-3
    assert torch.equal(result.weighted, (result.total.float() * norm.float()).bfloat16())
    assert error(result.squares.sum(0), result.total.double().square().sum(1)) < 1e-5
    assert not behind(result.weighted).any()


ROTATED = [
    (40, ProductTiling(64, 128)),
    (70, ProductTiling(64, 128, peers=2)),
    (70, ProductTiling(64, 128, beside_attention=True)),
]


@pytest.mark.parametrize(
    ("num_rows", "tiling", "head_dim", "has_bias"),
    # a bias depends on the size of heads, and on nothing else
    [(*case, size, bool((index + size // 64) % 2)) for index, case in enumerate(ROTATED) for size in (64, 128)],
    ids=str,
)
def test_rotation_and_cache(num_rows: int, tiling: ProductTiling, head_dim: int, has_bias: bool) -> None:
    x, normed = deferred(num_rows, 512)
    heads, kv_heads = 256 // head_dim, 128 // head_dim
    weight = random(512, 512, scale=512**-0.5)
    rotary = RotaryInputs(torch.rand(64, head_dim), torch.rand(head_dim).bfloat16() + 0.5, None, 1e-6)
    slots, positions = torch.arange(num_rows) * 3, torch.arange(num_rows) % 64
    slots[1] = -1
    caches = [torch.full((16, 2, kv_heads, 16, head_dim), 9.0).to(dtype) for dtype in (torch.bfloat16, torch.float32)]
    places = at_slots(slots, positions)
    bias = random(512) if has_bias else None
    query = decode_product.rotate_and_cache(x, weight, bias, tiling, caches[0], places, heads, rotary)
    product = (normed @ weight.double().T + (0.0 if bias is None else bias.double())).float()
    expected = rope_and_cache_torch(product, caches[1], places, heads, rotary)
    assert error(query, expected.double()) < 5e-3
    is_written = caches[1] != 9.0
    assert error(caches[0][is_written], caches[1][is_written].double()) < 5e-3
    assert bool((caches[0][~is_written] == 9.0).all())


@pytest.mark.parametrize(
    ("num_rows", "num_outputs", "tiling", "activation"),
    [
        (200, 336, GatedTiling(256, 224), "silu"),
        (129, 280, GatedTiling(192, 224), "gelu_tanh"),
        (270, 136, GatedTiling(256, 144, peers=1), "silu"),
    ],
    ids=str,
)
def test_gate_and_up_of_many_rows(num_rows: int, num_outputs: int, tiling: GatedTiling, activation: str) -> None:
    """Blocks have several tiles, some of which end behind the last output."""
    x, weight = random(num_rows, 512 + 16)[:, 8:-8], random(2 * num_outputs, 512, scale=512**-0.5)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=1)
    output = gated_product.multiply_gated_wide(x, weight, tiling, activation)
    assert error(output, ACTIVATIONS[activation](gate) * up) < 5e-3


@pytest.mark.parametrize(
    ("num_rows", "tiling"),
    [
        (64, GatedTiling(64, 224)),
        (70, GatedTiling(128, 224)),
        (128, GatedTiling(128, 96)),
        (200, GatedTiling(256, 176)),
    ],
    ids=str,
)
def test_gate_and_up_behind_a_deferred_norm(num_rows: int, tiling: GatedTiling) -> None:
    x, normed = deferred(num_rows, 512)
    weight = random(2 * 280, 512, scale=512**-0.5)
    gate, up = (normed @ weight.double().T).chunk(2, dim=1)
    output = gated_product.multiply_gated_wide(x, weight, tiling)
    assert error(output, torch.nn.functional.silu(gate) * up) < 5e-3
    assert not behind(output).any()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates_of_any_size(activation: str) -> None:
    """Reciprocals are computed in pairs, and none of a pair overflows. NaN stays."""
    values = torch.tensor([-torch.inf, -1e30, -300.0, -41.0, -20.0, 0.0, 50.0, 1e30]).bfloat16()
    x, weight = torch.zeros(130, 512).bfloat16(), torch.zeros(256, 512).bfloat16()
    x[:, 0] = 1.0
    weight[:128, 0], weight[128:, 0] = values.clamp(min=-3e38).repeat(16), 1.0
    output = gated_product.multiply_gated_wide(x, weight, GatedTiling(192, 128), activation)
    expected = ACTIVATIONS[activation](weight[:128, 0].double()).expand(130, 128)
    torch.testing.assert_close(output.double(), expected, rtol=0.01, atol=1e-15)
    weight[5, 0] = torch.nan
    assert output.isfinite().all()
    gated_product._weight_map.cache_clear()
    assert gated_product.multiply_gated_wide(x, weight, GatedTiling(192, 128), activation)[:, 5].isnan().all()


def scaled_weight(num_outputs: int, num_inputs: int, kind: str, rows: int, *, has_bias: bool = False) -> ScaledMatrix:
    values = (torch.randn(num_outputs, num_inputs) * 60).clamp(-448, 448).to(FP8)
    columns = 128 if kind == "group" else num_inputs
    scales = (torch.rand(-(-num_outputs // rows), num_inputs // columns) + 0.5) * 1e-3
    static = torch.tensor([0.02]) if kind == "static" else None
    return ScaledMatrix(values, scales, rows, columns, kind, static, random(num_outputs) if has_bias else None)


def scaled_product(x: torch.Tensor, weight: ScaledMatrix) -> torch.Tensor:
    """In float64, of inputs that are quantized first."""
    values, scales = quantize_rows(x, weight)
    wide = scales.double().repeat_interleave(x.shape[1] // scales.shape[1], dim=1)
    bias = 0.0 if weight.bias is None else weight.bias.double()
    return (values.double() * wide) @ weight.dequantized().double().T + bias


def launch(
    x: torch.Tensor, weight: ScaledMatrix, tiling: ScaledProduct, size: int, epilogue: Epilogue = PLAIN_EPILOGUE
) -> torch.Tensor:
    """One row as it is, more of them quantized."""
    output, scales = torch.empty(len(x), size, dtype=x.dtype), None
    if len(x) > 1:
        x, scales = quantize_rows(x, weight)
    launch_scaled_hopper(output, x, None if weight.activations == "static" else scales, weight, tiling, epilogue)
    return output


@pytest.mark.parametrize("num_rows", [1, 5, 8])
@pytest.mark.parametrize(
    ("kind", "rows", "num_outputs", "num_inputs", "tiling"),
    [
        ("group", 128, 200, 512, ScaledProduct(1, 4, 2, 2)),  # a tile that ends behind the last output
        ("group", 1, 64, 640, ScaledProduct(2, 2, 1, 1)),  # warps with different numbers of groups
        ("token", 1, 72, 256, ScaledProduct(2, 4, 4, 1)),  # warps without a group
        ("static", 96, 96, 384, ScaledProduct(1, 2, 1, 4)),
    ],
    ids=str,
)
def test_weights_in_fp8(
    num_rows: int, kind: str, rows: int, num_outputs: int, num_inputs: int, tiling: ScaledProduct
) -> None:
    weight = scaled_weight(num_outputs, num_inputs, kind, rows, has_bias=num_rows == 5)
    x = random(num_rows, num_inputs)
    x[:, 7] = 30.0  # other groups have other scales
    if kind != "static":
        x[0, -128:] = 0.0
    assert error(launch(x, weight, tiling, num_outputs), scaled_product(x, weight)) < 2.5e-3
    if num_rows > 1:
        x[1, 3] = torch.nan
        isnan = launch(x, weight, tiling, num_outputs).isnan()
        assert isnan[1].all() and not isnan[0].any()


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("kind", ["group", "token"])
def test_weights_in_fp8_between_norms(num_rows: int, kind: str) -> None:
    x, _ = deferred(num_rows, 384)
    factor = (x.squares.double().sum(0) / 384 + x.eps).rsqrt()[:, None]
    gated = scaled_weight(2 * 48, 384, kind, 16 if kind == "group" else 1)
    gate, up = (scaled_product(x.weighted, gated) * factor).chunk(2, dim=1)
    for index, activation in enumerate(ACTIVATIONS, 1):
        output = launch(x.weighted, gated, ScaledProduct(2, 2, 2, 1), 48, Epilogue(x, gated=index))
        assert error(output, ACTIVATIONS[activation](gate) * up) < 6e-3

    weight, residual, norm = scaled_weight(80, 384, kind, 1), random(num_rows, 80), torch.rand(80).bfloat16() + 0.5
    result = DeferredRMSNorm.empty(residual, 3, 1e-6)
    epilogue = Epilogue(add_norm=(residual, norm, result), scale=0.5)
    weighted = launch(x.weighted, weight, ScaledProduct(2, 2, 2, 1), 80, epilogue)
    assert error(result.total, scaled_product(x.weighted, weight) * 0.5 + residual.double()) < 4e-3
    assert torch.equal(weighted, (result.total.float() * norm.float()).bfloat16())
    assert error(result.squares.sum(0), result.total.double().square().sum(1)) < 1e-5


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_chain_with_a_gate_in_blocks(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row takes the kernel for Hopper GPUs, several Triton's."""
    monkeypatch.setattr(chain, "has_hopper_kernel", lambda *_: True)
    x, _ = deferred(num_rows, 384)
    weight = scaled_weight(2 * 48, 384, "group", 16)
    factor = (x.squares.double().sum(0) / 384 + x.eps).rsqrt()[:, None]
    gate, up = (scaled_product(x.weighted, weight) * factor).chunk(2, dim=1)
    chained = chain.quantized_chain_triton(weight, InputRole("gated", activation="silu"))
    assert chained is not None
    assert error(chained(x), torch.nn.functional.silu(gate) * up) < 6e-3
