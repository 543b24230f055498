"""Model Runner V2's preparation ops: the CPU twins against plain loops, the Triton kernels, interpreted, against the twins."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from fleetfoot.ops.prepare.gather_block_tables import gather_block_tables_cpu, gather_block_tables_triton
from fleetfoot.ops.prepare.post_update import post_update_cpu, post_update_triton
from fleetfoot.ops.prepare.prepare_decode import prepare_decode
from fleetfoot.ops.prepare.scatter_writes import scatter_writes_cpu, scatter_writes_triton
from fleetfoot.ops.prepare.slot_mapping import slot_mapping_cpu, slot_mapping_triton
from tests.helpers import prepare_cases
from tests.helpers.prepare_cases import CASES, OPS, assert_same, run

interpreted = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton's interpreter; on a GPU, tests/gpu runs the same cases compiled",
)


@pytest.mark.parametrize(("op", "batch"), CASES)
def test_twin_matches_loops(op: str, batch: str) -> None:
    assert_same(run(OPS[op].dispatch, op, batch), OPS[op].expected(batch))


@interpreted
@pytest.mark.parametrize(("op", "batch"), CASES)
def test_kernel_matches_twin(op: str, batch: str) -> None:
    assert_same(run(OPS[op].triton, op, batch), run(OPS[op].dispatch, op, batch))
