"""The connection of a client with the process of an engine, for asyncio. No torch."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from fleetfoot.engine.wire import ANY_KEY, HEARTBEAT_MS, ClientMessage, Dead, EngineMessage, Hello, Outputs, Ready


class Link(Protocol):
    """Messages with an engine, or with what takes its place; of one event loop."""

    async def hello(self) -> Ready:
        """Wait until the engine is ready."""
        ...

    def send(self, message: ClientMessage) -> None:
        """Send or queue a message."""
        ...

    async def receive(self) -> EngineMessage:
        """The next message. Outputs of several steps may come as one."""
        ...

    def close(self) -> None:
        """Disconnect, once queued messages are sent. The engine goes on."""
        ...


class EngineLink:
    """A connection with an engine's process.

    Args:
        address: of its socket, ``ipc://PATH`` or ``tcp://HOST:PORT``.
        key: of the engine, if it needs one.
        detects_loss: whether a connection without signs of life is closed.
    """

    def __init__(self, address: str, key: str = ANY_KEY, *, detects_loss: bool = False) -> None:
        self._key = key
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set_hwm(0)
        self.socket.linger = 0
        self.socket.ipv6 = True  # besides IPv4
        self.socket.reconnect_ivl = 10
        if detects_loss:
            self.socket.heartbeat_ivl, self.socket.heartbeat_timeout = HEARTBEAT_MS, 5 * HEARTBEAT_MS
        self.socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineMessage)
        self._arrived: deque[EngineMessage] = deque()
        self._without_waiting = zmq.Socket.shadow(self.socket.underlying)  # the same socket

    async def hello(self) -> Ready:
        """Raises ValueError: the engine needs another key."""
        self.send(Hello(self._key))
        message = await self.receive()
        if isinstance(message, Dead):
            raise ValueError(message.text)
        assert isinstance(message, Ready), message
        return message

    def send(self, message: ClientMessage) -> None:
        self.socket.send(self._encoder.encode(message))  # without a limit on its queue, it is sent or queued at once

    async def receive(self) -> EngineMessage:
        if not self._arrived:
            await asyncio.sleep(0)  # connections have their turn, also while messages keep coming
            contents = [await self.socket.recv()]
            with contextlib.suppress(zmq.Again):
                while True:
                    contents.append(self._without_waiting.recv(zmq.NOBLOCK))
            self._arrived.extend(merge_steps(map(self._decoder.decode, contents)))
        return self._arrived.popleft()

    def close(self, linger: int = 1000) -> None:
        """``linger``: milliseconds for messages that are not sent yet."""
        self._context.destroy(linger=linger)


def merge_steps(messages: Iterable[EngineMessage]) -> Iterator[EngineMessage]:
    """The messages, with the outputs of consecutive steps as one: a client that is behind makes one output of them."""
    outputs: Outputs | None = None
    for message in messages:
        if outputs is not None:
            if isinstance(message, Outputs) and outputs.weight_version == message.weight_version:
                outputs.tokens += message.tokens
                outputs.now = message.now
                continue
            yield outputs
            outputs = None
        if isinstance(message, Outputs):
            outputs = message
        else:
            yield message
    if outputs is not None:
        yield outputs
