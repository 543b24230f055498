"""Attention on a GPU: decodes as a share of the memory bandwidth, prefills in TFLOP/s, with torch's own beside them.

Usage: python benchmarks/gpu_attention.py [--heads 32] [--kv-heads 8] [--head-dim 128] [--block-size 16] [--decode] ...

A decode's bytes are its K and V, read once, and the bandwidth is that of a large copy, reads plus writes, in the
same run. Decodes run in a graph over as many caches as the layers of a model, so that none is left in the L2 cache. A
prefill's operations are those of the scores and of the weighted sum, for the positions that each token sees.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fleetfoot.kernels.attention.triton_backend import TritonBackend
from fleetfoot.records.forward_context import AttentionMetadata

_RANDOM = random.Random(1)
RAGGED = [_RANDOM.randint(1024, 8192) for _ in range(64)]
DECODES: list[tuple[str, list[int]]] = [
    ("1 x 256", [256]),
    ("1 x 1024", [1024]),
    ("1 x 8192", [8192]),
    ("8 x 1024", [1024] * 8),
    ("64 x 256", [256] * 64),
    ("64 x 1024", [1024] * 64),
    ("64 x 1024..8192", RAGGED),
    ("256 x 256", [256] * 256),
    ("256 x 1024", [1024] * 256),
]
PREFILLS: list[tuple[str, list[int], list[int]]] = [
    ("64 x 512", [512] * 64, [512] * 64),
    ("1 x 8192", [8192], [8192]),
    ("4 x 8192", [8192] * 4, [8192] * 4),
    ("2048 at 6144", [2048], [8192]),
    ("256 at 7936", [256], [8192]),
]


def milliseconds(work: Callable[[], object], least: float = 10.0) -> float:
    """The median of three means, each over at least ``least`` milliseconds."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def timed(count: int) -> float:
        begin.record()
        for _ in range(count):
            work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    timed(2)
    count = max(3, int(least / timed(2)))
    return statistics.median(timed(count) for _ in range(3))


def make_metadata(query_lens: Sequence[int], seq_lens: Sequence[int], block_size: int) -> tuple[AttentionMetadata, int]:
    """With blocks in random order; also the number of blocks."""
    counts = [-(-length // block_size) for length in seq_lens]
    order = torch.randperm(sum(counts), device="cuda").int()
    tables = torch.zeros(len(counts), max(counts), dtype=torch.int32, device="cuda")
    taken = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[taken : taken + count]
        taken += count
    unused = torch.empty(0, dtype=torch.int64, device="cuda")
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *query_lens], device="cuda").cumsum(0).int(),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device="cuda"),
        block_tables=tables,
        slot_mapping=unused,
        positions=unused,
        num_decodes=len(query_lens) if max(query_lens) == 1 else 0,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
    )
    return metadata, taken


class Shape:
    """What all measurements share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = args.heads, args.kv_heads, args.head_dim
        self.block_size, self.dtype = args.block_size, getattr(torch, args.dtype)
        self.backend = TritonBackend()

    def query(self, num_tokens: int) -> torch.Tensor:
        return torch.randn(num_tokens, self.num_heads, self.head_dim, dtype=self.dtype, device="cuda")

    def cache(self, num_blocks: int) -> torch.Tensor:
        shape = (num_blocks, 2, self.num_kv_heads, self.block_size, self.head_dim)
        return torch.randn(shape, dtype=self.dtype, device="cuda")

    def decode_us(self, seq_lens: list[int]) -> tuple[float, float]:
        """Microseconds of one layer, and the bytes that it reads."""
        metadata, num_blocks = make_metadata([1] * len(seq_lens), seq_lens, self.block_size)
        num_bytes = 2 * sum(seq_lens) * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        layers = max(2, min(64, 200_000_000 // num_bytes))
        caches, query = [self.cache(num_blocks) for _ in range(layers)], self.query(len(seq_lens))

        def step() -> None:
            for cache in caches:
                self.backend.forward(query, cache, metadata, self.head_dim**-0.5, None)

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return milliseconds(graph.replay) / layers * 1e3, num_bytes

    def prefill_tflops(self, query_lens: list[int], seq_lens: list[int]) -> float:
        metadata, num_blocks = make_metadata(query_lens, seq_lens, self.block_size)
        query, cache = self.query(sum(query_lens)), self.cache(num_blocks)
        time = milliseconds(lambda: self.backend.forward(query, cache, metadata, self.head_dim**-0.5, None))
        return self.operations(query_lens, seq_lens) / time / 1e9

    def torch_tflops(self, num_reqs: int, length: int) -> float:
        """cuDNN's kernel over contiguous K and V, with as many KV heads as query heads."""
        shape = (num_reqs, self.num_heads, length, self.head_dim)
        q, k, v = (torch.randn(shape, dtype=self.dtype, device="cuda") for _ in range(3))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            time = milliseconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.operations([length] * num_reqs, [length] * num_reqs) / time / 1e9

    def operations(self, query_lens: list[int], seq_lens: list[int]) -> float:
        pairs = sum(q * (s - q) + q * (q + 1) / 2 for q, s in zip(query_lens, seq_lens, strict=True))
        return 4 * self.head_dim * self.num_heads * pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--decode", action="store_true", help="decodes alone")
    parser.add_argument("--prefill", action="store_true", help="prefills alone")
    args = parser.parse_args()
    shape = Shape(args)
    print(f"{torch.cuda.get_device_name()}: {vars(args)}")
    if not args.prefill:
        source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda")
        target = torch.empty_like(source)
        bandwidth = 2 * source.nbytes / milliseconds(lambda: target.copy_(source)) * 1e3
        del source, target
        print(f"copy: {bandwidth / 1e12:.2f} TB/s")
        for name, seq_lens in DECODES:
            time, num_bytes = shape.decode_us(seq_lens)
            print(f"decode {name:>16}: {time:7.1f} us, {num_bytes / time * 1e6 / bandwidth:4.0%} of the bandwidth")
    if not args.decode:
        for name, query_lens, seq_lens in PREFILLS:
            print(f"prefill {name:>15}: {shape.prefill_tflops(query_lens, seq_lens):5.0f} TFLOP/s", end="")
            if query_lens == seq_lens:
                print(f" (torch with cuDNN: {shape.torch_tflops(len(query_lens), query_lens[0]):.0f})", end="")
            print()


if __name__ == "__main__":
    main()
