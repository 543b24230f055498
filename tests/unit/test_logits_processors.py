"""Logits processors: those of both runners against loops, and the Triton kernels, interpreted, against a CPU."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.interpreter import HAS_INTERPRETER, interpreted
from tests.helpers.logits_processor_cases import ProcessorCase, processor_case
from tests.helpers.recording_device import NoValues

from fleetfoot.kernels.sampling.logits_processors import process_logits_cpu, process_logits_torch
from fleetfoot.kernels.sampling.logits_processors_triton import process_logits_triton
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.sampling.sampler_v1 import SamplingMetadata, SamplingRow, banned_tokens, process_logits

float32 = np.float32


def by_loops(case: ProcessorCase, index: int) -> list[float]:
    """A row of logits after all logits processors, token by token."""
    request, length = case.requests[int(case.rows[index])], int(case.seq_lens[index])
    params, biases = request.params, request.params.logit_bias or {}
    prompt, output = np.split(request.token_ids[:length], [request.num_prompt_tokens])
    banned = banned_tokens(output, request.bad_words_token_ids, params.min_tokens, request.stop_token_ids)
    counts = Counter(output.tolist())
    values = [float32(value) for value in case.logits[index].float().tolist()]
    for token, value in enumerate(values):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            value = value - float32("inf")
        value = value + float32(biases.get(token, 0.0)) + float32(-np.inf if token in banned else 0.0)
        if token in counts or (token in prompt and params.repetition_penalty != 1):
            rate = float32(params.repetition_penalty)
            value = value / rate if value > 0 else value * rate
            value = value - float32(params.frequency_penalty) * float32(counts[token])
            value = value - float32(params.presence_penalty) * float32(token in counts)
        values[token] = value
    return [float(value) for value in values]


def processed_by(process: Callable[..., torch.Tensor], case: ProcessorCase, *long_lists: Any) -> torch.Tensor:
    """Without padding rows."""
    return process(case.logits, case.rows, case.seq_lens, case.tables, *long_lists)[case.rows >= 0]


def processed_by_v1(case: ProcessorCase) -> torch.Tensor:
    """By the logits processors of Model Runner V1, from the same parameters."""
    rows = []
    for number, length in zip(case.rows.tolist(), case.seq_lens.tolist(), strict=True):
        if number >= 0:
            one = case.requests[number]
            lists = (one.stop_token_ids, one.bad_words_token_ids)
            rows.append(SamplingRow(one.params, 0, one.token_ids[:length], one.num_prompt_tokens, *lists))
    return processed(case.logits[case.rows >= 0], *rows)


@pytest.mark.parametrize("seed", range(8))
def test_both_runners_equal_loops(seed: int) -> None:
    case = processor_case(seed)
    expected = [by_loops(case, index) for index in range(len(case.rows)) if case.rows[index] >= 0]
    assert processed_by(process_logits_cpu, case).tolist() == expected
    with NoValues():
        found = process_logits_torch(case.logits, case.rows, case.seq_lens, case.tables)
    assert found[case.rows >= 0].tolist() == expected
    assert processed_by_v1(case).tolist() == expected


def test_the_cases_have_every_processor() -> None:
    requests = [one for seed in range(4) for one in processor_case(seed).requests]
    off = SamplingParams()
    for name in ("logit_bias", "min_tokens", "allowed_token_ids", "frequency_penalty", "presence_penalty"):
        assert {getattr(one.params, name) == getattr(off, name) for one in requests} == {True, False}, name
    lengths = {len(word) for one in requests for word in one.bad_words_token_ids}
    assert lengths >= {1, 2, 3} and not all(one.bad_words_token_ids for one in requests)


@interpreted
@pytest.mark.parametrize("seed", range(4))
def test_kernels_equal_the_cpu(seed: int) -> None:
    case = processor_case(seed)
    assert torch.equal(processed_by(process_logits_triton, case), processed_by(process_logits_cpu, case))


@pytest.mark.parametrize(
    "process", [process_logits_torch, process_logits_cpu, pytest.param(process_logits_triton, marks=interpreted)]
)
def test_long_lists(process: Callable[..., torch.Tensor]) -> None:
    """A list outside the table has the effect of one inside."""
    case = processor_case(1)
    row = next(row for row, one in enumerate(case.requests) if one.params.logit_bias)
    listed, expected = case.tables.listed, processed_by(process, case)
    without = {name: getattr(listed, name).clone() for name in ("num_biases", "num_words", "num_stops")}
    for counts in without.values():
        counts[row] = 0
    short = replace(case, tables=replace(case.tables, listed=replace(listed, **without)))
    assert torch.equal(processed_by(process, short, {row: listed}), expected)


@interpreted
def test_no_rows() -> None:
    case = processor_case(0)
    found = process_logits_triton(case.logits[:0], case.rows[:0], case.seq_lens[:0], case.tables)
    assert found.shape == (0, case.logits.shape[1])


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_nan_and_inf_stay_visible() -> None:
    case = processor_case(0, logits=torch.tensor([[float("nan"), float("inf"), 1.0, -float("inf")] * 16]))
    for process in (process_logits_torch, process_logits_cpu, *([process_logits_triton] if HAS_INTERPRETER else [])):
        logits = processed_by(process, case)
        assert logits[:, ::4].isnan().all()
        assert not logits[:, 1::4].isneginf().any()


def row(tokens: list[int], **params: Any) -> SamplingRow:
    """With a prompt of two tokens."""
    return SamplingRow(SamplingParams(**params), seed=1, token_ids=tokens, num_prompt_tokens=2)


def processed(logits: torch.Tensor, *rows: SamplingRow) -> torch.Tensor:
    return process_logits(logits, SamplingMetadata.build(rows, logits.device))
