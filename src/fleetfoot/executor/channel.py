"""Sockets between the engine and its workers. Steps go out on one socket a worker, reports come in on one for all.

On one machine they are files in a folder that only the user can enter. Between machines they are TCP with CURVE
(http://curvezmq.org): encrypted, and of no use to whoever does not know the engine's public key, which the nodes learn
at their rendezvous. Messages are queued without limit. What is sent to a worker that is not connected waits until it
is, or fails after a while.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import zmq

_LINGER_MS = 2000
"""How long a worker that ends goes on trying to send its last report."""
_SEND_MS = 10_000
"""How long the engine waits for a worker's connection. It is there, unless the worker is gone."""


@dataclass(frozen=True, slots=True)
class WorkerAddresses:
    """What a worker needs to know to reach the engine."""

    steps: str
    reports: str
    engine_key: bytes | None
    """Public; None: no encryption."""


class EngineChannel:
    """The engine's end.

    Args:
        place: a folder for the sockets; or an IP address of this machine, for workers on others.
        num_workers: of the whole world.
    """

    def __init__(self, place: Path | str, num_workers: int) -> None:
        self._context = zmq.Context()
        self._keys = None if isinstance(place, Path) else zmq.curve_keypair()
        self.reports = self._bind(zmq.PULL, place, "reports")
        self._steps = [self._bind(zmq.PUSH, place, f"steps-{rank}") for rank in range(num_workers)]
        # the context keeps the sockets' addresses until they are closed
        self.addresses = [
            WorkerAddresses(_address(steps), _address(self.reports), self._keys[0] if self._keys else None)
            for steps in self._steps
        ]

    def _bind(self, kind: int, place: Path | str, name: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.sndhwm = socket.rcvhwm = 0
        socket.linger = 0
        socket.sndtimeo = _SEND_MS
        if self._keys is not None:
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = self._keys
        socket.bind(f"ipc://{place / name}" if isinstance(place, Path) else f"tcp://{place}:*")
        return socket

    def send(self, message: bytes) -> None:
        """To every worker; waits for none that is there.

        Raises:
            ConnectionError: one is gone.
        """
        for rank, socket in enumerate(self._steps):
            try:
                socket.send(message)
            except zmq.Again as error:
                raise ConnectionError(f"worker {rank} is not connected any more") from error

    def receive(self) -> bytes | None:
        """A report, if one has come."""
        try:
            return self.reports.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def flush(self) -> None:
        """What has been sent is delivered, or given up after a while, once the channel is closed."""
        for socket in self._steps:
            socket.linger = _LINGER_MS

    def close(self) -> None:
        """Safe to call again, in any thread once no other uses the channel."""
        for socket in (*self._steps, self.reports):
            socket.close()
        self._context.term()


class WorkerChannel:
    """A worker's end. Each thread that reports has a socket of its own: they cannot be shared."""

    def __init__(self, addresses: WorkerAddresses) -> None:
        self._addresses = addresses
        self._context = zmq.Context()
        self._keys = None if addresses.engine_key is None else zmq.curve_keypair()
        self._steps = self._connect(zmq.PULL, addresses.steps)

    def _connect(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.sndhwm = socket.rcvhwm = 0
        socket.linger = _LINGER_MS
        if self._keys is not None:
            socket.curve_serverkey = self._addresses.engine_key
            socket.curve_publickey, socket.curve_secretkey = self._keys
        socket.connect(address)
        return socket

    def receive(self) -> bytes:
        """Wait for a message."""
        return self._steps.recv()

    def open_reports(self) -> zmq.Socket[bytes]:
        """A socket to send reports from the thread that calls this."""
        return self._connect(zmq.PUSH, self._addresses.reports)

    def close(self) -> None:
        """Sends what is left. No other thread may use its socket any more."""
        self._context.destroy(_LINGER_MS)


def _address(socket: zmq.Socket[bytes]) -> str:
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
