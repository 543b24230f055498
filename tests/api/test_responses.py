"""Responses with the `openai` client, and raw events against its types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from tests.helpers.server import RunningServer

INPUT = "Tell me a story about a crow."
OPTIONS: dict[str, Any] = {"model": "story", "temperature": 0, "max_output_tokens": 10}
EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
TEXT_EVENTS = [
    *("response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"),
    *("response.output_text.delta", "response.output_text.done", "response.content_part.done"),
    *("response.output_item.done", "response.incomplete"),
]


@pytest.fixture(scope="module")
def api(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as made:
        yield made


def texts(response: Any) -> list[Any]:
    """The output without ids."""
    return [(item.type, item.role, item.status, [part.text for part in item.content]) for item in response.output]


def raw_events(client: httpx.Client, body: dict[str, Any]) -> list[Any]:
    with client.stream("POST", "/v1/responses", json={**body, "stream": True}) as response:
        blocks = "".join(response.iter_text()).split("\n\n")
    assert blocks.pop() == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = EVENT.validate_json(data.removeprefix("data: "), strict=True)
        assert (event.type, event.sequence_number) == (name.removeprefix("event: "), number)
        events.append(event)
    return events


def test_a_response_is_that_of_chat(api: openai.OpenAI, client: httpx.Client) -> None:
    messages: Any = [{"role": "system", "content": "You tell stories."}, {"role": "user", "content": INPUT}]
    chat = api.chat.completions.create(model="story", messages=messages, temperature=0, max_tokens=10)
    body = {**OPTIONS, "input": INPUT, "instructions": "You tell stories.", "user": "me", "metadata": {"a": "b"}}
    raw = client.post("/v1/responses", json={**body, "service_tier": "auto", "prompt_cache_key": "key"})
    response = Response.model_validate_json(raw.content, strict=True)
    assert response.output_text == chat.choices[0].message.content
    assert chat.usage is not None and response.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens and response.usage.output_tokens == 10
    assert response.status == "incomplete" and response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    echo = (response.instructions, response.user, response.metadata, response.service_tier, response.prompt_cache_key)
    assert echo == ("You tell stories.", "me", {"a": "b"}, "default", "key")


def test_events(api: openai.OpenAI, client: httpx.Client) -> None:
    expected = api.responses.create(**OPTIONS, input=INPUT)
    events = raw_events(client, {**OPTIONS, "input": INPUT})
    assert list(dict.fromkeys(event.type for event in events)) == TEXT_EVENTS
    assert events[0].response.status == "in_progress" and not events[0].response.output
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert len(deltas) > 1 and "".join(deltas) == expected.output_text  # tokens that come at once are one delta
    assert texts(events[-1].response) == texts(expected) and events[-1].response.usage.output_tokens == 10
    assert api.responses.retrieve(events[-1].response.id) == events[-1].response


def test_a_conversation_continues(api: openai.OpenAI) -> None:
    first = api.responses.create(**OPTIONS, input=INPUT)
    user: Any = {"role": "user", "content": [{"type": "input_text", "text": INPUT}]}
    then: Any = {"type": "message", "role": "user", "content": "And then?"}
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    easy: Any = {"role": "assistant", "content": first.output_text}
    whole: list[Any] = [
        [user, *(item.model_dump(exclude_none=True) for item in first.output), then],
        [user, easy, then],
        [user, reference, then],
    ]
    options: Any = {**OPTIONS, "max_output_tokens": 30}
    expected = api.responses.create(**options, input=[then], previous_response_id=first.id)
    answers = [api.responses.create(**options, input=items) for items in whole]
    assert {answer.output_text for answer in answers} == {expected.output_text}
    assert expected.usage is not None and expected.previous_response_id == first.id
    assert {answer.usage and answer.usage.input_tokens for answer in answers} == {expected.usage.input_tokens}
    alone = api.responses.create(**options, input=[then])
    assert alone.usage is not None and alone.usage.input_tokens < expected.usage.input_tokens
    counted = api.responses.input_tokens.count(model="story", input=[then], previous_response_id=first.id)
    assert counted.input_tokens == expected.usage.input_tokens


def test_background(api: openai.OpenAI) -> None:
    expected = api.responses.create(**OPTIONS, input=INPUT)
    queued = api.responses.create(**OPTIONS, input=INPUT, background=True)
    assert queued.status == "queued" and not queued.output
    with pytest.raises(openai.BadRequestError, match="background"):
        api.responses.cancel(expected.id)
    api.responses.create(**{**OPTIONS, "max_output_tokens": 40}, input=INPUT)  # ends later
    response = api.responses.retrieve(queued.id)
    assert response.status == expected.status and texts(response) == texts(expected)
    endless: Any = {"input": INPUT, "background": True, "extra_body": {"ignore_eos": True}}
    running = api.responses.create(model="story", **endless)
    with pytest.raises(openai.BadRequestError, match="in progress"):
        api.responses.create(**OPTIONS, input="Why?", previous_response_id=running.id)
    assert api.responses.cancel(running.id).status == "cancelled"
    assert api.responses.retrieve(running.id).status == "cancelled"


CITY: Any = {"type": "object", "properties": {"city": {"enum": ["Rome", "Linz"]}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "name": "get_weather", "description": "The weather.", "parameters": CITY, "strict": True},
    {"type": "function", "name": "get_time"},
]
CHOICES: list[Any] = [
    {"type": "function", "name": "get_weather"},
    {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]},
    "required",
]


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_calls_tools(api: openai.OpenAI, client: httpx.Client, streams: bool) -> None:
    items: Any = [{"role": "user", "content": "What is the weather?"}]
    last: Any = None
    for number in range(6):
        options = {"model": "story", "tools": TOOLS, "parallel_tool_calls": False, "seed": number, "input": items[-1:]}
        options |= {"tool_choice": CHOICES[number % 3], "previous_response_id": last and last.id}
        if streams:
            events = raw_events(client, options)
            last = events[-1].response
            deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
            assert "".join(deltas) == last.output[0].arguments
        else:
            last = Response.model_validate_json(client.post("/v1/responses", json=options).content, strict=True)
        (call,) = last.output
        assert last.status == "completed" and (call.type, call.status) == ("function_call", "completed")
        arguments = json.loads(call.arguments)
        expected = {"get_weather": ("Rome", "Linz"), "get_time": (None,)}
        assert call.name == ["get_weather", "get_time", call.name][number % 3]
        assert arguments.get("city") in expected[call.name]
        items += [call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    whole: Any = {"model": "story", "tools": TOOLS, "temperature": 0, "max_output_tokens": 5}
    continued = api.responses.create(**whole, input=items[-1:], previous_response_id=last.id)
    assert texts_or_calls(continued) == texts_or_calls(api.responses.create(**whole, input=items))


def texts_or_calls(response: Any) -> Any:
    assert response.usage is not None
    return response.output_text, response.usage.input_tokens


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"nonsense": 1}, "nonsense"),
    ({"input": []}, "input"),
    ({"input": [{"role": "critic", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": 3}]}, "input[0].content"),
    ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].id"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments"),
    ({"input": [{"type": "reasoning", "encrypted_content": "??"}]}, "input[0].encrypted_content"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"include": ["everything"]}, "include[0]"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_tokens": 3}, "max_tokens"),
    ({"n": 2}, "n"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"top_p": 2}, "top_p"),
    ({"truncation": "middle"}, "truncation"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "string"}}]}, "tools[0].parameters.type"),
    ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice.name"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "f"}]}}, "tool_choice.tools[0]"),
    ({"tool_choice": {"type": "function", "name": "f"}, "truncation": "auto"}, "tool_choice.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "nope"}]}, "input[0].arguments"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "text.format"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "b"}}}}, "text.format.schema"),
    ({"reasoning": {"effort": "utmost"}}, "reasoning.effort"),
    ({"background": True, "store": False}, "background"),
    ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
]


@pytest.mark.parametrize(("body", "field"), REFUSED, ids=[field for _, field in REFUSED])
def test_a_refusal_names_the_field(client: httpx.Client, body: dict[str, Any], field: str) -> None:
    response = client.post("/v1/responses", json={"input": INPUT, **OPTIONS, **body})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["type"]) == (400, field, "invalid_request_error")


def test_refusals_of_stored_responses(api: openai.OpenAI, client: httpx.Client) -> None:
    name = api.responses.create(**OPTIONS, input=INPUT).id
    for path, params, field in (
        ("", {"stream": "true"}, "stream"),
        ("", {"stream": "true", "starting_after": "-1"}, "starting_after"),
        ("/input_items", {"limit": "0"}, "limit"),
        ("/input_items", {"limit": "many"}, "limit"),
        ("/input_items", {"after": "msg_1"}, "after"),
    ):
        response = client.get(f"/v1/responses/{name}{path}", params=params)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert json.loads(client.get("/v1/responses/none").content)["error"]["code"] == "response_not_found"
