"""Edits of logits and log-probabilities, read from the rows: what a CPU runs against plain loops, and Triton kernels,
interpreted, against what a CPU runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.edit_cases import EditCase, edit_case

from fleetfoot.kernels.sampling.allowed_tokens import keep_allowed_tokens_cpu, keep_allowed_tokens_triton
from fleetfoot.kernels.sampling.listed_tokens import edit_listed_tokens_cpu, edit_listed_tokens_triton
from fleetfoot.kernels.sampling.paged_penalties import penalize_cpu, penalize_triton
from fleetfoot.kernels.sampling.token_logprobs import MAX_SELECTED, token_logprobs, token_logprobs_torch
from fleetfoot.kernels.sampling.token_logprobs_triton import token_logprobs_triton
from fleetfoot.sampling.masks import banned_tokens

HAS_TRITON = importlib.util.find_spec("triton") is not None
REPOSITORY = Path(__file__).parents[2]
interpreted = pytest.mark.skipif(
    not HAS_TRITON or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs Triton's interpreter; on a GPU, tests/gpu runs the same cases compiled",
)
SEEDS = pytest.mark.parametrize("seed", range(4))
float32 = np.float32


def by_loops(case: EditCase, index: int) -> list[float]:
    """A row of logits after all edits, token by token."""
    values = [float32(value) for value in case.logits[index].float().tolist()]
    row = case.rows[index].item()
    if row < 0:
        return [float(value) for value in values]
    wish, length = case.wishes[int(row)], int(case.seq_lens[index])
    tokens = case.sequences[int(row)][:length]
    prompt, output = tokens[: wish.prompt_len], tokens[wish.prompt_len :]
    banned = banned_tokens(output, wish.words, wish.min_tokens, wish.stops)
    counts = Counter(output)
    for token, value in enumerate(values):
        if wish.allowed is not None and token not in wish.allowed:
            value = value - float32("inf")
        value = value + float32(wish.biases.get(token, 0.0)) + float32(banned.get(token, 0.0))
        if token in counts or (token in prompt and wish.repetition != 1):
            rate = float32(wish.repetition)
            value = value / rate if value > 0 else value * rate
            value = value - float32(wish.frequency) * float32(counts[token])
            value = value - float32(wish.presence) * float32(token in counts)
        values[token] = value
    return [float(value) for value in values]


def edited(case: EditCase, *, triton: bool) -> torch.Tensor:
    keep = keep_allowed_tokens_triton if triton else keep_allowed_tokens_cpu
    edit = edit_listed_tokens_triton if triton else edit_listed_tokens_cpu
    punish = penalize_triton if triton else penalize_cpu
    logits = keep(case.logits, case.rows, case.allowed)
    edit(logits, case.rows, case.seq_lens, case.history, case.listed)
    punish(logits, case.rows, case.seq_lens, case.history, case.penalties)
    return logits[case.rows >= 0]


@SEEDS
def test_edits_match_loops(seed: int) -> None:
    case = edit_case(seed)
    expected = [by_loops(case, index) for index in range(len(case.rows)) if case.rows[index] >= 0]
    assert edited(case, triton=False).tolist() == expected


def test_every_kind_of_edit_was_met() -> None:
    wishes = [wish for seed in range(4) for wish in edit_case(seed).wishes]
    for name in ("biases", "words", "stops", "allowed", "frequency", "presence", "min_tokens"):
        assert 0 < sum(bool(getattr(wish, name)) for wish in wishes) < len(wishes), name
    assert any(len(word) == 1 for wish in wishes for word in wish.words)
    assert any(len(word) > 2 for wish in wishes for word in wish.words)


@interpreted
@SEEDS
def test_kernels_match_what_a_cpu_runs(seed: int) -> None:
    case = edit_case(seed)
    assert torch.equal(edited(case, triton=True), edited(case, triton=False))


@interpreted
def test_no_rows() -> None:
    case = edit_case(0)
    none, lens = case.rows[:0], case.seq_lens[:0]
    logits = keep_allowed_tokens_triton(case.logits[:0], none, case.allowed)
    edit_listed_tokens_triton(logits, none, lens, case.history, case.listed)
    penalize_triton(logits, none, lens, case.history, case.penalties)
    assert logits.shape == (0, case.logits.shape[1])
    assert token_logprobs_triton(logits, torch.empty(0, dtype=torch.int64), 3)[0].shape == (0, 9)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_what_is_not_finite_stays_visible() -> None:
    """A mask must not hide that the model's logits mean nothing."""
    case = edit_case(0, logits=torch.tensor([[float("nan"), float("inf"), 1.0, -float("inf")] * 16]))
    for triton in (False, True) if HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1" else (False,):
        logits = edited(case, triton=triton)
        assert logits[:, ::4].isnan().all()
        assert not logits[:, 1::4].isneginf().any()


