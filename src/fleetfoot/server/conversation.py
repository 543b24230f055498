"""The next message of a conversation, in no API's dialect: what chat completions, responses and messages share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec

from fleetfoot.engine.chat import ExpectedMessages, ToolUse, find_schema_error, is_cut, merge_deltas
from fleetfoot.engine.input_processor import Limit
from fleetfoot.outputs import CompletionOutput, RequestOutput
from fleetfoot.parsers.base import MessageDelta, MessageParser
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.server.service import RequestOutputs, Service, check_completion, engine_prompt
from fleetfoot.structured.grammars import MAX_CHARS
from fleetfoot.utils.validation import FieldError

_OWN_FIELDS = "structured_outputs.grammar", "structured_outputs.frame"
"""Constraints that the server makes of tools."""
_TOOL_COST = 1 << 17
"""Cost of the search for a tool that cannot be compiled, in bytes."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
_COMMON_EFFORTS: Mapping[str, Effort] = {
    "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high",
}  # fmt: skip
"""In place of an effort that a chat template does not name. It need not name common ones."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """A request for the next message."""

    request_id: str
    messages: Sequence[Mapping[str, Any]]
    """As chat templates take them: ``role``, ``content``, ``tool_calls`` and others."""
    params: SamplingParams
    template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `Service.render_chat`."""
    tools: Sequence[Mapping[str, Any]] = ()
    """OpenAI's form: ``{"type": "function", "function": {"name", "description", "parameters", "strict"}}``."""
    tool_choice: str | Mapping[str, Any] = "auto"
    """``auto``, ``none``, ``required``, or ``{"type": "function", "function": {"name": ...}}``."""
    parallel_tool_calls: bool = True
    thinking_token_budget: int | None = None
    """The most tokens of reasoning, after which its end is forced."""
    thinks: bool | None = None
    """Whether the model reasons, if its chat template has a variable for that; None: as the template has it."""
    effort: Effort | None = None
    """The effort of reasoning. ``none``: ``thinks`` is False."""
    verbosity: Verbosity | None = None
    """A variable of chat templates."""
    cache_salt: str | None = None
    priority: int | None = None
    place: str = "messages"
    """The field of the body that has the conversation, for errors."""
    limit: Limit | None = None
    """See `EngineClient.submit`."""


@dataclass(slots=True)
class ToolCall:
    """A call of a function by the model."""

    id: str
    name: str
    arguments: str
    """JSON text, as the model has generated it."""


@dataclass(slots=True)
class Message:
    """A whole generated message."""

    completion: CompletionOutput
    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str | None = None
    """The reason of the completion; ``tool_calls`` if it has ended by itself with calls, the last one of which is
    whole."""


@dataclass(slots=True)
class MessageChunk:
    """What one step has added to a message. Its completion has the step's tokens and logprobs."""

    completion: CompletionOutput
    delta: MessageDelta
    finish_reason: str | None
    """As of `Message`; None while it goes on."""


