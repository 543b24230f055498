"""``POST /v1/embeddings``, ``/classify``, ``/pooling``, ``/score`` and ``/rerank``."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetfoot.engine.input_processor import LONG_TEXT
from fleetfoot.engine.pooling import pair_conversations, pair_prompts, pair_scores, rendered_prompts
from fleetfoot.records.pooling_params import PoolingParams
from fleetfoot.server.http import JSON, ApiError, invalid, request_id, until_disconnected
from fleetfoot.server.openai.chat import template_options
from fleetfoot.server.openai.prompts import read_messages, read_prompts
from fleetfoot.server.openai.protocol import Usage
from fleetfoot.server.openapi import RUNS, Endpoint
from fleetfoot.server.pooling.protocol import (
    Classification,
    ClassificationRequest,
    Classifications,
    Embedding,
    EmbeddingRequest,
    Embeddings,
    Pooled,
    PooledList,
    PoolingFields,
    PoolingRequest,
    PromptFields,
    RerankDocument,
    RerankedDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreRequest,
    Scores,
)
from fleetfoot.server.service import Service, engine_prompt, entry_names

_EMBEDDING = msgspec.json.Decoder(EmbeddingRequest)
_CLASSIFICATION = msgspec.json.Decoder(ClassificationRequest)
_POOLING = msgspec.json.Decoder(PoolingRequest)
_SCORE = msgspec.json.Decoder(ScoreRequest)
_RERANK = msgspec.json.Decoder(RerankRequest)
_ENTRY_BYTES, _NUMBER_BYTES = 256, 20
"""Bytes of a response, for each prompt and each number of its vector."""
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2"))
_PARAMS = (
    *("truncate_prompt_tokens", "use_activation", "normalize", "softmax", "activation", "prompt_name", "dimensions"),
    "step_tag_id",
)
"""Fields that are parameters of the same name."""


def endpoints(service: Service) -> list[Endpoint]:
    """The table of these endpoints."""
    pooling = PoolingEndpoints(service)
    rows: list[tuple[tuple[str, ...], Any, str, Any, Any]] = [
        (("/v1/embeddings",), pooling.embed, "Make embeddings.", EmbeddingRequest, Embeddings),
        (("/classify",), pooling.classify, "Classify prompts.", ClassificationRequest, Classifications),
        (("/pooling",), pooling.pool, "Pool prompts, or each of their tokens.", PoolingRequest, PooledList),
        (("/v1/score", "/score"), pooling.score, "Score pairs of texts.", ScoreRequest, Scores),
        (
            *(("/v1/rerank", "/v2/rerank", "/rerank"), pooling.rerank, "Sort documents by their score for a query."),
            *(RerankRequest, RerankResponse),
        ),
    ]
    return [
        Endpoint("POST", path, handler, summary, request, response, errors=RUNS)
        for paths, handler, summary, request, response in rows
        for path in paths
    ]


class PoolingEndpoints:
    """The endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._labels = _labels(service)

    async def embed(self, http: Request) -> Response:
        body = await self._service.read(http, _EMBEDDING)
        name, outputs = await self._pool(http, body, "embed", "embd")
        return await self._respond(outputs, body.encoding_format, Embedding, Embeddings, name)

    async def classify(self, http: Request) -> Response:
        body = await self._service.read(http, _CLASSIFICATION)
        name, outputs = await self._pool(http, body, "classify", "classify")
        data = []
        for index, output in enumerate(outputs):
            probs = output.outputs.data.tolist()
            best = probs.index(max(probs))
            data.append(Classification(index, self._labels.get(str(best), f"LABEL_{best}"), probs, len(probs)))
        return JSON(Classifications(id=name, model=self._service.model_name, data=data, usage=_usage(outputs)))

    async def pool(self, http: Request) -> Response:
        body = await self._service.read(http, _POOLING)
        name, outputs = await self._pool(http, body, body.task, "pool")
        return await self._respond(outputs, body.encoding_format, Pooled, PooledList, name)

    async def score(self, http: Request) -> Response:
        body = await self._service.read(http, _SCORE)
        given = [pair for pair in _PAIRS if any(getattr(body, name) is not None for name in pair)]
        first, second = given[0] if given else _PAIRS[0]
        if len(given) != 1 or getattr(body, first) is None or getattr(body, second) is None:
            param = next((one for pair in given for one in pair if getattr(body, one) is None), second)
            raise invalid(param, f"give {' or '.join(' and '.join(pair) for pair in _PAIRS)}")
        left, right = ([value] if isinstance(value := getattr(body, one), str) else value for one in (first, second))
        if len(left) not in (1, len(right)) or not right:
            message = f"{first} has {len(left)} texts and {second} {len(right)}; expected one, or as many"
            raise invalid(first, message)
        name, outputs = await self._scores(http, body, left, right, (first, second))
        data = [Score(index, output.outputs.score) for index, output in enumerate(outputs)]
        return JSON(Scores(id=name, model=self._service.model_name, data=data, usage=_usage(outputs)))

    async def rerank(self, http: Request) -> Response:
        body = await self._service.read(http, _RERANK)
        texts = [document.text if isinstance(document, RerankDocument) else document for document in body.documents]
        name, outputs = await self._scores(
            http, body, [body.query], await self._cut(texts, body.max_tokens_per_doc), ("query", "documents")
        )
        results = [RerankResult(index, output.outputs.score) for index, output in enumerate(outputs)]
        results = sorted(results, key=lambda result: -result.relevance_score)[: body.top_n or None]
        if body.return_documents is not False:
            for result in results:
                result.document = RerankedDocument(texts[result.index])
        return JSON(RerankResponse(name, self._service.model_name, _usage(outputs), results))

    async def _respond(
        self, outputs: list[Any], encoding: str | None, entry: type[Any], response: type[Any], name: str
    ) -> Response:
        def make() -> Any:
            data = [entry(index, encoded(output.outputs.data, encoding)) for index, output in enumerate(outputs)]
            return response(id=name, model=self._service.model_name, data=data, usage=_usage(outputs))

        size = sum(_ENTRY_BYTES + _NUMBER_BYTES * output.outputs.data.numel() for output in outputs)
        return await self._service.respond(size, make, "data")

    # --- what they share ----------------------------------------------------------------------------------------------

    def _params(self, body: PoolingFields, task: str | None) -> PoolingParams:
        """Raises ApiError and ValueError for a task or a value that does not fit."""
        pooling = self._service.engine.facts.pooling
        if pooling is None:
            raise ApiError(400, "this model generates; serve it with --runner pooling for embeddings if it can")
        task = task or pooling.tasks[0]
        if task not in pooling.tasks:
            hint = "; scores of pairs need embeddings, or one label" if task == "score" else ""
            message = f"this model does not have the task {task!r}; it has {', '.join(pooling.tasks)}{hint}"
            raise ApiError(400, message, None, "task" if isinstance(body, PoolingRequest) else None)
        return PoolingParams(task=task, **{field: getattr(body, field, None) for field in _PARAMS})

    async def _pool(self, http: Request, body: PromptFields, task: str | None, prefix: str) -> tuple[str, list[Any]]:
        """The request's id, and the output of each prompt."""
        service, params = self._service, self._params(body, task)
        if (body.input is None) == (body.messages is None):
            raise invalid("input", "give either input or messages")
        if body.add_special_tokens is False:
            message = "add_special_tokens must be true; send token ids for prompts without special tokens"
            raise invalid("add_special_tokens", message)
        prompts: list[Any] = [] if body.input is None else await service.work(read_prompts, "input", body.input)
        if body.messages is not None:
            if body.add_generation_prompt is None:
                body.add_generation_prompt = False
            options = template_options(body)
            messages = await service.work(read_messages, body.messages)
            prompts = [await service.render_chat(messages, **options)]
        return await self._run(http, body, prompts, params, prefix, entry_names("input", len(prompts)))

    async def _scores(
        self, http: Request, body: ScoreRequest | RerankRequest, first: list[str], second: list[str], names: Any
    ) -> tuple[str, list[Any]]:
        """The request's id, and the score of each pair."""
        processor = self._service.engine.input_processor
        params = self._params(body, "score").clone(task=None)
        size = sum(map(len, first)) * len(second) + sum(map(len, second))
        if (template := body.chat_template) is not None and "{" in template:
            conversations = await self._service.work(pair_conversations, processor, first, second, params)
            texts = await self._service.render_apart(template, conversations)
            make: Any = partial(rendered_prompts, processor, texts, params)
        else:
            make = partial(pair_prompts, processor, first, second, params, template)
        prompts, params = await self._service.run_native(size, make) if size >= LONG_TEXT else make()
        places = entry_names(names[1], len(second))
        if len(prompts) > len(second):
            places = entry_names(names[0], len(first)) + places
        name, outputs = await self._run(http, body, prompts, params, "score", places)
        return name, pair_scores(processor, len(first), outputs)

    async def _run(
        self,
        http: Request,
        body: PoolingFields,
        prompts: Sequence[Any],
        params: PoolingParams,
        prefix: str,
        places: Sequence[str],
    ) -> tuple[str, list[Any]]:
        """``places``: of the prompts in the body, for errors."""
        name = body.request_id or request_id(http, prefix)
        salt = {"cache_salt": body.cache_salt}
        inputs: Any = [
            {**(prompt if isinstance(prompt, dict) else engine_prompt(prompt)), **salt} for prompt in prompts
        ]
        running = await self._service.submit(inputs, params, name, body.priority, places)
        outputs: Any = await until_disconnected(http, running.collect())
        for place, output in zip(places, outputs, strict=True):
            if output.finish_reason == "error":
                raise ApiError(500, f"{place} has failed: {output.stop_reason}")
        return name, outputs

    async def _cut(self, texts: list[str], most: int | None) -> list[str]:
        """Texts of at most ``most`` tokens each."""
        if not most:
            return texts
        tokenizer = self._service.tokenizer

        def cut(text: str) -> str:
            ids = tokenizer.encode(text, add_special_tokens=False)
            return text if len(ids) <= most else tokenizer.decode(ids[:most])

        return await self._service.run_native(sum(map(len, texts)), lambda: [cut(text) for text in texts])


def encoded(values: Any, encoding: str | None) -> Any:
    """A float32 tensor as numbers, or as the base64 of its little-endian bytes."""
    if encoding != "base64":
        return values.tolist()
    return base64.b64encode(values.numpy().astype("<f4").tobytes()).decode()


def _usage(outputs: Sequence[Any]) -> Usage:
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return Usage.of(num_tokens, 0, sum(output.num_cached_tokens for output in outputs))


def _labels(service: Service) -> dict[str, str]:
    """The names of classes in the checkpoint: number -> name."""
    facts = service.engine.facts
    if facts.pooling is None or facts.pooling.task != "classify":
        return {}
    labels: dict[str, str] = json.loads((Path(facts.model_path) / "config.json").read_text("utf-8")).get("id2label", {})
    return labels
