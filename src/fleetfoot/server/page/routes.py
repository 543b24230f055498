"""The files of the page, and the events of its view of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import AsyncIterator, Iterator
from importlib.resources import files
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.engine.step_trace import StepTrace, encoded
from fleetfoot.server.conversion import converted
from fleetfoot.server.http import ENCODER, ApiError, ErrorResponse, EventStream, until_disconnected
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


class TraceOptions(msgspec.Struct, forbid_unknown_fields=True):
    seconds: Annotated[float, msgspec.Meta(gt=0, le=60)] = 5.0
    """How long to look."""


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
        ),
        Endpoint(
            *("GET", "/live/trace", view.trace, "The same for some seconds, as a trace for Perfetto: `?seconds=5`."),
            query=TraceOptions,
            response=dict[str, Any],
            errors=(400, 429, 503),
            is_admin=True,
        ),
    ]


class LiveView:
    """Tells viewers what the engine does; see `fleetfoot.engine.watch`. It asks the engine while somebody looks."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._num_viewers = 0

    async def events(self, http: Request) -> Response:
        """An event each quarter of a second. Raises ApiError 429: there are `MOST_VIEWERS`."""
        self._check_room()
        return EventStream(self._events(), {"X-Content-Type-Options": "nosniff"})

    def _check_room(self) -> None:
        if self._num_viewers >= MOST_VIEWERS:
            raise ApiError(429, f"{MOST_VIEWERS} viewers look at the engine already", "too_many_viewers", retry_after=5)

    async def trace(self, http: Request) -> Response:
        """What the engine does in the next seconds. Raises ApiError: as `events`; 400 for the seconds, 503: the
        engine has ended."""
        seconds = converted(dict(http.query_params), TraceOptions, strict=False).seconds
        self._check_room()
        content = await until_disconnected(http, self._traced(seconds))
        headers = {
            "Content-Disposition": 'attachment; filename="steps.trace.json"',
            "X-Content-Type-Options": "nosniff",
        }
        return Response(content, media_type="application/json", headers=headers)

    async def _traced(self, seconds: float) -> bytes:
        traces: dict[str, StepTrace] = {}
        try:
            with self._viewer() as viewer:
                for left in (*([INTERVAL_S] * int(seconds / INTERVAL_S)), seconds % INTERVAL_S, 0.0):
                    for seen in await self._look(viewer):
                        name = seen["engine"]
                        if name not in traces:
                            traces[name] = StepTrace(name, 1 + len(traces))
                        traces[name].take(seen)
                    await asyncio.sleep(left)
        except (RuntimeError, EngineDeadError) as error:
            raise ApiError(503, str(error), "engine_dead") from error
        return await asyncio.to_thread(encoded, traces.values())

    async def _events(self) -> AsyncIterator[bytes]:
        with self._viewer() as viewer:
            while True:
                try:
                    seen = await self._look(viewer)
                except (RuntimeError, EngineDeadError) as error:
                    yield b"data: %b\n\n" % ENCODER.encode(ErrorResponse.of(ApiError(503, str(error), "engine_dead")))
                    return
                yield b"data: %b\n\n" % ENCODER.encode({"engines": seen})
                await asyncio.sleep(INTERVAL_S)

    @contextlib.contextmanager
    def _viewer(self) -> Iterator[str]:
        """A name, which is counted."""
        self._num_viewers += 1
        try:
            yield secrets.token_hex(8)
        finally:
            self._num_viewers -= 1

    async def _look(self, viewer: str) -> list[dict[str, Any]]:
        values = await self._service.engine.call("watch", viewer)
        return values if isinstance(values, list) else [{**values, "engine": "engine"}]
