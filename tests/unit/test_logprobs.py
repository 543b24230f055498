"""Log-probabilities: values, order, ranks, bounded work, kernels, and the dictionaries of the public API."""

import copy
import pickle
from dataclasses import asdict

import pytest
import torch
from tests.helpers.interpreter import interpreted

from fleetfoot.kernels import sampling
from fleetfoot.kernels.sampling.token_logprobs import (
    MAX_SELECTED,
    select_logprobs,
    token_logprobs_torch,
    token_logprobs_triton,
)
from fleetfoot.outputs import Logprob, logprob_dict
from fleetfoot.sampling.logprobs import PromptLogprobs, token_logprobs


def test_equals_a_stable_sort():
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(5)) * 3
    sampled = torch.tensor([0, 5, 39, 7, 7, 20])
    result = token_logprobs(logits, 7, sampled)
    expected = logits.double().log_softmax(dim=-1)
    order = expected.sort(dim=-1, descending=True, stable=True).indices
    token_ids = torch.cat((sampled[:, None], order[:, :7]), dim=1)
    assert result.token_ids.tolist() == token_ids.tolist()
    torch.testing.assert_close(result.logprobs.double(), expected.gather(1, token_ids), rtol=1e-5, atol=1e-5)
    for i, token in enumerate(sampled.tolist()):
        assert result.ranks[i].item() == order[i].tolist().index(token) + 1


def test_prompt_logprobs_make_few_logits_at_a_time(monkeypatch):
    hidden, head, next_ids = torch.randn(17, 4), torch.randn(30, 4), torch.randint(0, 30, (17,))
    whole = token_logprobs(hidden @ head.T, 2, next_ids)
    monkeypatch.setitem(sampling.MAX_ELEMENTS, "cpu", 100)
    sizes = []

    def compute_logits(states):
        sizes.append(len(states))
        return states @ head.T

    result = PromptLogprobs(compute_logits, 30, token_logprobs_torch).logprobs(hidden, next_ids, 2)
    assert sizes == [3, 3, 3, 3, 3, 2]
    assert torch.equal(result.token_ids, whole.token_ids) and torch.equal(result.ranks, whole.ranks)
    torch.testing.assert_close(result.logprobs, whole.logprobs)


def logprob_case(seed: int, vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(5, vocab_size, generator=generator) * 4).to(dtype)
    logits[0, 1::3] = logits[0, 0]  # many ties
    logits[1, : vocab_size // 2] = -torch.inf
    logits[2] = 0.0
    logits[2, ::2] = -0.0
    return logits, torch.randint(vocab_size, (5,), generator=generator)


def check_kernels(vocab_size: int, dtype: torch.dtype, device: str = "cpu") -> None:
    """Ids and ranks equal the reference, logprobs float64, and sorting gives what selecting gives, to the last bit."""
    logits, sampled = logprob_case(vocab_size, vocab_size, dtype)
    num = min(9 if device == "cpu" else 40, vocab_size)
    expected = token_logprobs_torch(logits, sampled, num)
    packed, normalizers = (found.cpu() for found in select_logprobs(logits.to(device), sampled.to(device), num))
    assert torch.equal(packed[:, : num + 1], expected[:, : num + 1])
    assert torch.equal(packed[:, -1], expected[:, -1])
    values = packed[:, num + 1 : -1].contiguous().view(torch.float32)
    exact = logits.double().log_softmax(-1).gather(1, expected[:, : num + 1].long()).float()
    tolerance = 2e-6 if device == "cpu" else 1e-5
    torch.testing.assert_close(values, exact, atol=tolerance, rtol=1e-6)
    by_hand = logits.float().gather(1, packed[:, : num + 1].long()) - normalizers[:, :1] - normalizers[:, 1:]
    assert torch.equal(by_hand, values)
    if vocab_size > MAX_SELECTED:
        many = token_logprobs_triton(logits.to(device), sampled.to(device), MAX_SELECTED + 1).cpu()
        assert torch.equal(many[:, : num + 1], packed[:, : num + 1])
        assert torch.equal(many[:, MAX_SELECTED + 2 : MAX_SELECTED + 3 + num], packed[:, num + 1 : -1])


@interpreted
@pytest.mark.parametrize("vocab_size", [1, 7, 300, 2049, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_equal_the_reference(vocab_size: int, dtype: torch.dtype) -> None:
    check_kernels(vocab_size, dtype)


def test_dictionary_has_the_chosen_token_first_then_the_top_in_order():
    entries = logprob_dict([9, 4, 2], [-3.0, -0.1, -2.0], rank=5, decode=str)
    expected = {9: Logprob(-3.0, 5, "9"), 4: Logprob(-0.1, 1, "4"), 2: Logprob(-2.0, 2, "2")}
    assert list(entries.items()) == list(expected.items())
    assert repr(entries) == repr(expected)
    # A sampled token among the top is there once, still first.
    entries = logprob_dict([2, 4, 2, 7], [-2.0, -0.1, -2.0, -2.0], rank=3)
    assert [(token, entry.rank) for token, entry in entries.items()] == [(2, 2), (4, 1), (7, 3)]
    assert entries[2].decoded_token is None
    assert logprob_dict([3], [-1.0], rank=8) == {3: Logprob(-1.0, 8)}


def test_the_text_of_a_token_is_decoded_when_it_is_read():
    decoded: list[int] = []

    def decode(token_id: int) -> str:
        decoded.append(token_id)
        return f"<{token_id}>"

    entries = logprob_dict([9, 4], [-3.0, -0.1], rank=5, decode=decode)
    assert decoded == []
    assert entries[4].decoded_token == entries[4].decoded_token == "<4>"
    assert decoded == [4]
    for copied in (pickle.loads(pickle.dumps(entries)), copy.deepcopy(entries)):
        assert copied == {9: Logprob(-3.0, 5, "<9>"), 4: Logprob(-0.1, 1, "<4>")}
    assert asdict(entries[9]) == {"logprob": -3.0, "rank": 5, "decoded_token": "<9>"}
    with pytest.raises(AttributeError, match="'Logprob' object has no attribute 'text'"):
        entries[4].text  # noqa: B018
