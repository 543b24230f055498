"""The preparation ops: CPU twins against plain loops, and Triton kernels, interpreted, against the twins."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.helpers.prepare_cases import get_batch, int32
from tests.helpers.prepare_runs import CASES, OPS, assert_same, run

from fleetfoot.kernels.prepare.post_update import post_update_cpu, post_update_triton
from fleetfoot.kernels.prepare.prepare_decode import prepare_decode, prepare_decode_cpu
from fleetfoot.kernels.prepare.slot_mapping import slot_mapping_cpu, slot_mapping_triton
from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2

HAS_TRITON = importlib.util.find_spec("triton") is not None
REPOSITORY = Path(__file__).parents[2]

interpreted = pytest.mark.skipif(
    not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton's interpreter; on a GPU, tests/gpu runs the same cases compiled",
)


def run_python(*arguments: str) -> str:
    """The output of a Python process that is not told to interpret kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


TWINS = {"post_update": post_update_cpu, "prepare_decode": prepare_decode_cpu}
"""Of the ops that run in C on a CPU where the native library is there."""


@pytest.mark.parametrize(("op", "batch"), CASES)
def test_what_a_cpu_runs_matches_loops(op: str, batch: str) -> None:
    assert_same(run(OPS[op].dispatch, op, batch), OPS[op].expected(batch))


@pytest.mark.parametrize(("op", "batch"), [(op, batch) for op, batch in CASES if op in TWINS])
def test_twin_matches_loops(op: str, batch: str) -> None:
    assert_same(run(TWINS[op], op, batch), OPS[op].expected(batch))


@interpreted
@pytest.mark.parametrize(("op", "batch"), CASES)
def test_kernel_matches_twin(op: str, batch: str) -> None:
    assert_same(run(OPS[op].triton, op, batch), run(OPS[op].dispatch, op, batch))


@pytest.mark.parametrize("implementation", [slot_mapping_cpu, pytest.param(slot_mapping_triton, marks=interpreted)])
def test_slots_may_exceed_32_bits(implementation: Callable[..., None]) -> None:
    block_id, block_size = 2**30, 64
    slots = torch.zeros(2, dtype=torch.int64)
    positions, batch_index = torch.tensor([0, 63]), int32([0, 0])
    implementation(positions, batch_index, int32([0]), int32([100]), int32([[block_id]]), block_size, slots=slots)
    assert slots.tolist() == [block_id * block_size, block_id * block_size + 63]


@pytest.mark.parametrize("implementation", [post_update_cpu, pytest.param(post_update_triton, marks=interpreted)])
def test_sampled_tokens_may_be_int64(implementation: Callable[..., None]) -> None:
    num_computed, last_sampled = int32([4, 5]), int32([0, 0])
    implementation(
        int32([1]),
        int32([0, 1]),
        torch.tensor([[151_935]]),
        int32([1]),
        int32([0]),
        num_computed=num_computed,
        last_sampled=last_sampled,
    )
    assert (num_computed.tolist(), last_sampled.tolist()) == ([4, 6], [0, 151_935])


@pytest.mark.parametrize(("num_reqs", "num_tokens"), [(0, 0), (4, 0), (4, 6), (4, 12)])
def test_prepare_decode_takes_uniform_batches_only(num_reqs: int, num_tokens: int) -> None:
    batch = get_batch("graph_full")
    out32, out64 = torch.zeros(num_tokens, dtype=torch.int32), torch.zeros(num_tokens, dtype=torch.int64)
    with pytest.raises(ValueError, match=f"{num_tokens} tokens for {num_reqs} requests with up to 1 drafts"):
        prepare_decode(
            batch.idx_mapping[:num_reqs],
            batch.num_computed,
            batch.prefill_lens,
            batch.last_sampled,
            batch.draft_tokens[:, :1],
            batch.limits,
            batch.block_table,
            batch.block_size,
            token_pages=batch.token_pages,
            positions=out64,
            seq_lens=torch.zeros(num_reqs, dtype=torch.int32),
            batch_index=out32,
            slots=out64,
            input_ids=out64,
            block_tables=torch.zeros(num_reqs, 8, dtype=torch.int32),
        )


def test_a_cpu_needs_no_triton() -> None:
    script = """
import sys
sys.modules["triton"] = None  # any import of it fails
from tests.helpers.prepare_runs import OPS, run
for op in OPS:
    run(OPS[op].dispatch, op, "one_decode")
print("done")
"""
    assert run_python("-c", script) == "done\n"


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton's compiler")
def test_kernels_compile_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = run_python("-m", "tests.helpers.compile_prepare_kernels").splitlines()
    names = {line.split(":")[0] for line in compiled}
    assert len(names) == len(compiled) == len(OPS) + 1  # the last is the drafter's that reads the token pages


@interpreted
def test_a_device_function_is_not_called_from_python() -> None:
    from fleetfoot.kernels.runtime.upper_bound import upper_bound

    with pytest.raises(TypeError, match="upper_bound is called within kernels"):
        upper_bound(None, 0, 0, None)


@pytest.mark.parametrize(("count", "pieces", "width"), [(1, 1, 1), (2, 1, 2), (4, 1, 4), (5, 2, 8), (1024, 256, 1024)])
def test_sizes(count: int, pieces: int, width: int) -> None:
    assert (cdiv(count, 4), next_power_of_2(count)) == (pieces, width)
