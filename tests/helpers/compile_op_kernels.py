"""Compiles the kernels of the operations for an H100, on any machine: run as a module, without ``TRITON_INTERPRET``.

The interpreter forgives what the compiler does not, and leaves out what overlaps one kernel with the next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fleetfoot.kernels.linear.linear_triton import ChainedGateUp, ChainedLinear, ChainedResidual
from fleetfoot.kernels.linear.tilings import Tiling
from fleetfoot.kernels.runtime.triton_support import TritonKernel
from fleetfoot.kernels.sampling.sample import RandomRows, RowFilters
from tests.helpers.kernels import triton_kernels

_OPTIONS = ("num_warps", "launch_pdl", "enable_fp_fusion")


def compile_instead(kernel: TritonKernel, grid: tuple[int, ...]) -> Callable[..., None]:
    """What `TritonKernel.__getitem__` gives here: a launch that compiles for the types of its arguments."""

    def launch(*arguments: Any, **keywords: Any) -> None:
        function = kernel.jit
        options = {name: keywords.pop(name) for name in _OPTIONS if name in keywords}
        values = dict(zip(function.arg_names, arguments, strict=False)) | keywords
        types, attributes = {}, {}
        for index, name in enumerate(function.arg_names):
            value = values[name]
            types[name] = "constexpr" if name in keywords else triton.runtime.jit.mangle_type(value)
            is_aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
            if name not in keywords and is_aligned and name not in kernel.unspecialized:
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(function, types, keywords, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        print(f"{kernel.__name__}: {len(compiled.asm['cubin'])} bytes")

    return launch


def main() -> None:
    ops = triton_kernels()
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("fleetfoot.kernels.") and hasattr(module, "can_overlap"):
            module.can_overlap = lambda device: True  # type: ignore[attr-defined]

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    ops.add_rms_norm(empty(4, 2, 1024, dtype=torch.float32), empty(2, 1024), empty(1024), 1e-6)
    ops.silu_and_mul(empty(2, 256))
    angles, norm = empty(32, 128, dtype=torch.float32), empty(128)
    ops.rope_and_cache(empty(2, 1024), empty(4, 2, 2, 16, 128), zeros(2), zeros(2), angles, 4, norm, norm, 1e-6)
    temperatures, rows, invalid = empty(2, dtype=torch.float32), zeros(2, dtype=torch.int32), empty(2, dtype=torch.bool)
    ops.sample(empty(2, 40000), RandomRows(temperatures, zeros(2), zeros(2), rows=rows), invalid=invalid)
    filters = RowFilters(temperatures, rows, temperatures)
    ops.sample(empty(2, 40000), RandomRows(temperatures, zeros(2), zeros(2), filters, rows))
    tilings = (
        (8, Tiling("staged", 16, 256, 8, 1)),
        (1, Tiling("streamed", 16, 128, 1, 4)),
        (40, Tiling("tiled", 64, 128, 64, 3)),
    )
    for num_rows, tiling in tilings:
        ChainedGateUp(empty(256, 1024)).launch(empty(num_rows, 1024), tiling)
    for num_rows, num_inputs in ((8, 1024), (1, 1000)):
        deferred = ChainedResidual(empty(1024, num_inputs)).add_and_norm(
            empty(num_rows, num_inputs), empty(num_rows, 1024), empty(1024), 1e-6
        )
        assert deferred is not None
        (ChainedGateUp if num_rows == 8 else ChainedLinear)(empty(512, 1024))(deferred)


if __name__ == "__main__":
    with patch.object(TritonKernel, "__getitem__", compile_instead):
        main()
