"""Reasoning over HTTP, on a model that a budget makes end it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.server import RunningServer

TEMPLATE = """\
{%- for message in messages -%}
<|{{ message.role | replace('tool', 'user') }}|>
{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}{{ eos_token }}
{%- endfor -%}
{%- if reasoning_effort or verbosity %}<|system|>{{ reasoning_effort }} {{ verbosity }}{{ eos_token }}{% endif -%}
{%- if add_generation_prompt -%}
<|assistant|>
{%- if enable_thinking is defined and not enable_thinking %}<think>

</think>
{% elif opens %}<think>
{% endif -%}
{%- endif -%}
{%- if tools %}{# <tool_call> #}{% endif -%}"""
ASK: Any = [{"role": "user", "content": "Hi"}]
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    Path(template).write_text(TEMPLATE)
    with RunningServer("--chat-template", str(template), "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


def chat(client: httpx.Client, **fields: Any) -> Any:
    body = {"messages": ASK, "temperature": 0, "max_tokens": 40, **fields}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("opens", [True, False], ids=["prompt", "model"])
def test_a_budget_ends_reasoning(client: httpx.Client, opens: bool) -> None:
    fields: dict[str, Any] = {"chat_template_kwargs": {"opens": opens}, "thinking_token_budget": 6}
    body = chat(client, **fields, return_token_ids=True)
    message = body["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] and message["content"]
    assert "think>" not in message["reasoning"] + message["content"]
    assert 0 < body["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 6
    hidden = chat(client, **fields, include_reasoning=False)["choices"][0]["message"]
    assert hidden["content"] == message["content"] and "reasoning" not in hidden
    with_none = chat(client, **{**fields, "thinking_token_budget": 0})["choices"][0]["message"]
    assert "reasoning" not in with_none


def test_streams(server: RunningServer, client: httpx.Client) -> None:
    fields: dict[str, Any] = {"thinking_token_budget": 6, "chat_template_kwargs": {"opens": True}}
    whole = chat(client, **fields)["choices"][0]["message"]
    options: Any = {"model": openai.NOT_GIVEN, "messages": ASK, "temperature": 0, "max_tokens": 40}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as api:
        model = api.models.list().data[0].id
        options |= {"model": model, "stream": True, "stream_options": {"include_usage": True}, "extra_body": fields}
        chunks = list(api.chat.completions.create(**options))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    reasoning = [getattr(delta, "reasoning_content", None) or "" for delta in deltas]
    assert "".join(reasoning) == whole["reasoning_content"]
    assert "".join(delta.content or "" for delta in deltas) == whole["content"]
    assert sum(map(bool, reasoning)) > 1
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize(
    "variables", [{}, {"opens": True}, {"enable_thinking": False}], ids=["perhaps", "opens", "closed"]
)
def test_a_constraint_applies_after_reasoning(client: httpx.Client, variables: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"chat_template_kwargs": variables, "guided_choice": ["yes", "no"]}
    if variables.get("opens"):
        fields["thinking_token_budget"] = 5
    message = chat(client, **fields)["choices"][0]["message"]
    assert message["content"] in ("yes", "no")
    assert ("reasoning" in message) == ("opens" in variables)


def test_a_call_after_reasoning(client: httpx.Client) -> None:
    fields = {"tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 90}
    (choice,) = chat(client, thinking_token_budget=5, **fields)["choices"]
    message = choice["message"]
    assert message["reasoning"] and message["content"] is None and choice["finish_reason"] == "tool_calls"
    assert [call["function"] for call in message["tool_calls"]] == [{"name": "clock", "arguments": "{}"}]


@pytest.mark.parametrize("thinks", [None, False])
def test_json_or_calls_after_reasoning(client: httpx.Client, thinks: bool | None) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"enum": [12]}}}
    fields: dict[str, Any] = {"tools": [CLOCK], "response_format": form, "parallel_tool_calls": False, "seed": 1}
    fields["chat_template_kwargs"] = {} if thinks is None else {"enable_thinking": thinks}
    message = chat(client, **fields, max_tokens=90, temperature=1)["choices"][0]["message"]
    assert message["content"] == "12" or message["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_of_earlier_messages(client: httpx.Client, name: str) -> None:
    messages = [*ASK, {"role": "assistant", "content": "Yes", name: "Hm"}, *ASK]
    token_ids = chat(client, messages=messages, max_tokens=1, return_token_ids=True)["prompt_token_ids"]
    assert "<think>Hm</think>Yes" in client.post("/detokenize", json={"tokens": token_ids}).json()["prompt"]


def test_reasoning_of_messages_and_responses(client: httpx.Client) -> None:
    """Anthropic's budget and OpenAI's effort. The former is at least 1,024 for its clients."""
    body = {"model": None, "messages": ASK, "max_tokens": 20, "thinking": {"type": "enabled", "budget_tokens": 3}}
    model = client.get("/v1/models").json()["data"][0]["id"]
    answer = client.post("/v1/messages", json={**body, "model": model, "temperature": 0}).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    answer = chat(client, reasoning_effort="none", prompt_logprobs=0, return_token_ids=True)
    assert "reasoning" not in answer["choices"][0]["message"]
    tokens = client.post("/detokenize", json={"tokens": answer["prompt_token_ids"]}).json()["prompt"]
    assert tokens.endswith("</think>\n")


@pytest.mark.parametrize("effort", ["low", "max"])
def test_efforts_are_the_same_in_all_apis(client: httpx.Client, effort: str) -> None:
    prompts = [chat(client, reasoning_effort=name, max_tokens=1)["usage"]["prompt_tokens"] for name in ("none", effort)]
    assert prompts[0] != prompts[1]
    body = {"input": "Hi", "reasoning": {"effort": effort}}
    assert client.post("/v1/responses/input_tokens", json=body).json()["input_tokens"] == prompts[1]
    model = client.get("/v1/models").json()["data"][0]["id"]
    anthropic = {"model": model, "messages": ASK, "output_config": {"effort": effort}}
    assert client.post("/v1/messages/count_tokens", json=anthropic).json()["input_tokens"] == prompts[1]


def test_verbosity_is_a_variable_of_the_template(client: httpx.Client) -> None:
    answer = chat(client, verbosity="low", max_tokens=1, return_token_ids=True)
    tokens = client.post("/detokenize", json={"tokens": answer["prompt_token_ids"]}).json()["prompt"]
    assert "<|system|> low" in tokens
    body = {"input": "Hi", "text": {"verbosity": "low"}}
    count = client.post("/v1/responses/input_tokens", json=body).json()["input_tokens"]
    assert count == len(answer["prompt_token_ids"])


@pytest.mark.parametrize("budget", [-1, 2.5])
def test_an_invalid_budget(client: httpx.Client, budget: float) -> None:
    response = client.post("/v1/chat/completions", json={"messages": ASK, "thinking_token_budget": budget})
    assert response.status_code == 400
    assert "thinking_token_budget" in json.dumps(response.json())
