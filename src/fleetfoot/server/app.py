"""The application: endpoints of one engine as ASGI."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match, Route

from fleetfoot._version import __version__
from fleetfoot.server.admin import admin_endpoints
from fleetfoot.server.http import (
    JSON,
    OPEN_PATHS,
    ApiError,
    Envelope,
    RequestGate,
    envelope_of,
    error_response,
    handled,
)
from fleetfoot.server.liveness import HEALTH_S
from fleetfoot.server.metrics import render_metrics
from fleetfoot.server.openai.chat import ChatCompletions
from fleetfoot.server.openai.completions import Completions
from fleetfoot.server.openai.protocol import (
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    Completion,
    CompletionChunk,
    CompletionRequest,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
)
from fleetfoot.server.openai.responses import responses_endpoints
from fleetfoot.server.openai.token_generation import Generated, GeneratedChunk, GenerateRequest, TokenGeneration
from fleetfoot.server.openai.tokens import ModelEndpoints
from fleetfoot.server.openapi import READS, RUNS, Endpoint, openapi_document
from fleetfoot.server.service import Service
from fleetfoot.server.store import ResponseStore


@dataclass(frozen=True, slots=True)
class CorsSettings:
    """Which pages of browsers may send requests; names as of vLLM's flags."""

    allowed_origins: tuple[str, ...]
    """``*``: all."""
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False


def make_app(
    service: Service,
    store: ResponseStore,
    keys: tuple[str, ...] = (),
    root_path: str = "",
    admin_key: str | None = None,
    cors: CorsSettings | None = None,
    *,
    logs_requests: bool = False,
    hosts: tuple[str, ...] | None = None,
) -> Starlette:
    """The application.

    Args:
        store: of responses.
        keys: clients send one of them; (): none is needed.
        admin_key: of the routes that change the engine; None: there are none.
        root_path: the path of the application behind a proxy.
        cors: None: pages of other origins may send none.
        hosts: see `RequestGate`.
    """
    endpoints = make_endpoints(service) + responses_endpoints(service, store) + admin_endpoints(service)
    endpoints = [endpoint for endpoint in endpoints if admin_key is not None or not endpoint.is_admin]
    document = JSON(openapi_document(endpoints, has_keys=bool(keys), root_path=root_path)).body
    envelopes: dict[str, Envelope] = {endpoint.path: endpoint.envelope.of for endpoint in endpoints}
    handlers = {(one.method, one.path): handled(one.handler, one.envelope.of) for one in endpoints}
    routes = [Route(path, handler, methods=[method]) for (method, path), handler in handlers.items()]

    async def openapi(http: Request) -> Response:
        return Response(document, media_type="application/json")

    async def on_http_error(http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status, path = error.status_code, http.url.path.removeprefix(root_path)
        detail = f"{http.method} {http.url.path}: {error.detail}" if status in (404, 405) else error.detail
        code = {404: "unknown_url", 405: "method_not_allowed"}.get(status)
        response = error_response(ApiError(status, detail, code), http.scope, envelope_of(path, envelopes))
        response.headers.update(error.headers or {})
        if status == 405:  # of all routes of the path, not of the first one alone
            matching = [route for route in routes if route.matches(http.scope)[0] != Match.NONE]
            exact = [route for route in matching if not route.param_convertors]
            methods = {name for route in exact or matching for name in route.methods or ()}
            response.headers["allow"] = ", ".join(sorted(methods))
        return response

    routes.append(Route("/openapi.json", openapi, methods=["GET"]))
    page = page_routes()
    routes += page
    keys_by_path: dict[str, tuple[str, ...]] = dict.fromkeys((*OPEN_PATHS, *(route.path for route in page)), ())
    if admin_key is not None:
        keys_by_path |= {endpoint.path: (admin_key,) for endpoint in endpoints if endpoint.is_admin}
    options: dict[str, Any] = {"root_path": root_path, "envelopes": envelopes, "keys_by_path": keys_by_path}
    options["handlers"] = {place: handler for place, handler in handlers.items() if "{" not in place[1]}
    middleware = [Middleware(RequestGate, keys=keys, logs=logs_requests, hosts=hosts, **options)]
    if cors is not None:  # it answers a browser's OPTIONS, which has no key
        middleware.insert(0, Middleware(CORSMiddleware, **_cors_options(cors)))
    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: on_http_error})


def _cors_options(cors: CorsSettings) -> dict[str, Any]:
    return {
        "allow_origins": cors.allowed_origins,
        "allow_methods": cors.allowed_methods,
        "allow_headers": cors.allowed_headers,
        "allow_credentials": cors.allow_credentials,
        "expose_headers": ("x-request-id", "request-id", "retry-after"),
    }


