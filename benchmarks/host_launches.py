"""Host time of the launches of a forward pass on a Hopper GPU, on a machine without one.

Captures and eager steps of Model Runner V2 wait for the host: each layer launches 5 to 8 kernels, which takes longer
than they compute. All of that runs here but three things. Kernels are not compiled; Triton's launcher, in C, does
nothing; products of the library are not computed. Weights are random, on the CPU.

Prints a line of JSON for each shape: launches of Triton's kernels, the least and the median microseconds of a forward
pass, and the least for each launch. Take two versions in turns: a core's speed moves.

Usage: python benchmarks/host_launches.py MODEL [--shapes decode:1 decode:64 mixed:128 mixed:640] [--repeat 100]
           [--profile]

MODEL is a folder with a config.json.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from fleetfoot.config.parsing import load_model_config
from fleetfoot.kernels.runtime import dependent_launch, gpu_limits

BLOCK_SIZE, MAX_MODEL_LEN = 16, 4096
LIMITS = {"max_num_seqs": 256, "max_num_batched_tokens": 8192}


class NoKernel(CompiledKernel):
    """A kernel that is launched by counting it."""

    num_launches = 0

    def __init__(self) -> None:
        self.module = self.src = self
        self.name, self.function, self.packed_metadata = "no kernel", 0, ()
        self._run = self._count

    def _count(self, *_: object) -> None:
        NoKernel.num_launches += 1


def imitate_gpu() -> None:
    """Properties of an H200, before the modules of kernels take the functions by their names."""
    limits = gpu_limits.GPULimits(num_sms=132, shared_bytes=232448, capability=(9, 0))
    gpu_limits.gpu_limits = lambda device: limits  # type: ignore[assignment]
    dependent_launch.can_overlap = lambda device: True  # type: ignore[assignment]
    fake = {
        "get_active_torch_device": lambda: torch.device("cpu"),
        "get_current_target": lambda: GPUTarget("cuda", 90, 32),
        "get_current_device": lambda: 0,
        "get_current_stream": lambda device: 0,
    }
    driver.set_active(SimpleNamespace(**fake))
    torch.Tensor.is_cuda = property(lambda tensor: True)  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = lambda: False

    def compile_nothing(jit: Any, key: str, signature: Any, device: int, *_: Any) -> NoKernel:
        kernel = NoKernel()
        jit.device_caches[device][0][key] = kernel
        return kernel

    JITFunction._do_compile = compile_nothing
    F.linear = lambda x, weight, bias=None: x.new_empty((*x.shape[:-1], weight.shape[0]))  # type: ignore[assignment]
    torch.Tensor.addmm_ = lambda total, *factors, **scales: total  # type: ignore[method-assign, assignment]


def make_runner(folder: Path) -> Any:
    """A `ModelRunnerV2` with a KV cache."""
    from fleetfoot.fusion import plan_fusion
    from fleetfoot.kernels.attention.triton_backend import TritonBackend
    from fleetfoot.kernels.registry import DeviceFacts, load_kernels, plan_kernels
    from fleetfoot.layers.context import ModelContext
    from fleetfoot.records.kv_layout import KVLayout
    from fleetfoot.runner.v2.runner import ModelRunnerV2
    from fleetfoot.weights.loading import ModelLoader

    config = load_model_config(folder)
    kernels = load_kernels(plan_kernels(DeviceFacts("cuda", has_triton=True)))
    cpu = torch.device("cpu")
    context = ModelContext(kernels, TritonBackend(), torch.bfloat16, cpu, max_positions=MAX_MODEL_LEN)
    loader, fusion = ModelLoader(config, context, None, "dummy"), plan_fusion(config, "v2")
    runner = ModelRunnerV2(loader, max_model_len=MAX_MODEL_LEN, fusion=fusion, **LIMITS)
    runner.load_model()
    runner.initialize_kv_cache(KVLayout.of(config, MAX_MODEL_LEN // BLOCK_SIZE, BLOCK_SIZE, "bfloat16"))
    # what a graph of sampling would read; there is no graph
    runner._padding._hidden = torch.zeros((LIMITS["max_num_seqs"], config.hidden_size), dtype=torch.bfloat16)
    return runner


def measure(runner: Any, kind: str, size: int, repeat: int, profiler: cProfile.Profile | None) -> dict[str, Any]:
    """Forward passes of a shape: of ``size`` requests or, ``mixed``, tokens."""
    from fleetfoot.runner.graphs import GraphKey, StepShape

    num_reqs = min(size, LIMITS["max_num_seqs"])
    forward = runner._padding.of_graph(GraphKey("forward", StepShape(kind, num_reqs, size)))
    with torch.inference_mode():
        forward()
        NoKernel.num_launches, times = 0, []
        for _ in range(repeat):
            begin = time.perf_counter()
            forward()
            times.append(1e6 * (time.perf_counter() - begin))
        if profiler is not None:
            profiler.runcall(forward)
    num_launches = NoKernel.num_launches // (repeat + (profiler is not None))
    least = min(times)
    figures = {"least_us": least, "median_us": statistics.median(times), "us_per_launch": least / num_launches}
    return {"shape": f"{kind}:{size}", "launches": num_launches, **{name: round(us, 1) for name, us in figures.items()}}


def shape(text: str) -> tuple[str, int]:
    kind, _, size = text.partition(":")
    if kind not in ("decode", "mixed") or not size.isdecimal() or not int(size):
        raise argparse.ArgumentTypeError(f"{text!r} is not decode:REQUESTS or mixed:TOKENS")
    return kind, int(size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    shapes = ["decode:1", "decode:64", "mixed:128", "mixed:640"]
    parser.add_argument("--shapes", nargs="+", type=shape, default=[shape(text) for text in shapes])
    parser.add_argument("--repeat", type=int, default=100)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    imitate_gpu()
    runner = make_runner(args.model)
    profiler = cProfile.Profile() if args.profile else None
    for kind, size in args.shapes:
        print(json.dumps(measure(runner, kind, size, args.repeat, profiler)))
    if profiler is not None:
        profiler.print_stats("tottime")


if __name__ == "__main__":
    main()
