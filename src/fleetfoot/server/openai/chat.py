"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetfoot.outputs import CompletionOutput, RequestOutput
from fleetfoot.parsers.base import ToolCallDelta
from fleetfoot.server.conversation import GeneratedMessages, Message, MessageChunk, Turn, generate, prepare
from fleetfoot.server.http import (
    JSON,
    ApiError,
    invalid,
    request_id,
    until_disconnected,
)
from fleetfoot.server.openai.events import (
    GenerationEvents,
    UsageCounter,
    logprob_entries,
    token_logprobs,
)
from fleetfoot.server.openai.prompts import read_messages
from fleetfoot.server.openai.protocol import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChatToolCall,
    FunctionCall,
)
from fleetfoot.server.openai.structured import naming_constraint
from fleetfoot.server.openai.token_generation import GenerateRequest
from fleetfoot.server.service import RESERVED_VARIABLES, Service, response_size
from fleetfoot.server.streaming import PushedEvents

_DECODER = msgspec.json.Decoder(ChatRequest)
ROLE = "assistant"


def template_options(body: Any) -> dict[str, Any]:
    """Arguments of `Service.render_chat` from the fields of a body. Raises ApiError for fields that contradict each
    other, and for variables that a template cannot have."""
    continues = bool(body.continue_final_message)
    adds = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if adds and continues:
        message = "add_generation_prompt and continue_final_message exclude each other"
        raise invalid("continue_final_message", message)
    options = {"add_generation_prompt": adds, "continue_final_message": continues}
    variables = body.chat_template_kwargs or {}
    if taken := sorted(RESERVED_VARIABLES & set(variables)):
        raise invalid("chat_template_kwargs", f"chat_template_kwargs cannot set {', '.join(taken)}")
    return {**options, **variables, "chat_template": body.chat_template}


class ChatCompletions:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, http: Request) -> Response:
        service = self._service
        body = await service.read(http, _DECODER)
        service.check_generates()
        answer, turn = await service.work(self._read, http, body)
        with naming_constraint(body):
            generated = await generate(service, turn)
        last = turn.messages[-1]
        answer.echoed = last["content"] if body.echo and last["role"] == ROLE else ""
        if body.stream:
            return PushedEvents(_Events(answer, generated))
        output = await until_disconnected(http, generated.collect())
        return await service.respond(response_size([output]), lambda: answer.whole(output, generated), "choices")

    async def render(self, http: Request) -> Response:
        """The request of ``/inference/v1/generate`` for the conversation."""
        service = self._service
        body = await service.read(http, _DECODER)
        service.check_generates()
        answer, turn = await service.work(self._read, http, body)
        with naming_constraint(body):
            prepared = await prepare(service, turn)
        params = prepared.expected.params
        room = await service.check_prompt(prepared.token_ids, params, turn.place, answer.limit)
        rendered = GenerateRequest.of(body, answer.id, prepared.token_ids, params, room)
        return await service.work(JSON, rendered)

    def _read(self, http: Request, body: ChatRequest) -> tuple[_Answer, Turn]:
        """Raises ApiError and ValueError for a field that is invalid or not supported."""
        service = self._service
        body.check()
        messages = read_messages(body.messages)
        if body.top_logprobs and not body.logprobs:  # 0 is vLLM's default, which clients send
            raise invalid("top_logprobs", "top_logprobs needs logprobs=true")
        facts, num_top = service.engine.facts, body.top_logprobs or 0
        most = facts.vocab_size if facts.max_logprobs < 0 else facts.max_logprobs
        if not 0 <= (facts.vocab_size if num_top == -1 else num_top) <= most:
            raise invalid("top_logprobs", f"top_logprobs is {body.top_logprobs}; at most {most} (--max-logprobs)")
        if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
            message = (
                f"max_tokens is {body.max_tokens} and max_completion_tokens {body.max_completion_tokens}; give one"
            )
            raise ApiError(400, message, None, "max_completion_tokens")
        if body.max_completion_tokens is not None and body.max_completion_tokens < 1:
            message = f"max_completion_tokens is {body.max_completion_tokens}; it must be at least 1"
            raise invalid("max_completion_tokens", message)
        answer = _Answer(body.request_id or request_id(http, "chatcmpl"), body, service)
        options = template_options(body)
        _check_budget(service, body)
        if body.documents is not None:
            options["documents"] = body.documents
        if body.add_special_tokens:
            options["tokenizer_kwargs"] = {"add_special_tokens": True}
        turn = Turn(
            request_id=answer.id,
            messages=messages,
            params=answer.params,
            template=options,
            tools=body.tools or (),
            tool_choice="auto" if body.tool_choice is None else body.tool_choice,
            thinking_token_budget=body.thinking_token_budget,
            effort=body.reasoning_effort,
            verbosity=body.verbosity,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            cache_salt=body.cache_salt,
            priority=body.priority,
            limit=answer.limit,
        )
        return answer, turn


