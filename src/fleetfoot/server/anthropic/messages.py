"""``POST /v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetfoot.outputs import CompletionOutput, RequestOutput
from fleetfoot.parsers.base import MessageDelta, ToolCallDelta
from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.records.structured_outputs import StructuredOutputsParams
from fleetfoot.server.anthropic.prompts import read_conversation, read_tool_choice, read_tools, sign
from fleetfoot.server.anthropic.protocol import (
    NO_THREADS,
    UNSUPPORTED,
    AnthropicError,
    AssistantMessage,
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    CountTokensRequest,
    Event,
    InputJSONDelta,
    MessageDeltaUsage,
    MessageEnd,
    MessagesRequest,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputTokensDetails,
    Ping,
    SignatureDelta,
    Stop,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    TokenCount,
    ToolUseBlock,
)
from fleetfoot.server.conversation import GeneratedMessages, Turn, generate, prompt_token_ids
from fleetfoot.server.http import ENCODER, JSON, ApiError, invalid, renamed, until_disconnected
from fleetfoot.server.openapi import READS, RUNS, Endpoint
from fleetfoot.server.service import Service, check_stop_strings, response_size
from fleetfoot.server.streaming import PushedEvents
from fleetfoot.utils.validation import FieldError, is_one_of


def endpoints(service: Service) -> list[Endpoint]:
    """The table of these endpoints."""
    messages = MessagesEndpoints(service)
    return [
        Endpoint(
            *("POST", "/v1/messages", messages.create, "Continue a conversation, in Anthropic's form."),
            *(MessagesRequest, AssistantMessage, Event),
            errors=RUNS,
            envelope=AnthropicError,
        ),
        Endpoint(
            *("POST", "/v1/messages/count_tokens", messages.count, "The number of tokens of a conversation."),
            *(CountTokensRequest, TokenCount),
            errors=READS,
            envelope=AnthropicError,
        ),
    ]


_MESSAGE = msgspec.json.Decoder(MessagesRequest)
_COUNT = msgspec.json.Decoder(CountTokensRequest)

_NAMES = {
    ".function.parameters": ".input_schema",
    ".function.name": ".name",
    "structured_outputs.json": "output_config.format.schema",
}
"""Names of fields in errors about `Turn` and the engine's parameters -> those of Anthropic's API."""


class MessagesEndpoints:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, http: Request) -> Response:
        service = self._service
        body = await service.read(http, _MESSAGE)
        service.check_generates()
        turn = await service.work(_read_turn, body, service, http.scope["request_id"])
        answer = MessageAnswer(body, service.model_name, turn.request_id)
        try:
            generated = await generate(service, turn)
        except FieldError as error:
            raise renamed(error, _NAMES) from None
        if body.stream:
            return PushedEvents(MessageEvents(answer, generated))
        output = await until_disconnected(http, generated.collect())
        return await service.respond(response_size([output]), lambda: answer.whole(generated, output), "content")

    async def count(self, http: Request) -> Response:
        service = self._service
        body = await service.read(http, _COUNT)
        service.check_generates()
        turn = await service.work(_read_turn, body, service, http.scope["request_id"])
        try:
            return JSON(TokenCount(len(await prompt_token_ids(service, turn))))
        except FieldError as error:
            raise renamed(error, _NAMES) from None


def _read_turn(body: CountTokensRequest, service: Service, request_id: str) -> Turn:
    """Raises ApiError and ValueError for a field that is invalid or not supported."""
    for name, neutral in UNSUPPORTED.items():
        if not is_one_of(getattr(body, name), neutral):
            code = NO_THREADS if name == "thread" else "unsupported_parameter"
            raise invalid(name, f"{name} is not supported", code)
    if body.output_config is not None and body.output_config.task_budget is not None:
        name = "output_config.task_budget"
        raise invalid(name, f"{name} is not supported", "unsupported_parameter")
    messages, tools = read_conversation(body), read_tools(body.tools or ())
    continues = messages[-1]["role"] == "assistant"
    return Turn(
        request_id=request_id,
        messages=messages,
        params=_sampling_params(body, service.engine.facts.sampling_defaults),
        template={"add_generation_prompt": not continues, "continue_final_message": continues},
        thinks=_thinks(body),
        effort=body.output_config.effort if body.output_config is not None else None,
        tools=tools,
        tool_choice=read_tool_choice(body.tool_choice, tools),
        thinking_token_budget=getattr(body.thinking, "budget_tokens", None),
        parallel_tool_calls=not getattr(body.tool_choice, "disable_parallel_tool_use", None),
    )


def _sampling_params(body: CountTokensRequest, defaults: dict[str, Any]) -> SamplingParams:
    check_stop_strings("stop_sequences", body.stop_sequences or ())
    given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "stop": body.stop_sequences}
    given["max_tokens"] = body.max_tokens
    known = {name: value for name, value in given.items() if value is not None}
    kind = RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY
    form = body.output_format or (body.output_config and body.output_config.format)
    constraint = StructuredOutputsParams(json=form.schema) if form else None
    return SamplingParams(**{**defaults, **known}, output_kind=kind, structured_outputs=constraint)


def _thinks(body: CountTokensRequest) -> bool | None:
    """Raises ApiError for a budget that is invalid."""
    if body.thinking is None:
        return None
    budget = body.thinking.budget_tokens
    if (budget is not None) != (body.thinking.type == "enabled"):
        message = f"thinking.budget_tokens is {budget}; the type 'enabled' needs it, and others are without"
        raise invalid("thinking.budget_tokens", message)
    if budget is not None and budget < 1:
        raise invalid("thinking.budget_tokens", f"thinking.budget_tokens is {budget}; it must be at least 1")
    return body.thinking.type != "disabled"


class MessageAnswer:
    """The response to one request."""

    def __init__(self, body: MessagesRequest, model: str, request_id: str) -> None:
        self.id = f"msg_{secrets.token_hex(12)}"
        self.model = model
        self.request_id = request_id
        self._max_tokens = body.max_tokens
        self.omits_thinking = getattr(body.thinking, "display", None) == "omitted"

    def whole(self, generated: GeneratedMessages, output: RequestOutput) -> AssistantMessage:
        (message,) = generated.messages(output)
        num_tokens = len(message.completion.token_ids)
        stop = self.stop(message.completion, message.finish_reason, num_tokens)
        blocks: list[Block] = []
        if message.reasoning:
            thinking = "" if self.omits_thinking else message.reasoning
            blocks.append(ThinkingBlock(thinking, sign(message.reasoning, is_omitted=self.omits_thinking)))
        if message.content:
            blocks.append(TextBlock(message.content))
        blocks += [ToolUseBlock(call.id, call.name, _tool_input(call.arguments)) for call in message.tool_calls]
        usage = MessageUsage(*_counts(output, num_tokens), output_tokens_details=_details(generated, num_tokens))
        return AssistantMessage(self.id, self.model, blocks, usage, stop.stop_reason, stop.stop_sequence)

    def stop(self, completion: CompletionOutput, finish_reason: str | None, num_tokens: int) -> Stop:
        """Raises ApiError for a message that the server has aborted."""
        if finish_reason == "tool_calls":
            return Stop("tool_use")
        if finish_reason == "length":
            return Stop("max_tokens" if num_tokens >= self._max_tokens else "model_context_window_exceeded")
        if finish_reason == "stop":
            is_text = isinstance(completion.stop_reason, str)
            return Stop("stop_sequence", str(completion.stop_reason)) if is_text else Stop("end_turn")
        raise ApiError(503, "the server has aborted the request", retry_after=5)


class MessageEvents:
    """The events of a streamed response."""

    def __init__(self, answer: MessageAnswer, generated: GeneratedMessages) -> None:
        self.outputs = generated.outputs
        self._answer = answer
        self._generated = generated
        self._blocks = _BlockEvents(omits_thinking=answer.omits_thinking)
        self._has_begun = False
        self._num_tokens = 0

    def feed(self, index: int, output: RequestOutput) -> bytes:
        answer, chunks = self._answer, self._generated.chunks(output)
        events: list[Event] = []
        if not self._has_begun:
            self._has_begun = True
            message = AssistantMessage(answer.id, answer.model, [], MessageUsage(*_counts(output, 0)))
            events += [MessageStart(message), Ping()]
        for chunk in chunks:
            self._num_tokens += len(chunk.completion.token_ids)
            events += self._blocks.add(chunk.delta)
            if chunk.finish_reason is not None:
                stop = answer.stop(chunk.completion, chunk.finish_reason, self._num_tokens)
                details = _details(self._generated, self._num_tokens)
                usage = MessageDeltaUsage(*_counts(output, self._num_tokens), output_tokens_details=details)
                events += [*self._blocks.close(), MessageEnd(stop, usage), MessageStop()]
        return b"".join([_encode(event) for event in events])

    def end(self) -> bytes:
        return b""

    def fail(self, error: Exception) -> bytes:
        return _encode(AnthropicError.of(ApiError.of(error), self._answer.request_id))


class _BlockEvents:
    """The events of content blocks, one of which is open at a time."""

    def __init__(self, *, omits_thinking: bool) -> None:
        self._omits_thinking = omits_thinking
        self._index = -1
        self._open: str | int | None = None
        """``text``, ``thinking``, or the index of a tool call."""
        self._thinking = ""

    def add(self, delta: MessageDelta) -> list[Event]:
        events: list[Event] = []
        if delta.reasoning:
            events += self._switch("thinking", ThinkingBlock("", ""))
            self._thinking += delta.reasoning
            if not self._omits_thinking:
                events.append(BlockDelta(self._index, ThinkingDelta(delta.reasoning)))
        if delta.content:
            events += self._switch("text", TextBlock(""))
            events.append(BlockDelta(self._index, TextDelta(delta.content)))
        for call in delta.tool_calls:
            events += self._add_call(call)
        return events

    def _add_call(self, call: ToolCallDelta) -> list[Event]:
        events = self._switch(call.index, ToolUseBlock(call.id or "", call.name or "", {}))
        if call.arguments:
            events.append(BlockDelta(self._index, InputJSONDelta(call.arguments)))
        return events

    def _switch(self, kind: str | int, block: Block) -> list[Event]:
        """Close the open block and begin another, unless it is of this kind."""
        if self._open == kind:
            return []
        events = self.close()
        self._open = kind
        self._index += 1
        return [*events, BlockStart(self._index, block)]

    def close(self) -> list[Event]:
        if self._open is None:
            return []
        events: list[Event] = [BlockStop(self._index)]
        if self._open == "thinking":
            signature = sign(self._thinking, is_omitted=self._omits_thinking)
            events.insert(0, BlockDelta(self._index, SignatureDelta(signature)))
            self._thinking = ""
        self._open = None
        return events


def _counts(output: RequestOutput, num_tokens: int) -> tuple[int, int, int]:
    """The first fields of a usage."""
    num_cached = output.num_cached_tokens
    return len(output.prompt_token_ids) - num_cached, num_tokens, num_cached


def _details(generated: GeneratedMessages, num_tokens: int) -> OutputTokensDetails | None:
    num_thinking = generated.num_reasoning_tokens()
    return None if num_thinking is None else OutputTokensDetails(min(num_thinking, num_tokens))


def _tool_input(arguments: str) -> dict[str, Any]:
    """The arguments of a call; empty if ``max_tokens`` has cut them."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


def _encode(event: Event | AnthropicError) -> bytes:
    name = str(event.__struct_config__.tag)
    return b"event: " + name.encode() + b"\ndata: " + ENCODER.encode(event) + b"\n\n"
