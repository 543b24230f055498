"""The connectors of two engines, a producer and a consumer, and a relay between them that can inject faults."""

import base64
import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from fleetfoot.config import env
from fleetfoot.kv_transfer.base.connector import TransferContext
from fleetfoot.kv_transfer.base.offers import Offer, Offers
from fleetfoot.kv_transfer.nixl.params import NixlSettings
from fleetfoot.kv_transfer.nixl.side_channel import SIDE_CHANNEL
from fleetfoot.kv_transfer.nixl.transfer_agent import TcpAgent, TransferAgent, make_agent, nixl_api
from fleetfoot.kv_transfer.nixl.worker import NixlWorker
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import KVConnectorOutput, NewRequest, SchedulerOutput
from fleetfoot.utils.cluster_key import ClusterKey, find_cluster_key
from fleetfoot.utils.sockets import Channel, ConnectionLostError, SocketServer, connect, parse_address
from tests.helpers.kv_bench import BLOCKS, PLACES, TOKENS, Bench, transfer_config


def skip_without(backend: str) -> None:
    """Skip the test if the backend's library is not installed."""
    if backend == "nixl":
        try:
            nixl_api()
        except ValueError:
            pytest.skip("the extra nixl is not installed")


def join_threads(*names: str) -> None:
    """Wait until the threads of these names have ended; by default those of all connectors and lines."""
    for thread in threading.enumerate():
        if thread.name in names or (not names and thread.name.startswith(("kv-", "line"))):
            thread.join(60)
            assert not thread.is_alive(), thread.name


def whole(content: bytes, offset: int) -> bytes:
    """No fault."""
    return content


def flip_at(place: int) -> Callable[[bytes, int], bytes]:
    """A bit of this byte of every connection is flipped."""

    def flip(content: bytes, offset: int) -> bytes:
        index = place - offset
        if 0 <= index < len(content):
            content = content[:index] + bytes([content[index] ^ 1]) + content[index + 1 :]
        return content

    return flip


def cut_at(place: int) -> Callable[[bytes, int], bytes]:
    """Every connection is closed after this many bytes."""
    return lambda content, offset: content[: max(0, place - offset)]


def cluster_key() -> ClusterKey:
    """That of the tests."""
    return find_cluster_key(None, env.cluster_key(), ())


class Gate:
    """Holds bytes back until it is opened: those that contain ``at``, and all after them."""

    def __init__(self, at: bytes = b"") -> None:
        self._at = at
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, content: bytes, offset: int) -> bytes:
        if self._at in content:
            self.reached.set()
            assert self.opened.wait(30)
        return content


class Line(contextlib.AbstractContextManager["Line"]):
    """A relay between consumers and one producer.

    Attributes:
        spoil: called with the bytes that the producer sends, and how many it has sent on this connection before;
            returns the bytes to pass on. If fewer, the connection is closed after them.
        asked: set once the producer has received something.
    """

    def __init__(self, address: str) -> None:
        self.producer = address
        self._connections: list[socket.socket] = []
        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), self._handler(), bind_and_activate=True)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), name="line-accept", daemon=True).start()
        self.spoil: Callable[[bytes, int], bytes] = whole
        self.asked = threading.Event()

    def _handler(self) -> Any:
        line = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                threading.current_thread().name = "line"
                line._connections.append(self.request)
                line._serve(self.request)

        return Handler

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:
            _cut(connection)

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, consumer: socket.socket) -> None:
        with socket.create_connection(parse_address(self.producer)) as producer:
            back = threading.Thread(target=self._pass_back, args=(producer, consumer), daemon=True)
            back.start()
            with contextlib.suppress(OSError):
                while content := consumer.recv(1 << 16):
                    producer.sendall(content)
                    self.asked.set()
            _cut(producer)
            back.join()

    def _pass_back(self, producer: socket.socket, consumer: socket.socket) -> None:
        offset = 0
        with contextlib.suppress(OSError):
            while content := producer.recv(1 << 16):
                spoiled = self.spoil(content, offset)
                offset += len(content)
                consumer.sendall(spoiled)
                if not spoiled or len(spoiled) < len(content):
                    break
        _cut(consumer)


