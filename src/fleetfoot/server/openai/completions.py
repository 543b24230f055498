"""``POST /v1/completions``."""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from fleetfoot.outputs import CompletionOutput, Logprob, RequestOutput
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.server.http import (
    JSON,
    invalid,
    request_id,
    until_disconnected,
)
from fleetfoot.server.openai.events import (
    MIN_LOGPROB,
    GenerationEvents,
    UsageCounter,
    finite,
    logprob_entries,
    token_text,
)
from fleetfoot.server.openai.prompts import read_prompts
from fleetfoot.server.openai.protocol import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from fleetfoot.server.openai.structured import naming_constraint
from fleetfoot.server.openai.token_generation import GenerateRequest
from fleetfoot.server.service import (
    RequestOutputs,
    Service,
    check_completion,
    engine_prompt,
    entry_names,
    response_size,
)
from fleetfoot.server.streaming import PushedEvents

_DECODER = msgspec.json.Decoder(CompletionRequest)
DEFAULT_MAX_TOKENS = 16
_Entry = dict[int, Logprob] | None
"""The logprobs of a position; None for the first of a prompt."""


class Completions:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, http: Request) -> Response:
        service = self._service
        body = await service.read(http, _DECODER)
        service.check_generates()
        answer, prompts = await service.work(self._read, http, body)
        inputs = prompts
        if body.add_special_tokens is False:
            keep = body.truncate_prompt_tokens
            inputs = [
                await service.encode(one, special=False, keep=keep) if isinstance(one, str) else one for one in prompts
            ]
        with naming_constraint(body):
            outputs = await service.submit(
                [engine_prompt(one, body.cache_salt) for one in inputs],
                *(answer.params, answer.id, body.priority, entry_names("prompt", len(inputs)), answer.limit),
            )
        if body.stream:
            return PushedEvents(_Events(answer, outputs))
        collected = await until_disconnected(http, outputs.collect())
        return await service.respond(response_size(collected), lambda: answer.whole(collected), "choices")

    async def render(self, http: Request) -> Response:
        """The requests of ``/inference/v1/generate`` for the prompts."""
        service = self._service
        body = await service.read(http, _DECODER)
        service.check_generates()
        answer, prompts = await service.work(self._read, http, body)
        options: dict[str, Any] = {"special": body.add_special_tokens is not False, "keep": body.truncate_prompt_tokens}
        rendered, places = [], entry_names("prompt", len(prompts))
        for index, prompt in enumerate(prompts):
            token_ids = await service.encode(prompt, **options) if isinstance(prompt, str) else prompt
            room = await service.check_prompt(token_ids, answer.params, places[index], answer.limit)
            name = answer.id if len(prompts) == 1 else f"{answer.id}-{index}"
            rendered.append(GenerateRequest.of(body, name, token_ids, answer.params, room))
        return await service.work(JSON, rendered)

    def _read(self, http: Request, body: CompletionRequest) -> tuple[_Answer, list[str | list[int]]]:
        """Raises ApiError and ValueError for a field that is invalid or not supported."""
        body.check()
        if body.best_of is not None and body.best_of != (body.n or 1):
            message = f"best_of is {body.best_of} and n is {body.n or 1}; they must be equal: outputs are not ranked"
            raise invalid("best_of", message)
        prompts = read_prompts("prompt", body.prompt)
        return _Answer(body.request_id or request_id(http, "cmpl"), body, self._service, prompts), prompts


