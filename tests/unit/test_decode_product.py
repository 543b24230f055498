"""Products of decode steps with norms on their two sides: their tilings, and rows that whole tiles may read."""

import shutil
import subprocess

import pytest
import torch

from fleetfoot.kernels.linear import decode_product
from fleetfoot.kernels.linear.decode_product import kernel_of
from fleetfoot.kernels.linear.linear_triton import ChainedGateUp, ChainedLinear, ChainedResidual
from fleetfoot.kernels.linear.product_tilings import ProductTiling, product_tiling
from fleetfoot.kernels.runtime.row_padding import empty_rows, readable_rows

NUM_SMS = 132
SHAPES = {  # q, k and v; o; gate and up; down
    "Qwen3-0.6B": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "Llama-3.2-1B": ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)),
    "Llama-3.1-8B": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
}
KINDS = ("qkv", "residual", "gated", "residual")
CASES = [
    (kind, shape, num_rows)
    for shapes in SHAPES.values()
    for kind, shape in zip(KINDS, shapes, strict=True)
    for num_rows in (65, 128, 129, 192, 193, 256)
]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("num_rows", [64, 65, 128, 129, 256, 257])
def test_rows_with_norms_within_products(name: str, num_rows: int) -> None:
    """The norms of Llama-3.1-8B are kernels from 129 rows on, since its products are those of the library."""
    found = [
        product_tiling(kind, num_rows, *shape, NUM_SMS) is not None
        for kind, shape in zip(KINDS, SHAPES[name], strict=True)
    ]
    last = 128 if name == "Llama-3.1-8B" else 256
    assert found[1] == found[3] == (64 < num_rows <= last)
    assert not found[1] or all(found)


@pytest.mark.parametrize(("kind", "shape", "num_rows"), CASES)
def test_tilings_fit(kind, shape, num_rows: int) -> None:
    tiling = product_tiling(kind, num_rows, *shape, NUM_SMS)
    if tiling is None:
        return
    num_weight_rows, num_inputs = shape
    kernel = kernel_of(kind, tiling, num_inputs, *((128, 16) if kind == "qkv" else (0, 0)))
    defines = dict(kernel.defines)
    assert kernel.shared_bytes <= 232448 and defines["STAGES"] >= 2
    assert num_weight_rows % tiling.outputs == 0 and num_inputs % (64 * tiling.splits) == 0
    assert kernel.cluster in (1, 2, 4) and tiling.row_tiles(num_rows) % tiling.peers == 0
    assert tiling.row_tiles(num_rows) * tiling.rows >= num_rows
    blocks = tiling.row_tiles(num_rows) * (num_weight_rows // tiling.outputs) * tiling.splits
    assert kind == "gated" or blocks <= NUM_SMS  # a second round would wait for the first


def test_two_blocks_of_a_multiprocessor() -> None:
    tiling = ProductTiling(128, 128, resident=2)
    assert 2 * (tiling.shared_bytes(4096) + 1024) <= 233472
    assert tiling.shared_bytes(4096) < ProductTiling(128, 128).shared_bytes(4096)


def test_row_padding() -> None:
    like = torch.empty(0, dtype=torch.bfloat16)
    for num_rows, room in ((1, 1), (64, 64), (65, 128), (128, 128), (160, 256), (256, 256), (300, 300)):
        x = empty_rows(num_rows, 2, 8, like=like)
        assert x.shape == (num_rows, 2, 8) and x.dtype is like.dtype and x.is_contiguous()
        assert readable_rows(x.flatten(1), 64) == min(room, -(-num_rows // 64) * 64)
    assert readable_rows(torch.empty(100, 24)[:, 8:16], 64) == 100  # what follows the last row ends early
    assert readable_rows(torch.empty(200, 24)[10:110, 8:16], 64) == 128


def test_other_devices_and_types_have_no_such_kernel() -> None:
    weight = torch.zeros(1024, 1024, dtype=torch.bfloat16)
    assert not ChainedGateUp(weight).reads_deferred_norm(100)
    residual = ChainedResidual(weight)
    assert residual.add_and_norm(weight[:100], weight[:100], weight[0], 1e-6) is None
    layer = ChainedLinear(weight)
    layer._has_hopper_kernel = True
    assert not layer.reads_deferred_norm(100)  # without heads


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_arguments_of_the_source(tmp_path) -> None:
    """The struct of the source has the size and the layout of the one in Python."""
    fields = [name for name, *_ in decode_product._Arguments._fields_]
    checks = "\n".join(
        f"static_assert(offsetof(Arguments, {name}) == {getattr(decode_product._Arguments, name).offset});"
        for name in fields
    )
    source = tmp_path / "check.cu"
    kernel = kernel_of("residual", ProductTiling(64, 64, splits=2), 1024)
    source.write_text(f'#include <cstddef>\n#include "{decode_product.SOURCE_PATH}"\n{checks}\n')
    command = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-cubin", "-o", tmp_path / "check.cubin"]
    command += [
        f"-I{decode_product.SOURCE_PATH.parent}",
        *(f"-D{key}={value}" for key, value in kernel.defines),
        source,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
