"""``POST /v1/embeddings``."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetfoot.records.pooling_params import PoolingParams
from fleetfoot.server.http import JSON, ApiError, request_id, until_disconnected
from fleetfoot.server.openai.prompts import read_prompts
from fleetfoot.server.openai.protocol import Embedding, EmbeddingRequest, Embeddings, Usage
from fleetfoot.server.service import Service, engine_prompt

_DECODER = msgspec.json.Decoder(EmbeddingRequest)


class EmbeddingsEndpoint:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, http: Request) -> Response:
        service = self._service
        body = await service.read(http, _DECODER)
        pooling = service.engine.facts.pooling
        if pooling is None or pooling.task != "embed":
            raise ApiError(400, "this model makes no embeddings; serve it with --runner pooling if it can")
        prompts = [engine_prompt(prompt, None) for prompt in read_prompts("input", body.input)]
        params = PoolingParams(
            task="embed",
            dimensions=body.dimensions,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            use_activation=body.normalize,
        )
        name = body.request_id or request_id(http, "embd")
        outputs: list[Any] = await until_disconnected(
            http, (await service.submit(prompts, params, name, body.priority)).collect()
        )
        data = []
        for index, output in enumerate(outputs):
            if output.finish_reason == "error":
                raise ApiError(500, f"input[{index}] has failed: {output.stop_reason}")
            data.append(Embedding(index, encoded(output.outputs.data, body.encoding_format)))
        num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
        cached = sum(output.num_cached_tokens for output in outputs)
        return JSON(Embeddings(data, service.model_name, Usage.of(num_tokens, 0, cached), id=name))


def encoded(vector: Any, encoding: str | None) -> list[float] | str:
    """A float32 tensor ``[dimensions]`` as numbers, or as the base64 of its little-endian bytes."""
    if encoding != "base64":
        numbers: list[float] = vector.tolist()
        return numbers
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()
