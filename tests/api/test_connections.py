"""Connections that send slowly, endlessly or too much, and those of web pages of other origins."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from fleetfoot.server import http, http_protocol
from fleetfoot.server.app import CorsSettings, make_app
from fleetfoot.server.http_protocol import LimitedHttp

POST = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


async def read(request: Request) -> Response:
    return PlainTextResponse(str(len(await http.read_body(request, limit=1000))))


async def ignore(request: Request) -> Response:
    return PlainTextResponse("ignored")


def loaded() -> uvicorn.Config:
    """Of `read` and `ignore`."""
    routes = [Route("/", http.handled(read), methods=["POST"]), Route("/ignore", ignore, methods=["POST"])]
    config = uvicorn.Config(Starlette(routes=routes), http=LimitedHttp, ws="none", lifespan="off", log_config=None)
    config.load()
    return config


def converse(
    talk: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]],
    run_loop: Callable[..., bytes] = asyncio.run,
) -> bytes:
    """What ``talk`` with a server returns."""

    async def run() -> bytes:
        config, state = loaded(), uvicorn.server.ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: LimitedHttp(config, state, {}), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            return await talk(reader, writer)
        finally:
            writer.close()
            server.close()

    return run_loop(run())


def sends(*parts: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]]:
    """Send, and read until the server closes the connection."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        for part in parts:
            writer.write(part)
        return await reader.read()

    return talk


@pytest.mark.parametrize("begin", [b"", b"GET / HTTP/1.1\r\nHost: a\r\n", POST + b"Content-Length: 3\r\nX-Long: aaa"])
def test_headers_that_do_not_end(monkeypatch: pytest.MonkeyPatch, begin: bytes) -> None:
    monkeypatch.setattr(http_protocol, "HEADERS_S", 0.05)
    assert b"408 Request Timeout" in converse(sends(begin))


def test_a_second_request_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEADERS_S", 0.05)
    answer = converse(sends(POST + b"Content-Length: 2\r\n\r\n{}" + POST))
    assert b"200 OK" in answer and b"408 Request Timeout" in answer


