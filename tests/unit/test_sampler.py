"""The sampler: what each parameter does, the distribution of draws, and the independence of rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.recording_device import NoValues

from fleetfoot.kernels import sampling
from fleetfoot.kernels.sampling import sample as filters
from fleetfoot.kernels.sampling.sample import RandomRows, sample_cpu, sample_torch
from fleetfoot.kernels.sampling.token_logprobs import LogprobRows, token_logprobs_cpu, token_logprobs_torch
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.sampling.sampler_v1 import SamplingMetadata, SamplingRow, process_logits, sample

CPU = torch.device("cpu")


def row(tokens=(1,), num_prompt_tokens=1, seed=0, stop=(), bad_words=(), **params):
    return SamplingRow(SamplingParams(**params), seed, list(tokens), num_prompt_tokens, frozenset(stop), bad_words)


def run(logits, *rows):
    return sample(logits, SamplingMetadata.build(rows, CPU))


def remaining(scores):
    return [line.isfinite().nonzero().flatten().tolist() for line in scores]


def test_top_k_keeps_ties_with_the_last():
    scores = torch.tensor([[0.0, -1.0, -1.0, -2.0], [0.0, -1.0, -1.0, -2.0], [-3.0, 0.0, -1.0, -2.0]])
    filters.apply_top_k(scores, torch.tensor([2, 0, 9]), 9)
    assert remaining(scores) == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("weights", "top_p", "expected"),
    [
        ([1.0] * 4, [0.5, 0.51, 1e-9, 1.0, 0.75], [[0, 1], [0, 1, 2], [0], [0, 1, 2, 3], [0, 1, 2]]),
        ([1.0, 0.25, 1.0, 0.25], [0.3, 0.79, 0.85], [[0], [0, 2], [0, 1, 2]]),
    ],
)
def test_top_p_keeps_the_smallest_set_and_the_lowest_ids_of_a_tie(weights, top_p, expected):
    scores = torch.tensor(weights).log().repeat(len(top_p), 1)
    filters.apply_top_p(scores, torch.tensor(top_p))
    assert remaining(scores) == expected


def test_top_p_of_long_rows_equals_a_full_sort():
    # Coarse scores, as bfloat16 gives them, tie often; the sets reach past what is sorted first.
    scores = (torch.randn(6, 5000, generator=torch.Generator().manual_seed(8)) * 4).round() / 8
    scores -= scores.amax(dim=-1, keepdim=True)
    top_p = torch.tensor([0.05, 0.3, 0.9, 0.99, 1.0, 0.6])
    expected = []
    for line, p in zip(scores.double(), top_p.tolist(), strict=True):
        order = line.sort(descending=True, stable=True).indices
        before = line.exp()[order].cumsum(0) - line.exp()[order]
        expected.append(sorted(order[before < p * line.exp().sum()].tolist()) if p < 1 else list(range(5000)))
    filters.apply_top_p(scores, top_p)
    assert remaining(scores) == expected


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_invalid_rows_are_flagged_and_do_not_affect_others(temperature, value):
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(9))
    filtered = [{"top_k": 5 * i, "top_p": 1 - 0.1 * i, "min_p": 0.01, "logprobs": i or None} for i in range(3)]
    rows = [row(temperature=temperature, seed=i, **params) for i, params in enumerate(filtered)]
    expected = run(logits, *rows).token_ids[[0, 2]].tolist()
    logits[1] = value
    output = run(logits, *rows)
    assert output.invalid.tolist() == [False, True, False]
    assert output.token_ids[[0, 2]].tolist() == expected
    assert 0 <= output.token_ids[1].item() < 40


def test_wrong_number_of_rows():
    with pytest.raises(ValueError, match="logits have 2 rows and the sampling metadata 1"):
        run(torch.zeros(2, 4), row())


@pytest.mark.parametrize("filtered", [False, True])
def test_the_reference_equals_the_cpu_without_host_synchronisation(filtered):
    generator = torch.Generator().manual_seed(11)
    logits = (torch.randn(9, 3000, generator=generator) * 3).to(torch.bfloat16)
    logits[4, 7], logits[5] = math.nan, -math.inf
    rows = torch.tensor([3, 0, 1, 2, 4, 5, -1, 6, 2], dtype=torch.int32)
    row_filters = filters.RowFilters(
        torch.tensor([-math.inf, -2.0, -math.inf, -math.inf, -1.0, -math.inf, -3.0]),
        torch.tensor([0, 0, 40, 0, 3, 0, 2500], dtype=torch.int32),
        torch.tensor([1.0, 1.0, 1.0, 0.9, 0.5, 1.0, 0.99]),
    )
    temperatures, seeds = torch.tensor([0.0, 0.7, 1.0, 2.0, 1.0, 1.0, 0.5]), torch.arange(7) * 977
    random = RandomRows(temperatures, seeds, torch.arange(9), row_filters if filtered else None, rows)
    invalid, expected_invalid = torch.empty((2, 9), dtype=torch.bool)
    expected = sample_cpu(logits, random, invalid=expected_invalid)
    sizes = torch.tensor([0, 1, 6, 3, 0, 2, 4], dtype=torch.int32)
    of_rows = LogprobRows(sizes, rows)
    expected_logprobs = token_logprobs_cpu(logits, expected, 5, of_rows)
    with NoValues():
        token_ids = sample_torch(logits, random, invalid=invalid)
        logprobs = token_logprobs_torch(logits, expected, 5, of_rows)
    assert token_ids.tolist() == expected.tolist() and invalid.tolist() == expected_invalid.tolist()
    assert torch.equal(logprobs, expected_logprobs)


VOCAB = 37
TOKENS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)


SEQUENCES = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=2), max_size=3)
PARAMS = {
    "temperature": st.sampled_from([0.0, 0.01, 0.7, 1.0, 5.0]),
    "top_k": st.just(0) | st.integers(1, 50),
    "top_p": st.just(1.0) | st.floats(0.01, 1.0),
    "min_p": st.just(0.0) | st.floats(0.0, 1.0),
    "repetition_penalty": st.just(1.0) | st.floats(0.5, 2.0),
    "frequency_penalty": st.just(0.0) | st.floats(-2.0, 2.0),
    "presence_penalty": st.just(0.0) | st.floats(-2.0, 2.0),
    "logit_bias": st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9, 9), max_size=4),
    "allowed_token_ids": st.none() | TOKENS,
    "logprobs": st.none() | st.integers(-1, 5),
    "min_tokens": st.integers(0, 3),
}


@st.composite
def sampling_rows(draw_from):
    tokens = draw_from(TOKENS)
    return SamplingRow(
        SamplingParams(**draw_from(st.fixed_dictionaries(PARAMS))),
        seed=draw_from(st.integers(0, 2**64 - 1)),
        token_ids=tokens,
        num_prompt_tokens=draw_from(st.integers(1, len(tokens))),
        stop_token_ids=frozenset(draw_from(st.sets(st.integers(0, VOCAB - 1), max_size=2))),
        bad_words_token_ids=draw_from(st.just(()) | SEQUENCES),
    )


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(sampling_rows(), min_size=2, max_size=7),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    chunk=st.sampled_from([1, 2 * VOCAB, 1 << 20]),
)
def test_a_row_is_the_same_alone_and_among_any_neighbours(rows, seed, dtype, chunk):
    logits = (torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)

    def outcome(rows, logits):
        """Of each row: token, flag, processed logits, logprobs."""
        metadata = SamplingMetadata.build(rows, CPU)
        output = sample(logits, metadata)
        counts = metadata.logprobs
        logprobs = dict(zip(counts, output.logprobs.to_rows(list(counts.values())), strict=True)) if counts else {}
        columns = (output.token_ids.tolist(), output.invalid.tolist(), process_logits(logits, metadata))
        return [(*entry, logprobs.get(i)) for i, entry in enumerate(zip(*columns, strict=True))]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sampling.MAX_ELEMENTS, "cpu", chunk)
        together = outcome(rows, logits)
    for i, (token, flag, processed, logprobs) in enumerate(together):
        ((alone_token, alone_flag, alone_processed, alone_logprobs),) = outcome([rows[i]], logits[i : i + 1])
        assert (token, flag, logprobs) == (alone_token, alone_flag, alone_logprobs)
        assert torch.equal(processed, alone_processed)
