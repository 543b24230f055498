"""Warms a runner up for an H100 that is not there, compiles for real and launches nothing. Run as a module, without
``TRITON_INTERPRET``; prints a line of JSON, see `main`."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from fleetfoot.assets import embedded_model_path
from fleetfoot.config.model import ModelConfig
from fleetfoot.config.parsing import load_model_config
from fleetfoot.fusion import plan_fusion
from fleetfoot.kernels.attention.triton_backend import TritonBackend
from fleetfoot.kernels.runtime import compile_worker
from fleetfoot.kernels.runtime.compile_ahead import CompileAhead, CompiledKernels, KernelCompileError
from fleetfoot.kernels.runtime.triton_support import instead_of_launching, triton_kernel
from fleetfoot.layers.context import ModelContext
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.runner.graphs import BatchShape, CaptureTable, GraphKey
from fleetfoot.runner.v2 import padding_work
from fleetfoot.runner.v2 import runner as runner_module
from fleetfoot.runner.v2.runner import ModelRunnerV2
from fleetfoot.runner.v2.warm_up import EagerStep, prompt
from fleetfoot.weights.loading import ModelLoader
from tests.helpers.kernels import triton_kernels
from tests.helpers.recording_device import RecordingDevice

if TYPE_CHECKING:
    import triton.language as tl


def use_fake_driver() -> None:
    """Triton's driver and torch with the properties of an H100 that a compilation reads."""
    properties = {
        "get_active_torch_device": lambda: torch.device("cpu"),
        "get_current_target": lambda: GPUTarget("cuda", 90, 32),
        "get_current_device": lambda: 0,
        "get_current_stream": lambda device: 0,
        "map_python_to_cpp_type": str,
    }
    driver.set_active(SimpleNamespace(**properties))
    torch.Tensor.is_cuda = property(lambda tensor: True)  # type: ignore[assignment]
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.set_num_threads(1)


@triton_kernel()
def cannot_be_compiled(pointer, width: tl.constexpr):
    tl.store(pointer + tl.arange(0, width), 1)  # a width that is no power of 2


def launch_nothing(jit: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """What a launch does before it launches."""

    def launch(*arguments: Any, **options: Any) -> None:
        jit.warmup(*arguments, grid=grid, **options)

    return launch


def make_runner(config: ModelConfig, table: CaptureTable, **limits: int) -> ModelRunnerV2:
    """With dummy weights and a KV cache, on a device that launches nothing."""
    context = ModelContext(triton_kernels(), TritonBackend(), torch.bfloat16, torch.device("cpu"), max_positions=256)
    runner = ModelRunnerV2(
        ModelLoader(config, context, None, "dummy"),
        **limits,
        max_model_len=256,
        capture_table=table,
        device=RecordingDevice(has_graphs=True),
        fusion=plan_fusion(config, "v2"),
    )
    runner.load_model()
    runner.initialize_kv_cache(KVLayout.of(config, 16, 16, "bfloat16"))
    return runner


def warm_up(table: CaptureTable) -> dict[str, Any]:
    """``kernels``: numbers of those found and compiled; ``late``: kernels that the rest of the warm-up had to
    compile."""
    runner = make_runner(load_model_config(embedded_model_path()), table, max_num_seqs=17, max_num_batched_tokens=32)
    late: list[str] = []
    compile_all, all_work = runner._padding.compile, runner._padding.all

    def some_work(keys: Iterable[GraphKey]) -> Iterator[Callable[[], object]]:
        """Others take minutes on two cores."""
        yield from islice(all_work(keys), 6)
        for shape in (prompt(4), BatchShape(1, 1, 1, 1, 1, 1, 1)):  # of the steps that run
            yield runner._padding.eager(EagerStep(shape))

    def compile_and_listen(*arguments: Any) -> CompiledKernels:
        with patch.object(runner._padding, "all", some_work):
            kernels = compile_all(*arguments)
        knobs.compilation.listener = lambda *, src, **_: late.append(src.name)
        return kernels

    with (
        patch.object(runner._padding, "compile", compile_and_listen),
        patch.object(runner_module, "library_steps", lambda _: []),
    ):
        runner.warm_up()
    knobs.compilation.listener = None
    runner.shutdown()
    return {"kernels": runner.kernels, "late": late}


def fail() -> list[str]:
    """What becomes of a kernel that does not compile."""
    ahead = CompileAhead(2)
    numbers = torch.zeros(4)
    ahead.queue(lambda: cannot_be_compiled[(1,)](numbers, 3))
    try:
        ahead.wait()
    except KernelCompileError as error:
        return [error.name, type(error.__cause__).__name__]
    finally:
        ahead.close()
    return []


def main() -> None:
    """Prints a start, what becomes of a kernel that fails, and threads left."""
    use_fake_driver()
    padding_work.can_compile_ahead = lambda device: True
    compile_worker.num_cores = lambda: 2
    instead_of_launching.set(launch_nothing)
    report: dict[str, Any] = warm_up(CaptureTable())
    report["failed"] = fail()
    report["threads"] = [thread.name for thread in threading.enumerate() if "compile" in thread.name]
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
