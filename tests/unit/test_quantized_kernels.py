"""The Triton kernels of quantized weights in the interpreter, beside the references."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from tests.helpers.interpreter import compiled, interpreted, run_python
from tests.helpers.ops_checks import packed_matrix

from fleetfoot.kernels.elementwise import DeferredRMSNorm, gelu_and_mul_torch, silu_and_mul_torch
from fleetfoot.kernels.linear.roles import InputRole, OutputRole
from fleetfoot.kernels.native_blocks import scaled_linear_native
from fleetfoot.kernels.quantized.chain import Matrix, quantized_chain_triton
from fleetfoot.kernels.quantized.packed import (
    PackedMatrix,
    packed_linear_torch,
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
    multiply_written,
    quantize_rows_triton,
    scaled_linear_triton,
    scaled_tiling,
    write_scaled,
)
from fleetfoot.native.loading import load_library, native_problem

FP8 = torch.float8_e4m3fn
KINDS = ["none fp8", "token fp8", "group fp8", "static fp8", "none int8", "token int8"]


def matrix(
    num_outputs: int,
    num_inputs: int,
    activations: str,
    columns: int = 0,
    *,
    bias: bool = False,
    dtype: torch.dtype = FP8,
) -> ScaledMatrix:
    generator = torch.Generator().manual_seed(num_outputs)
    spread = 60 if dtype is FP8 else 40
    values = (torch.randn(num_outputs, num_inputs, generator=generator) * spread).to(dtype)
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
    for size, dtype in ((256, FP8), (256, torch.int8), (5008, FP8)):
        weight, x = matrix(32, size, activations, 64, dtype=dtype), inputs(3, size)
        values, scales = quantize_rows_triton(x, weight)
        expected, expected_scales = quantize_rows(x, weight)
        assert torch.equal(scales, expected_scales)
        assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_rows", [1, 3, 20])
def test_products_with_8_bits(num_rows: int, kind: str) -> None:
    activations, dtype = kind.split()[0].replace("none", ""), torch.int8 if "int8" in kind else FP8
    for num_outputs, num_inputs, columns, bias in ((40, 512, 0, True), (72, 528, 64, False)):
        weight = matrix(num_outputs, num_inputs, activations, columns, bias=bias, dtype=dtype)
        x = inputs(num_rows, num_inputs)
        expected = scaled_linear_torch(x, weight)
        torch.testing.assert_close(scaled_linear_triton(x, weight), expected, rtol=0.02, atol=0.02)


@interpreted
@pytest.mark.skipif(bool(native_problem()), reason="the C kernels are not there")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_in_c(dtype: torch.dtype) -> None:
    """Sums are exact, also of -128 on both sides; the bits of a row do not depend on the batch."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-128, 128, (27, 160), generator=generator).to(torch.int8)
    values[3] = -128
    x = torch.randn(13, 160, generator=generator)
    x[2, :80], x[4] = -3.0, -1.0
    bias = torch.randn(27, generator=generator).to(dtype)
    scales = torch.rand(27, 1, generator=generator) * 0.01
    weight = ScaledMatrix(values, scales, 1, 160, "token", None, bias)
    multiply = partial(scaled_linear_native, load_library())
    found, expected = multiply(x.to(dtype), weight), scaled_linear_torch(x.to(dtype), weight)
    torch.testing.assert_close(found, expected, rtol=2e-5 if dtype is torch.float32 else 1e-2, atol=1e-4)
    for begin, end in ((0, 1), (2, 4), (4, 12)):
        assert torch.equal(multiply(x[begin:end].to(dtype), weight), found[begin:end])


