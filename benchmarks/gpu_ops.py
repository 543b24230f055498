"""How long the operations of a decode step take on this GPU, next to the time that memory takes to give the weights.

    python benchmarks/gpu_ops.py                        # whole steps: three models, 1 to 64 rows
    python benchmarks/gpu_ops.py --layers --rows 1 64   # each linear layer by itself

A step is every operation of a decoder but attention, whose place the rotated queries take: norms, linear layers with
weights of their own in every layer, rotation with the cache write, the head, and one token chosen for each row. It is
captured as one graph, and the median of its replays is what is printed. "library" is the same graph with the linear
layers of torch; the floor is the bytes of all weights at the bandwidth that reading reaches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.linear.linear import PlainLinear
from fleetfoot.kernels.linear.roles import InputRole, OutputRole
from fleetfoot.kernels.registry import DeviceFacts, load_kernels, plan_kernels
from fleetfoot.kernels.runtime.gpu_limits import has_hopper_kernels
from fleetfoot.kernels.sampling.sample import RandomRows
from fleetfoot.records.forward_context import AttentionMetadata, RotaryInputs

READ_BYTES_PER_US = 3.05e6  # of an H100 with HBM3, measured
EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a decoder."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    qk_norm: bool = False

    def linears(self) -> dict[str, tuple[int, int]]:
        """``[out, in]`` of each weight of a layer."""
        queries = self.heads * self.head_dim
        return {
            "qkv": (queries + 2 * self.kv_heads * self.head_dim, self.hidden),
            "o": (self.hidden, queries),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }

    def num_bytes(self) -> int:
        """Of all weights that a step reads."""
        per_layer = sum(out * inputs for out, inputs in self.linears().values())
        return 2 * (self.layers * per_layer + self.vocab * self.hidden)


MODELS = [
    Model("Qwen3-0.6B", 1024, 28, 16, 8, 128, 3072, 151936, qk_norm=True),
    Model("Llama-3.2-1B", 2048, 16, 32, 8, 64, 8192, 128256),
    Model("Llama-3.1-8B", 4096, 32, 32, 8, 128, 14336, 128256),
]


Layer = Callable[[torch.Tensor], torch.Tensor]


def triton_kernels() -> Kernels:
    has_hopper = has_hopper_kernels(torch.device("cuda"))
    return load_kernels(plan_kernels(DeviceFacts("cuda", has_triton=True, has_hopper=has_hopper)))


def library_ops() -> Kernels:
    """The Triton operations, but for the linear layers."""
    return replace(
        triton_kernels(), prepare_linear=lambda weight, bias=None: PlainLinear(weight, bias), linear_chain=None
    )


def make_layer(ops: Kernels, name: str, weight: torch.Tensor) -> Layer:
    """A linear layer of a decoder, by the name that `Model.linears` has for it, or the head."""
    if ops.linear_chain is not None and name != "head":
        inputs = {"gate_up": InputRole("gated"), "qkv": InputRole("qkv")}
        return ops.linear_chain(weight, None, inputs.get(name, OutputRole()))
    linear = ops.prepare_linear(weight)
    return linear if name != "gate_up" else lambda x: ops.silu_and_mul(linear(x))


def random_weight(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda") * shape[-1] ** -0.5


class Weights:
    """Random weights, each layer's its own."""

    def __init__(self, model: Model) -> None:
        self.linears = {name: random_weight((model.layers, *shape)) for name, shape in model.linears().items()}
        self.head = random_weight((model.vocab, model.hidden))
        self.norm = torch.rand(model.hidden, device="cuda").bfloat16()
        self.cos_sin = torch.rand(4096, model.head_dim, device="cuda")
        self.head_norm = torch.rand(model.head_dim, device="cuda").bfloat16() if model.qk_norm else None


