"""TCP connections between processes that share a cluster key: servers and clients prove it, and messages are signed.

The server speaks first, with frames of fixed size, and nothing else is read before the proof:

    server  ``_MAGIC`` and a nonce of 32 random bytes
    client  a nonce of 32 random bytes, and its signature over the purpose and both nonces
    server  its own signature over the same, or 32 zeros and the end

From both nonces follow two keys, one for each direction. Each message is its length, its content, and an HMAC-SHA256
over a counter, length and content: a message that was changed, repeated, dropped, or is of another connection ends the
connection. Messages are not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from fleetfoot.utils.cluster_key import SIGNATURE_BYTES, ClusterKey

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
PROOF_SECONDS = 10.0
"""How long a peer may take to prove the key."""
MAX_PENDING = 64
"""Peers of a server that may be about to prove the key at the same time; a further one displaces the oldest."""
_MAGIC = b"fleetft1"
_NONCE_BYTES = 32
_REFUSED = bytes(SIGNATURE_BYTES)
_LENGTH_BYTES = 4
_POLL_SECONDS = 0.05
_RETRY_SECONDS = 0.5
_KEEPALIVE_SECONDS = 10


class ConnectionLostError(RuntimeError):
    """The other end has closed the connection, or cannot be reached."""


class UntrustedError(ConnectionLostError):
    """The other end has not proved that it has the cluster key, or has sent a message with a wrong signature."""


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


class Channel:
    """A connection with a proof of the key from both ends. One thread may send and another one receive.

    ``connection`` is for data that has its own form, which `sign` and `check` are for.
    """

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self.connection = connection
        self._send_key, self._receive_key = send_key, receive_key
        self._num_sent = self._num_received = 0
        self.fileno, self.close = connection.fileno, connection.close

    def send(self, body: bytes) -> None:
        """Send a message. Raises ConnectionLostError if the other end is gone."""
        length = len(body).to_bytes(_LENGTH_BYTES, "little")
        try:
            self.connection.sendall(b"".join((length, body, self.sign(length, body))))
        except OSError as error:
            raise ConnectionLostError(f"the connection is lost ({error})") from error

    def receive(self, should_stop: Callable[[], bool] = never) -> bytes:
        """The next message. Raises ConnectionLostError if the other end is gone or has sent an invalid message, and
        StoppedError if ``should_stop``, which is polled, has returned True."""
        self.connection.settimeout(None if should_stop is never else _POLL_SECONDS)
        head = self._receive(_LENGTH_BYTES, should_stop)
        if (length := int.from_bytes(head, "little")) > MAX_MESSAGE_BYTES:
            raise ConnectionLostError(f"a message of {length:,} bytes is announced; the most is {MAX_MESSAGE_BYTES:,}")
        body = self._receive(length, should_stop)
        self.check(self._receive(SIGNATURE_BYTES, should_stop), head, body)
        return body

    def sign(self, *parts: Any) -> bytes:
        """The signature of the next data that is sent; ``parts``: buffers, which are signed as one."""
        self._num_sent += 1
        return _sign(self._send_key, self._num_sent, parts)

    def check(self, signature: bytes | bytearray, *parts: Any) -> None:
        """Raise UntrustedError unless ``signature`` is that of the next data that is received."""
        self._num_received += 1
        if not hmac.compare_digest(signature, _sign(self._receive_key, self._num_received, parts)):
            raise UntrustedError("a message has a wrong signature")

    def _receive(self, count: int, should_stop: Callable[[], bool]) -> bytes:
        content = bytearray()
        while len(content) < count:
            try:
                received = self.connection.recv(min(count - len(content), 1 << 20))
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


def _sign(key: bytes, number: int, parts: tuple[Any, ...]) -> bytes:
    mac = hmac.new(key, number.to_bytes(8, "big"), "sha256")
    for part in parts:
        mac.update(part)
    return mac.digest()


# --- the proof ------------------------------------------------------------------------------------------------------


def prove_as_client(connection: socket.socket, key: ClusterKey, purpose: str, timeout: float) -> Channel:
    """Prove the key to a server, and have it prove the same.

    Raises UntrustedError: the other end is no server for this purpose, or has another key; ConnectionLostError: it is
    gone, or does not answer within ``timeout`` seconds.
    """
    until = time.monotonic() + timeout
    greeting = _receive_by(connection, len(_MAGIC) + _NONCE_BYTES, until)
    if not greeting.startswith(_MAGIC):
        raise UntrustedError("it is no server of this version of Fleetfoot")
    nonces = greeting[len(_MAGIC) :], secrets.token_bytes(_NONCE_BYTES)
    _send_by(connection, nonces[1] + key.sign(f"{purpose}: client", *nonces), until)
    proof = _receive_by(connection, SIGNATURE_BYTES, until)
    if not key.verify(proof, f"{purpose}: server", *nonces):
        raise UntrustedError("it has another cluster key, or serves something else; give both the same key")
    return _proved(connection, key, purpose, nonces, ("server", "client"))


def prove_as_server(connection: socket.socket, key: ClusterKey, purpose: str, timeout: float) -> Channel:
    """Have a client prove the key, and prove the same; raises as `prove_as_client`."""
    until = time.monotonic() + timeout
    nonce = secrets.token_bytes(_NONCE_BYTES)
    _send_by(connection, _MAGIC + nonce, until)
    answer = _receive_by(connection, _NONCE_BYTES + SIGNATURE_BYTES, until)
    nonces = nonce, answer[:_NONCE_BYTES]
    if not key.verify(answer[_NONCE_BYTES:], f"{purpose}: client", *nonces):
        _send_by(connection, _REFUSED, until)
        raise UntrustedError("it has another cluster key, or none")
    _send_by(connection, key.sign(f"{purpose}: server", *nonces), until)
    return _proved(connection, key, purpose, nonces, ("client", "server"))


def _proved(
    connection: socket.socket, key: ClusterKey, purpose: str, nonces: tuple[bytes, bytes], ends: tuple[str, str]
) -> Channel:
    """``ends``: the other one and this one."""
    connection.settimeout(None)
    return Channel(connection, *(key.sign(f"{purpose}: messages to {end}", *nonces) for end in ends))


def _receive_by(connection: socket.socket, count: int, until: float) -> bytes:
    content = b""
    try:
        while len(content) < count:
            connection.settimeout(max(0.001, until - time.monotonic()))
            if not (received := connection.recv(count - len(content))):
                raise ConnectionLostError("it has closed the connection before the cluster key was proved")
            content += received
            if time.monotonic() >= until and len(content) < count:
                raise TimeoutError("timed out")
    except OSError as error:
        raise ConnectionLostError(f"it has not proved the cluster key ({error})") from error
    return content


def _send_by(connection: socket.socket, content: bytes, until: float) -> None:
    try:
        connection.settimeout(max(0.001, until - time.monotonic()))
        connection.sendall(content)
    except OSError as error:
        raise ConnectionLostError(f"it has not proved the cluster key ({error})") from error


def connect(address: str, timeout: float, key: ClusterKey, purpose: str) -> Channel:
    """A connection without delays, with a server for ``purpose``. Raises ConnectionLostError if there is none within
    ``timeout`` seconds, and UntrustedError if what is there does not prove the key."""
    until = time.monotonic() + timeout
    try:
        connection = socket.create_connection(parse_address(address), timeout=timeout)
    except OSError as error:
        raise ConnectionLostError(f"{address} cannot be reached ({error})") from error
    try:
        _configure(connection)
        return prove_as_client(connection, key, purpose, until - time.monotonic())
    except ConnectionLostError as error:
        connection.close()
        raise type(error)(f"{address} is not accepted: {error}") from error
    except BaseException:
        connection.close()
        raise


def _configure(connection: socket.socket) -> None:
    """No delays, and TCP keepalive, which detects hosts that disappear without closing the connection."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), _KEEPALIVE_SECONDS)


