"""What all endpoints share: errors in each API's envelope, bodies within limits, keys, disconnects, event streams."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.engine.input_processor import is_of_prompt
from fleetfoot.utils.logs import REQUEST_ID
from fleetfoot.utils.process import as_exception
from fleetfoot.utils.validation import FieldError, is_loopback, shown
from fleetfoot.utils.work_pool import PoolFullError

logger = logging.getLogger(__name__)

OPEN_PATHS = ("/health", "/ping", "/ready", "/version", "/metrics", "/openapi.json")
"""Paths that need no key."""
BODY_S = 120.0
"""Seconds that a client has to send a body."""
BODY_ARRIVED = "fleetfoot.body_arrived"
"""An extension of the ASGI scope: all of the body is there."""
KEEP_ALIVE_S = 15.0
"""Seconds without data after which an event stream gets a comment."""
_PATH_CHARACTERS = "/~!$&'()*+,;=:@"
_MAX_MESSAGE = 2000
_MAX_PARAM = 200
_BODY_NAMES = {"extra_args": "vllm_xargs"}
"""Fields of a body that the engine knows by other names."""
_LARGE_JOIN = 1 << 20
_LIST_PART, _TEXT_PART = 1 << 15, 1 << 18
_REQUEST_ID = re.compile(r"[!-~]{1,128}")

_T = TypeVar("_T")
ENCODER = msgspec.json.Encoder()


@dataclass
class ApiError(Exception):
    """A request that is refused, or has failed."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    """The field of the body that is the cause."""
    retry_after: int | None = None
    """Seconds."""

    def __post_init__(self) -> None:
        if len(self.message) > _MAX_MESSAGE:  # it quotes what the client has sent
            self.message = f"{self.message[:_MAX_MESSAGE]}..."
        self.param = self.param and self.param[:_MAX_PARAM]

    @property
    def kind(self) -> str:
        """``error.type`` of OpenAI's envelope."""
        kinds = {
            401: "authentication_error",
            404: "not_found_error",
            429: "rate_limit_error",
            503: "service_unavailable",
        }
        return kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})

    @classmethod
    def of(cls, error: Exception) -> ApiError:
        """An exception of a handler as the client's error. Others than those of the engine are logged."""
        if isinstance(error, ApiError):
            return error
        if isinstance(error, HTTPException):
            return cls(error.status_code, error.detail)
        if isinstance(error, PoolFullError):
            return cls(429, str(error), "queue_full", retry_after=1)
        if isinstance(error, EngineDeadError):
            return cls(503, str(error), "engine_dead")
        if isinstance(error, FieldError):
            field = _BODY_NAMES.get(error.field, error.field)
            return cls(400, str(error.at(field)), error.code, None if is_of_prompt(error) else field)
        if isinstance(error, ValueError | TypeError):
            return cls(400, str(error))
        if isinstance(error, RecursionError):
            return cls(400, "the body is nested too deeply")
        if isinstance(error, OverflowError):
            return cls(400, "the body has a number that does not fit into 64 bits")
        logger.error("a request has failed", exc_info=error)
        return cls(500, "the server has failed; its log has the reason")


def disconnected() -> ApiError:
    """The error of a request without a client that could get it."""
    return ApiError(499, "the client has disconnected")


def invalid(param: str, message: str, code: str | None = None) -> ApiError:
    """An invalid field of the body."""
    return ApiError(400, message, code, param)


def renamed(error: FieldError, names: Mapping[str, str]) -> FieldError:
    """An error with the names that an API has for parts of a field's path."""
    field = error.field
    for name, own in names.items():
        field = field.replace(name, own)
    return error.at(field)


class ErrorDetails(msgspec.Struct):
    """What is wrong, and with which field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct):
    """OpenAI's envelope."""

    error: ErrorDetails

    @classmethod
    def of(cls, error: ApiError, request_id: str | None = None) -> ErrorResponse:
        return cls(ErrorDetails(error.message, error.kind, error.param, error.code))


Envelope = Callable[["ApiError", str | None], Any]
"""The body of an error, for the id of the request."""
openai_error = ErrorResponse.of


def error_response(error: ApiError, scope: Scope, envelope: Envelope = openai_error) -> Response:
    return JSON(envelope(error, scope.get("request_id")), error.status, error.headers)


