"""Connections of several API servers: their supervisor accepts them, and passes each to the server with the fewest.

Servers that accept from one socket share its connections by chance, and a server with twice the streams of another
falls behind first. Supervisor and server have a channel, a pair of Unix sockets: descriptors of connections go one
way. The other way goes a byte when the server is ready, and one for each connection that has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Callable

logger = logging.getLogger(__name__)

_MANY = 4096
_NO_FILES = errno.EMFILE, errno.ENFILE


async def accepted(listener: socket.socket) -> AsyncIterator[socket.socket]:
    """Connections, not blocking. While no descriptors are left, for example, they wait in the listener's queue."""
    loop, is_failing = asyncio.get_running_loop(), False
    while True:
        try:
            connection, _ = await loop.sock_accept(listener)
        except OSError as error:
            if not is_failing:
                hint = "; raise the limit with ulimit -n, or close connections" * (error.errno in _NO_FILES)
                logger.error("connections cannot be accepted, and wait: %s%s", error, hint)
            is_failing = True
            await asyncio.sleep(0.1)
        else:
            is_failing = False
            yield connection


class _Server:
    """The supervisor's end of a channel."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.num_connections = self.num_passed = 0
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.writable: asyncio.Event | None = None
        """Set while a connection waits until the server takes it."""


class Balancer:
    """Shares connections among API servers. ``listener``: what clients connect to; not blocking."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._servers: list[_Server] = []
        self._changed = asyncio.Event()  # a server has become ready

    def add_server(self) -> socket.socket:
        """The end of a new server's channel that its process inherits; close it afterwards."""
        channel, other = socket.socketpair()
        channel.setblocking(False)
        server = _Server(channel)
        self._servers.append(server)
        asyncio.get_running_loop().add_reader(channel, self._read, server)
        return other

    async def wait_ready(self) -> None:
        """Wait until all servers take connections."""
        await asyncio.gather(*(server.ready for server in self._servers))

    async def run(self) -> None:
        """Accept and pass on connections, until it is cancelled."""
        async for connection in accepted(self._listener):
            with connection:
                while not await self._pass(await self._choose(), connection):
                    pass

    def close(self) -> None:
        while self._servers:
            self._remove(self._servers[0])

    async def _choose(self) -> _Server:
        """The server with the fewest connections; waits while none is ready."""
        while not (ready := [server for server in self._servers if server.ready.done()]):
            self._changed.clear()
            await self._changed.wait()
        return min(ready, key=lambda one: (one.num_connections, one.num_passed))

    async def _pass(self, server: _Server, connection: socket.socket) -> bool:
        """Waits while the server takes none: others wait in the listener's queue. False: the server has ended."""
        loop = asyncio.get_running_loop()
        while server in self._servers:
            try:
                socket.send_fds(server.channel, [b"+"], [connection.fileno()])
            except BlockingIOError:
                server.writable = asyncio.Event()
                loop.add_writer(server.channel, server.writable.set)
                await server.writable.wait()
                if server in self._servers:
                    loop.remove_writer(server.channel)
            except OSError:
                self._remove(server)
            else:
                server.num_connections += 1
                server.num_passed += 1
                return True
        return False

    def _remove(self, server: _Server) -> None:
        """The server has ended."""
        loop = asyncio.get_running_loop()
        self._servers.remove(server)
        loop.remove_reader(server.channel)
        loop.remove_writer(server.channel)
        server.channel.close()
        if server.writable is not None:
            server.writable.set()

    def _read(self, server: _Server) -> None:
        try:
            num_bytes = len(server.channel.recv(_MANY))
        except OSError:
            num_bytes = 0
        if not num_bytes:
            self._remove(server)
        elif server.ready.done():
            server.num_connections -= num_bytes
        else:
            server.ready.set_result(None)
            server.num_connections -= num_bytes - 1
            self._changed.set()


class ConnectionChannel:
    """A server's end of its channel."""

    def __init__(self, channel: socket.socket) -> None:
        channel.setblocking(False)
        self._channel = channel
        self._unsent = b""

    def start(self, connect: Callable[[socket.socket], object]) -> None:
        """Call ``connect`` with each connection from now on."""
        asyncio.get_running_loop().add_reader(self._channel, self._take, connect)
        self.report()

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._channel)

    def report(self) -> None:
        """The server is ready; later calls: a connection has ended."""
        self._unsent += b"-"
        with contextlib.suppress(OSError):  # it is full, and the next report sends this one too
            self._unsent = self._unsent[self._channel.send(self._unsent) :]

    def _take(self, connect: Callable[[socket.socket], object]) -> None:
        while True:
            try:
                content, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
            except OSError:
                return
            for descriptor in descriptors:
                connection = socket.socket(fileno=descriptor)
                connection.setblocking(False)
                connect(connection)
            if not content:
                self.stop()
                return
