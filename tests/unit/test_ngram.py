"""N-gram lookup: against a search that is written to be read, on the host, in pages, and in Triton's interpreter."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tests.helpers.interpreter import interpreted

from fleetfoot.kernels.prepare import ngram
from fleetfoot.kernels.prepare.tables import RowTables


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
