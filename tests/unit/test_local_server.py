"""The socket of an engine's process for clients on the same machine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.unit.test_engine_group import FACTS

from fleetfoot.engine import wire
from fleetfoot.engine.link import connect
from fleetfoot.engine.local_server import SCHEME, LocalServer, framed, take_messages


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "engine")


@pytest.fixture
def server(path: str) -> Iterator[LocalServer]:
    LocalServer(path).close()  # the file is left
    made = LocalServer(path)
    yield made
    made.close()


def connected(path: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    return client


def received(server: LocalServer) -> list[tuple[bytes, bytes]]:
    return [*iter(server.receive, None)]


def test_messages_of_any_size_come_whole_and_in_order(server: LocalServer, path: str) -> None:
    one, other = connected(path), connected(path)
    assert received(server) == []  # two are accepted
    content = b"".join(map(framed, (b"a", b"", b"c" * 300_000)))
    for begin in range(0, 12, 5):
        one.sendall(content[begin : min(12, begin + 5)])
        assert {name for name, _ in received(server)} <= {b"0"}
    one.setblocking(False)
    begin, found = 12, []
    while begin < len(content):
        begin += one.send(content[begin:])
        found += received(server)
    other.sendall(framed(b"d"))
    assert found + received(server) == [(b"0", b"c" * 300_000), (b"1", b"d")]
    for client in (one, other):
        client.close()


def test_a_client_that_does_not_read_gets_all_later(server: LocalServer, path: str) -> None:
    client = connected(path)
    client.sendall(framed(b"hello"))
    assert server.receive() is None
    assert server.receive() == (b"0", b"hello")
    messages = [bytes([number]) * 100_000 for number in range(40)]
    assert all(server.send(b"0", message) for message in messages)
    buffer, found = bytearray(), list[bytes]()
    while len(found) < len(messages):
        buffer += client.recv(1 << 16)
        found += take_messages(buffer)
        assert server.receive() is None
    assert found == messages
    assert server.send(b"0", b"more") and client.recv(100) == framed(b"more")
    client.close()
    assert server.receive() is None
    assert not server.send(b"0", b"gone") and not server.send(b"7", b"nobody")


def test_a_client_that_sends_too_much_is_left(server: LocalServer, path: str) -> None:
    client = connected(path)
    client.sendall((wire.MAX_MESSAGE_BYTES + 1).to_bytes(4, "little"))
    assert server.receive() is server.receive() is None
    assert client.recv(1) == b"" and not server.send(b"0", b"")
    client.close()


def test_a_link_waits_for_its_engine_and_sees_its_end(path: str) -> None:
    async def run() -> None:
        link = connect(SCHEME + path)
        greeting, lost = asyncio.ensure_future(link.hello()), asyncio.ensure_future(link.lost())
        await asyncio.sleep(0)
        server = LocalServer(path)
        arrived = asyncio.Event()
        asyncio.get_running_loop().add_reader(server.pollable, arrived.set)
        while (found := server.receive()) is None:
            arrived.clear()
            await arrived.wait()
        client, content = found
        assert isinstance(wire.decode_as(wire.ClientMessage)(content), wire.Hello)
        server.send(client, msgspec.msgpack.encode(FACTS))
        assert await greeting == FACTS and not lost.done()
        for reason in ("a", "b"):
            server.send(client, msgspec.msgpack.encode(wire.Interruption(reason)))
        assert [await link.receive(), await link.receive()] == [wire.Interruption("a"), wire.Interruption("b")]
        asyncio.get_running_loop().remove_reader(server.pollable)
        server.close()
        await lost
        link.close()

    asyncio.run(run())