class Step:
    """One decode step of ``rows`` requests."""

    def __init__(self, model: Model, weights: Weights, ops: Kernels, rows: int) -> None:
        self.model, self.weights, self.ops, self.rows = model, weights, ops, rows
        self.layers = [
            {name: make_layer(ops, name, stack[layer]) for name, stack in weights.linears.items()}
            for layer in range(model.layers)
        ]
        self.head = ops.prepare_linear(weights.head)
        self.x = random_weight((rows, model.hidden)) * model.hidden**0.5
        shape = (model.layers, rows + 1, 2, model.kv_heads, 16, model.head_dim)
        self.kv_caches = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        lens = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
        positions, slots = torch.arange(rows, device="cuda") * 7 % 4096, torch.arange(rows, device="cuda") * 16
        self.metadata = AttentionMetadata(lens, lens[1:], lens[:rows, None], slots, positions, rows, 1, rows)
        self.rotary = RotaryInputs(weights.cos_sin, weights.head_norm, weights.head_norm, EPS)
        self.temperatures = torch.ones(rows, device="cuda")
        self.invalid = torch.empty(rows, dtype=torch.bool, device="cuda")

    def hidden_states(self) -> torch.Tensor:
        """``[rows, hidden]`` after the last norm."""
        ops, model, weights = self.ops, self.model, self.weights
        normed, residual = ops.rms_norm(self.x, weights.norm, EPS), self.x
        for layer, kv_cache in zip(self.layers, self.kv_caches, strict=True):
            query = ops.rope_and_cache(layer["qkv"](normed), kv_cache, self.metadata, model.heads, self.rotary)
            normed, residual = ops.add_rms_norm(layer["o"](query.flatten(1)), residual, weights.norm, EPS)
            hidden = layer["down"](layer["gate_up"](normed))
            normed, residual = ops.add_rms_norm(hidden, residual, weights.norm, EPS)
        return normed

    def __call__(self) -> torch.Tensor:
        logits = self.head(self.hidden_states())
        random = RandomRows(self.temperatures, self.metadata.positions, self.metadata.positions)
        return self.ops.sample(logits, random, invalid=self.invalid)


def median_us(run: Callable[[], object], replays: int = 25) -> float:
    """The median time of a captured graph's replay, in microseconds."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) * 1e3 for begin, end in times)[replays // 2]


def measure_steps(models: list[Model], rows: list[int]) -> None:
    print(
        f"{'model':<14}{'rows':>5}{'floor us':>10}{'library us':>12}{'triton us':>11}{'of floor':>10}{'difference':>12}"
    )
    for model in models:
        weights = Weights(model)
        floor = model.num_bytes() / READ_BYTES_PER_US
        for count in rows:
            steps = [Step(model, weights, ops, count) for ops in (library_ops(), triton_kernels())]
            steps[1].x.copy_(steps[0].x)
            library, triton = (step.hidden_states().double() for step in steps)
            difference = float((library - triton).norm() / library.norm())
            times = [median_us(step) for step in steps]
            print(
                f"{model.name:<14}{count:>5}{floor:>10.0f}{times[0]:>12.0f}{times[1]:>11.0f}"
                f"{floor / times[1]:>10.0%}{difference:>12.1e}",
                flush=True,
            )
        del weights, steps


def measure_layers(models: list[Model], rows: list[int]) -> None:
    """Each layer in a chain of copies of itself, so that none is read from cache."""
    print(f"{'layer':<36}{'rows':>5}{'floor us':>10}{'library us':>12}{'triton us':>11}{'of floor':>10}")
    for model in models:
        for name, (out, inputs) in (model.linears() | {"head": (model.vocab, model.hidden)}).items():
            copies = max(4, min(32, (400 << 20) // (2 * out * inputs)))
            stack = random_weight((copies, out, inputs))
            floor = 2 * out * inputs / READ_BYTES_PER_US
            for count in rows:
                x = random_weight((count, inputs))
                times = []
                for ops in (library_ops(), triton_kernels()):
                    chain = [make_layer(ops, name, weight) for weight in stack]
                    times.append(median_us(lambda chain=chain, x=x: [layer(x) for layer in chain]) / copies)
                label = f"{model.name} {name} {out}x{inputs}"
                print(
                    f"{label:<36}{count:>5}{floor:>10.1f}{times[0]:>12.1f}{times[1]:>11.1f}{floor / times[1]:>10.0%}",
                    flush=True,
                )
            del stack


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", action="store_true", help="each linear layer by itself")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16, 64])
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("needs a CUDA device")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    models = [model for model in MODELS if model.name in arguments.models]
    (measure_layers if arguments.layers else measure_steps)(models, arguments.rows)


if __name__ == "__main__":
    main()
