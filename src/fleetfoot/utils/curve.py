"""ZeroMQ sockets on TCP that only processes with the cluster key can use, by CURVE (http://curvezmq.org).

Each end proves a key pair by fresh nonces, and messages are encrypted and authenticated by keys of the connection
alone. The pairs follow from the cluster key, or their public keys cross an authenticated connection. Before the proof a
peer can send no frame above `MAX_FRAME_BYTES`, and has `_HANDSHAKE_MS` for it; ZeroMQ decodes nothing but the frames of
its handshake until then. So messages are sent in frames of that size.
"""

from __future__ import annotations

import hmac
import logging
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from fleetfoot.utils.cluster_key import ClusterKey

logger = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 << 10
"""The largest part of a message."""
_ROOM_BYTES = 1 << 10
"""What CURVE adds to a frame, and more."""
_HANDSHAKE_MS = 10_000
_DOMAIN = "fleetfoot"

KeyPair = tuple[bytes, bytes]
"""A public and a secret key."""


def curve_pair(key: ClusterKey, purpose: str, *parts: bytes) -> KeyPair:
    """The key pair of one end, which follows from the cluster key."""
    secret = z85.encode(key.sign(f"curve: {purpose}", *parts))
    return zmq.curve_public(secret), secret


def listen_with(socket: zmq.Socket[Any], own: KeyPair) -> None:
    """Let a socket, before it is bound, accept the clients of the context's `ClientCheck` alone."""
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = own
    socket.zap_domain = _DOMAIN.encode()
    _limit(socket)


def connect_with(socket: zmq.Socket[Any], own: KeyPair, server: bytes) -> None:
    """Let a socket, before it is connected, accept the server with this public key alone."""
    socket.curve_publickey, socket.curve_secretkey = own
    socket.curve_serverkey = server
    _limit(socket)


def _limit(socket: zmq.Socket[Any]) -> None:
    socket.maxmsgsize = MAX_FRAME_BYTES
    socket.handshake_ivl = _HANDSHAKE_MS


def frames_of(message: bytes) -> list[bytes]:
    """The parts of a message that `listen_with` and `connect_with` let through."""
    size = MAX_FRAME_BYTES - _ROOM_BYTES
    if len(message) <= size:
        return [message]
    view = memoryview(message)
    return [bytes(view[begin : begin + size]) for begin in range(0, len(message), size)]


def message_of(frames: list[bytes]) -> bytes:
    """The argument of `frames_of`."""
    return frames[0] if len(frames) == 1 else b"".join(frames)


class ClientCheck:
    """Refuses clients of a context's sockets that do not have the ``allowed`` public key. It is a thread, which `close`
    ends; the context must be terminated afterwards."""

    def __init__(self, context: zmq.Context[Any], allowed: bytes) -> None:
        self._allowed = allowed
        self._num_refused = 0
        self._thread = ThreadAuthenticator(context, log=logger)
        self._thread.start()
        self._thread.configure_curve_callback(_DOMAIN, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client is accepted; called by the thread. Refusals are logged: the first one, the second, the
        fourth and so on, so that a stranger cannot fill the log."""
        if hmac.compare_digest(key, self._allowed):
            return True
        self._num_refused += 1
        if self._num_refused & (self._num_refused - 1) == 0:
            logger.warning("%d clients without the cluster key were refused", self._num_refused)
        return False

    def close(self) -> None:
        """Safe to call again."""
        self._thread.stop()
