"""Draws under min-p, top-k and top-p by the Triton kernels, interpreted, against the reference."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.interpreter import interpreted

from fleetfoot.kernels.sampling.filter_cuts_triton import filter_cuts_triton
from fleetfoot.kernels.sampling.sample import MAX_TOP_K, RandomRows, RowFilters, sample_torch
from fleetfoot.kernels.sampling.sample_triton import sample_triton

pytestmark = interpreted
ALL = 2**31 - 1


def random_rows(
    *filters: tuple[float, int, float], temperature: float = 1.0, rows: torch.Tensor | None = None
) -> RandomRows:
    """With (min_p, top_k, top_p) of each row; 0, 0, 1 are off."""
    min_p, top_k, top_p = (torch.tensor(values) for values in zip(*filters, strict=True))
    index = torch.arange(len(filters))
    positions = index if rows is None else index[: len(rows)]
    temperatures = torch.full((len(filters),), temperature)
    return RandomRows(temperatures, index * 77 + 5, positions, RowFilters(min_p.log(), top_k.int(), top_p), rows)


def cuts_of(logits: torch.Tensor, random: RandomRows) -> torch.Tensor:
    """From the best candidate of each row, as `pack_candidates` makes it."""
    best = logits.float().max(dim=-1)
    bits = best.values.view(torch.int32).long()
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # of negative floats: the order is reversed
    return filter_cuts_triton(logits, ((keys << 32) | (ALL - best.indices))[:, None], random, overlap=False)


def check(logits: torch.Tensor, *filters: tuple[float, int, float], temperature: float = 0.8) -> None:
    """The same draws as the reference, and the same tokens are kept."""
    random = random_rows(*filters, temperature=temperature)
    expected = sample_torch(logits, random)
    assert sample_triton(logits, random).tolist() == expected.tolist()
    row_filters = random.filters
    assert row_filters is not None
    is_cut = (row_filters.top_k == 0) | (row_filters.top_k > MAX_TOP_K)  # in the other rows candidates are drawn
    top_k_only = sample_triton(logits, replace(random, filters=replace(row_filters, top_k_only=True)))
    assert (top_k_only == expected)[~is_cut | ~row_filters.are_on()].all()
    scores = (logits.float() - logits.float().max(dim=1, keepdim=True).values) / temperature
    cuts, index = cuts_of(logits, random), torch.arange(logits.shape[1])
    limits = -cuts[:, :1].contiguous().view(torch.float32)
    kept = (scores > limits) | ((scores == limits) & (index <= cuts[:, 1:]))
    kept &= scores > -torch.inf
    row_filters.apply(scores)
    assert torch.equal(kept[is_cut], (scores > -torch.inf)[is_cut])


@pytest.mark.parametrize(("vocab_size", "spread"), [(1, 2.0), (5, 2.0), (300, 0.01), (300, 30.0), (2100, 2.0)])
def test_each_filter_and_all_together(vocab_size: int, spread: float) -> None:
    filters = [(0.0, 0, 1.0), (0.05, 0, 1.0), (0.0, 7, 1.0), (0.0, 0, 0.83), (0.3, 3, 0.9), (0.0, 40, 0.31)]
    logits = torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * spread
    check(logits, *filters, (0.0, 1, 0.99))


def test_ties_are_cut_by_index() -> None:
    """Of equal tokens top-p keeps the first; top-k all, and min-p."""
    logits = torch.zeros(4, 4100)
    logits[:, ::3] = 1.0
    logits[3, 4000:] = 2.0
    check(logits, (0.0, 0, 0.5), (0.0, 0, 0.9), (0.0, 10, 0.0001), (0.9, 0, 0.2))
    rows = [(0.0, 0, 0.25), (0.0, 5, 1.0), (0.0, 2000, 0.7), (0.0, 3000, 1.0), (0.0, 150, 0.5)]
    check(logits[[0, 1, 2, 3, 3]].to(torch.bfloat16), *rows)


@pytest.mark.parametrize("top_k", [1, 65, 300, 1024])
def test_few_and_many_candidates(top_k: int) -> None:
    """Groups of 64 tokens, 64 and 256 candidates, and 1,024 of a search at a time are limits of the kernel."""
    spread = torch.randn(1200, generator=torch.Generator().manual_seed(top_k))
    excluded = torch.where(torch.arange(1200) < 5, spread, -torch.inf)
    logits = torch.stack((spread, torch.zeros(1200), (spread > 1.0).float(), excluded))
    check(logits, (0.0, top_k, 0.9), (0.0, top_k, 1.0), (0.02, top_k, 0.7), (0.0, top_k, 0.5))


@pytest.mark.parametrize(
    ("filters", "score", "last"),
    [
        ((0.0, 0, 1.0), -float("inf"), ALL),
        ((0.0, 0, 0.82), -1.0, 1),  # 1 + 0.61 + 0.37 of 2.39 are enough
        ((0.0, 0, 0.83), -1.0, 2),
        ((0.0, 0, 1e-6), 0.0, 0),
        ((0.5, 0, 1.0), -0.6931, ALL),
    ],
)
def test_the_cut_itself(filters: tuple[float, int, float], score: float, last: int) -> None:
    (cut,) = cuts_of(torch.tensor([[0.0, -1.0, -1.0, -3.0, -0.5]]), random_rows(filters))
    assert -cut[:1].view(torch.float32).item() == pytest.approx(score, abs=1e-4)
    assert cut[1] == last


def test_rows_without_a_distribution_are_flagged() -> None:
    logits, invalid = torch.randn(4, 300), torch.zeros(4, dtype=torch.bool)
    logits[0, 7], logits[1, 9], logits[2] = float("nan"), float("inf"), float("-inf")
    sample_triton(logits, random_rows(*[(0.1, 5, 0.5)] * 4), invalid=invalid)
    assert invalid.tolist() == [True, True, True, False]


def test_parameters_are_read_through_rows() -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(3))
    rows = torch.tensor([2, -1, 0])
    random = random_rows((0.0, 2, 1.0), (0.0, 0, 1.0), (0.0, 0, 0.2), (0.4, 0, 1.0), rows=rows)
    assert sample_triton(logits, random)[[0, 2]].tolist() == sample_torch(logits, random)[[0, 2]].tolist()


def test_a_row_of_negative_logits() -> None:
    check(torch.tensor([[-torch.inf, -torch.inf, -1.0429, -0.8276]]), (1.0, 0, 0.5), temperature=0.5)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    vocab_size=st.integers(2, 2500),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    top_k=st.just(0) | st.integers(1, 3000),
    top_p=st.just(1.0) | st.floats(0.01, 0.99),
    is_coarse=st.booleans(),
    excludes_half=st.booleans(),
)
def test_any_row(
    seed: int, vocab_size: int, min_p: float, top_k: int, top_p: float, is_coarse: bool, excludes_half: bool
) -> None:
    logits = torch.randn(1, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3
    logits = logits.round() if is_coarse else logits
    if excludes_half:
        logits[0, : vocab_size // 2] = float("-inf")
    check(logits, (min_p, top_k, top_p), temperature=0.5 + seed % 3)