def envelope_of(path: str, envelopes: Mapping[str, Envelope]) -> Envelope:
    """The envelope of a path, or of the longest known path that it begins with; OpenAI's if there is none."""
    known = [other for other in envelopes if path == other or path.startswith(other + "/")]
    return envelopes[max(known, key=len)] if known else openai_error


class JSON(Response):
    """A response in JSON, encoded by msgspec."""

    media_type = "application/json"

    def __init__(self, content: Any, status_code: int = 200, headers: dict[str, str] | None = None) -> None:
        super().__init__(ENCODER.encode(content), status_code, headers)


def encoded(values: list[Any] | str) -> Any:
    """A list or a text of a response, in JSON already, made in parts: msgspec keeps the interpreter meanwhile."""
    ends, separator, size = (b'""', b"", _TEXT_PART) if isinstance(values, str) else (b"[]", b",", _LIST_PART)
    parts = (ENCODER.encode(values[begin : begin + size])[1:-1] for begin in range(0, len(values), size))
    return msgspec.Raw(ends[:1] + separator.join(parts) + ends[1:])


# --- requests ---------------------------------------------------------------------------------------------------------


async def read_body(request: Request, limit: int) -> bytes:
    """The body. Raises ApiError 415 for one that is not plain JSON, and 413 above ``limit`` bytes, before more of it is
    read."""
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(415, f"the body's content-type is {shown(media_type)}; it must be application/json")
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise ApiError(415, f"the body's content-encoding is {shown(encoding)}; send the body without one")
    length = request.headers.get("content-length", "")
    too_large = ApiError(413, f"the body is larger than the limit of {limit} bytes (--max-body-bytes)")
    if length.isdecimal() and int(length) > limit:
        raise too_large
    parts, size = [], 0
    try:
        is_there = request.scope.get("extensions", {}).get(BODY_ARRIVED)
        async with contextlib.nullcontext() if is_there else asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large
                parts.append(part)
    except ClientDisconnect:
        raise disconnected() from None
    except TimeoutError:
        raise ApiError(408, f"the body has not ended after {BODY_S:g} s, which is the limit") from None
    if size >= _LARGE_JOIN:
        return await asyncio.to_thread(b"".join, parts)  # which leaves the interpreter to others
    return b"".join(parts)


def check_request_id(given: str) -> None:
    """Raises ApiError for an id of a body."""
    if not _REQUEST_ID.fullmatch(given):
        message = f"request_id is {shown(given)}; it must have 1 to 128 printable ASCII characters without spaces"
        raise invalid("request_id", message)


def request_id(request: Request, prefix: str) -> str:
    """``X-Request-Id`` of the client, if it is printable and not too long; else a new one."""
    given = request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"{prefix}-{secrets.token_hex(12)}"


