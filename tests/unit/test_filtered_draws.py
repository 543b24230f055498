"""Draws under min-p, top-k and top-p by the Triton kernels, interpreted, against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.interpreter import interpreted

from fleetfoot.kernels.sampling.filter_cuts_triton import filter_cuts_triton
from fleetfoot.kernels.sampling.sample import RandomRows, RowFilters, sample_torch
from fleetfoot.kernels.sampling.sample_triton import sample_triton

pytestmark = interpreted


def filters_of(*rows: tuple[float, int, float]) -> RowFilters:
    """(min_p, top_k, top_p) of each row; 0, 0, 1 are off."""
    return RowFilters(
        torch.tensor([min_p for min_p, _, _ in rows]).log(),
        torch.tensor([top_k for _, top_k, _ in rows], dtype=torch.int32),
        torch.tensor([top_p for _, _, top_p in rows]),
    )


def check(logits: torch.Tensor, filters: RowFilters, temperature: float = 0.8) -> None:
    num_rows = len(logits)
    index = torch.arange(num_rows)
    random = RandomRows(torch.full((num_rows,), temperature), index * 77 + 5, index, filters)
    assert sample_triton(logits, random).tolist() == sample_torch(logits, random).tolist()
    scores = scores_of(logits, random.temperatures)
    filters.apply(scores)
    assert torch.equal(kept_by_kernel(logits, random), scores > -torch.inf)


def scores_of(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    scores = logits.float()
    return (scores - scores.max(dim=1, keepdim=True).values) / temperatures[:, None]


def kept_by_kernel(logits: torch.Tensor, random: RandomRows) -> torch.Tensor:
    highest = torch.tensor(_packed(logits.float()))[:, None]
    cuts = filter_cuts_triton(logits, highest, random, overlap=False)
    limits = -cuts[:, :1].contiguous().view(torch.float32)
    scores, index = scores_of(logits, random.temperatures), torch.arange(logits.shape[1])
    kept = (scores > limits) | ((scores == limits) & (index <= cuts[:, 1:]))
    return kept & (scores > -torch.inf)


EACH = [(0.0, 0, 1.0), (0.05, 0, 1.0), (0.0, 7, 1.0), (0.0, 0, 0.83), (0.3, 3, 0.9), (0.0, 40, 0.31), (0.0, 1, 0.99)]


@pytest.mark.parametrize(("vocab_size", "spread"), [(1, 2.0), (5, 2.0), (300, 0.01), (300, 30.0), (2100, 2.0)])
def test_each_filter_and_all_together(vocab_size: int, spread: float) -> None:
    logits = torch.randn(len(EACH), vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * spread
    check(logits, filters_of(*EACH))


def test_ties_are_cut_by_index() -> None:
    """Of equal tokens top-p keeps the first; top-k all, and min-p."""
    logits = torch.zeros(4, 4100)
    logits[:, ::3] = 1.0
    logits[3, 4000:] = 2.0
    check(logits, filters_of((0.0, 0, 0.5), (0.0, 0, 0.9), (0.0, 10, 0.0001), (0.9, 0, 0.2)))
    check(logits.to(torch.bfloat16), filters_of((0.0, 0, 0.25), (0.0, 5, 1.0), (0.0, 2000, 0.7), (0.0, 150, 0.5)))


def test_the_cut_itself() -> None:
    logits = torch.tensor([[0.0, -1.0, -1.0, -3.0, -0.5]])
    highest = torch.tensor([[int(choice)] for choice in _packed(logits)])

    def cut(*wanted: float) -> tuple[float, int]:
        random = RandomRows(torch.ones(1), torch.zeros(1), torch.zeros(1), filters_of(wanted))  # type: ignore[arg-type]
        found = filter_cuts_triton(logits, highest, random, overlap=False)[0]
        return -float(found[:1].view(torch.float32)), int(found[1])

    all_of_them = 2**31 - 1
    assert cut(0.0, 2, 1.0) == (-0.5, all_of_them)
    assert cut(0.0, 3, 1.0) == (-1.0, all_of_them)  # and its equal
    assert cut(0.0, 5, 1.0) == (-float("inf"), all_of_them)
    assert cut(0.0, 0, 0.82) == (-1.0, 1)  # 1 + 0.61 + 0.37 of 2.39 are enough
    assert cut(0.0, 0, 0.83) == (-1.0, 2)
    assert cut(0.0, 0, 1e-6) == (0.0, 0)
    assert cut(0.5, 0, 1.0)[0] == pytest.approx(-0.6931, abs=1e-4)


def _packed(logits: torch.Tensor) -> list[int]:
    """The best candidate of each row, as `fleetfoot.kernels.runtime.triton_support` packs it."""
    chosen = logits.argmax(dim=-1)
    bits = logits.gather(1, chosen[:, None]).view(torch.int32)[:, 0]
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # of negative floats: the order is reversed
    return [(int(key) << 32) | (0x7FFFFFFF - int(index)) for key, index in zip(bits, chosen, strict=True)]


def test_rows_that_mean_nothing_stay_recognisable() -> None:
    logits = torch.randn(4, 300)
    logits[0, 7] = float("nan")
    logits[1, 9] = float("inf")
    logits[2] = float("-inf")
    invalid = torch.zeros(4, dtype=torch.bool)
    index = torch.arange(4)
    sample_triton(logits, RandomRows(torch.ones(4), index, index, filters_of(*[(0.1, 5, 0.5)] * 4)), invalid=invalid)
    assert invalid.tolist() == [True, True, True, False]


def test_parameters_are_read_through_rows() -> None:
    logits = torch.randn(3, 700, generator=torch.Generator().manual_seed(3))
    filters = filters_of((0.0, 2, 1.0), (0.0, 0, 1.0), (0.0, 0, 0.2), (0.4, 0, 1.0))
    rows = torch.tensor([2, -1, 0])
    random = RandomRows(torch.ones(4), torch.arange(4), torch.tensor([4, 5, 6]), filters, rows)
    got, expected = sample_triton(logits, random).tolist(), sample_torch(logits, random).tolist()
    assert (got[0], got[2]) == (expected[0], expected[2])


def test_a_row_of_negative_logits() -> None:
    check(torch.tensor([[-torch.inf, -torch.inf, -1.0429, -0.8276]]), filters_of((1.0, 0, 0.5)), temperature=0.5)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    vocab_size=st.integers(2, 2500),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    top_k=st.one_of(st.just(0), st.integers(1, 3000)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    is_coarse=st.booleans(),
    num_excluded=st.integers(0, 1),
)
def test_any_row(
    seed: int, vocab_size: int, min_p: float, top_k: int, top_p: float, is_coarse: bool, num_excluded: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, vocab_size, generator=generator) * 3
    if is_coarse:
        logits = logits.round()
    logits[0, : num_excluded * (vocab_size // 2)] = float("-inf")
    check(logits, filters_of((min_p, top_k, top_p)), temperature=0.5 + seed % 3)