def test_blocks_are_written_for_the_library() -> None:
    weight, x = matrix(40, 272, "group", 64, bias=True), inputs(6, 272)
    written = write_scaled(weight, torch.bfloat16, slice(8, 40))
    assert torch.equal(written, weight.dequantized(8, 40).to(torch.bfloat16))
    rounded, scales = quantize_rows_triton(x, weight, is_written=True)
    values, _ = quantize_rows(x, weight)
    expected = values.float() * scales.repeat_interleave(64, dim=1)[:, :272]
    assert torch.equal(rounded, expected.to(torch.bfloat16))
    product = multiply_written(rounded, weight.bias, 40, partial(write_scaled, weight, torch.bfloat16))
    torch.testing.assert_close(product, scaled_linear_torch(x, weight), rtol=0.02, atol=0.15)


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
            assert by_block.kernel == ("few" if num_rows <= 8 else "tiled" if num_rows <= 512 else "library")
            programs = -(-num_outputs // max(1, by_block.outputs)) * by_block.splits
            assert by_block.kernel == "library" or programs * -(-num_rows // by_block.row_tile) >= 100


def test_tilings_of_hopper() -> None:
    """One row of any form, and up to 8 rows in blocks without a gate, where shared memory holds their inputs."""
    for num_rows in (1, 2, 8, 9):
        for num_inputs, columns, gated in product((2048, 14336), (128, 0), (False, True)):
            sizes = num_rows, 4096, num_inputs, columns or num_inputs, 132
            found = scaled_tiling(*sizes, hopper=True, gated=gated)
            of_rows = num_rows <= 8 and columns == 128 and num_inputs == 2048 and not gated
            assert (found.kernel == "hopper") == (found.product is not None) == (num_rows == 1 or of_rows)
            assert scaled_tiling(*sizes, gated=gated).product is None
            if found.product is not None and gated:
                assert found.product.tiles == 2 and found.outputs == 16


@interpreted
@pytest.mark.parametrize(("kind", "group"), [("zeros", 128), ("bias", 32), ("mxfp4", 32), ("order", 64), ("zeros", 0)])
@pytest.mark.parametrize("num_rows", [1, 5, 18])
def test_products_with_4_bits(num_rows: int, kind: str, group: int) -> None:
    for num_outputs, num_inputs in ((40, 512), (72, 656)):
        weight, x = packed_matrix(num_outputs, num_inputs, group, kind), inputs(num_rows, num_inputs)
        for dtype in (torch.bfloat16, torch.float16):
            values = x.to(dtype)
            expected = packed_linear_torch(values, weight)
            torch.testing.assert_close(packed_linear_triton(values, weight), expected, rtol=0.02, atol=0.02)


@interpreted
def test_ranges_of_inputs_are_added_with_4_bits() -> None:
    weight, x = packed_matrix(72, 1040, 16, "bias"), inputs(18, 1040)
    tiling = replace(packed_tiling(18, 72, 1040, 4, hopper=False), splits=4)
    torch.testing.assert_close(launch_packed(x, weight, tiling), packed_linear_torch(x, weight), rtol=0.02, atol=0.02)


@interpreted
def test_the_weight_is_written_for_the_library() -> None:
    for kind in ("zeros", "mxfp4", ""):
        weight = packed_matrix(21, 656, 32, kind)
        written = write_weight(weight, torch.bfloat16, slice(5, 21))
        assert torch.equal(written, weight.dequantized(5, 21).to(torch.bfloat16))
    weight, x = packed_matrix(40, 256, 64, "bias"), inputs(LIBRARY_ROWS, 256)
    torch.testing.assert_close(packed_linear_triton(x, weight), packed_linear_torch(x, weight), rtol=0.02, atol=0.02)


MATRICES = {
    "fp8 by token": lambda outputs: matrix(outputs, 512, "token", bias=True),
    "fp8 by group": lambda outputs: matrix(outputs, 512, "group", 64),
    "4 bits": lambda outputs: packed_matrix(outputs, 512, 64, "zeros"),
    "mxfp4": lambda outputs: packed_matrix(outputs, 512, 32, "mxfp4"),
}


def multiply(x: torch.Tensor, weight: ScaledMatrix | PackedMatrix) -> torch.Tensor:
    return scaled_linear_torch(x, weight) if isinstance(weight, ScaledMatrix) else packed_linear_torch(x, weight)


def normed(x: DeferredRMSNorm, weight: Matrix) -> torch.Tensor:
    factor = torch.rsqrt(x.squares.sum(dim=0) / x.total.shape[1] + x.eps)[:, None]
    product = multiply(x.weighted, replace(weight, bias=None)).float() * factor
    return (product if weight.bias is None else product + weight.bias).to(x.weighted.dtype)


@interpreted
@pytest.mark.parametrize("make", MATRICES.values(), ids=MATRICES)
@pytest.mark.parametrize("num_rows", [1, 5])
def test_norms_and_gates_are_part_of_products(
    make: Callable[[int], ScaledMatrix | PackedMatrix], num_rows: int
) -> None:
    """As separate operations, where a norm's factor comes after the product."""
    total, norm = inputs(num_rows, 512), torch.rand(512).to(torch.bfloat16)
    squares = total.float().square().unflatten(1, (4, -1)).sum(dim=2).T.contiguous()  # [4, rows]
    deferred = DeferredRMSNorm(total * norm, squares, total, 1e-5)
    close = partial(torch.testing.assert_close, rtol=0.04, atol=0.04)
    weight = make(64)
    role = quantized_chain_triton(weight, InputRole("qkv"))
    assert role is not None and role.reads_deferred_norm(num_rows) and not role.reads_deferred_norm(9)
    close(role(deferred), normed(deferred, weight))
    for activation, reference in (("silu", silu_and_mul_torch), ("gelu_tanh", gelu_and_mul_torch)):
        gated = quantized_chain_triton(weight, InputRole("gated", activation=activation))
        assert gated is not None
        for x in (total, deferred):
            product = multiply(x, weight) if isinstance(x, torch.Tensor) else normed(x, weight)
            close(gated(x), reference(product))
    output, weight = inputs(num_rows, 512), make(72)
    chained = quantized_chain_triton(weight, OutputRole(0.5))
    assert chained is not None
    residual, norm = inputs(num_rows, 72), torch.rand(72).to(torch.bfloat16)
    found = chained.add_and_norm(output, residual, norm, 1e-5)
    assert found is not None
    close(found.total, residual + multiply(output, weight) * 0.5)
    close(found.weighted, found.total * norm)
    close(found.squares.sum(dim=0), found.total.float().square().sum(dim=1))
    close(chained(output), multiply(output, weight) * 0.5)


def test_what_is_not_chained() -> None:
    static, ordered = matrix(64, 512, "static"), packed_matrix(64, 512, 64, "order")
    assert quantized_chain_triton(static, OutputRole()) is quantized_chain_triton(ordered, InputRole("qkv")) is None


@compiled
def test_kernels_compile_for_an_h100(tmp_path: Path) -> None:
    """Without spilling registers, and within the memory of a multiprocessor."""
    arguments = ("-m", "tests.helpers.compile_kernels", "quantized")
    lines = run_python(*arguments, is_forked=True, TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    assert {line.split(":")[0] for line in lines} == {
        *("_scaled_few_rows_kernel", "_scaled_tiled_kernel", "_quantize_rows_kernel", "_sum_splits_kernel"),
        *("_packed_hopper_kernel", "_packed_few_rows_kernel", "_packed_tiled_kernel", "_write_weight_kernel"),
    }
    for line in lines:
        stack, shared = re.findall(r"(\d+) bytes", line)
        assert int(stack) <= 8 and int(shared) <= 227 * 1024, line  # exact divisions have 8 bytes
