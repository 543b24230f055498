"""How the machines of one engine find each other, and hear of each other's end.

Node 0, where the engine is, opens the store of torch.distributed at ``master_addr:master_port``. In it lies what the
others need: what they must agree on, the addresses of the engine's sockets with their public key, and the address of a
plain TCP connection, the link, that each of them keeps open to node 0. Its end is the end of the machine, or of what
ran there. Whoever can read the store can become a part of the engine: the port is for the engine's machines alone.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from fleetfoot.config.engine import EngineConfig
from fleetfoot.execution.channel import WorkerAddresses
from fleetfoot.execution.node_facts import check_same, facts_of
from fleetfoot.plan.plan import EnginePlan

GATHER_S = 600.0
"""How long nodes wait for each other when they start."""
_SLICE_S = 1.0
"""How long a wait goes on before Ctrl-C can end it."""
_KNOCK_S = 0.5
"""Between two attempts to reach a machine that may not be there yet; nothing could say when it is."""
_HELLO_S = 10.0
"""How long whoever connects may take to say who it is."""
_ENGINE, _NODE = "fleetfoot/engine", "fleetfoot/node-{}"
_OVER, _FAILED = "over", "failed"


class Invitation(msgspec.Struct):
    """What node 0 tells the others."""

    facts: dict[str, str]
    engine_id: str
    addresses: list[WorkerAddresses]
    link_port: int
    secret: str


def check_is_first_node(config: EngineConfig) -> None:
    """Raise ValueError if the engine does not start on this machine."""
    if config.node_rank != 0:
        raise ValueError(
            f"node_rank is {config.node_rank}: the engine starts on node 0, and this machine runs `fleetfoot worker` "
            "with the same settings"
        )


def check_devices(plan: EnginePlan) -> None:
    """Raise ValueError if this machine has fewer GPUs than ranks."""
    config = plan.config
    if plan.device != "cuda" or config.local_world_size <= torch.cuda.device_count():
        return
    spread = f", spread over nnodes {config.nnodes}," if config.nnodes > 1 else ""
    raise ValueError(
        f"tensor_parallel_size {config.tensor_parallel_size} times pipeline_parallel_size "
        f"{config.pipeline_parallel_size}{spread} needs {config.local_world_size} GPUs on each machine, and torch "
        f"finds {torch.cuda.device_count()} here"
    )


class Link:
    """A connection between node 0 and another one. Each side says one thing at most, and then leaves."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine may go without a word
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def say(self, kind: str, reason: str) -> None:
        with contextlib.suppress(OSError):  # who has left needs to hear nothing
            self._connection.sendall(msgspec.json.encode((kind, reason)))
            self._connection.shutdown(socket.SHUT_WR)

    def hear(self) -> tuple[str, str]:
        """What the other side says at its end; if it left without a word, ``gone``."""
        said = b""
        try:
            while part := self._connection.recv(1 << 16):
                said += part
            return msgspec.json.decode(said, type=tuple[str, str])
        except (OSError, msgspec.DecodeError):
            return "gone", ""

    def close(self) -> None:
        self._connection.close()


class EngineNodes:
    """The other machines, as node 0 sees them.

    Raises:
        ValueError: ``master_addr`` is not this machine's, or the port is taken.
    """

    def __init__(self, plan: EnginePlan) -> None:
        config = plan.config
        self._plan = plan
        self._links: dict[int, Link] = {}
        self.port = config.master_port
        try:
            self.address = socket.gethostbyname(config.master_addr)
            self._server = socket.create_server((self.address, 0), backlog=config.nnodes)
        except OSError as error:
            raise ValueError(
                f"master_addr is {config.master_addr!r}, and nothing can listen there: {error}; it must be an address "
                "of node 0, which is this machine"
            ) from error
        try:
            self._store = dist.TCPStore(self.address, self.port, is_master=True, wait_for_workers=False)
        except RuntimeError as error:
            self._server.close()
            raise ValueError(
                f"master_port is {self.port}, and node 0 cannot listen there: {_first_line(error)}; choose another "
                "one, the same on all nodes"
            ) from error

    def gather(self, addresses: Sequence[WorkerAddresses]) -> None:
        """Wait for all nodes.

        Raises:
            ValueError: one of them is set up differently. TimeoutError: one does not come.
        """
        facts, secret = facts_of(self._plan), secrets.token_hex(32)
        link_port = self._server.getsockname()[1]
        invitation = Invitation(facts, self._plan.engine_id, list(addresses), link_port, secret)
        self._store.set(_ENGINE, msgspec.json.encode(invitation).decode())
        until = time.monotonic() + GATHER_S
        for node in range(1, self._plan.config.nnodes):
            others = _get(self._store, _NODE.format(node), until, f"node {node} has not come")
            check_same(facts, msgspec.json.decode(others, type=dict[str, str]), node=node)
        while len(self._links) < self._plan.config.nnodes - 1:
            self._accept(secret, until)

    def _accept(self, secret: str, until: float) -> None:
        self._server.settimeout(max(0.0, until - time.monotonic()))
        connection, _ = self._server.accept()
        connection.settimeout(_HELLO_S)
        try:
            node, token = _read_line(connection).split()
            is_known = hmac.compare_digest(token, secret) and int(node) not in self._links
        except (OSError, ValueError):
            is_known = False
        if is_known:
            self._links[int(node)] = Link(connection)
        else:
            connection.close()

    @property
    def descriptors(self) -> list[int]:
        """File descriptors that can be read when a node has something to say, or is gone."""
        return [link.fileno() for link in self._links.values()]

    def gone(self, wait_ms: int = 0) -> str:
        """A sentence about a node that is no more; empty: all are there."""
        readable, _, _ = select.select(self.descriptors, [], [], wait_ms / 1000)
        for node, link in self._links.items():
            if link.fileno() in readable:
                _, reason = link.hear()
                return f"node {node}: {reason or 'the connection to it has ended'}"
        return ""

    def say_over(self) -> None:
        """The engine ends, and nothing is wrong."""
        for link in self._links.values():
            link.say(_OVER, "")

    def close(self, reason: str) -> None:
        """The engine ends; whoever has not been told otherwise hears why."""
        for link in self._links.values():
            link.say(_FAILED, reason)
            link.close()
        self._links = {}
        self._server.close()


