"""Bodies of OpenAI's completions, chat completions and models, with vLLM's additional fields.

Unknown fields are refused unless they change nothing (`server/unknown_fields.py`). Fields in `UNSUPPORTED` are known
and refused unless their value is neutral.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from fleetfoot.records.sampling_params import RequestOutputKind, SamplingParams
from fleetfoot.server.conversation import Effort, Verbosity
from fleetfoot.server.http import invalid
from fleetfoot.server.openai.structured import structured_outputs
from fleetfoot.server.service import check_stop_strings
from fleetfoot.utils.validation import is_one_of

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "mm_processor_kwargs": ({},),
}
"""Field -> neutral values besides null."""
_REPLACEMENTS = {"functions": "tools", "function_call": "tool_choice"}


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """``stream_options``."""

    include_usage: bool | None = None
    """Send a last event with the usage of the whole request."""
    continuous_usage_stats: bool | None = None
    """vLLM's: send the usage so far with each event."""
    include_obfuscation: bool | None = None
    """No effect."""


class GenerationRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that completions, chat completions and responses share."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED
    """Field -> neutral values besides null."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None

    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None

    # no effect on the result
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    # structured output: one of these
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None  # no effect: there is one

    # refused unless neutral
    use_beam_search: Any = None
    length_penalty: Any = None

    def check(self) -> None:
        """Raises ApiError for a field that is not supported, or beyond its limits."""
        for name, neutral in self.unsupported.items():
            value = getattr(self, name, None)
            if not is_one_of(value, neutral):
                hint = f"; use {_REPLACEMENTS[name]}" if name in _REPLACEMENTS else ""
                raise invalid(name, f"{name} is not supported{hint}", "unsupported_parameter")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options needs stream=true")
        check_stop_strings("stop", [self.stop] if isinstance(self.stop, str) else self.stop or ())

    def sampling_params(self, defaults: dict[str, Any], **fields: Any) -> SamplingParams:
        """The request's parameters; ``fields`` override those of the same name. Raises ValueError."""
        given = {name: value for name in SAMPLING if (value := getattr(self, name)) is not None}
        extra = dict(self.vllm_xargs or {})
        if self.kv_transfer_params is not None:
            extra["kv_transfer_params"] = self.kv_transfer_params
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        given["structured_outputs"] = structured_outputs(self)
        return SamplingParams(**{**defaults, **given, **fields}, extra_args=extra or None, output_kind=kind)

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        return self.includes_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


SAMPLING = (
    *("n", "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop", "logit_bias", "top_k"),
    *("min_p", "repetition_penalty", "ignore_eos", "min_tokens", "stop_token_ids", "allowed_token_ids", "bad_words"),
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "truncate_prompt_tokens"),
    "prompt_logprobs",
)
"""Fields that are parameters of the same name."""


class CompletionRequest(GenerationRequest, kw_only=True):
    """``POST /v1/completions``."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: Any = None


class ChatRequest(GenerationRequest, kw_only=True):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None

    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    verbosity: Verbosity | None = None

    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    mm_processor_kwargs: Any = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /tokenize``: of a prompt or of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``POST /detokenize``."""

    tokens: list[int]
    model: str | None = None


# --- responses --------------------------------------------------------------------------------------------------------


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Details for a model that reasons."""

    @classmethod
    def of(cls, num_prompt: int, num_completion: int, num_cached: int = 0) -> Usage:
        return cls(num_prompt, num_completion, num_prompt + num_completion, PromptTokensDetails(num_cached))


class PromptLogprob(msgspec.Struct):
    """vLLM's ``prompt_logprobs``."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None] | None
"""Token id -> logprob, for each token; None for the first one."""


class CompletionLogprobs(msgspec.Struct):
    """Logprobs of completions."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    """vLLM's: the stop string or token."""
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct):
    id: str
    choices: list[CompletionChoice]
    model: str
    usage: Usage | None = None
    object: Literal["text_completion"] = "text_completion"
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    system_fingerprint: str | None = None
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class CompletionChunk(msgspec.Struct):
    """An event of a stream."""

    id: str
    choices: list[CompletionChoice]
    model: str
    object: Literal["text_completion"]
    created: int
    system_fingerprint: str | None
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] = []


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob] | None
    refusal: list[TokenLogprob] | None = None


class FunctionCall(msgspec.Struct):
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET


class ChatToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET
    """In streams."""


class ChatMessage(msgspec.Struct):
    role: str
    content: str | None
    refusal: str | None = None
    tool_calls: list[ChatToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same, by its other name."""


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    id: str
    choices: list[ChatChoice]
    model: str
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    created: int = msgspec.field(default_factory=lambda: int(time.time()))
    system_fingerprint: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    content: str | UnsetType = UNSET
    role: str | UnsetType = UNSET
    tool_calls: list[ChatToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """An event of a stream."""

    id: str
    choices: list[ChatChunkChoice]
    model: str
    object: Literal["chat.completion.chunk"]
    created: int
    system_fingerprint: str | None
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """These two: of the first event."""


class ModelCard(msgspec.Struct):
    id: str
    created: int
    root: str
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "fleetfoot"
    parent: str | None = None
    permission: list[Any] = []


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct):
    prompt: str
