"""Preparation operations and n-gram lookup: references against plain loops, faster implementations against them."""

import mmap
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.helpers.interpreter import compiled, interpreted, run_python
from tests.helpers.kernels import cpu_kernels, reference_kernels, triton_kernels
from tests.helpers.prepare_cases import get_batch, int32
from tests.helpers.prepare_runs import CASES, OPS, assert_same, row_tables, run
from tests.helpers.recording_device import NoValues

from fleetfoot.kernels.interface import Kernels
from fleetfoot.kernels.prepare import ngram
from fleetfoot.kernels.prepare.tables import GroupTables, RowTables, StateTables, StepBuffers
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
def test_groups_have_slots_and_tables_of_their_own(kernels: Callable[[], Kernels]) -> None:
    """A decode behind its window, a prompt that begins within one, padding, and a token after the last block."""
    size, windows, max_blocks = 4, [5, 2**31 - 1], 1100
    idx, starts, computed = int32([2, 0, -1]), int32([0, 1, 7, 7]), int32([6, 0, 4099, 0])
    tables = torch.arange(1, 1 + 2 * 4 * max_blocks, dtype=torch.int32).view(2, 4, max_blocks)
    drafts, pages = torch.full((5, 0), -1, dtype=torch.int32), torch.zeros(4 * max_blocks * size, dtype=torch.int32)
    anchor = torch.arange(4 * max_blocks, dtype=torch.int32).view(4, max_blocks)
    limits = int32([7, 100, 5000, 100])  # the first row's last block is the second
    rows = RowTables(computed, int32([12, 9, 4099, 9]), limits, int32([7] * 4), drafts, anchor, pages, size)
    tokens = torch.zeros(3, 9, dtype=torch.int64)
    step = StepBuffers(idx, starts, tokens[0], int32([0] * 3), int32([0] * 9), tokens[1], tokens[2], anchor[:3].clone())
    slots, copies = torch.zeros(2, 9, dtype=torch.int64), torch.full((2, 3, max_blocks), -7, dtype=torch.int32)
    kernels().prepare_inputs(step, rows)
    kernels().prepare_groups(step, rows, GroupTables(int32(windows), tables, slots, copies))
    for group, window in enumerate(windows):
        for request, (row, count) in enumerate([(2, 1), (0, 6)]):
            first = max(0, int(computed[row]) + 1 - window) // size
            last = -(-(int(computed[row]) + count) // size)
            blocks = [min(block, (int(limits[row]) - 1) // size) for block in range(first, last)]
            expected = [0] * first + tables[group, row, blocks].tolist()
            assert copies[group, request, :last].tolist() == expected
        places = [(2, 4099), (0, 6), (0, 7)]
        found = [int(tables[group, row, p // size]) * size + p % size for row, p in places]
        assert slots[group].tolist() == [*found, *[-1] * 6]


@pytest.mark.parametrize("num_slots", [1, 3])
@pytest.mark.parametrize("kernels", KERNELS)
def test_states_have_slots_by_position(kernels: Callable[[], Kernels], num_slots: int) -> None:
    """A decode, one that reaches its limit, the first and the last chunk of a prompt, padding."""
    size, max_blocks, num_rows = 4, 8, 4
    idx, starts, computed = int32([2, 1, 0, 3, -1]), int32([0, 3, 6, 11, 14, 14]), int32([0, 13, 6, 8])
    tables = torch.arange(1, 1 + num_slots * num_rows * max_blocks, dtype=torch.int32)
    tables = tables.view(num_slots, num_rows, max_blocks)
    drafts, pages = torch.full((5, 2), -1, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
    anchor = torch.zeros(num_rows, max_blocks, dtype=torch.int32)
    rows = RowTables(
        computed, int32([9, 12, 5, 11]), int32([30, 15, 30, 30]), int32([7] * 4), drafts, anchor, pages, size
    )
    tokens = torch.zeros(3, 14, dtype=torch.int64)
    step = StepBuffers(idx, starts, tokens[0], int32([0] * 5), int32([0] * 14), tokens[1], tokens[2], anchor[idx])
    read, write = torch.full((5,), -7, dtype=torch.int32), torch.full((5, num_slots), -7, dtype=torch.int32)
    kernels().prepare_states(step, rows, StateTables(tables, read, write))

    def slot(row: int, position: int) -> int:
        return int(tables[position % num_slots, row, position // size])

    assert read.tolist() == [slot(2, 5), slot(1, 12), 0, slot(3, 7), 0]
    kept = [[slot(2, p) for p in (6, 7, 8)], [slot(1, 13), slot(1, 14), -1], [-1, -1, slot(0, 4)]]
    kept += [[-1, -1, slot(3, 10)], [-1, -1, -1]]
    assert write.tolist() == [slots[3 - num_slots :] for slots in kept]


@pytest.mark.parametrize("kernels", KERNELS)
def test_sampled_tokens_may_be_int64(kernels: Callable[[], Kernels]) -> None:
    rows = replace(row_tables(get_batch("one_decode")), num_computed=int32([4, 5]), last_sampled=int32([0, 0]))
    kernels().post_update(int32([1]), int32([0, 1]), rows, torch.tensor([[151_935]]), int32([1]), int32([0]))
    assert (rows.num_computed.tolist(), rows.last_sampled.tolist()) == ([4, 6], [0, 151_935])


@pytest.mark.parametrize("kernels", [reference_kernels, cpu_kernels, triton_kernels])
@pytest.mark.parametrize(("num_reqs", "num_tokens"), [(0, 0), (4, 0), (4, 6), (4, 12)])
def test_prepare_decode_takes_uniform_batches(kernels: Callable[[], Kernels], num_reqs: int, num_tokens: int) -> None:
    batch = get_batch("graph_full")
    tokens, requests = torch.zeros(num_tokens, dtype=torch.int64), torch.zeros(num_reqs, dtype=torch.int32)
    starts, tables = torch.zeros(num_reqs + 1, dtype=torch.int32), torch.zeros(num_reqs, 8, dtype=torch.int32)
    step = StepBuffers(requests, starts, tokens, requests, tokens.int(), tokens, tokens, tables)
    with pytest.raises(ValueError, match=f"{num_tokens} tokens for {num_reqs} requests with up to 1 drafts"):
        kernels().prepare_decode(step, row_tables(batch, draft_tokens=batch.draft_tokens[:, :1]))


@compiled
def test_kernels_of_a_step_compile_for_a_gpu(tmp_path: Path) -> None:
    """Step preparation, the n-gram drafter, logits processors and logprobs."""
    lines = run_python(
        "-m", "tests.helpers.compile_kernels", "steps", is_forked=True, TRITON_CACHE_DIR=str(tmp_path)
    ).splitlines()
    counts = Counter(line.split("_kernel: ")[0].removeprefix("_") for line in lines)
    sampling = {"keep_allowed": 1, "listed_tokens": 1, "mask_tokens": 1, "penalties": 3, "tile_stats": 7, "select": 7}
    assert counts == dict.fromkeys((*OPS, "propose_ngrams"), 1) | sampling


def test_a_device_function_is_not_called_from_python() -> None:
    with pytest.raises(TypeError, match="upper_bound is called within kernels"):
        upper_bound(None, 0, 0, None)


@pytest.mark.parametrize(("count", "pieces", "width"), [(1, 1, 1), (2, 1, 2), (4, 1, 4), (5, 2, 8), (1024, 256, 1024)])
def test_sizes(count: int, pieces: int, width: int) -> None:
    assert (cdiv(count, 4), next_power_of_2(count)) == (pieces, width)


def search(tokens: list[int], num_drafts: int, longest: int, shortest: int) -> list[int]:
    for size in range(longest, shortest - 1, -1):
        for begin in range(len(tokens) - size - 1, -1, -1):
            if tokens[begin : begin + size] == tokens[len(tokens) - size :]:
                known = list(tokens)
                for place in range(begin + size, begin + size + num_drafts):
                    known.append(known[place])
                return known[len(tokens) :]
    return [-1] * num_drafts


sequences = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@given(sequences, st.integers(1, 6), st.integers(1, 4), st.integers(0, 3))
@example([1, 7, 8, 2, 7, 8], 3, 1, 2)  # the longest match, not the latest
@example([5, 5, 5, 5], 3, 1, 2)
@example([4], 3, 1, 2)
def test_the_longest_latest_match_is_continued(tokens: list[int], num_drafts: int, shortest: int, more: int) -> None:
    got = ngram.prompt_lookup(np.array(tokens), num_drafts, shortest + more, shortest)
    assert got.dtype == np.int32
    assert got.tolist() == search(tokens, num_drafts, shortest + more, shortest)


def paged(lengths: list[int], block_size: int, num_drafts: int) -> tuple[torch.Tensor, RowTables, list[list[int]]]:
    """Each request's row, with padding behind; sequences in shuffled pages, but for their newest tokens."""
    rng = np.random.default_rng(num_drafts)
    num_rows, width = len(lengths) + 2, -(-max(lengths) // block_size) + 1
    table = rng.permutation(num_rows * width).reshape(num_rows, width).astype(np.int32)
    pages = np.full(num_rows * width * block_size, 777, dtype=np.int32)
    newest = np.full(num_rows, 778, dtype=np.int32)
    rows = rng.permutation(num_rows)[: len(lengths)]
    sequences = [rng.integers(0, 4, length) for length in lengths]
    for row, tokens in zip(rows, sequences, strict=True):
        places = np.arange(len(tokens) - 1)
        pages[table[row, places // block_size] * block_size + places % block_size] = tokens[:-1]
        newest[row] = tokens[-1]
    drafts, unused = torch.full((num_rows + 1, num_drafts), 99, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    tables = torch.from_numpy(newest), drafts, torch.from_numpy(table), torch.from_numpy(pages)
    idx_mapping = torch.tensor([*rows, -1], dtype=torch.int32)
    return idx_mapping, RowTables(unused, unused, unused, *tables, block_size), [line.tolist() for line in sequences]


@pytest.mark.parametrize("propose", ["torch", "numpy", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize(("block_size", "lengths"), [(4, [1, 2, 3, 17, 40]), (16, [33, 16, 1100]), (8, [8, 9])])
@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_in_pages(propose: str, block_size: int, lengths: list[int], num_drafts: int) -> None:
    idx_mapping, rows, sequences = paged(lengths, block_size, num_drafts)
    seq_lens = torch.tensor([*lengths, 5], dtype=torch.int32)
    getattr(ngram, f"propose_ngrams_{propose}")(idx_mapping, seq_lens, rows, 4, 2)
    expected = torch.full_like(rows.draft_tokens, 99)
    for row, tokens in zip(idx_mapping.tolist(), sequences, strict=False):
        expected[row] = torch.tensor(search(tokens, num_drafts, 4, 2))
    assert rows.draft_tokens[:-1].tolist() == expected[:-1].tolist()  # padding may write the last row
