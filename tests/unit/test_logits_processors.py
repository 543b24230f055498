"""Logits processors: the CPU implementation against loops, and the Triton kernels, interpreted, against the CPU
implementation. Penalties of Model Runner V1 against plain Python."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.logits_processor_cases import ProcessorCase, processor_case

from fleetfoot.kernels.sampling.logits_processors import count_tokens, process_logits_cpu
from fleetfoot.kernels.sampling.logits_processors_triton import process_logits_triton
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.sampling.logits_processors import banned_tokens
from fleetfoot.sampling.metadata import SamplingMetadata, SamplingRow
from fleetfoot.sampling.sampler_v1 import process_logits

HAS_TRITON = importlib.util.find_spec("triton") is not None
HAS_INTERPRETER = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"
REPOSITORY = Path(__file__).parents[2]
interpreted = pytest.mark.skipif(
    not HAS_INTERPRETER, reason="needs Triton's interpreter; on a GPU, tests/gpu runs the same cases compiled"
)
SEEDS = pytest.mark.parametrize("seed", range(4))
float32 = np.float32


def by_loops(case: ProcessorCase, index: int) -> list[float]:
    """A row of logits after all logits processors, token by token."""
    values = [float32(value) for value in case.logits[index].float().tolist()]
    row = int(case.rows[index])
    params, length = case.params[row], int(case.seq_lens[index])
    tokens = case.sequences[row][:length]
    prompt, output = tokens[: params.prompt_len], tokens[params.prompt_len :]
    banned = banned_tokens(output, params.words, params.min_tokens, params.stops)
    counts = Counter(output)
    for token, value in enumerate(values):
        if params.allowed is not None and token not in params.allowed:
            value = value - float32("inf")
        value = value + float32(params.biases.get(token, 0.0)) + float32(banned.get(token, 0.0))
        if token in counts or (token in prompt and params.repetition != 1):
            rate = float32(params.repetition)
            value = value / rate if value > 0 else value * rate
            value = value - float32(params.frequency) * float32(counts[token])
            value = value - float32(params.presence) * float32(token in counts)
        values[token] = value
    return [float(value) for value in values]


def processed_by(process: Callable[..., torch.Tensor], case: ProcessorCase) -> torch.Tensor:
    """Without padding rows."""
    return process(case.logits, case.rows, case.seq_lens, case.tables)[case.rows >= 0]


@SEEDS
def test_equals_loops(seed: int) -> None:
    case = processor_case(seed)
    expected = [by_loops(case, index) for index in range(len(case.rows)) if case.rows[index] >= 0]
    assert processed_by(process_logits_cpu, case).tolist() == expected


def test_the_cases_have_every_processor() -> None:
    params = [one for seed in range(4) for one in processor_case(seed).params]
    for name in ("biases", "words", "stops", "allowed", "frequency", "presence", "min_tokens"):
        assert 0 < sum(bool(getattr(one, name)) for one in params) < len(params), name
    assert any(len(word) == 1 for one in params for word in one.words)
    assert any(len(word) > 2 for one in params for word in one.words)


@interpreted
@SEEDS
def test_kernels_equal_the_cpu(seed: int) -> None:
    case = processor_case(seed)
    assert torch.equal(processed_by(process_logits_triton, case), processed_by(process_logits_cpu, case))


@pytest.mark.parametrize("process", [process_logits_cpu, pytest.param(process_logits_triton, marks=interpreted)])
def test_long_lists(process: Callable[..., torch.Tensor]) -> None:
    """A list outside the table has the effect of one inside."""
    case = processor_case(1)
    row = next(row for row, one in enumerate(case.params) if one.biases)
    listed = case.tables.listed
    without = {name: getattr(listed, name).clone() for name in ("num_biases", "num_words", "num_stops")}
    for counts in without.values():
        counts[row] = 0
    tables = replace(case.tables, listed=replace(listed, **without))
    found = process(case.logits, case.rows, case.seq_lens, tables, {row: listed})
    assert torch.equal(found[case.rows >= 0], processed_by(process, case))


@interpreted
def test_no_rows() -> None:
    case = processor_case(0)
    found = process_logits_triton(case.logits[:0], case.rows[:0], case.seq_lens[:0], case.tables)
    assert found.shape == (0, case.logits.shape[1])


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_nan_and_inf_stay_visible() -> None:
    case = processor_case(0, logits=torch.tensor([[float("nan"), float("inf"), 1.0, -float("inf")] * 16]))
    for process in (process_logits_cpu, process_logits_triton) if HAS_INTERPRETER else (process_logits_cpu,):
        logits = processed_by(process, case)
        assert logits[:, ::4].isnan().all()
        assert not logits[:, 1::4].isneginf().any()


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton's compiler")
def test_kernels_compile_for_a_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.helpers.compile_sampling_kernels"]
    result = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for name in ("_keep_allowed", "_listed_tokens", "_penalties", "_tile_stats", "_select"):
        assert f"{name}_kernel: " in result.stdout
    assert result.stdout.count("_penalties_kernel") == 3


# --- penalties of Model Runner V1 -------------------------------------------------------------------------------------

VOCAB = 23


def penalized_reference(logits, prompt, output, repetition, frequency, presence):
    result = list(logits)
    for token in set(prompt) | set(output):
        result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
    for token in set(output):
        result[token] -= frequency * output.count(token) + presence
    return result


def row(prompt, output, **params):
    return SamplingRow(SamplingParams(**params), seed=1, token_ids=[*prompt, *output], num_prompt_tokens=len(prompt))


def processed(logits, rows):
    return process_logits(logits, SamplingMetadata.build(rows, logits.device))


@pytest.mark.parametrize(
    "factors",
    [(1.3, 0.0, 0.0), (0.7, 0.0, 0.0), (1.0, 0.5, 0.0), (1.0, 0.0, -1.5), (1.7, 2.0, 1.0), (0.5, -2.0, 2.0)],
)
def test_equals_the_reference(factors):
    generator = np.random.default_rng(3)
    repetition, frequency, presence = factors
    rows, expected = [], []
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(4)) * 5
    for i in range(8):
        prompt = generator.integers(0, VOCAB, generator.integers(1, 30)).tolist()
        output = generator.integers(0, VOCAB, generator.integers(0, 30)).tolist()
        rows.append(
            row(prompt, output, repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence)
        )
        expected.append(penalized_reference(logits[i].tolist(), prompt, output, *factors))
    torch.testing.assert_close(processed(logits, rows), torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_rows_without_penalties_keep_every_bit_and_the_logits_stay():
    logits = torch.randn(3, VOCAB)
    before = logits.clone()
    rows = [row([1, 2], [3]), row([1, 2], [3, 3], frequency_penalty=1.0), row([4], [5], temperature=0)]
    result = processed(logits, rows)
    assert torch.equal(result[[0, 2]], logits[[0, 2]])
    assert result[1, 3].item() == pytest.approx(before[1, 3].item() - 2.0)
    assert torch.equal(logits, before)


def test_only_the_repetition_penalty_looks_at_the_prompt():
    logits = torch.ones(1, VOCAB)
    assert torch.equal(processed(logits, [row([1, 2, 3], [], frequency_penalty=2.0, presence_penalty=2.0)]), logits)
    repeated = processed(logits, [row([1, 2, 3], [], repetition_penalty=2.0)])
    assert repeated[0, :5].tolist() == [1.0, 0.5, 0.5, 0.5, 1.0]


def test_refresh_sees_new_tokens():
    logits = torch.zeros(1, VOCAB)
    tokens = [1]
    growing = SamplingRow(SamplingParams(presence_penalty=1.0), seed=1, token_ids=tokens, num_prompt_tokens=1)
    metadata = SamplingMetadata.build([growing], logits.device)
    assert process_logits(logits, metadata).count_nonzero() == 0
    tokens.append(9)
    assert process_logits(logits, metadata.refresh())[0, 9].item() == -1.0


def test_masked_tokens_stay_masked():
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 2] = 1.0
    result = processed(logits, [row([0, 1], [1], repetition_penalty=0.5, frequency_penalty=-2.0)])
    assert torch.equal(result, logits)


def test_count_tokens():
    counts = count_tokens(np.array([1, 4, 9]), [4, 2, 4])
    assert dict(zip(counts.token_ids.tolist(), counts.output_counts.tolist(), strict=True)) == {2: 1, 4: 2, 1: 0, 9: 0}
    assert count_tokens(None, []).token_ids.dtype == np.int64
