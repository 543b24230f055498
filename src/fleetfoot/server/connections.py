"""Connections of several API servers: their supervisor accepts them, and passes each to the server with the fewest.

Servers that accept from one socket share its connections by chance, and a server with twice the streams of another
falls behind first. Supervisor and server have a channel, a pair of Unix sockets: descriptors of connections go one
way. The other way goes a byte when the server is ready, and one for each connection that has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

logger = logging.getLogger(__name__)

_MANY = 4096


class _Server:
    """The supervisor's end of a channel."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.num_connections = self.num_passed = 0
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class Balancer:
    """Shares connections among API servers. ``listener``: what clients connect to; not blocking."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._servers: list[_Server] = []

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
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # no descriptors are left, for example
                logger.warning("connections cannot be accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            with connection:
                server = min(self._servers, key=lambda one: (one.num_connections, one.num_passed))
                server.num_connections += 1
                server.num_passed += 1
                await self._pass(server, connection)

    def close(self) -> None:
        for server in self._servers:
            asyncio.get_running_loop().remove_reader(server.channel)
            server.channel.close()

    async def _pass(self, server: _Server, connection: socket.socket) -> None:
        """Waits while the server takes none: others wait in the listener's queue."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                socket.send_fds(server.channel, [b"+"], [connection.fileno()])
                return
            except BlockingIOError:
                writable = asyncio.Event()
                loop.add_writer(server.channel, writable.set)
                try:
                    await writable.wait()
                finally:
                    loop.remove_writer(server.channel)
            except OSError:
                return  # the server has ended, and so does the supervisor

    def _read(self, server: _Server) -> None:
        try:
            num_bytes = len(server.channel.recv(_MANY))
        except OSError:
            num_bytes = 0
        if not num_bytes:  # the server has ended
            asyncio.get_running_loop().remove_reader(server.channel)
        elif server.ready.done():
            server.num_connections -= num_bytes
        else:
            server.ready.set_result(None)
            server.num_connections -= num_bytes - 1


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
