"""Connections whose ends prove the cluster key: attacks on the proof, and on messages after it."""

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest
import zmq
from tests.helpers.processes import HANG

from fleetfoot.engine.link import engine_keys
from fleetfoot.utils import curve, sockets
from fleetfoot.utils.cluster_key import ClusterKey
from fleetfoot.utils.sockets import (
    Channel,
    ConnectionLostError,
    SocketServer,
    UntrustedError,
    connect,
    parse_address,
    prove_as_client,
    prove_as_server,
)

KEY, OTHER = ClusterKey(b"the key of tests"), ClusterKey(b"another of tests")
GREETING = len(sockets._MAGIC) + 32


class Server:
    """Echoes messages, and keeps them."""

    def __init__(self) -> None:
        self.received: SimpleQueue[bytes] = SimpleQueue()
        self.server = SocketServer("127.0.0.1", 0, self._serve, "echo", KEY)
        self.address = self.server.address

    def _serve(self, channel: Channel) -> None:
        while True:
            message = channel.receive()
            self.received.put(message)
            channel.send(message)

    def echo(self, message: bytes = b"still here") -> None:
        """Assert that the right peers are served."""
        with contextlib.closing(connect(self.address, HANG, KEY, "echo")) as channel:
            channel.send(message)
            assert channel.receive() == message
        assert self.received.get(timeout=HANG) == message

    def stranger(self) -> socket.socket:
        return socket.create_connection(parse_address(self.address), HANG)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    assert server.received.empty()
    server.server.close()


def read_to_end(connection: socket.socket) -> bytes:
    """Everything that the other side sends until it closes the connection."""
    content = b""
    with contextlib.suppress(ConnectionResetError):
        while received := connection.recv(1 << 16):
            content += received
    return content


def test_messages_of_every_size(server: Server) -> None:
    for size in (0, 1, 3 << 20):
        server.echo(bytes(size))