class SocketServer:
    """Serves each connection in its own thread, once its peer has proved the key; others are closed and logged.

    Args:
        host, port: where to listen; port 0: any free port.
        serve: called with each connection, which is closed when it returns or raises, unless it returns True.
        purpose: of the server, which its clients must name; also the threads' name.
        key: of the deployment.

    Raises ValueError if the address cannot be listened on.
    """

    def __init__(
        self, host: str, port: int, serve: Callable[[Channel], bool | None], purpose: str, key: ClusterKey
    ) -> None:
        self._serve, self._purpose, self._key = serve, purpose, key
        try:
            self._listener = socket.create_server((host, port), backlog=MAX_PENDING)
        except (OSError, OverflowError) as error:
            raise ValueError(f"cannot listen on {host}:{port} ({error}); choose another host or port") from error
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._pending: dict[socket.socket, None] = {}  # in the order of their arrival
        self._connections: set[socket.socket] = set()
        self._num_refused = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"{purpose}-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening, and close all connections at once, but those that `serve` has kept."""
        with self._lock:
            self._closed.set()
            connections = [*self._pending, *self._connections]
        for connection in (self._listener, *connections):
            _shut_down(connection)
        self._listener.close()
        self._thread.join()

    def _accept(self) -> None:
        while not self._closed.is_set():
            connection = None
            try:
                connection, peer = self._listener.accept()
                with self._lock:
                    if len(self._pending) >= MAX_PENDING:
                        _shut_down(next(iter(self._pending)))
                        del self._pending[next(iter(self._pending))]
                    self._pending[connection] = None
                arguments = connection, f"{peer[0]}:{peer[1]}"
                threading.Thread(target=self._run, args=arguments, name=self._purpose, daemon=True).start()
            except (OSError, RuntimeError) as error:  # closed, or no descriptor or thread is left for now
                if connection is not None:
                    self._forget(connection)
                if not self._closed.wait(_RETRY_SECONDS):
                    logger.warning("%s cannot serve a connection (%s)", self._purpose, error)

    def _run(self, connection: socket.socket, peer: str) -> None:
        is_kept = False
        try:
            _configure(connection)
            try:
                channel = prove_as_server(connection, self._key, self._purpose, PROOF_SECONDS)
            except ConnectionLostError as error:
                self._log_refusal(peer, error)
                return
            with self._lock:
                self._pending.pop(connection, None)
                self._connections.add(connection)
            if not self._closed.is_set():
                is_kept = self._serve(channel) is True
        except (ConnectionLostError, OSError):
            pass
        except Exception:
            logger.exception("a connection to %s failed", self._purpose)
        finally:
            self._forget(connection, is_kept=is_kept)

    def _forget(self, connection: socket.socket, *, is_kept: bool = False) -> None:
        with self._lock:
            self._pending.pop(connection, None)
            self._connections.discard(connection)
        if not is_kept:
            connection.close()

    def _log_refusal(self, peer: str, error: Exception) -> None:
        """The first one, the second, the fourth and so on: a stranger cannot fill the log."""
        with self._lock:
            self._num_refused += 1
            number = self._num_refused
        if not self._closed.is_set() and number & (number - 1) == 0:
            message = "%s has refused %d connections; the last is that of %s: %s"
            logger.warning(message, self._purpose, number, peer, error)


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
