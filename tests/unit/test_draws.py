"""Draws without filters, and the argmax, by the Triton kernels, interpreted, against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.interpreter import interpreted

from fleetfoot.kernels.sampling import sample_triton as kernels
from fleetfoot.kernels.sampling.sample import RandomRows, sample_torch
from fleetfoot.kernels.sampling.sample_triton import sample_triton

pytestmark = interpreted


def random_rows(count: int, temperature: float, seed: int = 0) -> RandomRows:
    index = torch.arange(count)
    seeds = index * 0x1234567890ABCDE - 977 * seed  # also negative ones
    return RandomRows(torch.full((count,), temperature), seeds, index.int() + seed)


def random_logits(rows: int, vocab_size: int, spread: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("below", [2.3, -30.0, 40.0], ids=["usual", "no token reaches the bound", "every token does"])
@pytest.mark.parametrize(("vocab_size", "spread"), [(1, 1.0), (3, 1.0), (700, 0.01), (1100, 3.0), (4400, 1.0)])
def test_tokens_do_not_depend_on_the_bound(
    vocab_size: int, spread: float, below: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In up to five tiles, each in two parts; two rows of each temperature. With this seed, one token is in a tile
    whose best is far below that of its row."""
    monkeypatch.setattr(kernels, "_BELOW", below)
    monkeypatch.setattr(kernels, "_FEW_ROWS", 1)
    monkeypatch.setattr(kernels, "_TILING", (1024, 1, 512))
    random = random_rows(8, 1.0)
    random.temperatures[:] = torch.tensor([0.01, 0.6, 1.0, 30.0] * 2)
    for dtype in (torch.float32, torch.bfloat16):
        logits = random_logits(8, vocab_size, spread, seed=24).to(dtype)
        assert sample_triton(logits, random).tolist() == sample_torch(logits, random).tolist()


def test_rows_without_a_token_that_reaches_the_bound_are_drawn_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of these rows have such a token, and others have none."""
    monkeypatch.setattr(kernels, "_BELOW", -0.5)  # of 24 rows
    logits, random = random_logits(24, 3000, 1.0), random_rows(24, 0.9)
    assert sample_triton(logits, random).tolist() == sample_torch(logits, random).tolist()


def test_more_rows_than_small_tiles_are_for() -> None:
    logits = random_logits(18, 5000, 2.0)
    logits[3:5, 1100:] = -torch.inf  # whole tiles
    random = random_rows(18, 0.7)
    random.temperatures[5:9] = 0.0
    assert sample_triton(logits, random).tolist() == sample_torch(logits, random).tolist()


def test_the_best_token_among_nan_infinity_and_zeros() -> None:
    nan, inf = torch.nan, torch.inf
    rows = torch.tensor([
        [1.0, nan, 2.0, nan], [nan, 1.0, inf, nan], [-inf, -inf, -inf, -inf], [-0.0, 0.0, -1.0, -0.0],
        [-1.0, 0.0, -0.0, 0.0], [inf, 1.0, inf, 2.0], [-inf, -inf, nan, -inf], [nan, nan, nan, nan],
    ])  # fmt: skip
    logits = torch.full((len(rows), 2000), -torch.inf)
    for place in (0, 1022, 1996):
        logits[:, place : place + 4] = rows
        for dtype in (torch.float32, torch.bfloat16):
            invalid, expected = torch.zeros(2, len(rows), dtype=torch.int64)
            tokens = sample_triton(logits.to(dtype), invalid=invalid)
            greedy = sample_torch(logits.to(dtype), invalid=expected)
            is_defined = ~rows.isnan().any(dim=1)
            assert tokens[is_defined].tolist() == greedy[is_defined].tolist()
            assert invalid.tolist() == expected.tolist()
            random = random_rows(len(rows), 0.8)
            sample_triton(logits.to(dtype), random, invalid=invalid)
            assert invalid.tolist() == expected.tolist()


def test_padding_and_rows_of_a_table() -> None:
    logits, rows = random_logits(3, 1300, 1.0), torch.tensor([2, -1, 0])
    table = random_rows(4, 0.9)
    random = RandomRows(table.temperatures, table.seeds, table.positions[:3], None, rows)
    assert sample_triton(logits, random)[[0, 2]].tolist() == sample_torch(logits, random)[[0, 2]].tolist()


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    vocab_size=st.integers(2, 2500),
    spread=st.sampled_from([0.0, 0.1, 2.0, 30.0]),
    temperature=st.floats(1e-6, 1e4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_any_row(seed: int, vocab_size: int, spread: float, temperature: float, dtype: torch.dtype) -> None:
    logits, random = random_logits(2, vocab_size, spread, seed).to(dtype), random_rows(2, temperature, seed)
    assert sample_triton(logits, random).tolist() == sample_torch(logits, random).tolist()