def _cut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class EngineLine(contextlib.AbstractContextManager["EngineLine"]):
    """A relay for the side channel of an engine with a TCP agent: one of its ``remote_addresses``. It has the key, so
    that consumers read the KV itself through `data`; what `spoil` gets are signed messages."""

    def __init__(self, address: str) -> None:
        self._producer = address
        self._server = SocketServer("127.0.0.1", 0, self._serve, SIDE_CHANNEL, cluster_key())
        self._line = Line(self._server.address)
        self.address = self._line.address
        self.data = Line("")  # the agent's address comes with the first Granted
        self.asked = self._line.asked

    @property
    def spoil(self) -> Callable[[bytes, int], bytes]:
        return self._line.spoil

    @spoil.setter
    def spoil(self, spoil: Callable[[bytes, int], bytes]) -> None:
        self._line.spoil = spoil

    def close(self) -> None:
        for part in (self._line, self._server, self.data):
            part.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, consumer: Channel) -> None:
        with contextlib.closing(connect(self._producer, 30.0, cluster_key(), SIDE_CHANNEL)) as producer:
            back = threading.Thread(target=self._pass_back, args=(producer, consumer), daemon=True)
            back.start()
            with contextlib.suppress(ConnectionLostError, OSError):
                while True:
                    producer.send(consumer.receive())
            _cut(producer.connection)
            back.join()

    def _pass_back(self, producer: Channel, consumer: Channel) -> None:
        with contextlib.suppress(ConnectionLostError, OSError):
            while True:
                consumer.send(self._redirected(producer.receive()))
        _cut(consumer.connection)

    def _redirected(self, content: bytes) -> bytes:
        if b"Granted" not in content:
            return content
        granted = msgspec.msgpack.decode(content)
        agent = msgspec.msgpack.decode(granted["agent"])
        self.data.producer = agent["address"]
        granted["agent"] = msgspec.msgpack.encode({**agent, "address": self.data.address})
        return msgspec.msgpack.encode(granted)


class LineAgent(TcpAgent):
    """A TCP agent that is reached through a `Line`."""

    def __init__(self, name: str, host: str, key: ClusterKey) -> None:
        super().__init__(name, host, key)
        self.line = Line(self._server.address)
        self.metadata = msgspec.msgpack.encode({"name": name, "address": self.line.address})

    def close(self) -> None:
        self.line.close()
        super().close()


KEY = ClusterKey(b"a key of tests alone")
"""Of all engines of the tests."""


def opened(params: Any) -> Offer:
    """The offer in the ``kv_transfer_params`` of an output."""
    return msgspec.msgpack.decode(base64.urlsafe_b64decode(params["offer"])[32:], type=Offer)


def changed(params: Any, key: ClusterKey = KEY, **fields: Any) -> dict[str, Any]:
    """The same with other fields of the offer, signed again: only an engine can make it."""
    return {**params, "offer": Offers(key, (), 30.0).text_of(msgspec.structs.replace(opened(params), **fields))}


class Engine(Bench):
    """One of the pair. ``line``: consumers reach its memory through a `Line` for each rank, see ``lines``."""

    def __init__(
        self, *, role: str = "kv_both", backend: str = "tcp", timeout: float = 60.0, line: bool = False,
        extra: dict[str, Any] | None = None, jobs: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        self.lines: list[Line] = []
        self.sent: set[str] = set()

        def make(backend: str, name: str, host: str, key: ClusterKey) -> TransferAgent:
            if not line:
                return make_agent(backend, name, host, key)
            agent = LineAgent(name, host, key)
            self.lines.append(agent.line)
            return agent

        def worker(context: TransferContext) -> NixlWorker:
            return NixlWorker(context, NixlSettings.of(context.config), cluster_key(), make_agent=make, jobs=jobs)

        config = transfer_config("NixlConnector", role=role, timeout=timeout, backend=backend, **(extra or {}))
        super().__init__(config, make_worker=worker, **options)
        self.step(idle=True)  # reports the addresses of its ranks

    def step(self, *arguments: Any, **options: Any) -> KVConnectorOutput:
        output = super().step(*arguments, **options)
        self.sent |= output.sent
        return output

    def hold(
        self, request_id: str, tokens: Sequence[int] = TOKENS, blocks: Sequence[int] = BLOCKS, *, step: bool = True,
        window: Sequence[int] = (),
    ) -> Any:  # fmt: skip
        """The ``kv_transfer_params`` of a finished prefill. ``step``: take a step, in which the workers get it."""
        request = self.request(request_id, tokens, blocks, window)
        request.kv_transfer_params = {"do_remote_decode": True}
        self.scheduler.check_request(request)
        request.output_token_ids.append(99)
        request.status = RequestStatus.FINISHED_LENGTH
        is_held, params = self.scheduler.request_finished(request)
        assert is_held == (params is not None)
        if step:
            self.step(idle=True)
        return params

    def remote(
        self, params: Any, request_id: str = "r", tokens: Sequence[int] = TOKENS, blocks: Sequence[int] = PLACES
    ) -> Request:
        """A request with these ``kv_transfer_params``."""
        request = self.request(request_id, tokens, blocks)
        request.kv_transfer_params = params
        self.scheduler.check_request(request)
        return request

    def run(self, request: Request) -> None:
        """A step that schedules the request without a load."""
        output = SchedulerOutput(self.num_steps, [], [], 0, 0, 0, new_requests=[NewRequest.of(request)])
        output.kv_connector_metadata = self.scheduler.build_connector_meta(output)
        for step in self.steps:
            step.pre_forward(output)
            step.post_forward(set())

    def until_sent(self, request_id: str) -> None:
        for _ in range(1000):
            if request_id in self.sent:
                return
            self.step(idle=True)
        raise AssertionError(f"{request_id} was never reported as sent")
