"""Bodies of OpenAI's responses, with vLLM's additional fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from fleetfoot.records.structured_outputs import StructuredOutputsParams
from fleetfoot.server.conversation import Effort, Verbosity
from fleetfoot.server.http import invalid
from fleetfoot.server.openai.protocol import UNSUPPORTED, GenerationRequest, TokenLogprob
from fleetfoot.server.openai.structured import FIELDS, schema_constraint
from fleetfoot.utils.validation import shown

MAX_TOP_LOGPROBS = 20
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # parts of items that no response has
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
Status = Literal["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"]


# --- requests ---------------------------------------------------------------------------------------------------------


class PlainFormat(msgspec.Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """What ``text.format`` has."""


class JsonObjectFormat(msgspec.Struct, tag_field="type", tag="json_object", forbid_unknown_fields=True):
    """A ``text.format``: any JSON object."""


class JsonSchemaFormat(msgspec.Struct, tag_field="type", tag="json_schema", forbid_unknown_fields=True):
    """A ``text.format``: JSON of a schema."""

    name: str
    schema: dict[str, Any]
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct, forbid_unknown_fields=True):
    """``text``."""

    format: PlainFormat | JsonObjectFormat | JsonSchemaFormat | None = None
    verbosity: Verbosity | None = None


class ReasoningConfig(msgspec.Struct, forbid_unknown_fields=True):
    """``reasoning``."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """If given, the text of the reasoning is returned as its summary."""
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    """The former name of ``summary``."""


class ResponseTool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One of ``tools``."""

    type: Literal["function"]
    name: str
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None

    def as_chat_tool(self) -> dict[str, Any]:
        """As `Turn` takes it."""
        function: dict[str, Any] = {"name": self.name, "description": self.description, "parameters": self.parameters}
        function["strict"] = self.strict
        return {"type": "function", "function": {name: one for name, one in function.items() if one is not None}}


class FunctionChoice(msgspec.Struct, tag_field="type", tag="function", forbid_unknown_fields=True):
    """A ``tool_choice``: a call of this function."""

    name: str


class AllowedTools(msgspec.Struct, tag_field="type", tag="allowed_tools", forbid_unknown_fields=True):
    """A ``tool_choice``: no functions but these."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class ResponseRequest(GenerationRequest, kw_only=True):
    """``POST /v1/responses``."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED | {
        "n": (1,),
        "max_tokens": (),
        "prompt_logprobs": (),
        "add_special_tokens": (False,),
        "return_token_ids": (False,),
        "response_format": (),
        "conversation": (),
        "prompt": (),
        "moderation": (),
        "context_management": ([],),
    }

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    include: list[Includable] | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    max_tool_calls: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """No effect: it limits built-in tools, and there are none."""

    conversation: Any = None
    prompt: Any = None
    moderation: Any = None
    context_management: Any = None

    def check(self) -> None:
        super().check()
        if self.stream_options is not None and self.stream_options.continuous_usage_stats:
            message = "stream_options.continuous_usage_stats is not supported: the last event has the usage"
            raise invalid("stream_options.continuous_usage_stats", message, "unsupported_parameter")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            message = f"max_output_tokens is {self.max_output_tokens}; it must be at least 1"
            raise invalid("max_output_tokens", message)
        if not 0 <= (self.top_logprobs or 0) <= MAX_TOP_LOGPROBS:
            raise invalid("top_logprobs", f"top_logprobs is {self.top_logprobs}; it can be 0 to {MAX_TOP_LOGPROBS}")
        for name, value in (self.metadata or {}).items():
            if not isinstance(value, str):
                raise invalid(f"metadata.{name}", f"metadata.{name} is {shown(value)}; it must be a string")
        if self.constraint is not None and any(getattr(self, name) is not None for name in FIELDS):
            raise invalid("text.format", f"text.format excludes {', '.join(FIELDS)}; give one of them")
        if self.background and self.store is False:
            raise invalid("background", "background needs store=true: the response is fetched later")
        if self.prompt_cache_retention not in (None, "in_memory", "24h"):
            message = f"prompt_cache_retention is {shown(self.prompt_cache_retention)}; it can be 'in_memory' or '24h'"
            raise invalid("prompt_cache_retention", message)

    @property
    def num_logprobs(self) -> int | None:
        """``top_logprobs`` of each token of the text; None: without logprobs."""
        return self.top_logprobs or (0 if LOGPROBS in (self.include or ()) else None)

    @property
    def constraint(self) -> StructuredOutputsParams | None:
        """What ``text.format`` has."""
        form = self.text.format if self.text is not None else None
        if isinstance(form, JsonSchemaFormat):
            return schema_constraint(form.schema, is_strict=bool(form.strict))
        return StructuredOutputsParams(json_object=True) if isinstance(form, JsonObjectFormat) else None

    @property
    def has_summary(self) -> bool:
        return self.reasoning is not None and bool(self.reasoning.summary or self.reasoning.generate_summary)


class RetrieveQuery(msgspec.Struct, kw_only=True):
    """``GET /v1/responses/{id}``."""

    stream: bool = False
    """Return the events of a response that was created with ``background`` and ``stream``."""
    starting_after: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The number of the event before the first one."""


class InputItemsQuery(msgspec.Struct, kw_only=True):
    """``GET /v1/responses/{id}/input_items``."""

    after: str | None = None
    """The id of the item before the first one."""
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


# --- responses --------------------------------------------------------------------------------------------------------


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """A part of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The reasoning of a reasoning item."""

    text: str = ""


class SummaryText(msgspec.Struct, tag_field="type", tag="summary_text"):
    """The reasoning of a reasoning item, as its summary."""

    text: str = ""


class MessageItem(msgspec.Struct, tag_field="type", tag="message", kw_only=True):
    """A message."""

    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning", kw_only=True):
    """Reasoning before a message or a call."""

    id: str
    status: str = "in_progress"
    summary: list[SummaryText] = []
    content: list[ReasoningText] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call", kw_only=True):
    """A call of a function."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


OutputItem = MessageItem | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseObject(msgspec.Struct, kw_only=True):
    """A response."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status = "in_progress"
    background: bool = False
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    reasoning: ReasoningConfig
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: str | FunctionChoice | AllowedTools
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, Any]
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class ResponseEvent(msgspec.Struct, kw_only=True):
    """An event of a stream. The fields depend on its type."""

    type: str
    sequence_number: int = 0
    response: ResponseObject | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | SummaryText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


class ResponseDeleted(msgspec.Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItems(msgspec.Struct):
    """A page of the items that a response was made of."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class InputTokens(msgspec.Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"
