"""Reasoning over HTTP, on a model that a budget makes end it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
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
