"""How the machines of one engine find each other, and hear of each other's end.

Node 0, where the engine is, listens at ``master_addr:master_port``. Every other node connects to it and says how it is
set up; if that agrees, it is told where the engine's sockets are, with their public key, and where the store of
torch.distributed is, at which all workers meet. The connection stays, as the link of both nodes: its end is the end
of the machine, or of what ran there. Whoever reaches the port and knows the settings can become a part of the engine:
it is for the engine's machines alone.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

from fleetfoot.config.engine import EngineConfig
from fleetfoot.executor.channel import WorkerAddresses
from fleetfoot.executor.node_facts import check_same, facts_of
from fleetfoot.plan.plan import EnginePlan

logger = logging.getLogger(__name__)

GATHER_S = 600.0
"""How long nodes wait for each other when they start."""
_KNOCK_S = 0.5
"""Between two attempts to reach a machine that may not be there yet; nothing could say when it is."""
_HELLO_S = 10.0
"""How long whoever connects may take to say who it is."""
_MAX_LINE = 1 << 20
_OVER, _FAILED, _GONE = "over", "failed", "gone"

_T = TypeVar("_T")


class Hello(msgspec.Struct):
    """What a node says first."""

    node_rank: int
    facts: dict[str, str]


class Invitation(msgspec.Struct):
    """What node 0 answers."""

    facts: dict[str, str]
    """Its own, so that both can say in what they differ."""
    refusal: str
    """Why the node cannot take part though its facts are the same; empty: it can."""
    engine_id: str
    addresses: list[WorkerAddresses]
    store_port: int


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
    """A connection between node 0 and another one. After the greeting, each side says one thing at most, and leaves."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine may go without a word
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection = connection
        self._reader = connection.makefile("rb")

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, greeting: msgspec.Struct) -> None:
        self._connection.sendall(msgspec.json.encode(greeting) + b"\n")

    def receive(self, kind: type[_T], timeout_s: float) -> _T:
        """The other side's greeting.

        Raises:
            OSError: it has left, or says nothing. ValueError: it says something else.
        """
        self._connection.settimeout(timeout_s)
        line = self._reader.readline(_MAX_LINE)
        self._connection.settimeout(None)
        if not line:
            raise ConnectionError("the connection has ended")
        return msgspec.json.decode(line, type=kind)

    def say(self, kind: str, reason: str) -> None:
        with contextlib.suppress(OSError):  # who has left needs to hear nothing
            self._connection.sendall(msgspec.json.encode((kind, reason)))
            self._connection.shutdown(socket.SHUT_WR)

    def hear(self) -> tuple[str, str]:
        """What the other side says at its end; if it left without a word, ``gone``."""
        try:
            return msgspec.json.decode(self._reader.read(), type=tuple[str, str])
        except (OSError, msgspec.DecodeError):
            return _GONE, ""

    def close(self) -> None:
        self._reader.close()
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
        try:
            self.address = socket.gethostbyname(config.master_addr)
            self._server = socket.create_server((self.address, config.master_port), backlog=config.nnodes)
        except OSError as error:
            raise ValueError(
                f"master_addr is {config.master_addr!r} and master_port {config.master_port}, and nothing can listen "
                f"there: {error}; it must be an address of node 0, which is this machine, and a port that is free"
            ) from error
        self._store = dist.TCPStore(self.address, 0, is_master=True, wait_for_workers=False)
        self.store_port: int = self._store.port

    def gather(self, addresses: Sequence[WorkerAddresses]) -> None:
        """Wait for all nodes, and say for whom: it may take minutes.

        Raises:
            ValueError: one of them is set up differently. TimeoutError: one does not come.
        """
        invitation = Invitation(facts_of(self._plan), "", self._plan.engine_id, list(addresses), self.store_port)
        config = self._plan.config
        expected = range(1, config.nnodes)
        logger.warning(
            "this is node 0 of %d, and waits at %s:%d for the others: `fleetfoot worker` with the same settings and "
            "--node-rank %s",
            config.nnodes,
            config.master_addr,
            config.master_port,
            ", ".join(map(str, expected)),
        )
        until = time.monotonic() + GATHER_S
        while missing := sorted(expected - self._links.keys()):
            self._server.settimeout(max(0.001, until - time.monotonic()))
            try:
                connection, _ = self._server.accept()
            except TimeoutError as error:
                raise TimeoutError(f"node {missing[0]} has not come within {GATHER_S:.0f} s") from error
            self._admit(Link(connection), invitation)

    def _admit(self, link: Link, invitation: Invitation) -> None:
        """Whoever is no node of this engine is sent away, and nobody is disturbed by it."""
        try:
            hello = link.receive(Hello, _HELLO_S)
            refusal = ""
            if hello.node_rank in self._links:
                refusal = f"node_rank is {hello.node_rank}, and another node has it already; each needs its own"
            link.send(msgspec.structs.replace(invitation, refusal=refusal))
        except (OSError, ValueError):
            link.close()
            return
        if refusal:
            link.close()
            return
        self._links[hello.node_rank] = link
        check_same(invitation.facts, hello.facts, node=hello.node_rank)

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
        ValueError: the machines are set up differently, or another one has this one's number.
        TimeoutError, ConnectionError: node 0 does not come, or does not take this one.
    """

    def __init__(self, plan: EnginePlan) -> None:
        config = plan.config
        where = f"master_addr {config.master_addr}, master_port {config.master_port}"
        try:
            self.address = socket.gethostbyname(config.master_addr)
        except OSError as error:
            raise ValueError(f"master_addr is {config.master_addr!r}, which is no address: {error}") from error
        facts = facts_of(plan)
        self.link = Link(_knock(self.address, config.master_port, where))
        try:
            self.link.send(Hello(config.node_rank, facts))
            invitation = self.link.receive(Invitation, GATHER_S)
        except (OSError, ValueError) as error:
            self.link.close()
            raise ConnectionError(f"what answers at {where} is not node 0 of an engine that starts: {error}") from error
        try:
            check_same(facts, invitation.facts, node=0)
            if invitation.refusal:
                raise ValueError(invitation.refusal)
        except ValueError:
            self.link.close()
            raise
        self.engine_id = invitation.engine_id
        self.addresses = invitation.addresses
        self.store_port = invitation.store_port

    def failed(self, reason: str) -> None:
        """Tell node 0 that this one is no more."""
        self.link.say(_FAILED, reason)

    def end(self) -> str | None:
        """What node 0 says at its end: why it has failed, or None if all is well."""
        kind, reason = self.link.hear()
        if kind == _OVER:
            return None
        return reason or "node 0 is gone"


def _knock(address: str, port: int, where: str) -> socket.socket:
    """Connect to node 0, which may not be there yet."""
    until = time.monotonic() + GATHER_S
    while True:
        try:
            return socket.create_connection(
                (address, port), timeout=min(_HELLO_S, max(0.001, until - time.monotonic()))
            )
        except OSError as error:
            if time.monotonic() >= until:
                raise TimeoutError(f"nobody answers at {where}: start node 0, and check both") from error
            time.sleep(_KNOCK_S)
