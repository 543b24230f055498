"""Compiles the attention kernels, and what else is in Gluon, for an H100, on any machine: run as a module, without
``TRITON_INTERPRET``.

Prints a line for each: its name and the bytes of stack that a thread takes, which are registers that spilled.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from fleetfoot.kernels.attention import decode, decode_hopper, prefill, prefill_hopper
from fleetfoot.kernels.attention.split_kv import AttentionWorkspace
from fleetfoot.kernels.linear import gated_hopper as gated_linear_hopper
from fleetfoot.kernels.runtime import gpu_limits
from fleetfoot.kernels.runtime.triton_support import TritonKernel
from tests.helpers.attention_batches import make_batch, make_fused_batch

H100 = gpu_limits.GPULimits(num_sms=132, shared_bytes=227 * 1024, capability=(9, 0))
OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg")


def stack_bytes(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", usage.stdout + usage.stderr)
    assert found is not None
    return found[1]


def compile_for_h100(name: str, function: Any, source: type, arguments: tuple[Any, ...], keywords: Any) -> None:
    options = {option: keywords.pop(option) for option in OPTIONS if option in keywords}
    values = dict(zip(function.arg_names, arguments, strict=False)) | keywords
    types = {
        argument: "constexpr" if argument in keywords else triton.runtime.jit.mangle_type(values[argument])
        for argument in function.arg_names
    }
    compiled = triton.compile(source(function, types, keywords), target=GPUTarget("cuda", 90, 32), options=options)
    print(name, stack_bytes(compiled.asm["cubin"]))


def compile_triton(kernel: TritonKernel, grid: tuple[int, ...]) -> Callable[..., None]:
    """What `TritonKernel.__getitem__` gives here: a launch that compiles for the types of its arguments."""
    return lambda *arguments, **keywords: compile_for_h100(kernel.__name__, kernel.jit, ASTSource, arguments, keywords)


def compile_gluon(kernel: GluonJITFunction, grid: tuple[int, ...]) -> Callable[..., None]:
    return lambda *arguments, **keywords: compile_for_h100(kernel.__name__, kernel, GluonASTSource, arguments, keywords)


def main() -> None:
    shape: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
    workspace = AttentionWorkspace(torch.device("cpu"))
    batch = make_batch([(1, 5)], **shape)
    out = torch.empty_like(batch.query)
    decode.paged_attention_decode(batch.inputs(), workspace=workspace, out=out)
    for query_len in (1, 4):
        fused = make_fused_batch([(query_len, 5)], **shape)
        decode.paged_attention_decode(
            fused.inputs(),
            workspace=workspace,
            out=fused.qkv.new_empty(len(fused.qkv), shape["num_heads"], shape["head_dim"]),
            rotary=fused.rotary,
            slot_mapping=fused.metadata.slot_mapping,
            prefetch_weight=torch.empty(1024, 4096, dtype=torch.bfloat16),
        )
    for num_kv_heads in (8, 2):  # 8 rows, and 16
        grouped = make_batch([(1, 5)], **shape | {"num_kv_heads": num_kv_heads})
        decoded = torch.empty_like(grouped.query)
        decode_hopper.paged_attention_decode_hopper(grouped.inputs(), workspace=workspace, out=decoded)
    prefill.paged_attention_prefill(batch.inputs(), out=out)
    prefill_hopper.paged_attention_prefill_hopper(batch.inputs(), counter=workspace.counter, out=out)
    for groups in (2, 3):
        x, weight = torch.empty(300, 1024, dtype=torch.bfloat16), torch.empty(512, 1024, dtype=torch.bfloat16)
        gated_linear_hopper.gated_linear_hopper(x, weight, groups, H100.num_sms)


if __name__ == "__main__":
    with (
        patch.object(TritonKernel, "__getitem__", compile_triton),
        patch.object(GluonJITFunction, "__getitem__", compile_gluon),
        patch.object(gpu_limits, "gpu_limits", lambda device: H100),
        patch.object(decode, "gpu_limits", lambda device: H100),
        patch.object(decode, "can_overlap", lambda device: True),
        patch.object(decode_hopper, "can_overlap", lambda device: True),
        patch.object(gated_linear_hopper, "can_overlap", lambda device: True),
        patch.object(prefill, "gpu_limits", lambda device: H100),
    ):
        main()
