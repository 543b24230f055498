"""Token masks of grammars on logits: the implementations against a loop."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.helpers.interpreter import interpreted
from tests.helpers.recording_device import NoValues

from fleetfoot.kernels.sampling.mask_tokens import mask_tokens_cpu, mask_tokens_torch, mask_tokens_triton
from fleetfoot.records.step import TokenMasks
from fleetfoot.runner.v2.device import CpuDevice
from fleetfoot.runner.v2.grammar_masks import GrammarMasks
from fleetfoot.structured.mask_space import MaskMemory

Implementation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]


def watched_torch(*args: torch.Tensor) -> None:
    """The reference, which reads no value on the host."""
    with NoValues():
        mask_tokens_torch(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [31, 64, 5000])
@pytest.mark.parametrize(
    "mask_tokens", [watched_torch, mask_tokens_cpu, pytest.param(mask_tokens_triton, marks=interpreted)]
)
def test_masked_tokens_are_minus_infinity(mask_tokens: Implementation, vocab_size: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(vocab_size)
    masks = rng.integers(-(2**31), 2**31, (3, -(-vocab_size // 32)), dtype=np.int32)
    index = np.array([2, -1, 0, -1, 1], dtype=np.int32)
    logits = torch.from_numpy(rng.standard_normal((5, vocab_size), dtype=np.float32)).to(dtype)
    logits[0, 5], logits[2, 6], logits[4, 7] = torch.nan, torch.inf, -torch.inf
    expected = logits.clone()
    for row, number in enumerate(index):
        for token in range(vocab_size) if number >= 0 else ():
            if not int(masks[number, token // 32]) >> (token % 32) & 1:
                expected[row, token] -= torch.inf  # NaN and +inf stay visible
    with np.errstate(invalid="ignore"):  # +inf - inf in the interpreter
        mask_tokens(logits, torch.from_numpy(masks), torch.from_numpy(index))
    assert torch.equal(logits.nan_to_num(7.0, 8.0, 9.0), expected.nan_to_num(7.0, 8.0, 9.0))


def test_masks_are_uploaded_from_shared_and_other_memory() -> None:
    masks, memory, rng = GrammarMasks(CpuDevice(), 6, 100), MaskMemory(4, 6, num_steps=3), np.random.default_rng(0)
    for turn in range(8):
        rows = rng.permutation(6)[: turn % 5].tolist()
        values = rng.integers(-9, 9, (len(rows), 4)).astype(np.int32)
        step = TokenMasks(rows, values)
        if turn % 2:
            place, offset = memory.next(len(rows))
            place[:] = values
            step = TokenMasks(rows, place, memory.file.words, offset)
        masks.upload(step)
        on_device, index = masks.of_rows(6)
        assert [on_device[index[row]].tolist() for row in rows] == values.tolist()
        assert all(index[row] == -1 for row in range(6) if row not in rows)
    masks.upload(None)
    assert masks.of_rows(6)[1].tolist() == [-1] * 6