FURTHER_APIS = ("anthropic.messages", "pooling.endpoints", "page.routes")
"""Modules with APIs besides OpenAI's, each with a function ``endpoints``. What was deleted is not served."""


def further_endpoints(service: Service) -> Iterator[Endpoint]:
    """The endpoints of FURTHER_APIS."""
    for name in FURTHER_APIS:
        room = f"fleetfoot.server.{name}"
        if find_spec(room.rpartition(".")[0]) is not None:
            yield from import_module(room).endpoints(service)


def page_routes() -> list[Route]:
    """Those of the page; none where its room was deleted."""
    room = "fleetfoot.server.page"
    return [] if find_spec(room) is None else import_module(f"{room}.routes").page_routes()


def make_endpoints(service: Service) -> list[Endpoint]:
    """The table of endpoints."""
    models, state = ModelEndpoints(service), StateEndpoints(service)
    completions, chats = Completions(service), ChatCompletions(service)
    return [
        Endpoint(
            *("POST", "/v1/completions", completions, "Complete prompts."),
            *(CompletionRequest, Completion, CompletionChunk),
            errors=RUNS,
            ends_with_done=True,
        ),
        Endpoint(
            *("POST", "/v1/chat/completions", chats, "Continue a conversation."),
            *(ChatRequest, ChatCompletion, ChatChunk),
            errors=RUNS,
            ends_with_done=True,
        ),
        Endpoint(
            *("POST", "/inference/v1/generate", TokenGeneration(service), "Continue token ids by token ids."),
            *(GenerateRequest, Generated, GeneratedChunk),
            errors=RUNS,
            ends_with_done=True,
        ),
        Endpoint(
            *("POST", "/v1/completions/render", completions.render, "Prompts as requests with token ids."),
            *(CompletionRequest, list[GenerateRequest]),
            errors=READS,
        ),
        Endpoint(
            *("POST", "/v1/chat/completions/render", chats.render, "A conversation as a request with token ids."),
            *(ChatRequest, GenerateRequest),
            errors=READS,
        ),
        Endpoint(
            *("POST", "/tokenize", models.tokenize, "The token ids of a prompt or a conversation."),
            *(TokenizeRequest, TokenizeResponse),
            errors=READS,
        ),
        Endpoint(
            *("POST", "/detokenize", models.detokenize, "The text of token ids."),
            *(DetokenizeRequest, DetokenizeResponse),
            errors=READS,
        ),
        *further_endpoints(service),
        Endpoint("GET", "/v1/models", models.models, "The models that are served.", response=ModelList),
        Endpoint(
            "GET", "/v1/models/{name:path}", models.model, "One of the models.", response=ModelCard, errors=(404,)
        ),
        Endpoint(
            "GET", "/health", state.health, "Whether the steps make progress.", response=ServerState, errors=(503,)
        ),
        *[
            Endpoint(method, "/ping", state.health, "The same as /health.", response=ServerState, errors=(503,))
            for method in ("GET", "POST")
        ],
        Endpoint("GET", "/ready", state.ready, "Whether requests are accepted.", response=ServerState, errors=(503,)),
        Endpoint(
            *("GET", "/metrics", state.metrics, "Statistics for Prometheus."),
            response=str,
            media_type="text/plain",
            errors=(503,),
        ),
        Endpoint("GET", "/version", state.version, "The version of the server.", response=Version),
        Endpoint("GET", "/load", state.load, "The number of unfinished requests.", response=Load),
        Endpoint("GET", "/get_load", state.loads, "The work of each engine.", response=list[EngineLoad], errors=(503,)),
        *[
            Endpoint("GET", path, state.description, "What routers register about the server.", response=Description)
            for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info")
        ],
    ]


class ServerState(msgspec.Struct):
    """The body of ``/health`` and ``/ready``."""

    status: str
    detail: str | msgspec.UnsetType = msgspec.UNSET
    """Which engines of a proxy serve nothing, and why, if the status is ``degraded``."""


class Version(msgspec.Struct):
    version: str


class Load(msgspec.Struct):
    server_load: int


class EngineLoad(msgspec.Struct):
    """The work of an engine, by SGLang's names."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    """Tokens in its KV cache."""


class Description(msgspec.Struct):
    """What SGLang's router reads of a server and its model. No path: a router would look for a tokenizer there."""

    served_model_name: str
    is_generation: bool
    max_context_length: int
    max_total_num_tokens: int
    """Tokens that the KV cache holds."""
    weight_version: str
    version: str


