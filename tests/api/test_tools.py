"""Tools and structured output with OpenAI's client, on a model that only a grammar makes call anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.server import RunningServer

MODEL = "story"
ASK: Any = [{"role": "user", "content": "What is the weather?"}]


def tool(name: str, **properties: Any) -> Any:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": schema}}


CITY = {"enum": ["Rome", "Linz"]}
TOOLS: Any = [tool("get_weather", city=CITY, days={"type": "integer", "minimum": 1, "maximum": 9}), tool("get_time")]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def api(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as made:
        yield made


def check_calls(message: Any, choice: Any) -> list[dict[str, Any]]:
    """Checks the calls of a message. Returns the messages that go on from it."""
    assert not message.content and message.tool_calls
    results = []
    for call in message.tool_calls:
        arguments = json.loads(call.function.arguments)
        assert call.type == "function" and call.id.startswith("call_")
        if call.function.name == "get_weather":
            assert arguments["city"] in CITY["enum"] and 1 <= arguments["days"] <= 9
        else:
            assert (choice, call.function.name, arguments) == ("required", "get_time", {})
        results.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    return [message.model_dump(exclude_none=True), *results]


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_calls_tools_ten_times(api: openai.OpenAI, streams: bool) -> None:
    messages, ids = list(ASK), set()
    for number in range(10):
        choice = "required" if number % 2 else NAMED
        options: Any = {"model": MODEL, "messages": messages[:1] + messages[-4:], "tools": TOOLS, "max_tokens": 200}
        options |= {"tool_choice": choice, "parallel_tool_calls": False, "seed": number}
        if streams:
            with api.chat.completions.stream(**options) as stream:
                finish = stream.get_final_completion().choices[0]
        else:
            finish = api.chat.completions.create(**options).choices[0]
        assert finish.finish_reason == "tool_calls"
        messages += check_calls(finish.message, choice)
        ids.add(messages[-1]["tool_call_id"])
    assert len(ids) == 10


def test_a_cut_call_ends_with_length(api: openai.OpenAI) -> None:
    """Without its name so far, it is no content. Its arguments begin those of the whole call."""
    options: Any = {"model": MODEL, "messages": ASK, "tools": TOOLS, "tool_choice": NAMED, "temperature": 0}
    whole = api.chat.completions.create(**options).choices[0].message.tool_calls[0].function.arguments
    for max_tokens in (1, 3, 9, 12, 22, 30):
        answer = api.chat.completions.create(**options, max_tokens=max_tokens).choices[0]
        assert answer.finish_reason == "length" and not answer.message.content
        for call in answer.message.tool_calls or ():
            assert call.function.name == "get_weather" and whole.startswith(call.function.arguments)


def test_strict_objects_have_no_properties_without_a_name(client: httpx.Client) -> None:
    form = {"name": "x", "strict": True, "schema": {"type": "object", "properties": {"a": {"const": 1}}}}
    chat = {"messages": ASK, "response_format": {"type": "json_schema", "json_schema": form}}
    responses = {"input": "a", "text": {"format": {"type": "json_schema", **form}}}
    for seed in range(3):
        body = client.post("/v1/chat/completions", json={**chat, "seed": seed, "max_tokens": 90}).json()
        assert json.loads(body["choices"][0]["message"]["content"]) in ({}, {"a": 1})
        body = client.post("/v1/responses", json={**responses, "max_output_tokens": 90}).json()
        assert json.loads(body["output"][0]["content"][0]["text"]) in ({}, {"a": 1})


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": {}},
        {"guided_json": "{}"},
        {"guided_json": True},
        {"structured_outputs": {"json": {}}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "any", "schema": {}, "strict": True}}},
    ],
    ids=str,
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_empty_schema_allows_any_json(client: httpx.Client, path: str, fields: dict[str, Any]) -> None:
    """Without the constraint, the bias would make text that is no JSON."""
    place: dict[str, Any] = {"messages": ASK} if "chat" in path else {"prompt": "Once"}
    words = client.post("/tokenize", json={"prompt": " there false", "add_special_tokens": False}).json()["tokens"]
    bias = {str(token): 100 for token in words}
    body = {**place, "max_tokens": 40, "temperature": 0, "logit_bias": bias}
    texts = []
    for more in ({}, fields):
        choice = client.post(path, json={**body, **more}).json()["choices"][0]
        texts.append(choice["message"]["content"] if "chat" in path else choice["text"])
    with pytest.raises(json.JSONDecodeError):
        json.loads(texts[0])
    assert json.loads(texts[1]) is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name"),
        ({"tools": [tool("f", x={"pattern": "(?=x)"})], "tool_choice": "required"}, "tools[0].function.parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice.function.name",
        ),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"guided_json": {"$ref": "#"}}, "guided_json"),  # refused by the engine
        ({"guided_json": {"$ref": "#"}, "stream": True}, "guided_json"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{]"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].function",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}, "tools": TOOLS},
            "response_format",
        ),
        (
            {"response_format": {"type": "json_object"}, "tools": [tool("f", x={"pattern": "(?=x)"})]},
            "tools[0].function.parameters",
        ),
        ({"guided_regex": "(", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "schema": {"const": 1}}}, "response_format.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "strict": True}},
            "response_format.strict",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strct": True}}},
            "response_format.json_schema.strct",
        ),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_whitespace_pattern": " ", "response_format": {"type": "text"}}, "guided_whitespace_pattern"),
        ({"guided_whitespace_pattern": " ", "structured_outputs": {"json": {}}}, "guided_whitespace_pattern"),
        ({"guided_regex": "("}, "guided_regex"),
    ],
)
def test_a_refusal_names_the_field(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    response = client.post("/v1/chat/completions", json={"messages": ASK, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert param.split("[")[0].split(".")[0] in response.json()["error"]["message"]
