"""Products of decode steps with norms on their two sides: their tilings, and rows that whole tiles may read."""

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from fleetfoot.kernels.linear.linear_triton import ChainedResidual
from fleetfoot.kernels.runtime.cuda_source import CudaKernel
from fleetfoot.kernels.runtime.row_padding import empty_rows, readable_rows
from fleetfoot.kernels_hopper.linear import decode_product, gated_product
from fleetfoot.kernels_hopper.linear.decode_product import kernel_of
from fleetfoot.kernels_hopper.linear.linear import HopperGateUp, HopperInput, HopperResidual
from fleetfoot.kernels_hopper.linear.product_tilings import (
    GatedTiling,
    ProductTiling,
    attention_bytes,
    product_tiling,
)

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
    for num_rows in (17, 33, 64, 65, 128, 129, 192, 193, 256)
]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("num_rows", [16, 17, 32, 33, 64, 65, 128, 129, 256, 257])
def test_rows_with_norms_within_products(name: str, num_rows: int) -> None:
    """The norms of Llama-3.1-8B are kernels from 129 rows on, since its products are others. With one tile of rows, few
    heads are no product."""
    found = [
        product_tiling(num_rows, kind, *shape, NUM_SMS) is not None
        for kind, shape in zip(KINDS, SHAPES[name], strict=True)
    ]
    last = 128 if name == "Llama-3.1-8B" else 256
    assert found[1] == found[2] == found[3] == (16 < num_rows <= last)
    assert found[0] == found[1] or num_rows <= (32 if name == "Llama-3.1-8B" else 64)


@pytest.mark.parametrize("num_sms", [NUM_SMS, 114, 78])  # the last: an H20
@pytest.mark.parametrize(("kind", "shape", "num_rows"), CASES)
def test_tilings_fit(kind, shape, num_rows: int, num_sms: int) -> None:
    tiling = product_tiling(num_rows, kind, *shape, num_sms)
    if tiling is None:
        return
    num_weight_rows, num_inputs = shape
    if isinstance(tiling, GatedTiling):
        kernel = gated_product.kernel_of(tiling, num_inputs, deferred=True)
        assert kernel.shared_bytes <= 232448 and dict(kernel.defines)["STAGES"] >= 3
        assert kind == "gated" and tiling.rows >= num_rows
        return
    kernel = kernel_of(kind, tiling, num_inputs, *((128, 16) if kind == "qkv" else (0, 0)))
    defines = dict(kernel.defines)
    assert kernel.shared_bytes <= 232448 and defines["STAGES"] >= 2
    assert num_weight_rows % tiling.outputs == 0 and num_inputs % (64 * tiling.splits) == 0
    assert kernel.cluster in (1, 2, 4) and tiling.row_tiles(num_rows) % tiling.peers == 0
    assert tiling.row_tiles(num_rows) * tiling.rows >= num_rows
    blocks = tiling.row_tiles(num_rows) * (num_weight_rows // tiling.outputs) * tiling.splits
    assert kind == "gated" or blocks <= num_sms  # a second round would wait for the first


@pytest.mark.parametrize(("head_dim", "stages"), [(64, 7), (128, 5)])
def test_attention_has_room_beside_a_product(head_dim: int, stages: int) -> None:
    """On a multiprocessor with 228 KB of shared memory, and 16,384 registers for each quarter of the warps."""
    tiling = product_tiling(256, "qkv", 4096, 1024, NUM_SMS)
    assert tiling is not None and tiling.beside_attention
    kernel = kernel_of("qkv", tiling, 1024, head_dim, 16)
    defines = dict(kernel.defines)
    assert kernel.shared_bytes + attention_bytes(head_dim) + 2 * 1024 <= 228 << 10
    assert defines["STAGES"] == stages and defines["BESIDE_ATTENTION"] == 1
    warps, attention_warps = kernel.threads // 32, 8
    assert (-(-warps // 4) * defines["REGISTERS"] + attention_warps // 4 * 128) * 32 <= 16384
    for num_rows, num_inputs in ((128, 1024), (256, 2048)):
        other = product_tiling(num_rows, "qkv", 4096, num_inputs, NUM_SMS)
        assert other is not None and not other.beside_attention


def test_row_padding() -> None:
    like = torch.empty(0, dtype=torch.bfloat16)
    for num_rows, room in (
        (1, 1),
        (16, 16),
        (17, 64),
        (32, 64),
        (40, 64),
        (64, 64),
        (65, 128),
        (128, 128),
        (160, 256),
        (256, 256),
        (300, 300),
    ):
        x = empty_rows(num_rows, 2, 8, like=like)
        assert x.shape == (num_rows, 2, 8) and x.dtype is like.dtype and x.is_contiguous()
        assert readable_rows(x.flatten(1), 64) == min(room, -(-num_rows // 64) * 64)
    assert readable_rows(torch.empty(100, 24)[:, 8:16], 64) == 100  # what follows the last row ends early
    assert readable_rows(torch.empty(200, 24)[10:110, 8:16], 64) == 128


def test_other_devices_and_types_have_no_such_kernel() -> None:
    weight = torch.zeros(1024, 1024, dtype=torch.bfloat16)
    for residual in (ChainedResidual(weight), HopperResidual(weight)):  # of another GPU, and where nothing compiles it
        assert residual.add_and_norm(weight[:100], weight[:100], weight[0], 1e-6) is None
    assert not HopperGateUp(weight).reads_deferred_norm(100)
    layer = HopperInput(weight)
    layer._choices.has_products = True
    assert not layer.reads_deferred_norm(100)  # without heads


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize(
    ("module", "kernel"),
    [
        (decode_product, kernel_of("residual", ProductTiling(64, 64, splits=2), 1024)),
        (gated_product, gated_product.kernel_of(GatedTiling(256, 224), 4096)),
    ],
    ids=["decode_product", "gated_product"],
)
def test_arguments_of_the_source(module, kernel: CudaKernel, tmp_path: Path) -> None:
    """The struct of the source has the size and the layout of the one in Python."""
    fields = [name for name, *_ in module._Arguments._fields_]
    checks = "\n".join(
        f"static_assert(offsetof(Arguments, {name}) == {getattr(module._Arguments, name).offset});" for name in fields
    )
    source = tmp_path / "check.cu"
    source.write_text(f'#include <cstddef>\n#include "{module.SOURCE_PATH}"\n{checks}\n')
    command = ["nvcc", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-cubin", "-o", tmp_path / "check.cubin"]
    command += [
        *(f"-I{folder}" for folder in kernel.include_paths),
        *(f"-D{key}={value}" for key, value in kernel.defines),
    ]
    command.append(source)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
