"""The socket of an engine's process for clients on the same machine. No torch.

Messages come after their length. ZeroMQ, which engines on other machines need, passes each one through two threads: a
third of what an idle server adds to the engine's time to the first token.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
from collections import deque
from dataclasses import dataclass, field
from itertools import count

from fleetfoot.engine.wire import MAX_MESSAGE_BYTES

SCHEME = "unix://"
"""Addresses begin with it; the path of the socket comes after it."""
_HEAD = struct.Struct("<I")
_READ_BYTES = 1 << 18
_BACKLOG = 64
_LINGER_S = 1.0


def framed(message: bytes) -> bytes:
    """A message as it is sent."""
    return _HEAD.pack(len(message)) + message


def take_messages(received: bytearray) -> list[bytes]:
    """Take whole messages off what was received. Raises ValueError for one that is too long."""
    found, begin = [], 0
    while len(received) - begin >= _HEAD.size:
        (size,) = _HEAD.unpack_from(received, begin)
        if size > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message has {size} bytes; {MAX_MESSAGE_BYTES} are the most")
        end = begin + _HEAD.size + size
        if end > len(received):
            break
        found.append(bytes(received[begin + _HEAD.size : end]))
        begin = end
    del received[:begin]
    return found


@dataclass(slots=True)
class _Client:
    """A connection, and what of it is in pieces."""

    socket: socket.socket
    name: bytes
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    is_full: bool = False
    """Whether it has to be told when it takes more."""


class LocalServer:
    """The socket. Nothing of it waits; what a client does not read is kept.

    Args:
        path: of the socket. One that another process has left there is replaced.
    """

    def __init__(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._ready = selectors.DefaultSelector()
        self._ready.register(self._listener, selectors.EVENT_READ)
        self._clients: dict[bytes, _Client] = {}  # by name
        self._names = count()
        self._arrived: deque[tuple[bytes, bytes]] = deque()

    @property
    def pollable(self) -> int:
        """What `zmq.Poller` waits for."""
        return self._ready.fileno()  # of epoll or kqueue

    @property
    def has_more(self) -> bool:
        """Whether there are messages that `pollable` does not tell of."""
        return bool(self._arrived)

    def receive(self) -> tuple[bytes, bytes] | None:
        """A client, and its next message; None: there is none now."""
        if not self._arrived:
            for key, events in self._ready.select(0):
                if key.data is None:
                    self._accept()
                elif events & selectors.EVENT_READ:
                    self._read(key.data)
                else:
                    self._flush(key.data)
        return self._arrived.popleft() if self._arrived else None

    def send(self, client: bytes, message: bytes) -> bool:
        """Send a message, now or when its client has read others. Returns whether the client is there."""
        if (found := self._clients.get(client)) is None:
            return False
        found.unsent += framed(message)
        return self._flush(found)

    def close(self) -> None:
        """Send what is left, and disconnect."""
        for client in [*self._clients.values()]:
            client.socket.settimeout(_LINGER_S)
            with contextlib.suppress(OSError):
                client.socket.sendall(client.unsent)
            self._drop(client)
        self._listener.close()
        self._ready.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            client = _Client(connection, b"%d" % next(self._names))
            self._clients[client.name] = client
            self._ready.register(connection, selectors.EVENT_READ, client)

    def _read(self, client: _Client) -> None:
        try:
            while data := client.socket.recv(_READ_BYTES):
                client.received += data
                self._arrived.extend((client.name, one) for one in take_messages(client.received))
                if len(data) < _READ_BYTES:
                    return
        except BlockingIOError:
            return
        except (OSError, ValueError):
            pass
        self._drop(client)

    def _flush(self, client: _Client) -> bool:
        try:
            while client.unsent:
                del client.unsent[: client.socket.send(client.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
            return False
        if client.is_full != bool(client.unsent):
            client.is_full = not client.is_full
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.is_full else 0)
            self._ready.modify(client.socket, events, client)
        return True

    def _drop(self, client: _Client) -> None:
        del self._clients[client.name]
        self._ready.unregister(client.socket)
        client.socket.close()
