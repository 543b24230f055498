"""Philox4x32-10 and the noise made of it: known answers, an independent reference, and exactness on every path."""

import math

import numpy as np
import pytest
import torch

from fleetfoot.kernels import sampling
from fleetfoot.kernels.sampling import gumbel
from fleetfoot.kernels.sampling.gumbel import gumbel_argmax, gumbel_noise, philox_4x32

ONES = 0xFFFFFFFF

# From the known-answer tests of Random123, the authors' library: counter, key, output.
KNOWN_ANSWERS = [
    ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([ONES] * 4, [ONES] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


def philox_reference(counter: list[int], key: list[int]) -> list[int]:
    """The paper's definition in Python integers, which do not overflow."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & ONES, (p0 >> 32) ^ c[3] ^ k[1], p0 & ONES]
        k = [(k[0] + 0x9E3779B9) & ONES, (k[1] + 0xBB67AE85) & ONES]
    return c


def noise_reference(seed: int, position: int, token_id: int) -> float:
    """The definition in gumbel.py, in Python."""
    word = philox_reference([token_id >> 2, position, 0, 0], [seed & ONES, seed >> 32])[token_id & 3]
    return -math.log(-math.log(((word >> 9) + 0.5) * 2**-23))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    words = philox_4x32(*counter, *(torch.tensor(word) for word in key))
    assert [int(word) for word in words] == expected
    assert philox_reference(counter, key) == expected


def test_equals_the_reference_on_random_words():
    words = torch.randint(0, 2**32, (6, 200), generator=torch.Generator().manual_seed(1))
    expected = [philox_reference(column[:4], column[4:]) for column in words.T.tolist()]
    assert torch.stack(philox_4x32(*words)).T.tolist() == expected


def test_uniform_is_exact_and_open():
    words = torch.tensor([0, 511, 512, ONES])
    assert gumbel.uniform_from_word(words).tolist() == [2.0**-24, 2.0**-24, 3 * 2.0**-24, 1 - 2.0**-24]


def test_noise_bounds_hold_at_the_extreme_words():
    lowest, highest = gumbel._gumbel_(gumbel.uniform_from_word(torch.tensor([0, ONES]))).tolist()
    assert gumbel.NOISE_MIN <= lowest < gumbel.NOISE_MIN + 1e-3
    assert gumbel.NOISE_MAX - 1e-3 < highest <= gumbel.NOISE_MAX


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 50])
def test_noise_follows_the_convention(vocab_size):
    seeds, positions = [0, 1, 2**32, 2**64 - 1], [0, 7, 131071, 2**31]
    noise = gumbel_noise(torch.tensor(np.uint64(seeds).view(np.int64)), torch.tensor(positions), vocab_size)
    expected = [[noise_reference(s, p, v) for v in range(vocab_size)] for s, p in zip(seeds, positions, strict=True)]
    torch.testing.assert_close(noise, torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_noise_is_the_same_alone_chunked_and_scattered(monkeypatch):
    seeds, positions = torch.randint(-(2**62), 2**62, (9,)), torch.randint(0, 10000, (9,))
    noise = gumbel_noise(seeds, positions, 1003)
    for i in range(9):
        assert torch.equal(gumbel_noise(seeds[i : i + 1], positions[i : i + 1], 1003)[0], noise[i])
    rows, token_ids = torch.randint(0, 9, (501,)), torch.randint(0, 1003, (501,))
    assert torch.equal(gumbel.gumbel_noise_at(seeds[rows], positions[rows], token_ids), noise[rows, token_ids])
    monkeypatch.setitem(sampling.MAX_ELEMENTS, "cpu", 2048)
    assert torch.equal(gumbel_noise(seeds, positions, 1003), noise)


@pytest.mark.parametrize("scale", [0.5, 4.0, 30.0])
@pytest.mark.parametrize("fraction", [0, 16, 1000])
def test_skipping_tokens_that_cannot_win_changes_nothing(scale, fraction, monkeypatch):
    monkeypatch.setattr(gumbel, "_SPARSE_FRACTION", fraction)
    scores = torch.randn(64, 997, generator=torch.Generator().manual_seed(2)) * scale
    scores -= scores.amax(dim=-1, keepdim=True)
    seeds, positions = torch.arange(64), torch.arange(64) * 3
    everywhere = (scores + gumbel_noise(seeds, positions, 997)).argmax(dim=-1)
    assert torch.equal(gumbel_argmax(scores.clone(), seeds, positions, on_host=True), everywhere)
    assert torch.equal(gumbel_argmax(scores.clone(), seeds, positions), everywhere)
