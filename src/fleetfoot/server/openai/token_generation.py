"""``POST /inference/v1/generate``: token ids in, token ids out; and requests for it, which ``render`` endpoints return.

A router renders a prompt on any server, looks for the engine with most of it in its prefix cache, and sends the token
ids there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from fleetfoot.outputs import CompletionOutput, RequestOutput
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.server.http import invalid, request_id, until_disconnected
from fleetfoot.server.openai.events import GenerationEvents, UsageCounter, logprob_entries, token_logprobs
from fleetfoot.server.openai.protocol import (
    SAMPLING,
    ChatLogprobs,
    CompletionRequest,
    GenerationRequest,
    PromptLogprobs,
    StreamOptions,
    Usage,
)
from fleetfoot.server.openai.structured import naming_constraint
from fleetfoot.server.service import RequestOutputs, Service, check_completion, engine_prompt, response_size
from fleetfoot.server.streaming import PushedEvents

_OWN = ("max_tokens", "logprobs", "structured_outputs")


class TokenParams(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """``sampling_params``, by the names of `SamplingParams`."""

    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: dict[str, Any] | None = None

    # vLLM's, without effect
    detokenize: bool | None = None
    output_kind: int | None = None

    @classmethod
    def of(cls, params: SamplingParams, room: int) -> TokenParams:
        """Parameters with all values, so that no server puts defaults of its own in their place."""
        given = {name: value for name in (*SAMPLING, "logprobs") if (value := getattr(params, name)) != []}
        if params.max_tokens is not None:
            given["max_tokens"] = min(params.max_tokens, room)  # a default may be more
        if params.logit_bias:
            given["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
        if (constraint := params.structured_outputs) is not None:
            fields = {one.name: getattr(constraint, one.name) for one in dataclasses.fields(constraint)}
            given["structured_outputs"] = {name: value for name, value in fields.items() if value}
        return cls(**given)


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body."""

    token_ids: list[int]
    """The prompt."""
    sampling_params: TokenParams
    request_id: str | None = None
    model: str | None = None
    features: None = None
    """No model here has inputs besides tokens."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @classmethod
    def of(
        cls, body: GenerationRequest, name: str, token_ids: list[int], params: SamplingParams, room: int
    ) -> GenerateRequest:
        """What a body asks for, with ``room`` for so many tokens of output.

        Raises ApiError: it has parameters that only its own server's processors read.
        """
        if body.vllm_xargs:
            raise invalid("vllm_xargs", "vllm_xargs has no place in a rendered request; leave it out")
        return cls(
            token_ids=token_ids,
            sampling_params=TokenParams.of(params, room),
            request_id=name,
            model=body.model,
            stream=body.stream,
            stream_options=body.stream_options,
            cache_salt=body.cache_salt,
            priority=body.priority,
            kv_transfer_params=body.kv_transfer_params,
        )


class GeneratedChoice(msgspec.Struct):
    """A sequence, or in a stream its next tokens."""

    index: int
    token_ids: list[int]
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Generated(msgspec.Struct):
    """The response."""

    request_id: str
    choices: list[GeneratedChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = None
    kv_transfer_params: dict[str, Any] | UnsetType = UNSET


class GeneratedChunk(msgspec.Struct):
    """An event of a stream."""

    request_id: str
    choices: list[GeneratedChoice]
    created: int
    system_fingerprint: str | None
    usage: Usage | UnsetType | None = UNSET


_DECODER = msgspec.json.Decoder(GenerateRequest)


class TokenGeneration:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, http: Request) -> Response:
        service = self._service
        given = await service.read(http, _DECODER)
        service.check_generates()
        if not given.token_ids:
            raise invalid("token_ids", "token_ids is an empty list; it must hold at least one id")
        body, answer = await service.work(self._read, http, given)
        with naming_constraint(body):
            outputs = await service.submit(
                [engine_prompt(given.token_ids, given.cache_salt)],
                *(answer.params, answer.name, given.priority, ["token_ids"], ("max_tokens", body.max_tokens)),
            )
        if body.stream:
            return PushedEvents(_Events(answer, body, outputs))
        collected = await until_disconnected(http, outputs.collect())
        return await service.respond(response_size(collected), lambda: answer.whole(collected[0]), "choices")

    def _read(self, http: Request, given: GenerateRequest) -> tuple[CompletionRequest, _Answer]:
        fields = {name: getattr(given.sampling_params, name) for name in (*SAMPLING, *_OWN)}
        body = CompletionRequest(
            prompt=[],
            stream=given.stream,
            stream_options=given.stream_options,
            kv_transfer_params=given.kv_transfer_params,
            **fields,
        )
        body.check()
        params = body.sampling_params(
            self._service.engine.facts.sampling_defaults,
            max_tokens=body.max_tokens,
            logprobs=body.logprobs,
            detokenize=bool(body.stop),  # nobody reads the text
        )
        return body, _Answer(self._service, given.request_id or request_id(http, "generate"), params)


class _Answer:
    """The response to one request."""

    def __init__(self, service: Service, name: str, params: SamplingParams) -> None:
        self.name = name
        self.params = params
        self._service = service

    def whole(self, output: RequestOutput) -> Generated:
        counter = UsageCounter()
        counter.add(0, output)
        choices: Any = map(self.choice, output.outputs)  # `Service.respond` reads it
        answer = Generated(self.name, choices, counter.usage())
        answer.prompt_logprobs = logprob_entries(output)
        answer.kv_transfer_params = self._service.kv_transfer_params(output)
        return answer

    def choice(self, completion: CompletionOutput) -> GeneratedChoice:
        check_completion(completion)
        logprobs = None
        if self.params.logprobs is not None:
            num_top = self.params.logprobs or 0
            logprobs = ChatLogprobs(token_logprobs(completion, self._service.tokenizer, num_top, as_ids=True))
        reasons = completion.finish_reason, completion.stop_reason
        return GeneratedChoice(completion.index, completion.token_ids, logprobs, *reasons)


class _Events(GenerationEvents):
    """The events of a streamed response."""

    def __init__(self, answer: _Answer, body: CompletionRequest, outputs: RequestOutputs) -> None:
        super().__init__(outputs, body, {"request_id": answer.name})
        self._answer = answer

    def feed(self, index: int, output: RequestOutput) -> bytes:
        self.counter.add(index, output)
        return b"".join([self.writer.chunk(self._answer.choice(one), self.counter) for one in output.outputs])
