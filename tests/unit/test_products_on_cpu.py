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
    for module in (decode_product, gated_product):
        monkeypatch.setattr(module, "load", compiled)
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