@pytest.mark.parametrize(
    "body", [POST + b"Content-Length: 10\r\n\r\n{", CHUNKED + b"1\r\n{\r\n"], ids=["length", "chunks"]
)
def test_a_body_that_does_not_end(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    monkeypatch.setattr(http, "BODY_S", 0.05)
    monkeypatch.setattr(http_protocol, "DISCARD_S", 0.05)
    answer = converse(sends(body))
    assert b"408 Request Timeout" in answer and b"the body has not ended" in answer


def test_the_rest_of_a_body_after_the_response(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = b"100000\r\n" + b"a" * 0x100000 + b"\r\n"
    ended = converse(sends(CHUNKED + rest + b"0\r\n\r\n" + POST + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}"))
    assert b"413 Request Entity Too Large" in ended and ended.endswith(b"\r\n\r\n2")  # the connection goes on
    monkeypatch.setattr(http_protocol, "DISCARD_S", 0.05)
    ignored = converse(sends(CHUNKED.replace(b"/", b"/ignore", 1) + b"1\r\n{\r\n"))
    assert ignored.endswith(b"ignored")


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        (b"X: " + b"a" * 70_000 + b"\r\n\r\n", "the headers have more than 65536 bytes"),
        (b"X: " + b"a" * 70_000, "the headers have more than 65536 bytes"),
        (b"X: a\r\n" * 20_000 + b"\r\n", "there are more than 100 headers"),
    ],
    ids=["long", "endless", "many"],
)
def test_headers_that_are_too_large(headers: bytes, message: str) -> None:
    answer = converse(sends(POST + headers))
    assert b"431 Request Header Fields Too Large" in answer
    assert json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["message"] == message


@pytest.mark.parametrize(
    ("request_bytes", "reason"),
    [
        (POST + b"Content-Length: x\r\n\r\n", "Invalid character in Content-Length"),
        (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", "Duplicate Content-Length"),
        (CHUNKED + b"zz\r\n", "Invalid character in chunk size"),
        (b"GET /a b HTTP/1.1\r\n", "Expected HTTP/"),
        (b"FOO / HTTP/1.1\r\n", "Invalid method"),
        (b"GET / HTTP/1.1\r\nHo st: a\r\n", "Invalid header token"),
        (b"\x16\x03\x01\x02\x00\x01", "begins with TLS"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "begins with HTTP/2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_http_has_its_reason(request_bytes: bytes, reason: str) -> None:
    answer = converse(sends(request_bytes))
    assert b"400 Bad Request" in answer
    assert reason in json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["message"]


def test_requests_in_a_row() -> None:
    one, last = (
        b"Content-Encoding:identity \t\r\nContent-Length: 3\r\n\r\n{ }",
        b"Connection: close\r\nContent-Length: 4\r\n\r\n{  }",
    )
    answer = converse(sends((POST + one) * 3 + POST + last))
    assert [part[-1:] for part in answer.split(b"HTTP/1.1 200 OK")[1:]] == [b"3", b"3", b"3", b"4"]
    assert b"400 Bad Request" in converse(sends(b"nonsense\r\n\r\n"))


@pytest.mark.parametrize(
    ("request_line", "hosts", "status"),
    [("HTTP/1.1", 0, 400), ("HTTP/1.1", 1, 200), ("HTTP/1.1", 2, 400), ("HTTP/1.0", 0, 200), ("HTTP/1.0", 2, 400)],
)
def test_one_host_is_needed(request_line: str, hosts: int, status: int) -> None:
    head = f"POST / {request_line}\r\n" + "Host: a\r\n" * hosts
    answer = converse(sends(head.encode() + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}"))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    if status == 400:
        message = json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["message"]
        assert message == f"the request has {hosts or 'no'} Host headers; HTTP/1.1 needs one"


def test_a_websocket_gets_a_plain_answer(caplog: pytest.LogCaptureFixture) -> None:
    upgrade = (
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: YQ==\r\n\r\n"
    )
    answer = converse(reads_head(b"GET / HTTP/1.1\r\nHost: a\r\n" + upgrade))
    assert b"405 Method Not Allowed" in answer
    assert not caplog.records


def reads_head(request: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[bytes]]:
    """Send, and read the head of the response."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(request)
        return await reader.readuntil(b"\r\n\r\n")

    return talk


class PanicException(BaseException):
    """As the libraries in Rust have."""


def test_a_panic_of_a_library_is_an_error_of_its_request(caplog: pytest.LogCaptureFixture) -> None:
    async def panic(request: Request) -> Response:
        raise PanicException("index out of bounds")

    async def call() -> httpx.Response:
        app = Starlette(routes=[Route("/", http.handled(panic))])
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.get("/")

    answer = asyncio.run(call())
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    (record,) = (one for one in caplog.records if one.exc_info)
    assert record.exc_info is not None and "index out of bounds" in str(record.exc_info[1])


@pytest.fixture
def service() -> Any:
    """Enough for endpoints that do not reach the engine."""
    settings = SimpleNamespace(model_names=("story",), trusts_chat_templates=False)
    return SimpleNamespace(engine=SimpleNamespace(facts=SimpleNamespace(pooling=None)), settings=settings)


def test_pages_of_other_origins(service: Any) -> None:
    cors = CorsSettings(("https://page.example",), allow_credentials=True)
    origin = {"Origin": "https://page.example"}
    asks = {**origin, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}

    async def run() -> None:
        transport = httpx.ASGITransport(make_app(service, service, ("secret",), cors=cors))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            preflight = await client.options("/v1/completions", headers=asks)  # without a key
            assert preflight.status_code == 200
            assert preflight.headers["access-control-allow-origin"] == "https://page.example"
            assert preflight.headers["access-control-allow-headers"] == "authorization"
            refused = await client.post("/v1/completions", headers=origin)
            assert refused.status_code == 401
            assert refused.headers["access-control-allow-origin"] == "https://page.example"
            assert "x-request-id" in refused.headers["access-control-expose-headers"]
            other = await client.get("/version", headers={"Origin": "https://other.example"})
            assert other.status_code == 200 and "access-control-allow-origin" not in other.headers
        transport = httpx.ASGITransport(make_app(service, service, ("secret",)))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            assert (await client.options("/v1/completions", headers=asks)).status_code == 405
            assert not any("control" in name for name in (await client.get("/version", headers=origin)).headers)

    asyncio.run(run())


def test_a_response_to_a_client_that_has_disconnected(caplog: pytest.LogCaptureFixture) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        writer.write(POST + b"Content-Length: 3\r\n\r\n{")
        writer.transport.abort()
        other, closing = await asyncio.open_connection(*writer.get_extra_info("peername"))
        closing.write(POST + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}")
        answer = await other.read()
        closing.close()
        return answer

    assert converse(talk, uvloop.run).endswith(b"\r\n\r\n2")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_data_for_a_closed_transport_is_dropped() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        protocol = LimitedHttp(loaded(), uvicorn.server.ServerState(), {})
        server = await loop.create_server(lambda: protocol, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(POST + b"Content-Length: 2\r\n\r\n{}")
        await reader.readuntil(b"\r\n\r\n2")
        protocol.transport.abort()
        protocol.transport.write(b"late")  # uvloop's transport itself raises RuntimeError
        writer.close()
        server.close()

    uvloop.run(run())