_PATIENCE_S = 0.02
"""Seconds that `/metrics` waits for new values while there are recent ones."""
_RECENT_S, _REFRESH_S, _INTEREST_S = 3.0, 1.0, 60.0


class StateEndpoints:
    """What the server and its engine are, and how they fare."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._metrics: Any = None  # the last ones, and when they came
        self._metrics_ts = self._asked_ts = 0.0
        self._refreshing: asyncio.Task[None] | None = None

    async def health(self, http: Request) -> Response:
        """200 while the engine's steps make progress; behind a proxy, while one of them serves."""
        engine = self._service.engine
        if not engine.is_running:
            raise ApiError(503, "the engine has ended", "engine_dead")
        if engine.interruption:
            raise ApiError(503, engine.interruption, "engine_interrupted", retry_after=5)
        self._check_progress()
        return JSON(ServerState("degraded", engine.degraded) if engine.degraded else ServerState("ok"))

    def _check_progress(self) -> None:
        if problem := self._service.liveness.problem:
            raise ApiError(503, problem, "engine_stuck")

    async def _ask(self, method: str) -> Any:
        """Call a method that returns between two steps. Raises ApiError: the engine does not answer."""
        self._check_progress()
        try:
            return await asyncio.wait_for(self._service.engine.call(method), HEALTH_S)
        except TimeoutError:
            message = f"the engine has not answered within {HEALTH_S:g} s; /health tells whether it makes progress"
            raise ApiError(503, message, "engine_busy", retry_after=5) from None

    async def ready(self, http: Request) -> Response:
        """200 while requests are accepted and computed."""
        engine = self._service.engine
        if self._service.is_draining or not engine.is_running:
            raise ApiError(503, "the server takes no requests", "not_ready")
        if engine.interruption or (await self._ask("state"))["is_paused"]:
            raise ApiError(503, engine.interruption or "the engine is paused or sleeps", "not_ready")
        return JSON(ServerState("ready"))

    async def metrics(self, http: Request) -> Response:
        """Statistics as text."""
        await self._read_metrics()
        content = render_metrics(self._metrics, self._service.model_name)
        return PlainTextResponse(content, media_type="text/plain; version=0.0.4")

    async def _read_metrics(self) -> None:
        """While a long step is computed, keep the values of a moment ago: the engine answers between two steps."""
        engine, self._asked_ts = self._service.engine, time.perf_counter()
        asking = asyncio.ensure_future(self._ask("metrics"))
        if engine.num_unfinished and self._asked_ts - self._metrics_ts < _RECENT_S:
            await asyncio.wait((asking,), timeout=_PATIENCE_S)
        else:
            await asyncio.wait((asking,))
        if asking.done():
            self._keep_metrics(asking.result())
        else:
            asking.cancel()
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.ensure_future(self._refresh_metrics())

    def _keep_metrics(self, values: Any) -> None:
        self._metrics, self._metrics_ts = values, time.perf_counter()

    async def _refresh_metrics(self) -> None:
        """Keep the last values recent, while the engine has work and somebody asks for them now and then."""
        engine = self._service.engine
        with contextlib.suppress(Exception):  # of an engine that has failed, which the next one who asks is told
            while engine.num_unfinished and time.perf_counter() - self._asked_ts < _INTEREST_S:
                self._keep_metrics(await engine.call("metrics"))
                await asyncio.sleep(_REFRESH_S)

    async def version(self, http: Request) -> Response:
        return JSON(Version(__version__))

    async def load(self, http: Request) -> Response:
        return JSON(Load(self._service.engine.num_unfinished))

    async def loads(self, http: Request) -> Response:
        """The work of each engine, for routers that send requests to the least busy one."""
        await self._read_metrics()
        engines = self._metrics if isinstance(self._metrics, list) else [self._metrics]
        found = [each["gauges"] for each in engines if "num_requests_running" in each["gauges"]]
        num_kv_tokens = self._service.engine.facts.num_kv_tokens
        loads = []
        for rank, gauges in enumerate(found):
            running, waiting = int(gauges["num_requests_running"]), int(gauges["num_requests_waiting"])
            num_tokens = round(gauges["kv_cache_usage_perc"] * num_kv_tokens)
            loads.append(EngineLoad(rank, running + waiting, waiting, num_tokens))
        return JSON(loads)

    async def description(self, http: Request) -> Response:
        facts, name = self._service.engine.facts, self._service.model_name
        sizes = facts.max_model_len, facts.num_kv_tokens
        return JSON(Description(name, facts.pooling is None, *sizes, str(facts.weight_version), __version__))
