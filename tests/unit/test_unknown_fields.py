"""Fields of a body that its type does not have."""

import json
import logging
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from fleetfoot.server.conversion import decode_body
from fleetfoot.server.http import ApiError
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
        ({"lora_request": {"lora_name": "a"}}, "lora_request", "adapters"),
        ({"prompt_embeds": ["AAAA"]}, "prompt_embeds", "token ids"),
        ({"prompt_tokens": [5]}, "prompt_tokens", "--allow-unknown-fields"),
        ({"num_beams": True}, "num_beams", "--allow-unknown-fields"),
        ({"temprature": 0}, "temprature", "did you mean temperature?"),
        ({"max_token": 5}, "max_token", "did you mean max_tokens?"),
        ({"MAX_TOKENS": 5}, "MAX_TOKENS", "did you mean max_tokens?"),
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


class Inner(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="inner"):
    value: int | list[int]
    more: dict[str, int | None] = {}


class Other(msgspec.Struct, tag_field="type", tag="other"):
    text: str


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    required: int
    parts: list[Inner | Other] | str | None = None
    limited: Annotated[int, msgspec.Meta(ge=0)] | None = None
    anything: Any = None


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"required": "1"}, "required"),
        ({"required": True}, "required"),
        ({"required": 1.5}, "required"),
        ({"required": ...}, "required"),
        ({"limited": -1}, "limited"),
        ({"limited": -1.0}, "limited"),
        ({"parts": 5}, "parts"),
        ({"parts": {}}, "parts"),
        ({"parts": [5]}, "parts[0]"),
        ({"parts": [{}]}, "parts[0].type"),
        ({"parts": [{"type": "inner"}]}, "parts[0].value"),
        ({"parts": [{"type": 5, "value": 1}]}, "parts[0].type"),
        ({"parts": [{"type": "no", "value": 1}]}, "parts[0].type"),
        ({"parts": [{"type": "other", "text": "x"}, {"type": "other", "text": None}]}, "parts[1].text"),
        ({"parts": [{"type": "inner", "value": [1, 2, "3"]}]}, "parts[0].value[2]"),
        ({"parts": [{"type": "inner", "value": [1] * 900 + [None]}]}, "parts[0].value[900]"),
        ({"parts": [{"type": "inner", "value": 1, "more": {"a": 1.0, "b c": "x"}}]}, "parts[0].more.b c"),
        ({"parts": [{"type": "inner", "value": 1, "x": 1}]}, "parts[0].x"),
        ({"x": 1}, "x"),
    ],
)
def test_the_place_of_what_does_not_fit(fields: dict[str, Any], place: str) -> None:
    body = {name: value for name, value in {"required": 1.0, **fields}.items() if value is not ...}
    with pytest.raises(ApiError) as raised:
        decode_body(json.dumps(body).encode(), msgspec.json.Decoder(Outer))
    assert (raised.value.status, raised.value.param) == (400, place)


def test_numbers_that_are_integers() -> None:
    fields = {"required": 2.0, "anything": 1.0, "parts": [{"type": "inner", "value": [3.0], "more": {"a": 4.0}}]}
    found = decode_body(json.dumps(fields).encode(), msgspec.json.Decoder(Outer))
    assert found == Outer(2, [Inner([3], {"a": 4})], anything=1.0) and isinstance(found.anything, float)


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
