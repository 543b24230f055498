"""``GET /v1/models``, ``POST /tokenize`` and ``/detokenize``."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetfoot.server.http import JSON, encoded, invalid
from fleetfoot.server.openai.chat import template_options
from fleetfoot.server.openai.prompts import read_messages
from fleetfoot.server.openai.protocol import (
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from fleetfoot.server.service import Service

_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_OF_CONVERSATIONS = (
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "tools",
)
"""Fields that have no effect on a prompt."""
_PART = 1 << 15
"""Tokens that are checked at a time: such a call keeps the interpreter."""
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


class ModelEndpoints:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def models(self, http: Request) -> Response:
        return JSON(ModelList([self._card(name) for name in self._service.model_names]))

    async def model(self, http: Request) -> Response:
        name = http.path_params["name"]
        self._service.check_model(name)
        return JSON(self._card(name))

    def _card(self, name: str) -> ModelCard:
        facts = self._service.engine.facts
        return ModelCard(name, self._service.created, facts.model, facts.max_model_len)

    async def tokenize(self, http: Request) -> Response:
        service = self._service
        body = await service.read(http, _TOKENIZE)
        tokenizer = service.tokenizer
        if body.prompt is not None and body.messages is None:
            for name in _OF_CONVERSATIONS:
                if getattr(body, name) is not None:
                    raise invalid(name, f"{name} needs messages; the body has a prompt")
            token_ids = await service.encode(body.prompt, special=body.add_special_tokens is not False)
        elif body.messages is not None and body.prompt is None:
            options = template_options(body)
            options["tools"] = body.tools
            if body.add_special_tokens:
                options["tokenizer_kwargs"] = {"add_special_tokens": True}
            token_ids = await service.render_chat(await service.work(read_messages, body.messages), **options)
        else:
            raise invalid("prompt", "give either prompt or messages")

        def respond() -> Response:
            texts = tokenizer.convert_ids_to_tokens(token_ids) if body.return_token_strs else None
            ids, most = encoded(token_ids), service.engine.facts.max_model_len
            return JSON(TokenizeResponse(len(token_ids), most, ids, None if texts is None else encoded(texts)))

        return await service.work(respond)

    async def detokenize(self, http: Request) -> Response:
        service = self._service
        body = await service.read(http, _DETOKENIZE)
        return await service.work(self._detokenize, body)

    def _detokenize(self, body: DetokenizeRequest) -> Response:
        service = self._service
        size, decode = service.engine.facts.vocab_size, service.tokenizer.decode
        for begin in range(0, len(body.tokens), _PART):
            part = body.tokens[begin : begin + _PART]
            if not 0 <= min(part) <= max(part) < size:
                index = begin + next(index for index, token in enumerate(part) if not 0 <= token < size)
                message = f"tokens[{index}] is {body.tokens[index]}; the vocabulary has {size} tokens, 0 to {size - 1}"
                raise invalid(f"tokens[{index}]", message)
        return JSON(DetokenizeResponse(encoded(decode(body.tokens))))
