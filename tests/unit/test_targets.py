"""The kernels that an engine launches on GPUs that are not here, compiled for them by Triton's compiler."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.helpers.interpreter import compiled, run_python

TARGETS = [("8.0", 108, 163), ("8.9", 58, 99), ("12.0", 170, 99)]
"""Capability, multiprocessors and KiB of shared memory of a program: A100, L4, RTX 5090."""
OF_A_TARGET = ["linear_few_rows", "linear_tiled", "paged_attention_decode", "paged_attention_prefill"]
"""Kernels that shared memory and matrix instructions determine. They are compiled for each target."""
OTHERS = [
    *("cuts", "draw", "draw_top_k", "keep_allowed", "listed_tokens", "mask_tokens", "penalties", "pick"),
    *(
        "post_update",
        "prepare_decode",
        "prepare_inputs",
        "rms_norm",
        "rope_and_cache",
        "rope_and_cache_whole_tokens",
        "row_max",
        "select",
        "tile_stats",
    ),
    "activation",
]
"""Each is compiled for one of the targets."""


def names(kernels: list[str]) -> list[str]:
    return [f"_{kernel}_kernel" for kernel in kernels]


@compiled
def test_kernels_compile_for_other_gpus(tmp_path: Path) -> None:
    """Within their shared memory, and without those in Gluon, which are for Hopper GPUs."""

    def compile_for(number: int) -> list[tuple[str, int, list[str]]]:
        command = ("-m", "tests.helpers.compile_for_target", *map(str, TARGETS[number]), "-", "1")
        command = (*command, *names(OF_A_TARGET + OTHERS[number::3]))
        lines = run_python(*command, is_forked=True, TRITON_CACHE_DIR=str(tmp_path))
        return [json.loads(line) for line in lines.splitlines()]

    with ThreadPoolExecutor(2) as pool:
        for number, kernels in enumerate(pool.map(compile_for, range(len(TARGETS)))):
            assert sorted(name for name, *_ in kernels) == sorted(names(OF_A_TARGET + OTHERS[number::3]))
            for name, shared_bytes, launched in kernels:
                assert shared_bytes <= TARGETS[number][2] * 1024, (TARGETS[number], name)
                assert launched == sorted(names(OF_A_TARGET + OTHERS))


@pytest.mark.parametrize(
    ("capability", "has_them"), [((9, 0), True), ((8, 9), False), ((10, 0), False), ((12, 0), False)]
)
def test_kernels_in_gluon_are_for_hopper_gpus(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_them: bool
) -> None:
    import torch

    from fleetfoot.kernels.runtime import gpu_limits

    pytest.importorskip("triton")
    monkeypatch.setattr(gpu_limits, "gpu_limits", lambda device: gpu_limits.GPULimits(64, 1 << 16, capability))
    monkeypatch.setattr(gpu_limits, "is_tested_triton", lambda: True)
    assert gpu_limits.has_hopper_kernels.__wrapped__(torch.device("cpu")) is has_them
