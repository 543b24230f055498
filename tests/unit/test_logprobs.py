"""Log-probabilities: values, order, ranks, bounded work, and the dictionaries that users see."""

import pytest
import torch

from fleetfoot.kernels.sampling import gumbel
from fleetfoot.records.logprobs import Logprob, logprob_dict
from fleetfoot.sampling.logprobs import prompt_logprobs, token_logprobs


def test_equals_a_stable_sort():
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(5)) * 3
    chosen = torch.tensor([0, 5, 39, 7, 7, 20])
    result = token_logprobs(logits, 7, chosen)
    expected = logits.double().log_softmax(dim=-1)
    order = expected.sort(dim=-1, descending=True, stable=True).indices
    token_ids = torch.cat((chosen[:, None], order[:, :7]), dim=1)
    assert result.token_ids.tolist() == token_ids.tolist()
    torch.testing.assert_close(result.logprobs.double(), expected.gather(1, token_ids), rtol=1e-5, atol=1e-5)
    for i, token in enumerate(chosen.tolist()):
        assert result.ranks[i].item() == order[i].tolist().index(token) + 1


def test_equal_tokens_stand_in_order_of_their_ids_whatever_the_count():
    logits = torch.tensor([[-2.0, -1.0, -1.0, -3.0, -1.0, -2.0]])
    for num in range(7):
        result = token_logprobs(logits, num, torch.tensor([4]))
        assert result.token_ids.tolist() == [[4, 1, 2, 4, 0, 5, 3][: num + 1]]
        assert result.ranks.tolist() == [3], "as many tokens are at least as probable"


def test_extreme_values_keep_their_order():
    values = torch.tensor([[-torch.inf, -1e30, -0.5, -1e-30, 0.0, -7.0]])
    assert token_logprobs(values, 6, torch.tensor([0])).token_ids.tolist() == [[0, 4, 3, 2, 5, 1, 0]]


def test_whole_vocabulary_and_counts_per_row():
    logits = torch.tensor([[1.0, 3.0, 2.0], [3.0, 2.0, 1.0]], dtype=torch.bfloat16)
    result = token_logprobs(logits, -1, torch.tensor([0, 2]))
    assert result.token_ids.tolist() == [[0, 1, 2, 0], [2, 0, 1, 2]]
    assert result.logprobs.dtype == torch.float32
    assert result.logprobs[:, 1:].exp().sum(dim=-1).tolist() == pytest.approx([1.0, 1.0])
    rows = result.to_rows(counts=[1, 0])
    assert [row.token_ids for row in rows] == [[0, 1], [2]]
    assert [row.rank for row in rows] == [3, 3]
    assert len(rows[1].logprobs) == 1
    assert result.to_rows(counts=[-1, -1]) == result.to_rows()
    # More than there are is all there are.
    assert token_logprobs(logits, 99, torch.tensor([0, 2])).token_ids.shape == (2, 4)


def test_no_rows():
    result = token_logprobs(torch.empty(0, 5), 2, torch.empty(0, dtype=torch.int64))
    assert result.token_ids.shape == (0, 3) and result.to_rows() == []


def test_prompt_logprobs_make_few_logits_at_a_time(monkeypatch):
    monkeypatch.setitem(gumbel._MAX_ELEMENTS, "cpu", 100)
    hidden, head = torch.randn(17, 4), torch.randn(30, 4)
    sizes = []

    def compute_logits(states):
        sizes.append(len(states))
        return states @ head.T

    next_ids = torch.randint(0, 30, (17,))
    result = prompt_logprobs(hidden, next_ids, 2, compute_logits, vocab_size=30)
    assert sizes == [3, 3, 3, 3, 3, 2]
    monkeypatch.undo()
    whole = token_logprobs(hidden @ head.T, 2, next_ids)
    assert torch.equal(result.token_ids, whole.token_ids) and torch.equal(result.ranks, whole.ranks)
    torch.testing.assert_close(result.logprobs, whole.logprobs)


def test_dictionary_has_the_chosen_token_first_then_the_top_in_order():
    entries = logprob_dict([9, 4, 2], [-3.0, -0.1, -2.0], rank=5, decode=str)
    assert list(entries.items()) == [
        (9, Logprob(-3.0, 5, "9")),
        (4, Logprob(-0.1, 1, "4")),
        (2, Logprob(-2.0, 2, "2")),
    ]
    # A chosen token among the top is there once, still first.
    entries = logprob_dict([2, 4, 2, 7], [-2.0, -0.1, -2.0, -2.0], rank=3)
    assert [(token, entry.rank) for token, entry in entries.items()] == [(2, 2), (4, 1), (7, 3)]
    assert entries[2].decoded_token is None
    assert logprob_dict([3], [-1.0], rank=8) == {3: Logprob(-1.0, 8)}
