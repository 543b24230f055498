"""The parser of requests with limits: of the size of headers, and of the time that they take."""

from __future__ import annotations

import asyncio
import http
import logging
import sys
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fleetfoot.server.http import BODY_ARRIVED, ENCODER, ApiError, ErrorResponse
from fleetfoot.server.streaming import EXTENSION, BodyWriter

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10
MAX_HEADERS = 100
HEADERS_S = 30.0
"""Seconds from the begin of a connection or a request to the end of its headers."""
DISCARD_S = 10.0
"""Seconds that the rest of a body is read, and discarded, after the response: most clients read it no sooner."""
_OTHERS = {
    b"\x16\x03": "the connection begins with TLS; this port takes http:// (an operator sets --ssl-certfile for https://)",
    b"PRI * HTTP/2": "the connection begins with HTTP/2; this port takes HTTP/1.1",
}
"""Beginnings of connections of other protocols, and what their clients are told."""


def no_callback() -> None:
    """Default of a callback."""


class _Transport:
    """Drops what is for a client that has disconnected; uvloop's own raises until it reports the loss."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class LimitedHttp(HttpToolsProtocol):
    """Ends connections with headers that are too large or too slow, or with a body that goes on after the response."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.on_lost: Callable[[], object] = no_callback
        """Called when the connection has ended."""
        self._timer: asyncio.TimerHandle | None = None
        self._discard_timer: asyncio.TimerHandle | None = None
        self._num_header_bytes = self._num_headers = self._num_hosts = 0
        self._num_unparsed = 0
        """Bytes received since the begin of the headers: a header that has not ended is not parsed."""
        self._is_in_headers = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Transport(transport))  # type: ignore[arg-type]
        self._begin_headers()
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_headers()
        self._end_discarding()
        super().connection_lost(exc)
        self.on_lost()

    def data_received(self, data: bytes) -> None:
        if self._is_in_headers and not self._num_unparsed and data.startswith(tuple(_OTHERS)):
            self._refuse(400, next(text for begin, text in _OTHERS.items() if data.startswith(begin)))
            return
        super().data_received(data)
        if self._is_in_headers:
            self._num_unparsed += len(data)
            self._check_size(self._num_unparsed)
            self._start_timer()

    def on_message_begin(self) -> None:
        self._begin_headers()
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {"writer": BodyWriter(self)}}

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._num_headers == MAX_HEADERS:
            self._refuse(431, f"there are more than {MAX_HEADERS} headers")
            return
        self._num_headers += 1
        super().on_header(name, value.strip(b" \t"))  # the parser keeps white space at the end
        self._num_hosts += name.lower() == b"host"
        self._count(len(name) + len(value) + 4)  # and a colon, a space and the end of the line

    def on_headers_complete(self) -> None:
        self._end_headers()
        is_old = self.parser.get_http_version() == "1.0"
        if self._num_hosts > 1 or not (self._num_hosts or is_old):
            self._refuse(400, f"the request has {self._num_hosts or 'no'} Host headers; HTTP/1.1 needs one")
        if not self.transport.is_closing():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._end_discarding()
        self.scope["extensions"][BODY_ARRIVED] = {}
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and self.cycle.more_body and self._discard_timer is None:
            self._discard_timer = self.loop.call_later(DISCARD_S, self.transport.close)

    def _unsupported_upgrade_warning(self) -> None:
        logger.debug("a request asks for another protocol, such as WebSocket; it is answered as plain HTTP")

    def send_400_response(self, msg: str) -> None:
        """Called where the parser's error is handled, which has the reason."""
        self._refuse(400, f"the request is not valid HTTP/1.1: {sys.exception() or msg}")

    def _begin_headers(self) -> None:
        self._end_headers()
        self._num_header_bytes = self._num_headers = self._num_unparsed = self._num_hosts = 0
        self._is_in_headers = True

    def _start_timer(self) -> None:
        """Headers that come at once need none."""
        if self._timer is None:
            self._timer = self.loop.call_later(HEADERS_S, self._refuse, 408, f"no headers within {HEADERS_S:g} s")

    def _end_headers(self) -> None:
        self._is_in_headers = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_discarding(self) -> None:
        if self._discard_timer is not None:
            self._discard_timer.cancel()
            self._discard_timer = None

    def _count(self, size: int) -> None:
        self._num_header_bytes += size
        self._check_size(self._num_header_bytes)

    def _check_size(self, size: int) -> None:
        if size > MAX_HEADER_BYTES:
            self._refuse(431, f"the headers have more than {MAX_HEADER_BYTES} bytes")

    def _refuse(self, status: int, message: str) -> None:
        """Send an error, unless a response is under way, and close the connection."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()
            return
        body = ENCODER.encode(ErrorResponse.of(ApiError(status, message)))
        head = (
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
