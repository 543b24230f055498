"""Fields of a body that its type does not have."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetfoot.server.http import ApiError, decode_body
from fleetfoot.server.openai.protocol import ChatRequest, CompletionRequest
from fleetfoot.server.unknown_fields import ANY, HARMLESS, UnknownFields

BODY = {"prompt": "a", "max_tokens": 3.0}


def read(fields: dict[str, Any], kind: Any = CompletionRequest, **options: Any) -> Any:
    return decode_body(json.dumps({**BODY, **fields}).encode(), msgspec.json.Decoder(kind), UnknownFields(**options))


def test_fields_without_an_effect_are_accepted() -> None:
    neutral = {name: "x" if value is ANY else value for name, value in HARMLESS.items()}
    body = read(neutral)
    assert (body.prompt, body.max_tokens) == ("a", 3)
    assert read(dict.fromkeys(HARMLESS)).max_tokens == 3
    documented = set(re.findall(r"`(\w+)`", (Path(__file__).parents[2] / "docs/serving.md").read_text()))
    assert set(HARMLESS) <= documented


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"cache_prompt": True, "do_sample": False}, "do_sample", "temperature"),
        ({"enable_thinking": False}, "enable_thinking", "chat_template_kwargs"),
        ({"repeat_penalty": 1.2}, "repeat_penalty", "repetition_penalty"),
        ({"num_beams": True}, "num_beams", "--allow-unknown-fields"),
        ({"temprature": 0}, "temprature", "did you mean temperature?"),
        ({"max_token": 5}, "max_token", "did you mean max_tokens?"),
        ({"nothing_like_it": 0}, "nothing_like_it", "--allow-unknown-fields"),
        ({"stream": True, "stream_options": {"include": True}}, "stream_options.include", "unknown field"),
    ],
)
def test_what_would_change_a_result_is_refused(fields: dict[str, Any], param: str, hint: str) -> None:
    with pytest.raises(ApiError) as raised:
        read(fields)
    error = raised.value
    assert (error.status, error.code, error.param) == (400, "unknown_field", param)
    assert hint in error.message


def test_unknown_fields_are_ignored_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    policy = UnknownFields(allow=True)
    decoder = msgspec.json.Decoder(ChatRequest)
    body = {"messages": [], "stream_options": {"x": 1}, "y\n": 2, "enable_thinking": False}
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert decode_body(json.dumps(body).encode(), decoder, policy).messages == []
    assert sorted(record.args[0] for record in caplog.records) == ["enable_thinking", "x", "y\n"]
    assert all("\n" not in record.getMessage() for record in caplog.records)
    with pytest.raises(ApiError, match="max_tokens"):
        decode_body(json.dumps({**body, "max_tokens": "x"}).encode(), decoder, policy)
