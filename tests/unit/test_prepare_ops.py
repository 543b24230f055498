"""The preparation operations: references against plain loops, and faster implementations against the references."""

import mmap
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.helpers.interpreter import compiled, interpreted, run_python
from tests.helpers.kernels import cpu_kernels, reference_kernels, triton_kernels
from tests.helpers.prepare_cases import get_batch, int32
from tests.helpers.prepare_runs import CASES, OPS, assert_same, row_tables, run
from tests.helpers.recording_device import NoValues

from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.prepare.tables import RowTables, StepBuffers
from fleetfoot.kernels.runtime.triton_support import cdiv, next_power_of_2, upper_bound

KERNELS = [reference_kernels, cpu_kernels, pytest.param(triton_kernels, marks=interpreted)]


@pytest.mark.parametrize(("op", "batch"), CASES)
@pytest.mark.parametrize("kernels", KERNELS)
def test_every_implementation_matches_loops(kernels: Callable[[], Kernels], op: str, batch: str) -> None:
    """The reference without an operation that would wait for a GPU."""
    mode = NoValues() if kernels is reference_kernels else None
    assert_same(run(kernels(), op, batch, mode=mode), OPS[op].expected(get_batch(batch)))


@pytest.mark.parametrize("op", ["prepare_inputs", "prepare_decode"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_slots_may_exceed_32_bits(kernels: Callable[[], Kernels], op: str) -> None:
    """A known token and a new one, in pages of 8 GiB of address space, of which one page of memory is used."""
    slot = 2**31
    memory = mmap.mmap(-1, 4 * (slot + 64), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    pages = torch.frombuffer(memory, dtype=torch.int32)
    pages[slot + 62] = 151_935
    drafts, table = int32([[-1], [-1]]), int32([[slot // 64]])
    rows = RowTables(int32([62]), int32([63]), int32([100]), int32([7]), drafts, table, pages, block_size=64)
    tokens, one = torch.zeros(3, 2, dtype=torch.int64), int32([0])
    step = StepBuffers(one, int32([0, 2]), tokens[0], int32([0]), int32([0, 0]), tokens[1], tokens[2], int32([[0]]))
    getattr(kernels(), op)(step, rows)
    assert step.slots.tolist() == [slot + 62, slot + 63]
    assert (step.input_ids.tolist(), pages[-1].item()) == ([151_935, 0], 0)


@pytest.mark.parametrize("kernels", KERNELS)
def test_sampled_tokens_may_be_int64(kernels: Callable[[], Kernels]) -> None:
    rows = replace(row_tables(get_batch("one_decode")), num_computed=int32([4, 5]), last_sampled=int32([0, 0]))
    kernels().post_update(int32([1]), int32([0, 1]), rows, torch.tensor([[151_935]]), int32([1]), int32([0]))
    assert (rows.num_computed.tolist(), rows.last_sampled.tolist()) == ([4, 6], [0, 151_935])


@pytest.mark.parametrize("kernels", [reference_kernels, cpu_kernels, triton_kernels])
@pytest.mark.parametrize(("num_reqs", "num_tokens"), [(0, 0), (4, 0), (4, 6), (4, 12)])
def test_prepare_decode_takes_uniform_batches_only(
    kernels: Callable[[], Kernels], num_reqs: int, num_tokens: int
) -> None:
    batch = get_batch("graph_full")
    tokens, requests = torch.zeros(num_tokens, dtype=torch.int64), torch.zeros(num_reqs, dtype=torch.int32)
    starts, tables = torch.zeros(num_reqs + 1, dtype=torch.int32), torch.zeros(num_reqs, 8, dtype=torch.int32)
    step = StepBuffers(requests, starts, tokens, requests, tokens.int(), tokens, tokens, tables)
    with pytest.raises(ValueError, match=f"{num_tokens} tokens for {num_reqs} requests with up to 1 drafts"):
        kernels().prepare_decode(step, row_tables(batch, draft_tokens=batch.draft_tokens[:, :1]))


@pytest.mark.slow
def test_a_cpu_needs_no_triton() -> None:
    script = """
import sys
sys.modules["triton"] = None  # any import of it fails
from tests.helpers.interpreter import compiled, interpreted, run_python
from tests.helpers.kernels import cpu_kernels
from tests.helpers.prepare_runs import OPS, run
for op in OPS:
    run(cpu_kernels(), op, "one_decode")
print("done")
"""
    assert run_python("-c", script) == "done\n"


@compiled
def test_kernels_of_a_step_compile_for_a_gpu(tmp_path: Path) -> None:
    """Step preparation, the n-gram drafter, logits processors and logprobs."""
    lines = run_python("-m", "tests.helpers.compile_kernels", "steps", TRITON_CACHE_DIR=str(tmp_path)).splitlines()
    counts = Counter(line.split("_kernel: ")[0].removeprefix("_") for line in lines)
    sampling = {"keep_allowed": 1, "listed_tokens": 1, "penalties": 3, "tile_stats": 7, "select": 7}
    assert counts == dict.fromkeys((*OPS, "propose_ngrams"), 1) | sampling


def test_a_device_function_is_not_called_from_python() -> None:
    with pytest.raises(TypeError, match="upper_bound is called within kernels"):
        upper_bound(None, 0, 0, None)


@pytest.mark.parametrize(("count", "pieces", "width"), [(1, 1, 1), (2, 1, 2), (4, 1, 4), (5, 2, 8), (1024, 256, 1024)])
def test_sizes(count: int, pieces: int, width: int) -> None:
    assert (cdiv(count, 4), next_power_of_2(count)) == (pieces, width)
