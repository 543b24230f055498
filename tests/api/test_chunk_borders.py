"""Streamed texts put together are the whole text, wherever tokens split a character or a stop string."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.openapi import sse_data

CHARACTERS = "é中😀 a"
STOPS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=3)
"""Places in the text, and lengths."""


@pytest.fixture(scope="module")
def byte_tokens(client: httpx.Client) -> list[int]:
    """Tokens that are parts of characters, so that random ones of them make valid and invalid UTF-8."""
    tokens = client.post("/tokenize", json={"prompt": CHARACTERS, "add_special_tokens": False}).json()["tokens"]
    assert len(tokens) > 8
    return tokens


def whole(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[str, Any, int]:
    """Text, stop string or finish reason, and number of tokens."""
    content = client.post(path, json=body).json()
    (choice,) = content["choices"]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return text, choice["stop_reason"] or choice["finish_reason"], content["usage"]["completion_tokens"]


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[str, Any, int]:
    """The same, of a stream."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = [json.loads(data) for data in sse_data(client.post(path, json={**body, **options}).text)[:-1]]
    choices = [choice for event in events for choice in event["choices"]]
    texts = [choice["delta"].get("content", "") if "delta" in choice else choice["text"] for choice in choices]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    end = choices[-1].get("stop_reason") or choices[-1]["finish_reason"]
    return "".join(texts), end, events[-1]["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@given(seed=st.integers(0, 2**32), prompt=st.text(min_size=1, max_size=8), stops=STOPS, include=st.booleans())
@settings(max_examples=15, derandomize=True)
def test_streams(
    client: httpx.Client, byte_tokens: list[int], path: str, seed: int, prompt: str, stops: Any, include: bool
) -> None:
    content = {"prompt": prompt} if path == "/v1/completions" else {"messages": [{"role": "user", "content": prompt}]}
    body = {**content, "max_tokens": 24, "seed": seed, "allowed_token_ids": byte_tokens, "temperature": 3}
    text, end, num_tokens = whole(client, path, body)
    assert (text, end, num_tokens) == streamed(client, path, body)
    known = text.rstrip("\N{REPLACEMENT CHARACTER}")  # bytes at the end that await others are not matched
    stop = [known[begin : begin + size] for begin, size in stops if known[begin : begin + size]]
    limited = {**body, "stop": stop, "include_stop_str_in_output": include}
    answer = whole(client, path, limited)
    assert answer == streamed(client, path, limited)
    if stop:
        assert answer[1] in stop
        kept = answer[0].removesuffix(answer[1]) if include else answer[0]
        assert text.startswith(kept + answer[1]) and not any(one in kept for one in stop)
        assert not include or answer[0].endswith(answer[1])
    else:
        assert answer[0] == text