class GeneratedMessages:
    """The messages of a turn, ``params.n`` of them: as they come, or whole.

    Args:
        outputs: of the engine, for one prompt.
        parsers: one for each message.
        count_tokens: of a text; None: the model does not reason.
    """

    def __init__(
        self,
        outputs: RequestOutputs,
        parsers: Sequence[MessageParser],
        count_tokens: Callable[[str], int] | None = None,
    ) -> None:
        self.outputs = outputs
        self._parsers = parsers
        self._count_tokens = count_tokens
        self._last_calls: list[list[str]] = [[] for _ in parsers]
        """The pieces of the last call's arguments; []: no call."""
        self._counts = [_ReasoningCount() for _ in parsers]

    def close(self) -> None:
        """Abort what is unfinished."""
        self.outputs.close()

    async def __aiter__(self) -> AsyncIterator[tuple[RequestOutput, list[MessageChunk]]]:
        """Deltas, for parameters with `RequestOutputKind.DELTA`. Raises ApiError 500 for a sequence that the engine has
        ended with an error."""
        async for _, output in self.outputs:
            yield output, self.chunks(output)

    def chunks(self, output: RequestOutput) -> list[MessageChunk]:
        """The chunks of the next output. Raises as the iteration."""
        return [self._chunk(completion) for completion in output.outputs]

    def num_reasoning_tokens(self) -> int | None:
        """The number in all messages so far; None: the model does not reason."""
        return None if self._count_tokens is None else sum(count.num_reasoning for count in self._counts)

    async def collect(self) -> RequestOutput:
        """The only output, for parameters with `RequestOutputKind.FINAL_ONLY`."""
        (output,) = await self.outputs.collect()
        return output

    def messages(self, output: RequestOutput) -> list[Message]:
        """The messages of the only output. Raises as the iteration."""
        return [self._message(self._chunk(completion)) for completion in output.outputs]

    def _chunk(self, completion: CompletionOutput) -> MessageChunk:
        check_completion(completion)
        parser = self._parsers[completion.index]
        delta = parser.feed(completion.text, completion.token_ids)
        if completion.finish_reason is not None:
            delta = merge_deltas(delta, parser.finish(is_cut=is_cut(completion)))
        if self._count_tokens is not None:
            self._counts[completion.index].add(delta, completion, self._count_tokens)
        arguments = self._last_calls[completion.index]
        for call in delta.tool_calls:
            if call.id is not None:
                arguments.clear()
            arguments.append(call.arguments)
        ends_with_calls = completion.finish_reason == "stop" and arguments and _is_whole(completion, arguments)
        return MessageChunk(completion, delta, "tool_calls" if ends_with_calls else completion.finish_reason)

    @staticmethod
    def _message(chunk: MessageChunk) -> Message:
        """The message of the only chunk."""
        calls = [ToolCall(call.id or "", call.name or "", call.arguments) for call in chunk.delta.tool_calls]
        return Message(chunk.completion, chunk.delta.content, chunk.delta.reasoning, calls, chunk.finish_reason)


def _is_whole(completion: CompletionOutput, arguments: Sequence[str]) -> bool:
    """Whether a stop string has not cut these arguments."""
    if not isinstance(completion.stop_reason, str):
        return True
    try:
        msgspec.json.decode("".join(arguments))
    except msgspec.DecodeError:
        return False
    return True


@dataclass(slots=True)
class _ReasoningCount:
    """The tokens of one message's reasoning, the same for whole messages and streams."""

    num_reasoning: int = 0
    """Until the message ends: those before other text."""
    _num_tokens: int = 0
    _reasoning: list[str] = field(default_factory=list)
    _others: list[str] = field(default_factory=list)

    def add(self, delta: MessageDelta, completion: CompletionOutput, count_tokens: Callable[[str], int]) -> None:
        """Count what a step has added. In the end, the shorter one of the texts is tokenized."""
        self._num_tokens += len(completion.token_ids)
        texts = [delta.content, *[call.arguments for call in delta.tool_calls]]
        self._others += [text for text in texts if text]
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        if not self._others:
            self.num_reasoning = self._num_tokens if self._reasoning else 0
        elif completion.finish_reason is not None and self._reasoning:
            reasoning, others = "".join(self._reasoning), "".join(self._others)
            is_short = len(reasoning) <= len(others)
            self.num_reasoning = (
                count_tokens(reasoning) if is_short else max(0, self._num_tokens - count_tokens(others))
            )


@dataclass(frozen=True, slots=True)
class Prepared:
    """A turn that can be sent."""

    token_ids: list[int]
    tools: ToolUse
    expected: ExpectedMessages


