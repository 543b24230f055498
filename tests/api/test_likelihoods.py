"""What evaluation harnesses compute over HTTP: the likelihood of a continuation, from ``echo`` with logprobs."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fleetfoot.assets import embedded_model_path

PAIRS = [
    ("Once upon a time", ", there was a fox."),
    ("The crow", " sat on a tree. It looked at the moon, and the moon looked back."),
    ("Every morning, she liked to", " look at the sea"),
    ("A", " zebra é 😀"),
]
"""Contexts and continuations."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded_model_path())


@pytest.fixture(scope="module")
def expected(tokenizer: Any) -> list[tuple[list[int], int, list[float], bool]]:
    """Of each pair: all token ids, the length of the context, the logprobs behind it, and whether it is greedy."""
    model = AutoModelForCausalLM.from_pretrained(embedded_model_path(), dtype=torch.float32).eval()
    result = []
    for context, continuation in PAIRS:
        ids, num_context = tokenizer(context + continuation).input_ids, len(tokenizer(context).input_ids)
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        rows, targets = logprobs[num_context - 1 :], torch.tensor(ids[num_context:])
        values = rows.gather(1, targets[:, None])[:, 0].tolist()
        result.append((ids, num_context, values, bool((rows.argmax(-1) == targets).all())))
    return result


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("as_ids", [True, False], ids=["ids", "texts"])
def test_likelihoods(client: httpx.Client, expected: list[Any], max_tokens: int, as_ids: bool) -> None:
    prompt = [ids for ids, *_ in expected] if as_ids else ["".join(pair) for pair in PAIRS]
    body = {"prompt": prompt, "max_tokens": max_tokens, "echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
    content = client.post("/v1/completions", json=body).json()
    assert content["usage"]["prompt_tokens"] == sum(len(ids) for ids, *_ in expected)
    assert content["usage"]["completion_tokens"] == max_tokens * len(PAIRS)
    for choice, (ids, num_context, values, is_greedy) in zip(content["choices"], expected, strict=True):
        logprobs = choice["logprobs"]
        end = len(ids)
        assert {len(column) for column in logprobs.values()} == {end + max_tokens}
        assert logprobs["token_logprobs"][num_context:end] == pytest.approx(values, abs=1e-4)
        tops = [max(top, key=top.get) for top in logprobs["top_logprobs"][num_context:end]]
        assert (tops == logprobs["tokens"][num_context:end]) == is_greedy
