"""Compiles every preparation kernel for an H100, on any machine: run as a module, without ``TRITON_INTERPRET``.

The interpreter forgives what the compiler does not: types that change within a loop, a name that it cannot see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fleetfoot.kernels.prepare.tables import RowTables
from fleetfoot.kernels.runtime.triton_support import TritonKernel
from tests.helpers.kernels import triton_kernels
from tests.helpers.prepare_runs import OPS, run


def compile_instead(kernel: TritonKernel, grid: tuple[int, ...]) -> Callable[..., None]:
    """What `TritonKernel.__getitem__` gives here: a launch that compiles for the types of its arguments."""

    def launch(*arguments: Any, **constants: Any) -> None:
        function = kernel.jit
        names = function.arg_names
        values = dict(zip(names, arguments, strict=False)) | constants
        types = {
            name: "constexpr" if name in constants else triton.runtime.jit.mangle_type(values[name]) for name in names
        }
        compiled = triton.compile(ASTSource(function, types, constants), target=GPUTarget("cuda", 90, 32))
        print(f"{kernel.__name__}: {len(compiled.asm['cubin'])} bytes")

    return launch


if __name__ == "__main__":
    with patch.object(TritonKernel, "__getitem__", compile_instead):
        for op in OPS:
            run(triton_kernels(), op, "one_decode_with_drafts")
        one = torch.zeros(1, dtype=torch.int32)
        rows = RowTables(one, one, one, one, one.new_zeros((2, 3)), one[None], one, 16)
        triton_kernels().propose_ngrams(one, one, rows, 5, 1)