class Membership:
    """This machine's place in an engine whose node 0 is another one.

    Raises:
        ValueError: the machines are set up differently.
        TimeoutError, ConnectionError: node 0 does not come, or does not take this one.
    """

    def __init__(self, plan: EnginePlan) -> None:
        config, until = plan.config, time.monotonic() + GATHER_S
        self.port = config.master_port
        try:
            self.address = socket.gethostbyname(config.master_addr)
        except OSError as error:
            raise ValueError(f"master_addr is {config.master_addr!r}, which is no address: {error}") from error
        store = self._open_store(until)
        invitation = msgspec.json.decode(_get(store, _ENGINE, until, "node 0 has not come"), type=Invitation)
        facts = facts_of(plan)
        store.set(_NODE.format(config.node_rank), msgspec.json.encode(facts).decode())  # so that both refuse
        check_same(facts, invitation.facts, node=0)
        self.engine_id = invitation.engine_id
        self.addresses = invitation.addresses
        connection = socket.create_connection((self.address, invitation.link_port), timeout=_HELLO_S)
        connection.sendall(f"{config.node_rank} {invitation.secret}\n".encode())
        self.link = Link(connection)

    def _open_store(self, until: float) -> dist.Store:
        """The store's own way to wait for node 0 fills the terminal, and Ctrl-C does not end it."""
        while True:
            try:
                socket.create_connection((self.address, self.port), timeout=_left(until, _HELLO_S)).close()
                return dist.TCPStore(self.address, self.port, is_master=False)
            except OSError as error:
                if time.monotonic() >= until:
                    raise TimeoutError(
                        f"nobody answers at master_addr {self.address}, master_port {self.port}: start node 0, and "
                        "check both"
                    ) from error
                time.sleep(_KNOCK_S)
            except RuntimeError as error:
                raise ConnectionError(
                    f"what answers at master_addr {self.address}, master_port {self.port} is not node 0: "
                    f"{_first_line(error)}"
                ) from error

    def failed(self, reason: str) -> None:
        """Tell node 0 that this one is no more."""
        self.link.say(_FAILED, reason)

    def end(self) -> str | None:
        """What node 0 says at its end: why it has failed, or None if all is well."""
        kind, reason = self.link.hear()
        if kind == _OVER:
            return None
        return reason or "node 0 is gone"


def _get(store: dist.Store, key: str, until: float, problem: str) -> bytes:
    """Wait for a value; Ctrl-C gets through."""
    while True:
        try:
            store.wait([key], timedelta(seconds=_left(until, _SLICE_S)))
            return store.get(key)
        except RuntimeError as error:
            if time.monotonic() >= until:
                raise TimeoutError(f"{problem} within {GATHER_S:.0f} s") from error
            if not isinstance(error, dist.DistStoreError):
                raise ConnectionError(f"the store of node 0 is gone: {_first_line(error)}") from error


def _left(until: float, most: float) -> float:
    return min(most, max(0.001, until - time.monotonic()))


def _read_line(connection: socket.socket) -> str:
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(256)
        if not part or len(line) > 256:
            raise ValueError("no line")
        line += part
    return line.decode()


def _first_line(error: Any) -> str:
    return str(error).partition("\n")[0]
