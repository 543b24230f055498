"""Bodies, events and errors of Anthropic's messages.

Unknown fields are refused. Fields in `UNSUPPORTED` are known and refused unless their value is neutral.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from fleetfoot.server.http import ApiError

_KEEP_THINKING = [{"edits": [{"type": "clear_thinking_20251015", "keep": keep}]} for keep in ("all", {"type": "all"})]
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": ({}, {"edits": []}, *_KEEP_THINKING),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
}
"""Field -> neutral values besides null."""
NO_THREADS = "thread_unsupported_request"
"""The code of an error after which clients send a whole conversation instead of the id of a thread."""
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class _Param(msgspec.Struct, forbid_unknown_fields=True):
    pass


# --- requests ---------------------------------------------------------------------------------------------------------


class CacheControl(msgspec.Struct):
    """No effect, other fields included: the prefixes of all prompts are cached."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextParam(_Param, tag_field="type", tag="text"):
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None
    """No effect."""


class ThinkingParam(_Param, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class RedactedThinkingParam(_Param, tag_field="type", tag="redacted_thinking"):
    """Thinking that another server has encrypted. It is left out of the prompt."""

    data: str


class ToolUseParam(_Param, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Any = None
    """No effect."""
    toolset_name: None = None


class ToolResultParam(_Param, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: None = None


BlockParam = TextParam | ThinkingParam | RedactedThinkingParam | ToolUseParam | ToolResultParam


class InputMessage(_Param):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]
    """A text, or blocks: `BlockParam`."""


class ToolParam(_Param):
    """A tool of the client."""

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    """No effect: inputs are always streamed as they are generated."""
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class ToolChoice(_Param):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(_Param):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(_Param, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(_Param):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    """The variable ``reasoning_effort`` of the chat template."""
    format: OutputFormat | None = None
    task_budget: Any = None


class Metadata(_Param):
    user_id: str | None = None


class CountTokensRequest(_Param):
    """``POST /v1/messages/count_tokens``: the fields of a message. Those of its generation have no effect."""

    model: str
    messages: list[InputMessage]
    system: str | list[dict[str, Any]] | None = None
    """A text, or blocks: `TextParam`."""
    tools: list[dict[str, Any]] | None = None
    """Objects like `ToolParam`."""
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older name of ``output_config.format``."""

    max_tokens: int | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None

    # no effect on the result
    cache_control: CacheControl | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None

    # refused unless neutral
    container: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    mcp_servers: Any = None
    speed: Any = None
    thread: Any = None


class MessagesRequest(CountTokensRequest, kw_only=True):
    """``POST /v1/messages``."""

    max_tokens: int


# --- responses --------------------------------------------------------------------------------------------------------


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class Caller(msgspec.Struct, tag_field="type", tag="direct", frozen=True):
    """The caller of a tool: the model itself."""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    caller: Caller = Caller()


Block = TextBlock | ThinkingBlock | ToolUseBlock
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class OutputTokensDetails(msgspec.Struct):
    thinking_tokens: int


class MessageDeltaUsage(msgspec.Struct):
    """Tokens of the prompt are counted once: as input, or as read from the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens_details: OutputTokensDetails | None = None
    """Details for a model that reasons."""
    server_tool_use: None = None


class MessageUsage(MessageDeltaUsage):
    """As of a whole message."""

    cache_creation: None = None
    inference_geo: None = None
    service_tier: Literal["standard"] = "standard"
    speed: None = None


class AssistantMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    model: str
    content: list[Block]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"
    container: None = None
    diagnostics: None = None
    stop_details: None = None


class TokenCount(msgspec.Struct):
    input_tokens: int


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: AssistantMessage


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    pass


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJSONDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJSONDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class Stop(msgspec.Struct):
    """Why the message has ended."""

    stop_reason: StopReason
    stop_sequence: str | None = None
    container: None = None
    stop_details: None = None


class MessageEnd(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: Stop
    usage: MessageDeltaUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


Event = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageEnd | MessageStop


# --- errors -----------------------------------------------------------------------------------------------------------


class ErrorCode(msgspec.Struct):
    error_code: str
    unsupported: list[str] = []


class AnthropicErrorDetails(msgspec.Struct):
    type: str
    message: str
    details: ErrorCode | UnsetType = UNSET


class AnthropicError(msgspec.Struct, tag_field="type", tag="error"):
    """Anthropic's envelope."""

    error: AnthropicErrorDetails
    request_id: str | None = None

    @classmethod
    def of(cls, error: ApiError, request_id: str | None = None) -> AnthropicError:
        kind = _ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        message = error.message
        if error.code == "context_length_exceeded":
            message = f"prompt is too long: {message}"  # clients compact the conversation when they read this
        elif error.param is not None and error.param not in message:
            message = f"{error.param}: {message}"
        details = ErrorCode(NO_THREADS) if error.code == NO_THREADS else UNSET
        return cls(AnthropicErrorDetails(kind, message, details), request_id)
