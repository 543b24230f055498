"""The Triton kernels of quantized weights in the interpreter, beside the references."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.helpers.interpreter import compiled, interpreted, run_python

from fleetfoot.kernels.quantized.packed import (
    PackedMatrix,
    pack_words,
    packed_linear_torch,
    unpack_words,
)
from fleetfoot.kernels.quantized.packed_triton import (
    LIBRARY_ROWS,
    launch_packed,
    packed_linear_triton,
    packed_tiling,
    write_weight,
)
from fleetfoot.kernels.quantized.scaled import ScaledMatrix, quantize_rows, scaled_linear_torch
from fleetfoot.kernels.quantized.scaled_triton import (
    ScaledTiling,
    launch_scaled,
    quantize_rows_triton,
    scaled_linear_triton,
    scaled_tiling,
)

FP8 = torch.float8_e4m3fn
INPUTS = {"": 0, "token": 0, "group": 64, "static": 0}


def matrix(
    num_outputs: int, num_inputs: int, activations: str, columns: int = 0, *, bias: bool = False
) -> ScaledMatrix:
    generator = torch.Generator().manual_seed(num_outputs)
    values = (torch.randn(num_outputs, num_inputs, generator=generator) * 60).to(FP8)
    rows, columns = (32, columns) if columns else (1, num_inputs)
    shape = -(-num_outputs // rows), -(-num_inputs // columns)
    scales = (torch.rand(shape, generator=generator) + 0.5) * 0.01
    biases = torch.randn(num_outputs, generator=generator).to(torch.bfloat16) if bias else None
    return ScaledMatrix(values, scales, rows, columns, activations, torch.tensor([0.004]), biases)


def inputs(num_rows: int, num_inputs: int) -> torch.Tensor:
    return torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(num_rows)).to(torch.bfloat16)


@interpreted
@pytest.mark.parametrize("activations", ["token", "group", "static"])
def test_quantized_rows(activations: str) -> None:
    for size in (256, 5008):
        weight, x = matrix(32, size, activations, 64), inputs(3, size)
        values, scales = quantize_rows_triton(x, weight)
        expected, expected_scales = quantize_rows(x, weight)
        assert torch.equal(scales, expected_scales)
        assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))


@interpreted
@pytest.mark.parametrize("activations", INPUTS)
@pytest.mark.parametrize("num_rows", [1, 3, 20])
def test_products_with_fp8(num_rows: int, activations: str) -> None:
    for num_outputs, num_inputs, columns, bias in ((40, 512, 0, True), (72, 528, 64, False)):
        weight, x = matrix(num_outputs, num_inputs, activations, columns, bias=bias), inputs(num_rows, num_inputs)
        expected = scaled_linear_torch(x, weight)
        torch.testing.assert_close(scaled_linear_triton(x, weight), expected, rtol=0.02, atol=0.02)


@interpreted
def test_ranges_of_inputs_are_added() -> None:
    weight, x = matrix(72, 1024, "token", bias=True), inputs(18, 1024)
    found = launch_scaled(x, weight, ScaledTiling("tiled", 64, 128, 32, 2, 4, splits=4))
    torch.testing.assert_close(found, scaled_linear_torch(x, weight), rtol=0.02, atol=0.02)


def test_tilings_of_llama() -> None:
    """Few rows and blocks are never the library's, and programs fill the multiprocessors where they can."""
    for num_outputs, num_inputs in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        for num_rows in (1, 8, 9, 64, 128, 129, 2048):
            by_output = scaled_tiling(num_rows, num_outputs, num_inputs, num_inputs, 132)
            by_block = scaled_tiling(num_rows, num_outputs, num_inputs, 128, 132)
            assert (by_output.kernel == "library") == (num_rows > 128)
            assert by_block.kernel == ("few" if num_rows <= 8 else "tiled")
            programs = -(-num_outputs // by_block.outputs) * by_block.splits
            assert programs * -(-num_rows // max(1, by_block.row_tile)) >= 100


def packed(num_outputs: int, num_inputs: int, group: int, kind: str) -> PackedMatrix:
    generator = torch.Generator().manual_seed(num_inputs)
    codes = torch.randint(0, 16, (num_outputs, num_inputs), dtype=torch.uint8, generator=generator)
    shape = num_outputs, -(-num_inputs // (group or num_inputs))
    scales = ((torch.rand(shape, generator=generator) + 0.5) * 0.01).to(torch.bfloat16)
    zeros = torch.randint(0, 16, shape, dtype=torch.uint8, generator=generator) if kind == "zeros" else None
    bias = torch.randn(num_outputs, generator=generator).to(torch.bfloat16) if kind == "bias" else None
    words, order = pack_words(codes), torch.randperm(num_inputs) if kind == "order" else None
    assert torch.equal(unpack_words(words)[:, :num_inputs], codes)
    return PackedMatrix(words, scales, zeros, group or num_inputs, num_inputs, kind == "mxfp4", order, bias)


@interpreted
@pytest.mark.parametrize(("kind", "group"), [("zeros", 128), ("bias", 32), ("mxfp4", 32), ("order", 64), ("zeros", 0)])
@pytest.mark.parametrize("num_rows", [1, 5, 18])
def test_products_with_4_bits(num_rows: int, kind: str, group: int) -> None:
    for num_outputs, num_inputs in ((40, 512), (72, 656)):
        weight, x = packed(num_outputs, num_inputs, group, kind), inputs(num_rows, num_inputs)
        for dtype in (torch.bfloat16, torch.float16):
            values = x.to(dtype)
            expected = packed_linear_torch(values, weight)
            torch.testing.assert_close(packed_linear_triton(values, weight), expected, rtol=0.02, atol=0.02)


@interpreted
def test_ranges_of_inputs_are_added_with_4_bits() -> None:
    weight, x = packed(72, 1040, 16, "bias"), inputs(18, 1040)
    tiling = replace(packed_tiling(18, 72, 1040, 4), splits=4)
    torch.testing.assert_close(launch_packed(x, weight, tiling), packed_linear_torch(x, weight), rtol=0.02, atol=0.02)


@interpreted
def test_the_weight_is_written_for_the_library() -> None:
    for kind in ("zeros", "mxfp4", ""):
        weight = packed(21, 656, 32, kind)
        written = write_weight(weight, slice(5, 21), torch.bfloat16)
        assert torch.equal(written, weight.dequantized(5, 21).to(torch.bfloat16))
    weight, x = packed(40, 256, 64, "bias"), inputs(LIBRARY_ROWS, 256)
    torch.testing.assert_close(packed_linear_triton(x, weight), packed_linear_torch(x, weight), rtol=0.02, atol=0.02)


@compiled
def test_kernels_compile_for_an_h100(tmp_path: Path) -> None:
    """Without spilling registers, and with two programs on a multiprocessor up to some dozens of rows."""
    arguments = ("-m", "tests.helpers.compile_kernels", "quantized")
    lines = run_python(*arguments, is_forked=True, TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    assert {line.split(":")[0] for line in lines} == {
        *("_scaled_few_rows_kernel", "_scaled_tiled_kernel", "_quantize_rows_kernel", "_sum_splits_kernel"),
        *("_packed_few_rows_kernel", "_packed_tiled_kernel", "_write_weight_kernel"),
    }
    for line in lines:
        stack, shared = re.findall(r"(\d+) bytes", line)
        assert int(stack) == 0 and int(shared) < 101 * 1024, line
