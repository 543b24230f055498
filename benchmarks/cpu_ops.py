"""The native CPU operations beside their torch twins, on the shapes of two models: microseconds of each, and the ratio.

Both are timed turn by turn in one process, and the best of several turns counts, so that the ratio holds on a machine
that is busy with other things. Weights and KV caches are as many as a model has layers and are used one after the
other: they come from memory, as they do in a model, not from a cache that one layer would fit into.

Usage: python benchmarks/cpu_ops.py [--threads 2] [--dtype bfloat16] [--turns 5] [--json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fleetfoot.kernels.attention import AttentionBackend
from fleetfoot.kernels.attention.sdpa_backend import SDPABackend
from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.native_ops import NativeBackend
from fleetfoot.kernels.registry import DeviceFacts, load_kernels, plan_kernels
from fleetfoot.kernels.sampling.sample import RandomRows
from fleetfoot.records.forward_context import AttentionMetadata, RotaryInputs

BLOCK_SIZE = 16
CACHE_BYTES = 128 << 20  # more than any last-level cache that the weights of one operation should come from

Case = tuple[str, Callable[[], object], Callable[[], object]]


@dataclass(frozen=True)
class Shape:
    """What the operations of one model's layer are about."""

    name: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int

    @property
    def qkv(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


SHAPES = (
    Shape("smol-135m", 576, 1536, 9, 3, 64, 49152),
    Shape("qwen3-0.6b", 1024, 3072, 16, 8, 128, 151936),
)
# (query tokens, sequence length) of each request
BATCHES = {
    "prefill 512": [(512, 512)],
    "chunk 256 of 2048": [(256, 2048)],
    "decode 1 x 256": [(1, 256)],
    "decode 1 x 4096": [(1, 4096)],
    "decode 32 x 512": [(1, 512)] * 32,
}


def elementwise_cases(
    shape: Shape, dtype: torch.dtype, num_tokens: int, fast: Kernels, twin: Kernels
) -> Iterator[Case]:
    """Norms, the gate, and rotary embedding with the cache write."""
    x, residual = torch.randn(2, num_tokens, shape.hidden).to(dtype)
    weight, gate_up = torch.rand(shape.hidden).to(dtype), torch.randn(num_tokens, 2 * shape.intermediate).to(dtype)
    qkv, norm = torch.randn(num_tokens, shape.qkv).to(dtype), torch.rand(shape.head_dim).to(dtype)
    num_blocks = num_tokens // BLOCK_SIZE + 1
    cache = torch.zeros(num_blocks, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim, dtype=dtype)
    cos_sin, places = torch.rand(num_tokens, shape.head_dim), torch.arange(num_tokens)

    def both(name: str, run: Callable[[Kernels], object]) -> Case:
        return f"{name}, {num_tokens} tokens", lambda: run(fast), lambda: run(twin)

    yield both("rms_norm", lambda ops: ops.rms_norm(x, weight, 1e-5))
    yield both("add_rms_norm", lambda ops: ops.add_rms_norm(x, residual, weight, 1e-5))
    yield both("silu_and_mul", lambda ops: ops.silu_and_mul(gate_up))
    lens = torch.arange(num_tokens + 1, dtype=torch.int32)
    metadata = AttentionMetadata(lens, lens[1:], lens[1:, None], places, places, num_tokens, 1, num_tokens)
    inputs = (cache, metadata, shape.num_heads)
    for name, norm_weight in (("", None), (" with q/k norm", norm)):
        rotary = RotaryInputs(cos_sin, norm_weight, norm_weight, 1e-6)
        yield both(f"rope_and_cache{name}", lambda ops, rotary=rotary: ops.rope_and_cache(qkv, *inputs, rotary))


def linear_cases(shape: Shape, dtype: torch.dtype, num_tokens: int, fast: Kernels, twin: Kernels) -> Iterator[Case]:
    """The four linear layers of a layer, each from as many weights as do not fit into the cache."""
    sizes = {
        "qkv": (shape.qkv, shape.hidden),
        "output": (shape.hidden, shape.num_heads * shape.head_dim),
        "gate_up": (2 * shape.intermediate, shape.hidden),
        "down": (shape.hidden, shape.intermediate),
    }
    for name, (num_outputs, num_inputs) in sizes.items():
        count = CACHE_BYTES // (num_outputs * num_inputs * dtype.itemsize)
        weight, x = torch.randn(num_outputs, num_inputs).to(dtype), torch.randn(num_tokens, num_inputs).to(dtype)
        layers = [itertools.cycle([ops.prepare_linear(weight) for _ in range(count)]) for ops in (fast, twin)]
        calls = [lambda turn=turn, x=x: next(turn)(x) for turn in layers]
        yield f"linear {name} {num_outputs} x {num_inputs}, {num_tokens} tokens", calls[0], calls[1]


def attention_cases(shape: Shape, dtype: torch.dtype) -> Iterator[Case]:
    """One layer's attention, each call over another layer's cache."""
    for name, requests in BATCHES.items():
        blocks = [-(-seq_len // BLOCK_SIZE) for _, seq_len in requests]
        order = torch.randperm(sum(blocks)).int()
        tables = torch.zeros(len(requests), max(blocks), dtype=torch.int32)
        for row, mine in enumerate(order.split(blocks)):
            tables[row, : len(mine)] = mine
        query_lens = [query_len for query_len, _ in requests]
        num_tokens = sum(query_lens)
        metadata = AttentionMetadata(
            query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens=torch.tensor([seq_len for _, seq_len in requests], dtype=torch.int32),
            block_tables=tables,
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64),
            positions=torch.zeros(num_tokens, dtype=torch.int64),
            num_decodes=query_lens.count(1),
            max_query_len=max(query_lens),
            max_seq_len=max(seq_len for _, seq_len in requests),
        )
        query = torch.randn(num_tokens, shape.num_heads, shape.head_dim).to(dtype)
        one = torch.randn(sum(blocks), 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim).to(dtype)
        caches = [one.clone() for _ in range(max(1, min(32, CACHE_BYTES // (one.numel() * one.itemsize))))]
        scale = 1 / math.sqrt(shape.head_dim)

        def call(
            backend: AttentionBackend,
            turn: Iterator[torch.Tensor],
            query: torch.Tensor = query,
            metadata: AttentionMetadata = metadata,
            scale: float = scale,
        ) -> Callable[[], object]:
            return lambda: backend.forward(query, next(turn), metadata, scale, None)

        yield (
            f"attention {name}",
            call(NativeBackend(), itertools.cycle(caches)),
            call(SDPABackend(), itertools.cycle(caches)),
        )


def choice_cases(shape: Shape, dtype: torch.dtype, num_rows: int, fast: Kernels, twin: Kernels) -> Iterator[Case]:
    """Greedy and random tokens from logits."""
    logits = torch.randn(num_rows, shape.vocab).to(dtype) * 3
    yield f"argmax, {num_rows} rows", lambda: fast.sample(logits), lambda: twin.sample(logits)
    numbers = torch.arange(num_rows)
    random = RandomRows(torch.ones(num_rows), numbers, numbers)
    yield f"sample, {num_rows} rows", lambda: fast.sample(logits, random), lambda: twin.sample(logits, random)


def cases(shape: Shape, dtype: torch.dtype) -> Iterator[Case]:
    fast, twin = (load_kernels(plan_kernels(DeviceFacts(name, has_native=True))) for name in ("cpu", "meta"))
    for num_tokens in (1, 8, 64, 512):
        yield from elementwise_cases(shape, dtype, num_tokens, fast, twin)
        yield from linear_cases(shape, dtype, num_tokens, fast, twin)
    yield from attention_cases(shape, dtype)
    for num_rows in (1, 16):
        yield from choice_cases(shape, dtype, num_rows, fast, twin)


def best_seconds(calls: tuple[Callable[[], object], ...], turns: int, seconds: float = 0.01) -> list[float]:
    """The best mean time of one call over several turns of about ``seconds`` each, taken by the calls in rotation."""
    counts = []
    for call in calls:
        call()
        begin = time.perf_counter()
        call()
        counts.append(max(1, int(seconds / max(1e-7, time.perf_counter() - begin))))
    best = [math.inf] * len(calls)
    for _ in range(turns):
        for i, (call, count) in enumerate(zip(calls, counts, strict=True)):
            begin = time.perf_counter()
            for _ in range(count):
                call()
            best[i] = min(best[i], (time.perf_counter() - begin) / count)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), action="append", help="default: both")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rows = []
    for shape in SHAPES:
        for name in arguments.dtype or ("float32", "bfloat16"):
            for case, fast, twin in cases(shape, getattr(torch, name)):
                native, plain = best_seconds((fast, twin), arguments.turns)
                row = {"model": shape.name, "dtype": name, "case": case, "native_us": native * 1e6}
                rows.append({**row, "torch_us": plain * 1e6, "ratio": plain / native})
                if not arguments.json:
                    times = f"{native * 1e6:10.1f} {plain * 1e6:10.1f} {plain / native:7.2f}x"
                    print(f"{shape.name:11} {name:9} {case:44} {times}")
    if arguments.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