async def until_disconnected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of ``work``, which is cancelled when the client disconnects. Raises ApiError 499 then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise disconnected()
    finally:
        for future in (task, watch):
            future.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events. The events are complete byte strings; the iterator is closed when the client disconnects.

    A client that does not read holds up its own iterator alone.
    """

    def __init__(self, events: AsyncIterator[bytes], headers: dict[str, str] | None = None) -> None:
        super().__init__(headers=headers)
        self.headers["content-type"] = "text/event-stream; charset=utf-8"
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # of nginx
        del self.headers["content-length"]
        self._events = events
        self.has_sent = False
        """Whether data was sent since the last comment, or the last wait for one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = asyncio.ensure_future(self._send_events(send))
        others = [asyncio.ensure_future(_disconnected(receive)), asyncio.ensure_future(self._keep_alive(send))]
        try:
            await asyncio.wait((body, *others), return_when=asyncio.FIRST_COMPLETED)
            if body.done():
                body.result()
        except OSError:
            pass  # the client has disconnected
        finally:
            for task in (body, *others):
                task.cancel()
            await asyncio.gather(body, *others, return_exceptions=True)

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await self.send_body(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_body(self, send: Send) -> None:
        """Send all events."""
        async with contextlib.aclosing(self._events) as events:  # type: ignore[type-var]
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                self.has_sent = True

    async def _keep_alive(self, send: Send) -> None:
        while True:
            self.has_sent = False
            await asyncio.sleep(KEEP_ALIVE_S)
            if not self.has_sent:
                await send({"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True})


Handler = Callable[[Request], Awaitable[Response]]

# --- middleware -------------------------------------------------------------------------------------------------------


class RequestGate:
    """ASGI middleware: checks keys, and gives each request an id: ``request_id`` of its scope, and in its response as
    ``x-request-id``, as OpenAI does, and as ``request-id``, as Anthropic does.

    Args:
        keys: clients send one of them; (): none is needed.
        envelopes: of the errors of paths; others have OpenAI's.
        keys_by_path: other keys of single paths; (): none is needed.
        logs: whether each request is logged.
        handlers: of methods and paths, to which ``app`` would lead as well, by five calls of middleware and routes.
        hosts: names that the Host header may have, besides those of this machine itself; None: any. A page of another
            origin whose name is made to point to this machine sends its own name.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: tuple[str, ...],
        root_path: str,
        envelopes: Mapping[str, Envelope],
        keys_by_path: Mapping[str, tuple[str, ...]],
        logs: bool,
        handlers: Mapping[tuple[str, str], Handler],
        hosts: tuple[str, ...] | None = None,
    ) -> None:
        self._app = app
        self._handlers = handlers
        self._envelopes = envelopes
        self._keys = keys
        self._keys_by_path = keys_by_path
        self._root_path = root_path
        self._logs = logs
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        name = scope["request_id"] = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        id_headers = [(b"x-request-id", name.encode()), (b"request-id", name.encode())]
        REQUEST_ID.set(name)
        begin, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                nonlocal status
                status = message["status"]
                message["headers"] = [*message["headers"], *id_headers]
            await send(message)

        path = scope["path"].removeprefix(self._root_path)
        keys, app = self._keys_by_path.get(path, self._keys), self._app
        handler = self._handlers.get((scope["method"], path))
        host, key = (scope["client"] or ("-",))[0], _key_number(headers, keys)
        scope["client_name"] = f"key {key}" if len(keys) > 1 else host
        named = _host_name(headers.get(b"host", b"").decode("latin-1"))
        if self._hosts is not None and named and not (_is_own(named) or named in self._hosts):
            message = f"the Host header is {shown(named)}, which is not this server (--allowed-hosts)"
            app = error_response(ApiError(403, message, "unknown_host"), scope, envelope_of(path, self._envelopes))
        elif keys and scope["method"] != "OPTIONS" and key is None:
            which = "key" if keys is self._keys else "key of this route (--admin-key)"
            hint = "send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'"
            error = ApiError(401, f"the {which} is missing or wrong; {hint}", "invalid_api_key")
            app = error_response(error, scope, envelope_of(path, self._envelopes))
        if handler is not None and app is self._app:
            app = await handler(Request(scope, receive, send_with_id))
        await app(scope, receive, send_with_id)
        if self._logs:
            milliseconds = 1000 * (time.perf_counter() - begin)
            path = quote(scope["path"], safe=_PATH_CHARACTERS)  # no field of the line has a space
            logger.info("%s %s %s %d %.1f ms", host, scope["method"], path, status, milliseconds)


def _host_name(header: str) -> str:
    """The name without the port, in small letters."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")


def _is_own(name: str) -> bool:
    return name in ("127.0.0.1", "localhost") or is_loopback(name) or name.endswith(".localhost")


def _key_number(headers: dict[bytes, bytes], keys: tuple[str, ...]) -> int | None:
    """Which of the keys a request has; None: none of them."""
    bearer = headers.get(b"authorization", b"")
    given = [bearer[7:] if bearer[:7].lower() == b"bearer " else b"", headers.get(b"x-api-key", b"")]
    matches = [hmac.compare_digest(one, known.encode()) for known in keys for one in given]
    return matches.index(True) // len(given) if any(matches) else None  # of all of them, for a constant time


def handled(handler: Handler, envelope: Envelope = openai_error) -> Handler:
    """A handler with exceptions as responses in the API's envelope."""

    async def respond(request: Request) -> Response:
        try:
            return await handler(request)
        except BaseException as error:
            return error_response(ApiError.of(as_exception(error)), request.scope, envelope)

    return respond
