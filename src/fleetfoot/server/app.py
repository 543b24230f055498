"""The application: endpoints of one engine as ASGI."""

from __future__ import annotations

import asyncio
import time

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from fleetfoot._version import __version__
from fleetfoot.server.http import JSON, ApiError, Handler, RequestGate, error_response, handled
from fleetfoot.server.metrics import render_metrics
from fleetfoot.server.openai.chat import ChatCompletions
from fleetfoot.server.openai.completions import Completions
from fleetfoot.server.openai.embeddings import EmbeddingsEndpoint
from fleetfoot.server.openai.tokens import ModelEndpoints
from fleetfoot.server.service import Service

HEALTH_S = 60.0
"""Seconds without a step or an answer of the engine after which it counts as stuck."""


def make_app(service: Service, keys: tuple[str, ...] = (), root_path: str = "") -> Starlette:
    """The application.

    Args:
        keys: clients send one of them; (): none is needed.
        root_path: the path of the application behind a proxy.
    """
    models, state = ModelEndpoints(service), StateEndpoints(service)

    async def on_http_error(http: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = error.status_code
        detail = f"{http.method} {http.url.path}: {error.detail}" if status in (404, 405) else error.detail
        response = error_response(ApiError(status, detail, {404: "unknown_url", 405: "method_not_allowed"}.get(status)))
        response.headers.update(error.headers or {})
        return response

    posts: dict[str, Handler] = {
        "/v1/completions": Completions(service),
        "/v1/chat/completions": ChatCompletions(service),
        "/v1/embeddings": EmbeddingsEndpoint(service),
        "/tokenize": models.tokenize,
        "/detokenize": models.detokenize,
    }
    gets: dict[str, Handler] = {
        "/v1/models": models.models,
        "/v1/models/{name:path}": models.model,
        "/health": state.health,
        "/ready": state.ready,
        "/metrics": state.metrics,
        "/version": state.version,
        "/load": state.load,
    }
    routes = [Route(path, handled(handler), methods=["POST"]) for path, handler in posts.items()]
    routes += [Route(path, handled(handler), methods=["GET"]) for path, handler in gets.items()]
    gate = Middleware(RequestGate, keys=keys, root_path=root_path)
    return Starlette(routes=routes, middleware=[gate], exception_handlers={HTTPException: on_http_error})


class StateEndpoints:
    """``/health``, ``/ready``, ``/metrics``, ``/version`` and ``/load``."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health(self, http: Request) -> Response:
        """200 while the engine's steps make progress."""
        engine = self._service.engine
        if not engine.is_running:
            raise ApiError(503, "the engine has ended", "engine_dead")
        if time.perf_counter() - engine.last_output_ts > HEALTH_S:  # it may be idle: it answers then
            try:
                await asyncio.wait_for(engine.call("ping"), HEALTH_S)
            except TimeoutError:
                raise ApiError(503, f"the engine has made no progress for {HEALTH_S:g} s", "engine_stuck") from None
        return JSON({"status": "ok"})

    async def ready(self, http: Request) -> Response:
        if self._service.is_draining or not self._service.engine.is_running:
            raise ApiError(503, "the server takes no requests", "not_ready")
        return JSON({"status": "ready"})

    async def metrics(self, http: Request) -> Response:
        values = await self._service.engine.call("metrics")
        return PlainTextResponse(
            render_metrics(values, self._service.model_name), media_type="text/plain; version=0.0.4"
        )

    async def version(self, http: Request) -> Response:
        return JSON({"version": __version__})

    async def load(self, http: Request) -> Response:
        return JSON({"server_load": self._service.engine.num_unfinished})