class _Answer:
    """The response to one request."""

    def __init__(self, name: str, body: CompletionRequest, service: Service, prompts: list[Any]) -> None:
        self.id = name
        self.body = body
        self.model = service.model_name
        self._prompts = prompts
        self._service = service
        self._is_only_echo = bool(body.echo) and body.max_tokens == 0
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        self.limit = "max_tokens", body.max_tokens
        fields: dict[str, Any] = {"max_tokens": 1 if self._is_only_echo else max_tokens, "logprobs": body.logprobs}
        if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
            fields["prompt_logprobs"] = body.logprobs
        self.params: SamplingParams = body.sampling_params(service.engine.facts.sampling_defaults, **fields)
        self._offsets: dict[int, _TextOffset] = {}  # of choices

    def whole(self, outputs: list[RequestOutput]) -> Completion:
        counter = UsageCounter()
        for index, output in enumerate(outputs):
            counter.add(index, output, num_hidden=self.num_hidden(output))
        choices: Any = self._choices(outputs)  # `Service.respond` reads it
        response = Completion(self.id, choices, self.model, counter.usage())
        response.kv_transfer_params = self._service.kv_transfer_params(outputs[0])
        return response

    def _choices(self, outputs: list[RequestOutput]) -> Iterator[CompletionChoice]:
        for index, output in enumerate(outputs):
            for completion in output.outputs:
                yield self.choice(index, output, completion, is_first=True)

    def num_hidden(self, output: RequestOutput) -> int:
        return sum([len(one.token_ids) for one in output.outputs]) if self._is_only_echo else 0

    def choice(
        self, index: int, output: RequestOutput, completion: CompletionOutput, *, is_first: bool
    ) -> CompletionChoice:
        """``is_first``: of its sequence, so that it begins with what is echoed."""
        check_completion(completion)
        body, is_echo = self.body, bool(self.body.echo) and is_first
        text, token_ids, entries = completion.text, completion.token_ids, completion.each_logprobs()
        if self._is_only_echo:
            text, token_ids, entries = "", [], entries and iter(())
        all_ids = token_ids
        if is_echo:
            text = self._prompt_text(output, self._prompts[index]) + text
            all_ids = output.prompt_token_ids + token_ids
            if entries is not None and isinstance(prompt := self._prompts[index], str):
                # the tokenizer's own tokens at the begin, such as <s>, are not in the text
                whole = _TextOffset()
                for token_id in output.prompt_token_ids:
                    whole.add(self._service.tokenizer.token_bytes(token_id))
                self._offsets[index * self.params.n + completion.index] = _TextOffset(len(prompt) - whole.offset)
            if entries is not None:
                entries = itertools.chain(output.each_logprobs() or (), entries)
        choice = CompletionChoice(
            index * self.params.n + completion.index,
            text,
            finish_reason="length" if self._is_only_echo and completion.finish_reason else completion.finish_reason,
            stop_reason=None if self._is_only_echo else completion.stop_reason,
        )
        if entries is not None:
            choice.logprobs = self._logprobs(choice.index, all_ids, entries)
        if body.prompt_logprobs is not None and is_first:
            choice.prompt_logprobs = logprob_entries(output)
        if body.return_token_ids:
            choice.token_ids = token_ids
            choice.prompt_token_ids = output.prompt_token_ids if is_first else UNSET
        return choice

    def _prompt_text(self, output: RequestOutput, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        text: str = self._service.tokenizer.decode(output.prompt_token_ids)
        return text

    def _logprobs(self, choice: int, token_ids: list[int], entries: Iterable[_Entry]) -> CompletionLogprobs:
        result = CompletionLogprobs([], [], [], [])
        decode, as_id = self._service.tokenizer.decode_token, bool(self.body.return_tokens_as_token_ids)
        offset = self._offsets.setdefault(choice, _TextOffset())
        for token_id, entry in zip(token_ids, entries, strict=False):
            text = token_text(token_id, None if entry is None else entry[token_id].decoded_token, decode, as_id=as_id)
            top: dict[str, float] | None = None
            if entry is not None:
                top = {}
                for other, one in entry.items():  # tokens that are parts of characters have equal texts
                    name = token_text(other, one.decoded_token, decode, as_id=as_id)
                    top[name] = max(finite(one.logprob), top.get(name, MIN_LOGPROB))
            result.tokens.append(text)
            result.token_logprobs.append(None if entry is None else finite(entry[token_id].logprob))
            result.top_logprobs.append(top)
            result.text_offset.append(max(0, offset.offset))
            offset.add(self._service.tokenizer.token_bytes(token_id))
        return result


class _TextOffset:
    """Characters of a text up to a token. Tokens that are parts of a character have the offset of that character."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: bytes) -> None:
        self.offset += len(self._decoder.decode(token))


class _Events(GenerationEvents):
    """The events of a streamed response."""

    def __init__(self, answer: _Answer, outputs: RequestOutputs) -> None:
        super().__init__(outputs, answer.body, {"id": answer.id, "object": "text_completion", "model": answer.model})
        self._answer = answer
        self._has_empty = bool(answer.body.return_token_ids)
        self._started: set[int] = set()

    def feed(self, index: int, output: RequestOutput) -> bytes:
        answer, events = self._answer, []
        self.counter.add(index, output, num_hidden=answer.num_hidden(output))
        for completion in output.outputs:
            number = index * answer.params.n + completion.index
            is_first = number not in self._started
            if is_first and not completion.token_ids and completion.finish_reason is None:
                continue  # a chunk of the prompt, whose logprobs are not whole yet
            self._started.add(number)
            choice = answer.choice(index, output, completion, is_first=is_first)
            if choice.text or choice.logprobs or choice.finish_reason or self._has_empty:
                events.append(self.writer.chunk(choice, self.counter))
        return b"".join(events)