def test_a_wrong_key_or_purpose_is_refused_on_both_sides(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fleetfoot"):
        for key, purpose in ((OTHER, "echo"), (KEY, "nodes")):
            with pytest.raises(UntrustedError, match="another cluster key"):
                connect(server.address, HANG, key, purpose)
        server.echo()
    assert "echo has refused 1 connections; the last is that of 127.0.0.1:" in caplog.text


@pytest.mark.parametrize("content", [b"", b"x", b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(64), b"\xff" * (1 << 20)])
def test_strangers_get_a_nonce_and_zeros_alone(server: Server, content: bytes) -> None:
    """No more than a frame of fixed size is read, however much is sent."""
    with contextlib.closing(server.stranger()) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(content)
            stranger.shutdown(socket.SHUT_WR)
        answer = read_to_end(stranger)
        assert answer.startswith(sockets._MAGIC[: len(answer)])
        assert answer[GREETING:] in (b"", bytes(32))
    server.echo()


def record(server: Server) -> tuple[bytes, bytes]:
    """What a client sends, and what the server does, for one message."""
    sent: list[bytes] = []
    got: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener, contextlib.closing(server.stranger()) as onward:

        def relay(source: socket.socket, target: socket.socket, log: list[bytes]) -> None:
            with contextlib.suppress(OSError):
                while content := source.recv(1 << 16):
                    log.append(content)
                    target.sendall(content)

        def serve() -> None:
            connection, _ = listener.accept()
            back = threading.Thread(target=relay, args=(onward, connection, got))
            with connection:
                back.start()
                relay(connection, onward, sent)
                onward.shutdown(socket.SHUT_RDWR)
                back.join()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with contextlib.closing(connect(f"127.0.0.1:{listener.getsockname()[1]}", HANG, KEY, "echo")) as channel:
            channel.send(b"secret")
            assert channel.receive() == b"secret"
        thread.join()
    assert server.received.get(timeout=HANG) == b"secret"
    return b"".join(sent), b"".join(got)


def test_a_recorded_handshake_cannot_be_replayed(server: Server) -> None:
    sent, got = record(server)
    with contextlib.closing(server.stranger()) as stranger:
        stranger.sendall(sent)
        assert read_to_end(stranger)[GREETING:] in (b"", bytes(32))
    with socket.create_server(("127.0.0.1", 0)) as listener:  # a false server, for a client

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(got)
                read_to_end(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(UntrustedError):
            connect(f"127.0.0.1:{listener.getsockname()[1]}", HANG, KEY, "echo")
        thread.join()
    server.echo()


def test_a_challenge_that_is_reflected_proves_nothing(server: Server) -> None:
    """Neither by the same connection, nor by another one to the same server."""
    with contextlib.closing(server.stranger()) as one, contextlib.closing(server.stranger()) as two:
        nonces = [connection.recv(GREETING, socket.MSG_WAITALL)[len(sockets._MAGIC) :] for connection in (one, two)]
        for connection, nonce in zip((one, two), reversed(nonces), strict=True):
            connection.sendall(nonce + nonce)
            assert read_to_end(connection) == bytes(32)
    ends = socket.socketpair()  # a client that is shown its own proof
    failures: list[Exception] = []

    def prove() -> None:
        try:
            prove_as_client(ends[0], KEY, "echo", HANG)
        except UntrustedError as error:
            failures.append(error)

    thread = threading.Thread(target=prove)
    thread.start()
    ends[1].sendall(sockets._MAGIC + bytes(32))
    answer = ends[1].recv(64, socket.MSG_WAITALL)
    ends[1].sendall(answer[32:])
    thread.join()
    assert len(failures) == 1
    for end in ends:
        end.close()


def test_slow_peers_in_masses_do_not_block_the_right_ones(server: Server) -> None:
    """None of them ends its proof, and each further one displaces the oldest."""
    loris = [server.stranger() for _ in range(3 * sockets.MAX_PENDING)]
    for stranger in loris:
        with contextlib.suppress(OSError):
            stranger.sendall(b"x")
    for _ in range(3):
        server.echo()
    assert read_to_end(loris[0])[GREETING:] == b""
    assert len(server.server._pending) <= sockets.MAX_PENDING
    for stranger in loris:
        stranger.close()


def test_a_proof_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, now = socket.socketpair(), [0.0]

    class Drip:
        """A peer that sends a byte for each second."""

        def settimeout(self, seconds: float) -> None:
            assert seconds <= 10.0

        def sendall(self, content: bytes) -> None:
            ends[0].sendall(content)

        def recv(self, count: int) -> bytes:
            now[0] += 1.0
            return b"x"

    monkeypatch.setattr(sockets.time, "monotonic", lambda: now[0])
    connection: Any = Drip()
    with pytest.raises(ConnectionLostError, match="has not proved the cluster key"):
        prove_as_server(connection, KEY, "echo", 10.0)
    assert now[0] == 10.0
    for end in ends:
        end.close()


def channels() -> tuple[Channel, Channel]:
    """Both ends of a connection."""
    one, two = socket.socketpair()
    return Channel(one, b"to two", b"to one"), Channel(two, b"to one", b"to two")


@pytest.mark.parametrize("how", ["changed", "repeated", "dropped", "reflected", "longer"])
def test_messages_that_were_tampered_with_end_the_connection(how: str) -> None:
    (sender, between), (receiver, line) = channels(), channels()
    frames = []
    for number in range(2):
        sender.send(b"message %d" % number)
        frames.append(between.connection.recv(1000))
    first, second = frames
    sent = {
        "changed": first.replace(b"0", b"1", 1),
        "repeated": first + first,
        "dropped": second,
        "longer": b"\xff\xff\xff\x7f" + first[4:],
    }.get(how, first)
    end = receiver if how != "reflected" else Channel(receiver.connection, b"to one", b"to one")
    end = end if how == "reflected" else Channel(receiver.connection, b"to one", b"to two")
    line.connection.sendall(sent)
    with pytest.raises(ConnectionLostError):
        for _ in range(2 if how == "repeated" else 1):
            assert end.receive() == b"message 0"
    for channel in (sender, between, receiver, line):
        channel.close()


def test_curve_sockets_refuse_strangers_and_large_frames() -> None:
    """A TCP socket of an engine: a client without the key is never heard, and a frame above the limit before the proof
    ends its connection; messages of the right client have any size."""
    own, clients = engine_keys(KEY)
    wrong = engine_keys(OTHER)
    with contextlib.ExitStack() as stack:
        context: zmq.Context[Any] = zmq.Context()
        stack.callback(context.term)
        check = curve.ClientCheck(context, clients[0])
        stack.callback(check.close)
        server = context.socket(zmq.ROUTER)
        stack.callback(server.close, 0)
        curve.listen_with(server, own)
        server.bind("tcp://127.0.0.1:*")
        address = server.getsockopt_string(zmq.LAST_ENDPOINT)
        outside: zmq.Context[Any] = zmq.Context()
        stack.callback(outside.destroy, 0)

        def client(message: bytes, keys: Any = None, public: bytes | None = None) -> None:
            end = outside.socket(zmq.DEALER)
            stack.callback(end.close, 0)
            if public is not None:
                curve.connect_with(end, keys, public)
            end.connect(address)
            end.send_multipart(curve.frames_of(message))

        client(b"no key")
        client(b"another key", wrong[1], wrong[0][0])
        client(b"the server's public key is not enough", wrong[1], own[0])
        client(b"the same", zmq.curve_keypair(), own[0])
        with socket.create_connection(parse_address(address.removeprefix("tcp://")), HANG) as raw:
            greeting = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
            raw.sendall(greeting)
            raw.sendall(b"\x06" + (1 << 20).to_bytes(8, "big") + b"x" * 1000)
            assert len(read_to_end(raw)) <= 64
        long = bytes(range(256)) * 2000
        client(long, clients, own[0])
        assert server.poll(HANG * 1000)
        _, *frames = server.recv_multipart()
        assert len(frames) > 1 and curve.message_of(frames) == long
        assert not server.poll(0)
