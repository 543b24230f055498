"""The connection of a client with the process of an engine, for asyncio. No torch."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from fleetfoot.engine import wire
from fleetfoot.engine.input_processor import EngineRequest
from fleetfoot.engine.local_server import SCHEME, framed, take_messages
from fleetfoot.engine.wire import HEARTBEAT_MS, ClientMessage, Dead, EngineMessage, Hello, Outputs, Ready
from fleetfoot.utils.cluster_key import ClusterKey
from fleetfoot.utils.curve import KeyPair, connect_with, curve_pair, frames_of, message_of
from fleetfoot.utils.validation import FieldError

_MOST_MERGED = 16
"""Messages that are decoded at a time."""
_RETRY_MS = 10
"""Between two attempts to connect."""
MAX_REFUSALS = 3
"""An engine that ends so many connections in a row before the proof has another key, and is not about to end."""
_REFUSALS = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL


def engine_keys(key: ClusterKey) -> tuple[KeyPair, KeyPair]:
    """The key pairs of an engine that listens on TCP, and of its clients."""
    return curve_pair(key, "engine"), curve_pair(key, "client of an engine")


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


def connect(address: str, key: ClusterKey | None = None, *, detects_loss: bool = False) -> EngineLink | LocalLink:
    """A connection with an engine's process; arguments as of `EngineLink`."""
    if address.startswith(SCHEME):
        return LocalLink(address.removeprefix(SCHEME))
    return EngineLink(address, key, detects_loss=detects_loss)


async def _greet(link: Link) -> Ready:
    link.send(Hello())
    message = await link.receive()
    if isinstance(message, Dead):
        raise ValueError(message.text)
    assert isinstance(message, Ready), message
    return message


def _encoded(encode: Callable[[ClientMessage], bytes], message: ClientMessage) -> bytes:
    """Raises ValueError: a client's value has an integer that MessagePack does not have."""
    try:
        return encode(message)
    except OverflowError:
        problem = "has an integer of more than 64 bits"  # in a request, this field alone can have any value
        raise FieldError("extra_args", problem) if isinstance(message, EngineRequest) else ValueError(problem) from None


class LocalLink(asyncio.Protocol):
    """A connection with an engine's process on this machine, which may not be ready yet. ``path``: of its socket."""

    def __init__(self, path: str) -> None:
        self._encode, self._decode = wire.encoder().encode, wire.decode_as(EngineMessage)
        self._transport: asyncio.Transport | None = None
        self._received, self._unsent = bytearray(), bytearray()
        self._contents: list[bytes] = []
        self._arrived: deque[EngineMessage] = deque()
        loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] = loop.create_future()
        self._lost: asyncio.Future[None] = loop.create_future()
        self._connecting = loop.create_task(self._connect(path))

    async def _connect(self, path: str) -> None:
        while self._transport is None:
            try:
                await asyncio.get_running_loop().create_unix_connection(lambda: self, path)
            except OSError:
                await asyncio.sleep(_RETRY_MS / 1e3)

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(bytes(self._unsent))

    def connection_lost(self, error: Exception | None) -> None:
        self._lost.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._contents += take_messages(self._received)
        if self._contents and not self._waiter.done():
            self._waiter.set_result(None)

    async def hello(self) -> Ready:
        return await _greet(self)

    async def lost(self) -> None:
        """Wait until the connection has ended."""
        await asyncio.shield(self._lost)

    def send(self, message: ClientMessage) -> None:
        content = framed(_encoded(self._encode, message))
        if self._transport is None:
            self._unsent += content
        else:
            self._transport.write(content)

    async def receive(self) -> EngineMessage:
        if not self._arrived:
            if self._contents:
                await asyncio.sleep(0)  # others have their turn, also while messages keep coming
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            contents, self._contents = self._contents[:_MOST_MERGED], self._contents[_MOST_MERGED:]
            self._arrived.extend(merge_steps(map(self._decode, contents)))
        return self._arrived.popleft()

    def close(self, linger: int = 1000) -> None:
        """Disconnect, once queued messages are sent."""
        self._connecting.cancel()
        if self._transport is not None:
            self._transport.close()


class EngineLink:
    """A connection with an engine's process by ZeroMQ.

    Args:
        address: of its socket, such as ``tcp://HOST:PORT``.
        key: of the deployment, for TCP.
        detects_loss: whether a connection without signs of life is closed.
    """

    def __init__(self, address: str, key: ClusterKey | None = None, *, detects_loss: bool = False) -> None:
        self._address, self._has_key = address, key is not None
        self._context = zmq.asyncio.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set_hwm(0)
        self.socket.linger = 0
        self.socket.ipv6 = True  # besides IPv4
        self.socket.reconnect_ivl = _RETRY_MS
        if detects_loss:
            self.socket.heartbeat_ivl, self.socket.heartbeat_timeout = HEARTBEAT_MS, 5 * HEARTBEAT_MS
        if key is not None:
            (public, _), own = engine_keys(key)
            connect_with(self.socket, own, public)
        events = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | _REFUSALS
        self._monitor = self.socket.get_monitor_socket(events)  # before there is anything to miss
        self.socket.connect(address)
        self._encode, self._decode = wire.encoder().encode, wire.decode_as(EngineMessage)
        self._arrived: deque[EngineMessage] = deque()
        self._without_waiting = zmq.Socket.shadow(self.socket.underlying)  # the same socket

    async def hello(self) -> Ready:
        return await _greet(self)

    async def lost(self) -> None:
        """Wait until the connection has ended. Raises ValueError: the engine has another cluster key."""
        num_refusals, is_connected = 0, False
        while True:
            event: Any = parse_monitor_message(await self._monitor.recv_multipart())["event"]
            if event & _REFUSALS and not is_connected:
                # after an error of the protocol, as of a client without a key, ZeroMQ does not connect again
                num_refusals += MAX_REFUSALS if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL else 1
                if num_refusals >= MAX_REFUSALS:
                    problem = "another cluster key" if self._has_key else "a cluster key, and this client has none"
                    raise ValueError(
                        f"the engine at {self._address} has {problem}; give both the same with --cluster-key-file or "
                        "FLEETFOOT_CLUSTER_KEY, or from Python with EngineGroup.key"
                    )
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                num_refusals, is_connected = 0, True
            elif is_connected:
                return

    def send(self, message: ClientMessage) -> None:
        # without a limit on its queue, it is sent or queued at once
        self.socket.send_multipart(frames_of(_encoded(self._encode, message)))

    async def receive(self) -> EngineMessage:
        if not self._arrived:
            await asyncio.sleep(0)  # connections have their turn, also while messages keep coming
            contents = [message_of(await self.socket.recv_multipart())]
            with contextlib.suppress(zmq.Again):
                while len(contents) < _MOST_MERGED:
                    contents.append(message_of(self._without_waiting.recv_multipart(zmq.NOBLOCK)))
            self._arrived.extend(merge_steps(map(self._decode, contents)))
        return self._arrived.popleft()

    def close(self, linger: int = 1000) -> None:
        """``linger``: milliseconds for messages that are not sent yet."""
        self._context.destroy(linger=linger)


def merge_steps(messages: Iterable[EngineMessage]) -> Iterator[EngineMessage]:
    """The messages, with the outputs of consecutive steps as one: a client that lags makes one output of them."""
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
