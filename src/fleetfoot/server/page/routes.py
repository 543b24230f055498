"""The files of the page, and the events of its view of the engine."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.server.http import ENCODER, ApiError, ErrorResponse, EventStream
from fleetfoot.server.openapi import Endpoint
from fleetfoot.server.service import Service

INTERVAL_S = 0.25
"""Seconds between two events."""
MOST_VIEWERS = 8
"""Viewers of an API server; others get 429."""
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """A route for each file of ``assets``; ``index.html`` is at ``/``, the others are below ``/page/``."""
    routes = []
    for file in sorted((files(__package__ or "") / "assets").iterdir(), key=lambda file: file.name):
        suffix = file.name[file.name.rindex(".") :]
        if suffix in _TYPES:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            routes.append(Route(path, _File(file.read_bytes(), _TYPES[suffix]).send, methods=["GET"]))
    return routes


class _File:
    def __init__(self, content: bytes, media_type: str) -> None:
        self._content, self._media_type = content, media_type
        self._headers = {**_HEADERS, "ETag": f'"{hashlib.sha256(content).hexdigest()[:24]}"'}

    async def send(self, http: Request) -> Response:
        if http.headers.get("if-none-match") == self._headers["ETag"]:
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, media_type=self._media_type, headers=self._headers)


def endpoints(service: Service) -> list[Endpoint]:
    """The events of the view of the engine, for the admin key alone."""
    view = LiveView(service)
    return [
        Endpoint(
            *("GET", "/live/events", view.events, "What the engine does, step by step, as events."),
            response=str,
            media_type="text/event-stream",
            errors=(429, 503),
            is_admin=True,
        )
    ]


class LiveView:
    """Tells viewers what the engine does; see `fleetfoot.engine.watch`. It asks the engine while somebody looks."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._num_viewers = 0

    async def events(self, http: Request) -> Response:
        """An event each quarter of a second. Raises ApiError 429: there are `MOST_VIEWERS`."""
        if self._num_viewers >= MOST_VIEWERS:
            raise ApiError(429, f"{MOST_VIEWERS} viewers look at the engine already", "too_many_viewers", retry_after=5)
        return EventStream(self._events(), {"X-Content-Type-Options": "nosniff"})

    async def _events(self) -> AsyncIterator[bytes]:
        engine, viewer = self._service.engine, secrets.token_hex(8)
        self._num_viewers += 1
        try:
            while True:
                try:
                    values = await engine.call("watch", viewer)
                except (RuntimeError, EngineDeadError) as error:
                    yield b"data: %b\n\n" % ENCODER.encode(ErrorResponse.of(ApiError(503, str(error), "engine_dead")))
                    return
                seen = values if isinstance(values, list) else [{**values, "engine": "engine"}]
                yield b"data: %b\n\n" % ENCODER.encode({"engines": seen})
                await asyncio.sleep(INTERVAL_S)
        finally:
            self._num_viewers -= 1
