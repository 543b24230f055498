"""Anthropic's messages with the `anthropic` client, and the bodies that it does not show."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, cast

import anthropic
import httpx
import msgspec
import pydantic
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.shared import ErrorResponse

from fleetfoot import LLM
from fleetfoot.outputs import CompletionOutput, RequestOutput
from fleetfoot.parsers.base import MessageDelta, ToolCallDelta
from fleetfoot.server.anthropic.messages import MessageAnswer, MessageEvents
from fleetfoot.server.anthropic.prompts import read_conversation, read_tool_choice, read_tools
from fleetfoot.server.anthropic.protocol import AssistantMessage, MessagesRequest, ToolUseBlock
from fleetfoot.server.conversation import GeneratedMessages, merge_deltas
from fleetfoot.server.streaming import iterate
from tests.helpers.server import RunningServer

MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story about a crow."}]
BODY: dict[str, Any] = {"model": "story", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
EVENT: Any = pydantic.TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def api(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def story() -> Iterator[LLM]:
    """The same model without a server."""
    with LLM(dtype="float32") as llm:
        yield llm


def create(api: anthropic.Anthropic, **fields: Any) -> Any:
    """The client has no parameters for temperature and others."""
    known = {
        name: fields.pop(name) for name in ("model", "messages", "max_tokens", "stream", "system") if name in fields
    }
    return api.messages.create(**known, extra_body=fields)


def events_of(text: str) -> list[Any]:
    """Checked events, without pings."""
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        if content["type"] != "ping":
            EVENT.validate_python(content, strict=True, extra="forbid")
            events.append(content)
    return events


def test_a_stream_is_the_same_message(api: anthropic.Anthropic, server: RunningServer) -> None:
    options: dict[str, Any] = {"model": "story", "messages": MESSAGES, "max_tokens": 12}
    whole = create(api, **BODY)
    with api.messages.stream(**options, extra_body={"temperature": 0}) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
        assert stream.request_id
    assert text == whole.content[0].text
    assert (final.content[0].to_dict(), final.stop_reason) == (whole.content[0].to_dict(), whole.stop_reason)
    assert final.usage.output_tokens == 12

    async def run() -> Any:
        async with (
            anthropic.AsyncAnthropic(base_url=server.url, auth_token="secret", max_retries=0) as client,
            client.messages.stream(**options, extra_body={"temperature": 0}) as stream,
        ):
            pieces = [piece async for piece in stream.text_stream]
            return "".join(pieces), await stream.get_final_message()

    text, final = asyncio.run(run())
    assert text == whole.content[0].text and final.stop_reason == "max_tokens"


CROW = {"type": "text", "text": "Tell me a story about a crow."}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"messages": [{"role": "user", "content": "A crow."}, {"role": "user", "content": [CROW]}]},
            [{"role": "user", "content": f"A crow.\n{CROW['text']}"}],
        ),
        (
            {"system": "Be brief.", "messages": MESSAGES},
            [{"role": "system", "content": "Be brief."}, *MESSAGES],
        ),
        (
            {"system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "Hi"}],
             "messages": MESSAGES},
            [{"role": "system", "content": "Hi"}, *MESSAGES],
        ),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"}, {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "No", "citations": None}]},
                {"role": "assistant", "content": "ne."}, *MESSAGES]},
            [*MESSAGES, {"role": "assistant", "content": "None."}, *MESSAGES],
        ),
    ],
    ids=["merged", "system", "billing", "assistant"],
)  # fmt: skip
def test_conversations_become_prompts(
    api: anthropic.Anthropic, client: httpx.Client, story: LLM, fields: Any, expected: Any
) -> None:
    prompt = story.get_tokenizer().apply_chat_template_ids(expected)
    message = create(api, **{**BODY, "max_tokens": 3, **fields})
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens == len(prompt)
    assert api.messages.count_tokens(model="story", **fields).input_tokens == len(prompt)


BLOCK = "messages[0].content[0]"
DEEP: Any = functools.reduce(lambda inner, _: {"a": inner}, range(900), {})
REFUSED = [
    ({"nonsense": 1}, "nonsense"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": 0.5}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 100}, "stop_sequences"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, BLOCK),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, BLOCK),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, BLOCK),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]}, BLOCK),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]}, BLOCK),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]},
     "messages[0]"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0]"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
    ({"tools": [{"name": "f", "input_schema": {"properties": {"x": {"pattern": "(?=x)"}}}}],
      "tool_choice": {"type": "any"}}, "tools[0].input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
    ({"thinking": {"type": "between_tools"}}, "thinking"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "disabled", "budget_tokens": 9}}, "thinking.budget_tokens"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": DEEP}]},
                   *MESSAGES]}, "nested"),
    ({"service_tier": "fast"}, "service_tier"),
    ({"cache_control": {"type": "forever"}}, "cache_control"),
    ({"container": "c"}, "container"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}}, "output_config.format.schema"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"output_config": {"task_budget": {"type": "tokens", "total": 5}}}, "output_config.task_budget"),
    ({"speed": "fast"}, "speed"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "named"), REFUSED, ids=[f"{named}-{index}" for index, (_, named) in enumerate(REFUSED)]
)
def test_a_refusal_names_the_field(client: httpx.Client, fields: dict[str, Any], named: str) -> None:
    response = client.post("/v1/messages", json={**BODY, **fields})
    body = response.json()
    assert response.status_code == 400, body
    assert body["error"]["type"] == "invalid_request_error" and named in body["error"]["message"]
    ErrorResponse.model_validate(body, strict=True, extra="forbid")


def test_errors_have_anthropics_envelope(client: httpx.Client, server: RunningServer, api: anthropic.Anthropic) -> None:
    for status, kind, response in (
        (401, "authentication_error", httpx.post(f"{server.url}/v1/messages", json=BODY, headers={"x-api-key": "no"})),
        (404, "not_found_error", client.post("/v1/messages", json={**BODY, "model": "claude-sonnet-4-5"})),
        (404, "not_found_error", client.get("/v1/messages/batches")),
        (405, "invalid_request_error", client.get("/v1/messages/count_tokens")),
        (413, "request_too_large", client.post("/v1/messages", json={**BODY, "system": "x" * 200_000})),
        (400, "invalid_request_error", client.post("/v1/messages", content=b"{")),
    ):
        body = response.json()
        assert (response.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert body["request_id"] == response.headers["request-id"] and set(body["error"]) == {"type", "message"}
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        create(api, **{**BODY, "system": "word " * 5000})
    both = {"Authorization": "Bearer other", "x-api-key": "secret"}
    assert httpx.post(f"{server.url}/v1/messages", json=BODY, headers=both).status_code == 200


# --- tools ------------------------------------------------------------------------------------------------------------


# --- tools and thinking, of a parser ----------------------------------------------------------------------------------


def generated(*deltas: MessageDelta, finish_reason: str = "stop", stop_reason: Any = None) -> GeneratedMessages:
    """A message with one token for each delta."""

    class Outputs:
        def close(self) -> None:
            pass

        async def collect(self) -> list[RequestOutput]:
            return [output(list(range(len(deltas))), finish_reason)]

        async def __aiter__(self) -> AsyncIterator[tuple[int, RequestOutput]]:
            for index in range(len(deltas)):
                yield 0, output([index], finish_reason if index == len(deltas) - 1 else None)

    class Parser:
        def feed(self, text: str, token_ids: Sequence[int]) -> MessageDelta:
            delta = MessageDelta()
            for token_id in token_ids:
                delta = merge_deltas(delta, deltas[token_id])
            return delta

        def finish(self, *, is_cut: bool = False) -> MessageDelta:
            return MessageDelta()

    def output(token_ids: list[int], reason: str | None) -> RequestOutput:
        completion = CompletionOutput(0, "", token_ids, finish_reason=reason, stop_reason=stop_reason)
        return RequestOutput("r", None, [1, 2, 3], [completion], reason is not None, num_cached_tokens=2)

    return GeneratedMessages(cast(Any, Outputs()), [Parser()], lambda text: len(text.split()))


def answer(**fields: Any) -> MessageAnswer:
    return MessageAnswer(msgspec.convert({**BODY, **fields}, MessagesRequest), "story", "req_1")


def whole_message(made: MessageAnswer, message: GeneratedMessages) -> AssistantMessage:
    return made.whole(message, asyncio.run(message.collect()))


def streamed(made: MessageAnswer, message: GeneratedMessages) -> str:
    async def run() -> bytes:
        return b"".join([event async for event in iterate(MessageEvents(made, message))])

    return asyncio.run(run()).decode()


def accumulated(events: list[Any]) -> Any:
    """The message that the client puts together."""
    snapshot, buffers = None, {}
    for event in events:
        snapshot = accumulate_event(event=EVENT.validate_python(event), current_snapshot=snapshot, json_bufs=buffers)
    return snapshot.to_dict()


DELTAS = (
    MessageDelta(reasoning="Two "),
    MessageDelta(reasoning="tools."),
    MessageDelta(content="Look"),
    MessageDelta(content="ing.", tool_calls=[ToolCallDelta(0, "call_a", "weather")]),
    MessageDelta(tool_calls=[ToolCallDelta(0, arguments='{"city": "Lin')]),
    MessageDelta(tool_calls=[ToolCallDelta(0, arguments='z"}'), ToolCallDelta(1, "call_b", "clock", "{}")]),
)


@pytest.mark.parametrize("display", ["summarized", "omitted"])
def test_thinking_and_tools_are_blocks(display: str) -> None:
    made = answer(thinking={"type": "adaptive", "display": display})
    whole = whole_message(made, generated(*DELTAS))
    body = json.loads(msgspec.json.encode(whole))
    Message.model_validate(body, strict=True, extra="forbid")
    thinking, *others = body["content"]
    assert thinking["thinking"] == ("Two tools." if display == "summarized" else "") and thinking["signature"]
    direct = {"type": "direct"}
    assert others == [
        {"type": "text", "text": "Looking."},  # some clients take no null as its citations
        {"type": "tool_use", "id": "call_a", "name": "weather", "input": {"city": "Linz"}, "caller": direct},
        {"type": "tool_use", "id": "call_b", "name": "clock", "input": {}, "caller": direct},
    ]
    assert body["stop_reason"] == "tool_use"
    assert body["usage"]["input_tokens"] == 1 and body["usage"]["cache_read_input_tokens"] == 2
    assert body["usage"]["output_tokens_details"] == {"thinking_tokens": 2}
    events = events_of(streamed(made, generated(*DELTAS)))
    snapshot = accumulated(events)
    assert [snapshot["content"], snapshot["stop_reason"]] == [body["content"], "tool_use"]
    assert snapshot["usage"]["output_tokens_details"] == {"thinking_tokens": 2}
    starts = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert starts == [event["index"] for event in events if event["type"] == "content_block_stop"] == [0, 1, 2, 3]
    # what is sent back is what was generated
    request = {**BODY, "messages": [{"role": "assistant", "content": body["content"][:2]}]}
    (message,) = read_conversation(msgspec.convert(request, MessagesRequest))
    assert (message["reasoning_content"], message["content"]) == ("Two tools.", "Looking.")


def test_a_call_that_max_tokens_cuts() -> None:
    calls = MessageDelta(tool_calls=[ToolCallDelta(0, "call_a", "weather", '{"city": "Lin')])
    message = whole_message(answer(max_tokens=1), generated(calls, finish_reason="length"))
    assert (message.stop_reason, message.content) == ("max_tokens", [ToolUseBlock("call_a", "weather", {})])
    text = generated(MessageDelta("x"), finish_reason="length")
    assert whole_message(answer(max_tokens=2), text).stop_reason == "model_context_window_exceeded"


def test_an_error_within_a_stream_is_its_last_event() -> None:
    text = streamed(answer(), generated(MessageDelta("x"), MessageDelta(), finish_reason="error", stop_reason="broken"))
    name, data = text.strip().split("\n\n")[-1].split("\n")
    body = json.loads(data.removeprefix("data: "))
    assert (name, body["error"]["type"], body["request_id"]) == ("event: error", "api_error", "req_1")
    ErrorResponse.model_validate(body, strict=True, extra="forbid")
    text = streamed(answer(), generated(MessageDelta("x"), finish_reason="abort"))
    assert '"overloaded_error"' in text


TOOLS: list[Any] = [{"name": "weather", "description": "Of a city.", "strict": True, "input_schema": {"type": "object"},
                     "input_examples": [{"city": "Linz"}], "cache_control": {"type": "ephemeral"}}]  # fmt: skip


def test_tools_become_those_of_chat_completions() -> None:
    schema = {"type": "object", "examples": [{"city": "Linz"}]}
    function = {"name": "weather", "description": "Of a city.", "parameters": schema, "strict": True}
    tools = read_tools(TOOLS)
    assert tools == [{"type": "function", "function": function}]
    for choice, expected in (
        (None, "auto"),
        ({"type": "auto"}, "auto"),
        ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, {"type": "function", "function": {"name": "weather"}}),
    ):
        body = msgspec.convert({**BODY, "tools": TOOLS, "tool_choice": choice}, MessagesRequest)
        assert read_tool_choice(body.tool_choice, tools) == expected


def test_tool_uses_and_results_become_messages() -> None:
    use = {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Linz"}}
    results = [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "Rain"}]},
        {"type": "tool_result", "tool_use_id": "b", "content": "none", "is_error": True},
        {"type": "text", "text": "Now?"},
    ]
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "text", "text": "Looking."}, use, {**use, "id": "b"}]},
        {"role": "user", "content": results},
    ]
    function = {"name": "weather", "arguments": {"city": "Linz"}}
    calls = [{"id": name, "type": "function", "function": function} for name in "ab"]
    assert read_conversation(msgspec.convert({**BODY, "messages": turns}, MessagesRequest)) == [
        *MESSAGES,
        {"role": "assistant", "content": "Looking.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "name": "weather", "content": "Rain"},
        {"role": "tool", "tool_call_id": "b", "name": "weather", "content": "Error: none"},
        {"role": "user", "content": "Now?"},
    ]
