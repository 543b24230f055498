"""TCP sockets for KV transfers: length-prefixed messages, and servers that can be closed."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
_LENGTH_BYTES = 4
_POLL_SECONDS = 0.05
_RETRY_SECONDS = 0.5
_KEEPALIVE_SECONDS = 10


class ConnectionLostError(RuntimeError):
    """The other end has closed the connection, or cannot be reached."""


class StoppedError(RuntimeError):
    """The caller has stopped waiting."""


def never() -> bool:
    """The default of ``should_stop``."""
    return False


def parse_address(address: str) -> tuple[str, int]:
    """The host and port of ``host:port``. Raises ValueError if the address has another form."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"address is {address!r}; it must be host:port, with a port from 1 to 65535")
    return host, int(port)


def connect(address: str, timeout: float) -> socket.socket:
    """A connection without delays. Raises ConnectionLostError if there is none within ``timeout`` seconds."""
    try:
        connection = socket.create_connection(parse_address(address), timeout=timeout)
    except OSError as error:
        raise ConnectionLostError(f"{address} cannot be reached ({error})") from error
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    keep_alive(connection)
    return connection


def send_message(connection: socket.socket, body: bytes) -> None:
    """Send a message with its length. Raises ConnectionLostError if the other end is gone."""
    try:
        connection.sendall(len(body).to_bytes(_LENGTH_BYTES, "little") + body)
    except OSError as error:
        raise ConnectionLostError(f"the connection is lost ({error})") from error


def receive_message(connection: socket.socket, should_stop: Callable[[], bool] = never) -> bytes:
    """The next message. Raises ConnectionLostError if the other end is gone or has sent an invalid message, and
    StoppedError if ``should_stop``, which is polled, has returned True."""
    length = int.from_bytes(_receive(connection, _LENGTH_BYTES, should_stop), "little")
    if length > MAX_MESSAGE_BYTES:
        raise ConnectionLostError(f"a message of {length:,} bytes is announced; the maximum is {MAX_MESSAGE_BYTES:,}")
    return _receive(connection, length, should_stop)


def _receive(connection: socket.socket, count: int, should_stop: Callable[[], bool]) -> bytes:
    connection.settimeout(None if should_stop is never else _POLL_SECONDS)
    content = bytearray()
    while len(content) < count:
        try:
            received = connection.recv(count - len(content))
        except TimeoutError:
            if should_stop():
                raise StoppedError("the request was given up") from None
            continue
        except OSError as error:
            raise ConnectionLostError(f"the connection is lost ({error})") from error
        if not received:
            raise ConnectionLostError("the other end has closed the connection")
        content += received
    return bytes(content)


def keep_alive(connection: Any) -> None:
    """Enable TCP keepalive, on a socket or asyncio's view of one: it detects hosts that disappear without closing the
    connection."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), _KEEPALIVE_SECONDS)


class SocketServer:
    """Serves each connection in its own thread, named ``name``; it is closed when ``serve`` returns or raises.
    ``port`` 0: any free port. Raises ValueError if the address cannot be listened on."""

    def __init__(self, host: str, port: int, serve: Callable[[socket.socket], None], name: str) -> None:
        self._serve, self._name = serve, name
        try:
            self._listener = socket.create_server((host, port))
        except (OSError, OverflowError) as error:
            raise ValueError(f"cannot listen on {host}:{port} ({error}); choose another host or port") from error
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and close all connections at once."""
        with self._lock:
            self._closed.set()
            connections = list(self._connections)
        for connection in (self._listener, *connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while not self._closed.is_set():
            connection = None
            try:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._run, args=(connection,), name=self._name, daemon=True).start()
            except (OSError, RuntimeError) as error:  # closed, or no descriptor or thread is left for now
                if connection is not None:
                    connection.close()
                if not self._closed.wait(_RETRY_SECONDS):
                    logger.warning("%s cannot serve a connection (%s)", self._name, error)

    def _run(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.add(connection)
        try:
            if not self._closed.is_set():
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                keep_alive(connection)
                self._serve(connection)
        except (ConnectionLostError, OSError):
            pass
        except Exception:
            logger.exception("a connection to %s failed", self._name)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()