def _check_budget(service: Service, body: ChatRequest) -> None:
    """Raises ApiError for a budget of reasoning that is invalid, or of a model without one."""
    budget = body.thinking_token_budget
    if budget is None:
        return
    template = body.chat_template or service.settings.chat_template
    why = "must be at least 0"
    if budget >= 0:
        if service.formats.of(template, has_tools=bool(body.tools)).reasoning is not None:
            return
        why = "needs a model that marks the end of its reasoning (--reasoning-parser)"
    raise invalid("thinking_token_budget", f"thinking_token_budget is {budget}; it {why}")


class _Answer:
    """The response to one request."""

    def __init__(self, name: str, body: ChatRequest, service: Service) -> None:
        self.id = name
        self.echoed = ""
        self.body = body
        self._service = service
        self.model = service.model_name
        name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        self.limit = name, getattr(body, name)
        self.params = body.sampling_params(
            service.engine.facts.sampling_defaults,
            max_tokens=self.limit[1],
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )

    def whole(self, output: RequestOutput, generated: GeneratedMessages) -> ChatCompletion:
        counter, messages = UsageCounter(), generated.messages(output)
        counter.add(0, output)
        counter.num_reasoning = generated.num_reasoning_tokens()
        choices: Any = map(self._choice, messages)  # `Service.respond` reads it
        response = ChatCompletion(self.id, choices, self.model, counter.usage())
        for name, value in self.prompt_fields(output).items():
            setattr(response, name, value)
        response.kv_transfer_params = self._service.kv_transfer_params(output)
        return response

    def prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """Fields of the response, or of the first event of a stream, that are about the prompt."""
        fields: dict[str, Any] = {}
        if self.body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = logprob_entries(output)
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        return fields

    def _choice(self, message: Message) -> ChatChoice:
        completion, content = message.completion, self.echoed + message.content
        answer = ChatMessage(ROLE, content or (None if message.tool_calls else ""))
        if message.tool_calls:
            answer.tool_calls = [
                ChatToolCall(FunctionCall(call.arguments, call.name), call.id, "function")
                for call in message.tool_calls
            ]
        if message.reasoning and self.shows_reasoning:
            answer.reasoning = answer.reasoning_content = message.reasoning
        choice = ChatChoice(
            completion.index,
            answer,
            self._logprobs(completion),
            message.finish_reason,
            completion.stop_reason,
        )
        if self.body.return_token_ids:
            choice.token_ids = completion.token_ids
        return choice

    def chunk_choice(self, chunk: MessageChunk) -> ChatChunkChoice:
        completion, parsed = chunk.completion, chunk.delta
        delta = ChatDelta(parsed.content) if parsed.content else ChatDelta()
        if parsed.reasoning:
            delta.reasoning = delta.reasoning_content = parsed.reasoning
        if parsed.tool_calls:
            delta.tool_calls = [_call_delta(call) for call in parsed.tool_calls]
        choice = ChatChunkChoice(completion.index, delta, self._logprobs(completion), chunk.finish_reason)
        if chunk.finish_reason is not None:
            choice.stop_reason = completion.stop_reason
        if self.body.return_token_ids:
            choice.token_ids = completion.token_ids
        return choice

    @property
    def shows_reasoning(self) -> bool:
        return self.body.include_reasoning is not False

    def _logprobs(self, completion: CompletionOutput) -> ChatLogprobs | None:
        if completion.each_logprobs() is None:
            return None
        as_ids = bool(self.body.return_tokens_as_token_ids)
        tokenizer = self._service.tokenizer
        return ChatLogprobs(token_logprobs(completion, tokenizer, self.body.top_logprobs or 0, as_ids=as_ids))


class _Events(GenerationEvents):
    """The events of a streamed response."""

    def __init__(self, answer: _Answer, generated: GeneratedMessages) -> None:
        fields = {"id": answer.id, "object": "chat.completion.chunk", "model": answer.model}
        super().__init__(generated.outputs, answer.body, fields)
        self._answer, self._generated = answer, generated
        self._has_empty = bool(answer.body.return_token_ids)
        self._has_begun = False

    def feed(self, index: int, output: RequestOutput) -> bytes:
        answer, events = self._answer, []
        self.counter.add(index, output)
        chunks = self._generated.chunks(output)
        if not self._has_begun:
            self._has_begun = True
            begins = [ChatChunkChoice(number, ChatDelta(answer.echoed, ROLE)) for number in range(answer.params.n)]
            fields = answer.prompt_fields(output)
            events.append(self.writer.chunk(begins[0], self.counter, fields))
            events += [self.writer.chunk(begin, self.counter) for begin in begins[1:]]
        for chunk in chunks:
            if not answer.shows_reasoning:
                chunk.delta.reasoning = ""
            choice = answer.chunk_choice(chunk)
            if chunk.delta or choice.logprobs or choice.finish_reason or self._has_empty:
                events.append(self.writer.chunk(choice, self.counter))
        return b"".join(events)

    def end(self) -> bytes:
        self.counter.num_reasoning = self._generated.num_reasoning_tokens() if self.includes_usage else None
        return super().end()


def _call_delta(call: ToolCallDelta) -> ChatToolCall:
    if call.id is None or call.name is None:
        return ChatToolCall(FunctionCall(call.arguments), index=call.index)
    return ChatToolCall(FunctionCall(call.arguments, call.name), call.id, "function", call.index)
