"""Launches of kernels on an H100 that is not there, by Triton and by `direct_launch`. Run as a module, without
``TRITON_INTERPRET``; prints a line of JSON, see `main`."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from fleetfoot.kernels.runtime.gluon_support import tensor_descriptor
from fleetfoot.kernels.runtime.internals import direct_launch
from fleetfoot.kernels.runtime.triton_support import triton_kernel
from tests.helpers.warm_up_without_gpu import use_fake_driver

if TYPE_CHECKING:
    import triton.language as tl

Launch = tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]
"""A grid, arguments and options."""

launched: list[list[str]] = []
"""What the launcher got: grid, stream, kernel, and the arguments."""


class RecordingLauncher:
    """In place of ``CudaLauncher``."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self._name = f"{metadata.name} {metadata.hash}"

    def __call__(self, *values: Any) -> None:
        (*what, metadata, enter, _), arguments = values[:9], values[9:]  # grid, stream, function and launch options
        launched.append([str(what), self._name, *map(describe, arguments)])
        if enter is not None:
            enter(metadata)


def describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"tensor at {value.data_ptr()}"
    if hasattr(value, "block_shape"):
        return f"{describe(value.base)} {value.shape} {value.strides} {value.block_shape} {value.layout}"
    return f"{type(value).__name__} {value}"


@triton_kernel(unspecialized=("count",))
def add_kernel(target, source, other, count, stride, scale, width: tl.constexpr, is_twice: tl.constexpr):
    place = tl.program_id(0) * stride + tl.arange(0, width)
    value = tl.load(source + place, mask=place < count) * scale
    if other is not None:
        value += tl.load(other + place, mask=place < count)
    tl.store(target + place, value * 2 if is_twice else value, mask=place < count)


@gluon.jit
def copy_kernel(source, target, rows: gl.constexpr):
    memory = gl.allocate_shared_memory(source.dtype, [rows, 64], source.layout)
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    mbarrier.expect(barrier, rows * 128)
    tma.async_copy_global_to_shared(source, [0, 0], barrier, memory)
    mbarrier.wait(barrier, 0)
    tma.async_copy_shared_to_global(target, [0, 0], memory)
    tma.store_wait(0)


def all_launches() -> list[tuple[Any, Launch]]:
    """Each specialization twice, and with other values of it."""
    x, y = torch.zeros(2, 4096), torch.zeros(2, 4096, dtype=torch.float16)
    add = add_kernel.jit
    launches: list[tuple[Any, Launch]] = []
    for source in (x[0], x[1], x[0, 1:], y[0]):
        for count, stride in ((1, 16), (1000, 48), (7, 1), (8, 2**33), (9, 17)):
            arguments = x[0], source, None if stride == 1 else x[1], count, stride, count / 2
            launches.append((add, ((count,), arguments, {"width": 32, "is_twice": count == 8})))
    launches += [(add, ((3, 5), (x[0], x[1], None, 9, 16, 1.0, 32, 0), {"num_warps": warps})) for warps in (2, 4, 2)]
    launches.append((add, ((3, 5, 2), (x[0], x[1], None, 9, 16, 1.0, 32, 0), {"num_warps": 2, "launch_pdl": True})))
    halves = torch.zeros(256, 128, dtype=torch.bfloat16)
    for rows, base in ((64, halves), (64, halves[64:]), (32, halves[:100])):
        descriptor = tensor_descriptor(base, base.shape, base.stride(), (rows, 64))
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
        checked = TensorDescriptor(base, list(base.shape), list(base.stride()), [rows, 64], layout)
        assert repr(descriptor) == repr(checked)
        launches.append((copy_kernel, ((1,), (descriptor, descriptor), {"rows": rows})))
    return launches * 2


def run_all(launches: list[tuple[Any, Launch]], launch: Any) -> list[list[str]]:
    launched.clear()
    for jit, (grid, arguments, options) in launches:
        launch(jit, grid)(*arguments, **options)
    return [*launched]


def main() -> None:
    """``equal``: whether both launch the same; ``launches``: of each; ``kernels``: different ones; ``by_triton``: how
    many of a later pass of `direct_launch` were left to Triton, of two with a hook, and of one without the empty chain
    of hooks; ``observed``: by the hook."""
    use_fake_driver()
    fake: Any = driver.active
    fake.launcher_cls = RecordingLauncher
    names = iter(range(1, 1 << 20))
    fake.utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232448},
        load_binary=lambda name, *_: (object(), next(names), 32, 0, 1024),
    )
    launches, observed = all_launches(), []
    expected = run_all(launches, lambda jit, grid: jit[grid])
    report: dict[str, Any] = {"launches": len(expected), "kernels": len({name for _, name, *_ in expected})}
    report["equal"] = [run_all(launches, direct_launch) == expected for _ in range(2)]
    report["by_triton"] = []

    def hook(metadata: Any) -> None:
        observed.append(metadata.get()["name"])

    chain = knobs.HookChain()
    chain.add(hook)
    for enter in (knobs.runtime.launch_enter_hook, chain, hook, None):
        knobs.runtime.launch_enter_hook = enter
        with patch.object(JITFunction, "run", autospec=True, side_effect=JITFunction.run) as run:
            report["equal"].append(run_all(launches, direct_launch) == expected)
        report["by_triton"].append(run.call_count)
    report["observed"] = len(observed)
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