def logprob_case(seed: int, vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(5, vocab_size, generator=generator) * 4).to(dtype)
    logits[0, 1::3] = logits[0, 0]  # many ties
    logits[1, : vocab_size // 2] = -torch.inf
    logits[2] = 0.0
    logits[2, ::2] = -0.0
    return logits, torch.randint(vocab_size, (5,), generator=generator)


@interpreted
@pytest.mark.parametrize("vocab_size", [1, 7, 300, 2049, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_match_the_twin(vocab_size: int, dtype: torch.dtype) -> None:
    logits, chosen = logprob_case(vocab_size, vocab_size, dtype)
    num = min(9, vocab_size)
    expected = token_logprobs_torch(logits, chosen, num)
    packed, normalizers = token_logprobs_triton(logits, chosen, num)
    assert torch.equal(packed[:, : num + 1], expected[:, : num + 1])
    assert torch.equal(packed[:, -1], expected[:, -1])
    values = packed[:, num + 1 : -1].view(torch.float32)
    torch.testing.assert_close(values, expected[:, num + 1 : -1].view(torch.float32), atol=2e-6, rtol=1e-6)
    by_hand = logits.float().gather(1, packed[:, : num + 1].long()) - normalizers[:, :1] - normalizers[:, 1:]
    assert torch.equal(by_hand, values)  # what is sorted for gets the same bits


@pytest.mark.parametrize("triton", [False, pytest.param(True, marks=interpreted)], ids=["cpu", "triton"])
def test_rows_get_what_they_want_whatever_others_do(triton: bool) -> None:
    logits, chosen = logprob_case(3, 2500, torch.float32)
    rows = torch.tensor([3, -1, 0, 2, 1], dtype=torch.int32)
    sizes = torch.tensor([1, 0, 6, 3], dtype=torch.int32)

    def compute(select: slice, num: int) -> torch.Tensor:
        arguments = (logits[select], chosen[select], num)
        whose = {"sizes": sizes, "rows": rows[select]}
        return token_logprobs_triton(*arguments, **whose)[0] if triton else token_logprobs_torch(*arguments, **whose)

    together = compute(slice(0, 5), 32)
    for index, wanted in ((0, 2), (2, 0), (3, 5)):
        alone = compute(slice(index, index + 1), 5)
        for begin, other in ((0, 0), (33, 6)):
            assert torch.equal(together[index, begin : begin + wanted + 1], alone[0, other : other + wanted + 1])
        assert together[index, -1] == alone[0, -1]


def test_a_cpu_sorts_for_any_number() -> None:
    logits, chosen = logprob_case(1, MAX_SELECTED + 50, torch.float32)
    many, few = token_logprobs(logits, chosen, MAX_SELECTED + 50), token_logprobs(logits, chosen, 3)
    assert torch.equal(many[:, :4], few[:, :4])
    assert torch.equal(many[:, MAX_SELECTED + 51 : MAX_SELECTED + 55], few[:, 4:8])
    assert many[3, 1 : MAX_SELECTED + 51].sort().values.tolist() == list(range(MAX_SELECTED + 50))


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton's compiler")
def test_kernels_compile_for_a_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.helpers.compile_edit_kernels"]
    result = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for name in ("_keep_allowed", "_listed_tokens", "_penalties", "_pieces", "_select"):
        assert f"{name}_kernel: " in result.stdout
    assert result.stdout.count("_penalties_kernel") == 3
