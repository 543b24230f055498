"""Products with the types of GGUF files on this GPU: their errors, and their time beside AWQ's at the same shapes.

    python benchmarks/gpu_gguf.py                 # Llama-3.1-8B's matrices, 1, 8 and 64 rows: less than a minute
    TRITON_INTERPRET=1 python benchmarks/gpu_gguf.py --small   # errors alone, on a CPU

Blocks are random. The error is that of outputs, relative, against float32 products with the dequantized blocks;
bfloat16 outputs alone have 0.0017. A time is the median of replays of a graph with so many matrices that they do not
fit in the L2 cache, for each. AWQ has groups of 128 with zero points.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch

from fleetfoot.kernels.quantized import block_form
from fleetfoot.kernels.quantized.block_matrices import empty_matrix, tensors_of, write_blocks
from fleetfoot.kernels.quantized.blocks import dequantize
from fleetfoot.kernels.quantized.packed import PackedMatrix
from fleetfoot.kernels.quantized.packed_triton import packed_linear_triton
from fleetfoot.kernels.quantized.scaled import ScaledMatrix
from fleetfoot.kernels.quantized.scaled_triton import scaled_linear_triton
from fleetfoot.records.weights import BLOCK_TYPES_BY_NAME

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
SMALL = {"small": (96, 512)}
TYPES = ("Q4_K", "Q8_0", "Q6_K")
CACHE_BYTES = 200e6
"""More than the L2 cache has."""

Matrix = PackedMatrix | ScaledMatrix


def random_blocks(kind: str, shape: tuple[int, int], device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """``[out, bytes of a row]`` with values of the order of 0.02."""
    each = BLOCK_TYPES_BY_NAME[kind]
    size = (shape[0], shape[1] // each.size, each.num_bytes)
    blocks = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)

    def halves(typical: float) -> torch.Tensor:
        drawn = torch.rand(size[:2], device=device, generator=generator) * typical + typical
        return drawn.half()[..., None].view(torch.uint8)

    if kind == "MXFP4":
        blocks[..., 0] = blocks[..., 0] % 4 + 117
    elif kind == "Q6_K":
        blocks[..., 208:] = halves(1e-5)
    else:
        blocks[..., :2] = halves({"Q8_0": 1e-4, "Q4_0": 2e-3}.get(kind, 5e-5))
        if kind in ("Q4_K", "Q5_K"):
            blocks[..., 2:4] = halves(4e-4)
    return blocks.flatten(1)


def multiply(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    return scaled_linear_triton(x, matrix) if isinstance(matrix, ScaledMatrix) else packed_linear_triton(x, matrix)


def block_matrix(kind: str, shape: tuple[int, int], blocks: torch.Tensor) -> Matrix:
    number = BLOCK_TYPES_BY_NAME[kind].number
    matrix = empty_matrix(block_form(number), *shape, torch.bfloat16, blocks.device, None)
    write_blocks(matrix, 0, number, blocks)
    assert not isinstance(matrix, torch.Tensor)
    return matrix


def awq_matrix(shape: tuple[int, int], device: torch.device, generator: torch.Generator) -> PackedMatrix:
    outputs, inputs = shape
    words = torch.randint(-(2**31), 2**31, (outputs, inputs // 8), device=device, generator=generator).int()
    scales = torch.rand(outputs, inputs // 128, device=device, generator=generator).bfloat16() * 0.01
    zeros = torch.randint(4, 12, scales.shape, device=device, generator=generator).to(torch.uint8)
    return PackedMatrix(words, scales, zeros, 128, inputs)


def copies(matrix: Matrix) -> list[Matrix]:
    """The matrix and others like it, more than the cache holds."""
    count = max(1, round(CACHE_BYTES / sum(each.nbytes for each in tensors_of(matrix)))) + 1
    made = []
    for _ in range(count):
        if isinstance(matrix, ScaledMatrix):
            made.append(ScaledMatrix(matrix.values.clone(), matrix.scales.clone(), matrix.rows, matrix.columns, ""))
        else:
            zeros = None if matrix.zeros is None else matrix.zeros.clone()
            words, scales = matrix.words.clone(), matrix.scales.clone()
            made.append(PackedMatrix(words, scales, zeros, matrix.group, matrix.num_inputs, matrix.is_e2m1))
    return made


def time_us(products: Sequence[Callable[[], object]]) -> float:
    """Median time of one of the products in a graph with all of them."""
    for product in products:
        product()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in products:
            product()
    times = []
    for _ in range(12):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[2:]) / len(products)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--types", nargs="+", default=TYPES, choices=sorted(BLOCK_TYPES_BY_NAME))
    parser.add_argument("--small", action="store_true", help="one small matrix, and no times")
    args = parser.parse_args()
    device = torch.device("cpu" if args.small else "cuda")
    generator = torch.Generator(device).manual_seed(0)
    print("| matrix | type | " + " | ".join(f"{rows} rows: error, us, of AWQ" for rows in args.rows) + " | MB |")
    print("| --- | --- |" + " --- |" * (len(args.rows) + 1))
    worst = 0.0
    for name, shape in (SMALL if args.small else SHAPES).items():
        inputs = torch.randn(max(args.rows), shape[1], device=device, generator=generator).bfloat16()
        awq = {} if args.small else _times(awq_matrix(shape, device, generator), inputs, args.rows)
        for kind in args.types:
            blocks = random_blocks(kind, shape, device, generator)
            matrix = block_matrix(kind, shape, blocks)
            exact = inputs.float() @ dequantize(BLOCK_TYPES_BY_NAME[kind].number, blocks).T
            times = {} if args.small else _times(matrix, inputs, args.rows)
            cells = []
            for rows in args.rows:
                error = (multiply(inputs[:rows], matrix).float() - exact[:rows]).norm() / exact[:rows].norm()
                worst = max(worst, float(error))
                spent = f", {times[rows]:.1f}, {times[rows] / awq[rows]:.2f}" if times else ""
                cells.append(f"{error:.4f}{spent}")
            size = sum(each.nbytes for each in tensors_of(matrix)) / 1e6
            print(f"| {name} | {kind} | " + " | ".join(cells) + f" | {size:.1f} |", flush=True)
        if awq:
            print(f"| {name} | AWQ | " + " | ".join(f"{awq[rows]:.1f}" for rows in args.rows) + " | |", flush=True)
    if not worst < 0.012:
        raise SystemExit(f"the largest error is {worst:.4f}, more than 0.012")


def _times(matrix: Matrix, inputs: torch.Tensor, numbers: Sequence[int]) -> dict[int, float]:
    made = copies(matrix)
    times = {}
    for rows in numbers:
        x = inputs[:rows]
        times[rows] = time_us([lambda x=x, each=each: multiply(x, each) for each in made])  # type: ignore[misc]
    return times


if __name__ == "__main__":
    main()