async def prepare(service: Service, turn: Turn) -> Prepared:
    """Render the prompt, and complete the parameters. Raises ApiError and ValueError."""
    read_tools = partial(ToolUse.of, turn.tools, turn.tool_choice, is_parallel=turn.parallel_tool_calls)
    tools = await service.work(read_tools)
    template = turn.template.get("chat_template") or service.settings.chat_template
    variables = _template_variables(service, turn, template)
    options = {**variables, **turn.template, "tools": list(tools.schemas) or None}
    messages = await service.work(lambda: [_with_reasoning(message) for message in turn.messages])
    token_ids = await service.render_chat(messages, turn.params.truncate_prompt_tokens, **options)
    content = turn.messages[-1].get("content") if turn.template.get("continue_final_message") else None
    expected = await service.work(
        *(service.formats.expect, template, tools, turn.params, token_ids, _text(content)),
        turn.thinking_token_budget,
    )
    expected.keep_special_tokens()
    _check_grammar(expected.params, tools)
    return Prepared(token_ids, tools, expected)


def _check_grammar(params: SamplingParams, tools: ToolUse) -> None:
    """Raises ApiError for tools the grammar of which is too long."""
    constraint = params.structured_outputs
    size = 0 if constraint is None else max(len(text or "") for text in (constraint.frame, constraint.grammar))
    if tools.functions and size > MAX_CHARS:
        problem = f"has {len(tools.functions)} tools, the grammar of which has {size:,} characters"
        raise FieldError("tools", f"{problem}; {MAX_CHARS:,} are the most: give fewer tools, or simpler parameters")


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with its reasoning by the names that chat templates read."""
    given = [message.get(name) for name in ("reasoning_content", "reasoning", "thinking")]
    text = next((one for one in given if isinstance(one, str) and one), None)
    if text is None:
        return message
    has_both = bool(
        message.get("content") and message.get("tool_calls")
    )  # GPT-OSS's template refuses them with thinking
    return {**message, "reasoning_content": text, **({} if has_both else {"thinking": text})}


def _text(content: Any) -> str | None:
    """The text of a message's content."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content


def _template_variables(service: Service, turn: Turn, template: str | None) -> dict[str, Any]:
    """Variables for reasoning and verbosity. A chat template reads some of them, and ignores others."""
    variables: dict[str, Any] = {} if turn.verbosity is None else {"verbosity": turn.verbosity}
    if turn.effort is not None or turn.thinks is not None:
        source = service.tokenizer.get_chat_template(template, True if turn.tools else None)
        variables |= reasoning_variables(turn.effort, turn.thinks, source)
    return variables


def reasoning_variables(effort: Effort | None, thinks: bool | None, source: str) -> dict[str, Any]:
    """Variables for the effort of reasoning, and whether there is any. ``source``: of the chat template."""
    if thinks is None:
        thinks = effort != "none"
    variables: dict[str, Any] = {"enable_thinking": thinks, "thinking": thinks}
    if effort is not None and not (f"'{effort}'" in source or f'"{effort}"' in source):
        effort = _COMMON_EFFORTS.get(effort)
    return variables if effort is None else {**variables, "reasoning_effort": effort}


async def prompt_token_ids(service: Service, turn: Turn) -> list[int]:
    """The prompt. Raises ApiError and ValueError."""
    return (await prepare(service, turn)).token_ids


async def generate(service: Service, turn: Turn) -> GeneratedMessages:
    """Send the request. Raises ApiError and ValueError for a request that cannot run; then nothing runs."""
    prepared = await prepare(service, turn)
    trial = service.engine.validate_grammar
    prompt = engine_prompt(prepared.token_ids, turn.cache_salt)
    try:
        outputs = await service.submit(
            *([prompt], prepared.expected.params, turn.request_id, turn.priority, [turn.place], turn.limit)
        )
    except FieldError as error:
        if error.field in _OWN_FIELDS and (
            found := await service.run_native(_TOOL_COST, find_schema_error, prepared.tools, trial)
        ):
            raise found from error
        raise
    parsers = [prepared.expected.parser() for _ in range(turn.params.n)]
    return GeneratedMessages(outputs, parsers, service.count_tokens if prepared.expected.can_reason else None)
