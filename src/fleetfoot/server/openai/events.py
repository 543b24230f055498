"""Server-sent events of a generation: chunks with choices, the usage, errors, and the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec

from fleetfoot.outputs import CompletionOutput, Logprob, RequestOutput
from fleetfoot.server.http import ENCODER, ApiError, openai_error
from fleetfoot.server.openai.protocol import (
    CompletionTokensDetails,
    GenerationRequest,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from fleetfoot.server.service import RequestOutputs
from fleetfoot.tokenizer.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"


def data_event(content: Any) -> bytes:
    return b"data: " + ENCODER.encode(content) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """An error after the stream has begun."""
    return data_event(openai_error(error))


class ChunkWriter:
    """Encodes the chunks of one request. What is the same in all of them is encoded once.

    Args:
        fields: of every chunk, without ``choices`` and ``usage``.
    """

    def __init__(self, request: GenerationRequest, fields: dict[str, Any]) -> None:
        self._begin = b"data: " + ENCODER.encode(fields)[:-1] + b',"choices":'
        self._usage = b',"usage":null}\n\n' if request.includes_usage else b"}\n\n"
        self._is_continuous = request.has_continuous_usage

    def chunk(self, choice: Any, counter: UsageCounter, fields: dict[str, Any] | None = None) -> bytes:
        """``fields``: further ones of this chunk."""
        choices = ENCODER.encode([choice])
        if fields:
            choices += b"," + ENCODER.encode(fields)[1:-1]
        if self._is_continuous:
            return self._with_usage(choices, counter)
        return self._begin + choices + self._usage

    def last(self, counter: UsageCounter) -> bytes:
        """The usage, without choices."""
        return self._with_usage(b"[]", counter)

    def _with_usage(self, choices: bytes, counter: UsageCounter) -> bytes:
        return self._begin + choices + b',"usage":' + ENCODER.encode(counter.usage()) + b"}\n\n"


class GenerationEvents:
    """What sources of events share: the writer of chunks, the usage, and the end.

    Args:
        fields: as of `ChunkWriter`.
    """

    def __init__(self, outputs: RequestOutputs, request: GenerationRequest, fields: dict[str, Any]) -> None:
        self.outputs = outputs
        self.writer = ChunkWriter(request, {**fields, "created": int(time.time()), "system_fingerprint": None})
        self.counter = UsageCounter()
        self.includes_usage = request.includes_usage

    def end(self) -> bytes:
        return (self.writer.last(self.counter) if self.includes_usage else b"") + DONE

    def fail(self, error: Exception) -> bytes:
        return error_event(ApiError.of(error)) + DONE


class UsageCounter:
    """Counts the tokens of a request with one prompt or several."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._num_completion = 0
        self.num_reasoning: int | None = None
        """Tokens of reasoning; None: the model does not reason."""

    def add(self, index: int, output: RequestOutput, *, num_hidden: int = 0) -> None:
        """The next output of a prompt. ``num_hidden``: tokens that are not part of the response."""
        self._prompts[index] = len(output.prompt_token_ids), output.num_cached_tokens
        self._num_completion += sum([len(completion.token_ids) for completion in output.outputs]) - num_hidden

    def usage(self) -> Usage:
        num_prompt = sum([prompt for prompt, _ in self._prompts.values()])
        usage = Usage.of(num_prompt, self._num_completion, sum([cached for _, cached in self._prompts.values()]))
        if self.num_reasoning is not None:
            num_reasoning = min(self.num_reasoning, self._num_completion)
            usage.completion_tokens_details = CompletionTokensDetails(num_reasoning)
        return usage


def token_text(token_id: int, decoded: str | None, decode: Callable[[int], str], *, as_id: bool) -> str:
    """A token in logprobs. ``as_id``: ``token_id:ID``, as vLLM's ``return_tokens_as_token_ids``."""
    if as_id:
        return f"token_id:{token_id}"
    return decode(token_id) if decoded is None else decoded


def token_logprobs(
    completion: CompletionOutput, tokenizer: Tokenizer, num_top: int, *, as_ids: bool
) -> list[TokenLogprob]:
    """Logprobs of a completion's tokens, each with those of the ``num_top`` most probable ones."""

    token_bytes = tokenizer.token_bytes

    def top_logprob(token_id: int, one: Logprob) -> TopLogprob:
        characters = token_bytes(token_id)
        text = f"token_id:{token_id}" if as_ids else characters.decode("utf-8", errors="replace")
        return TopLogprob(text, max(one.logprob, MIN_LOGPROB), list(characters))

    logprobs = []
    for token_id, entry in zip(completion.token_ids, completion.each_logprobs() or (), strict=True):
        own = top_logprob(token_id, entry[token_id])
        ranked = sorted(entry.items(), key=lambda item: item[1].rank or 0)[:num_top]
        logprobs.append(TokenLogprob(own.token, own.logprob, own.bytes, [top_logprob(*item) for item in ranked]))
    return logprobs


MIN_LOGPROB = -9999.0
"""In place of minus infinity, which JSON does not have."""


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def logprob_entries(output: RequestOutput) -> PromptLogprobs:
    """Prompt logprobs as vLLM's servers return them: token id -> logprob, rank and text. In JSON already, since there
    may be a million."""
    if (entries := output.each_logprobs()) is None:
        return None

    def encoded(entry: dict[int, Any]) -> Any:
        values = {key: PromptLogprob(finite(one.logprob), one.rank, one.decoded_token) for key, one in entry.items()}
        return msgspec.Raw(ENCODER.encode(values))

    return [entry and encoded(entry) for entry in entries]
