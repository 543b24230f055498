"""The custom all-gather in Triton's interpreter."""

from itertools import count
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import run_world, shared_memory
from tests.helpers.interpreter import HAS_TRITON  # also the ranks' interpreter

from fleetfoot.distributed import GATHER_SETS, GATHER_WORDS
from fleetfoot.distributed.peer_gather import CustomAllGather
from fleetfoot.distributed.peer_memory import PeerMemory

CPU = torch.device("cpu")
CALLS = ((1, 48, None), (3, 2050, None), (1, 5, 9), (2, 48, 60), (1, 48, 40), (1, 3000, 5001))
"""Rows, columns of each rank, and columns that are wanted."""
DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def part(call: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    rows, columns, _ = CALLS[call]
    return torch.randn((rows, columns), generator=torch.Generator().manual_seed(10 * call + rank)).to(dtype)


def run_gathers(rank: int, folder: Path) -> dict[int, list[torch.Tensor]]:
    """By the number of ranks that gather: the first two, and all three."""
    found = {}
    for size in (2, 3):
        memory = shared_memory(folder / str(size), rank, size, GATHER_SETS * GATHER_WORDS)
        if rank < size:
            gather = CustomAllGather(memory, rank, size, CPU)
            found[size] = [
                gather.all_gather(part(call, rank, dtype), wanted)
                for dtype in DTYPES
                for call, (_, _, wanted) in enumerate(CALLS)
            ]
    return found


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, list[torch.Tensor]]]:
    folder = tmp_path_factory.mktemp("three")
    return run_world(folder, 3, run_gathers, folder, TRITON_INTERPRET="1")


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton's interpreter")
@pytest.mark.parametrize("size", [2, 3])
def test_gathers_of_all_shapes(three: list[dict[int, list[torch.Tensor]]], size: int) -> None:
    found = [gathered[size] for gathered in three[:size]]
    number = count()
    for dtype in DTYPES:
        for call, (_, _, wanted) in enumerate(CALLS):
            expected = torch.cat([part(call, rank, dtype) for rank in range(size)], dim=1)[:, :wanted]
            index = next(number)
            for gathered in found:
                assert torch.equal(gathered[index], expected)


def test_supported_shapes() -> None:
    nothing = torch.zeros(2, dtype=torch.int64)
    gather = CustomAllGather(PeerMemory(nothing, nothing), 0, 2, CPU)
    assert gather.fits(torch.empty(8, 64128, dtype=torch.bfloat16))  # half of Llama's vocabulary
    assert not gather.fits(torch.empty(9, 64128, dtype=torch.bfloat16))
    assert gather.fits(torch.empty(4, 64128))
    for x in (torch.empty(0, 8), torch.empty(8), torch.empty(1, 8, dtype=torch.float64), torch.ones(1, 8).long()):
        assert not gather.fits(x)
