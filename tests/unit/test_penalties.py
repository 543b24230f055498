"""Repetition, frequency and presence penalties against plain Python."""

import numpy as np
import pytest
import torch

from fleetfoot.kernels.sampling.penalties import count_tokens
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.sampling.metadata import SamplingMetadata, SamplingRow
from fleetfoot.sampling.sampler import process_logits

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
