"""Engines over several machines: the rendezvous of the nodes, and what runs on every node but the first.

Node 0 runs the engine and listens at ``master_addr:master_port``. Every other node connects and sends its settings. If
they agree with node 0's, it receives the addresses of the engine's sockets with their public key, and the port of the
store of torch.distributed. The connection stays open; its end means that the node has ended. Any process that reaches
the port with the same settings can join, so the port must be reachable by the engine's machines only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import TypeVar

import msgspec

from fleetfoot._version import __version__
from fleetfoot.config.engine import EngineConfig
from fleetfoot.executor.messages import WorkerAddresses
from fleetfoot.executor.processes import WorkerProcesses
from fleetfoot.executor.protocol import WorkerError
from fleetfoot.kv_transfer.base.sockets import ConnectionLostError, StoppedError, receive_message, send_message
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.plan.resolve import resolve_plan
from fleetfoot.utils.torch_build import torch_build

logger = logging.getLogger(__name__)

GATHER_S = 600.0
"""How long nodes wait for each other when they start."""
_RETRY_S = 0.5
"""Between two attempts to reach a node that may not be listening yet."""
_HELLO_S = 10.0
"""How long a connection may take to send its first message."""
_LOCAL_SETTINGS = (
    *("node_rank", "master_addr", "model", "tokenizer", "skip_tokenizer_init"),
    *("generation_config", "override_generation_config", "cluster_key_file"),
)
"""Settings that nodes need not share. A model may lie at another path on each node; its content must be the same."""
_SHARED_DECISIONS = ("device", "dtype", "runner", "kernels", "kv_layout", "max_model_len", "max_num_batched_tokens")
"""Fields of the plan that must be equal on all nodes."""

_T = TypeVar("_T")
_NOT_A_NODE = (ConnectionLostError, StoppedError, OSError, ValueError)
"""What `Link.send` and `Link.receive` raise if the other side is no node."""


# --- what nodes must agree on ---------------------------------------------------------------------------------------


def shared_facts(plan: EnginePlan) -> dict[str, str]:
    """What all nodes must agree on: name -> value as text."""
    config = plan.config
    names = [item.name for item in dataclasses.fields(config) if item.name not in _LOCAL_SETTINGS]
    weights = "dummy"
    if config.load_format != "dummy":
        weights = repr([(path.name, path.stat().st_size) for path in sorted(plan.model_path.glob("*.safetensors"))])
    return {
        **{name: repr(getattr(config, name)) for name in names},
        **{f"model's {name}": repr(value) for name, value in dataclasses.asdict(plan.model).items()},
        "fleetfoot": __version__,
        "torch": torch_build().version,
        "weights (names and sizes of files)": weights,
        **{name: str(getattr(plan, name)) for name in _SHARED_DECISIONS},
    }


def check_same(facts: Mapping[str, str], others: Mapping[str, str], *, node: int) -> None:
    """Raise ValueError, with each difference, if this node's facts are not those of another."""
    different = [
        f"\n  - {name}: {facts.get(name, 'nothing')} here, {others.get(name, 'nothing')} there"
        for name in {**facts, **others}
        if facts.get(name) != others.get(name)
    ]
    if different:
        raise ValueError(
            f"node {node} is set up differently, and the two cannot be one engine:{''.join(different)}\n"
            "start all nodes with the same settings, model and versions"
        )


def check_devices(plan: EnginePlan) -> None:
    """Raise ValueError if this machine has fewer GPUs than ranks."""
    config = plan.config
    num_gpus = plan.machine.num_gpus
    if plan.device != "cuda" or config.local_world_size <= num_gpus:
        return
    spread = f", spread over nnodes {config.nnodes}," if config.nnodes > 1 else ""
    raise ValueError(
        f"tensor_parallel_size {config.tensor_parallel_size} times pipeline_parallel_size "
        f"{config.pipeline_parallel_size}{spread} needs {config.local_world_size} GPUs on each machine, and torch "
        f"finds {num_gpus} here"
    )


# --- connections ----------------------------------------------------------------------------------------------------


class Hello(msgspec.Struct):
    """The first message of a node."""

    node_rank: int
    facts: dict[str, str]


class Invitation(msgspec.Struct):
    """Node 0's reply."""

    facts: dict[str, str]
    """Node 0's, so that both sides can report the differences."""
    engine_id: str
    addresses: list[WorkerAddresses]
    store: tuple[str, int]
    refusal: str = ""
    """Why the node cannot join though its facts agree; empty if it can."""


class Link:
    """A connection between node 0 and another node. After the greeting each side sends at most one more message."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine may end without closing it
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection = connection
        self.fileno = connection.fileno
        self.close = connection.close

    def send(self, greeting: msgspec.Struct) -> None:
        """Send a greeting; raises ConnectionLostError if the other side has left."""
        send_message(self._connection, msgspec.msgpack.encode(greeting))

    def receive(self, kind: type[_T], timeout_s: float) -> _T:
        """The other side's greeting; raises one of `_NOT_A_NODE`."""
        until = time.monotonic() + timeout_s
        message = receive_message(self._connection, lambda: time.monotonic() >= until)
        self._connection.settimeout(None)
        return msgspec.msgpack.decode(message, type=kind)

    def send_end(self, reason: str) -> None:
        """The last message of this side: why it has failed; empty if it has not. Ignored if the other side has left."""
        with contextlib.suppress(ConnectionLostError, OSError):
            send_message(self._connection, msgspec.msgpack.encode(reason))
            self._connection.shutdown(socket.SHUT_WR)

    def receive_end(self, lost: str) -> str:
        """Wait for the last message of the other side; ``lost`` if it has left without one."""
        try:
            return msgspec.msgpack.decode(receive_message(self._connection), type=str)
        except (ConnectionLostError, OSError, msgspec.DecodeError):
            return lost


class EngineNodes:
    """Node 0's connections to the other nodes. ``place``: the address of this machine for the engine's sockets;
    ``store``: address and port of the store of torch.distributed. Raises ValueError if ``master_addr`` is not an
    address of this machine, or the port is in use."""

    def __init__(self, plan: EnginePlan) -> None:
        config = plan.config
        self._plan = plan
        self._links: dict[int, Link] = {}
        try:
            self.place = socket.gethostbyname(config.master_addr)
            self._server = socket.create_server((self.place, config.master_port), backlog=config.nnodes)
        except OSError as error:
            raise ValueError(
                f"master_addr is {config.master_addr!r} and master_port {config.master_port}, and nothing can listen "
                f"there: {error}; it must be an address of node 0, which is this machine, and a port that is free"
            ) from error
        from torch.distributed import TCPStore  # importing torch takes seconds, which an engine on one machine saves

        self._store = TCPStore(self.place, 0, is_master=True, wait_for_workers=False)
        self.store: tuple[str, int] = (self.place, self._store.port)

    def gather(self, addresses: Sequence[WorkerAddresses]) -> None:
        """Wait for all nodes, and log which: it may take minutes. Raises ValueError if the settings of a node differ,
        and TimeoutError if a node does not connect."""
        invitation = Invitation(shared_facts(self._plan), self._plan.engine_id, list(addresses), self.store)
        config = self._plan.config
        expected = range(1, config.nnodes)
        message = (
            "this is node 0 of %d, and waits at %s:%d for the others: `fleetfoot worker` with the same settings and "
            "--node-rank %s"
        )
        others = ", ".join(map(str, expected))
        logger.warning(message, config.nnodes, config.master_addr, config.master_port, others)
        until = time.monotonic() + GATHER_S
        while missing := sorted(expected - self._links.keys()):
            self._server.settimeout(max(0.001, until - time.monotonic()))
            try:
                connection, _ = self._server.accept()
            except TimeoutError as error:
                raise TimeoutError(f"node {missing[0]} has not come within {GATHER_S:.0f} s") from error
            self._accept(Link(connection), invitation)

    def _accept(self, link: Link, invitation: Invitation) -> None:
        """Add a node; connections that are not from a node of this engine are closed and otherwise ignored."""
        try:
            hello = link.receive(Hello, _HELLO_S)
            refusal = ""
            if hello.node_rank in self._links:
                refusal = f"node_rank is {hello.node_rank}, and another node has it already; each needs its own"
            link.send(msgspec.structs.replace(invitation, refusal=refusal))
        except _NOT_A_NODE:
            refusal = "not a node of this engine"
        if refusal:
            link.close()
            return
        self._links[hello.node_rank] = link
        check_same(invitation.facts, hello.facts, node=hello.node_rank)

    @property
    def descriptors(self) -> Sequence[int]:
        """File descriptors that become readable when a node has failed or ended."""
        return [link.fileno() for link in self._links.values()]

    def find_loss(self, wait_ms: int = 0) -> str:
        """A sentence about a node that has failed or ended; empty if all are there."""
        ready = wait(self.descriptors, wait_ms / 1000)
        for node, link in self._links.items():
            if link.fileno() in ready:
                return f"node {node}: {link.receive_end('the connection to it has ended')}"
        return ""

    def close(self, reason: str) -> None:
        """Report to all nodes why the engine has failed, or that it has not, and close all connections."""
        for link in self._links.values():
            link.send_end(reason)
            link.close()
        self._links = {}
        self._server.close()


# --- every node but the first ---------------------------------------------------------------------------------------


def join_engine(plan: EnginePlan) -> tuple[Link, Invitation]:
    """Connect to node 0, which may not be listening yet.

    Raises ValueError if the settings differ or another node has this node's rank, and TimeoutError or ConnectionError
    if node 0 does not answer or does not accept this node.
    """
    config = plan.config
    where = f"master_addr {config.master_addr}, master_port {config.master_port}"
    try:
        address = socket.gethostbyname(config.master_addr)
    except OSError as error:
        raise ValueError(f"master_addr is {config.master_addr!r}, which is no address: {error}") from error
    facts = shared_facts(plan)
    link = Link(_connect(address, config.master_port, where))
    try:
        link.send(Hello(config.node_rank, facts))
        invitation = link.receive(Invitation, GATHER_S)
    except _NOT_A_NODE as error:
        link.close()
        raise ConnectionError(f"what answers at {where} is not node 0 of an engine that starts: {error}") from error
    try:
        check_same(facts, invitation.facts, node=0)
        if invitation.refusal:
            raise ValueError(invitation.refusal)
    except ValueError:
        link.close()
        raise
    return link, invitation


def _connect(address: str, port: int, where: str) -> socket.socket:
    until = time.monotonic() + GATHER_S
    while True:
        timeout = min(_HELLO_S, max(0.001, until - time.monotonic()))
        try:
            return socket.create_connection((address, port), timeout)
        except OSError as error:
            if time.monotonic() >= until:
                raise TimeoutError(f"nothing answers at {where}: start node 0, and check both") from error
            time.sleep(_RETRY_S)


def run_node(config: EngineConfig) -> None:
    """Run the workers of this node; return when the engine has shut down.

    Raises ValueError if the settings name the first node, do not fit together, or are not those of the first node;
    TimeoutError or ConnectionError if that does not answer or accept this one; WorkerError if a worker or node fails.
    """
    if config.node_rank == 0:
        raise ValueError(
            f"node_rank is 0 (with nnodes {config.nnodes}): the first node starts the engine, with `fleetfoot "
            "generate`, `fleetfoot chat` or LLM(...); this command is for the nodes from 1 on"
        )
    plan = resolve_plan(config, Machine.detect())
    plan.decision.check()
    check_devices(plan)
    link, invitation = join_engine(plan)
    processes = WorkerProcesses()
    try:
        plan = dataclasses.replace(plan, engine_id=invitation.engine_id)
        processes.start(plan, invitation.addresses, invitation.store)
        ready = wait([link.fileno(), *processes.sentinels])
        # workers may end before the message of node 0 arrives here
        if link.fileno() not in ready and (loss := processes.find_loss(only_failed=True)):
            raise WorkerError(loss)
        if reason := link.receive_end("node 0 is gone"):
            raise WorkerError(f"the engine has failed: {reason}")
        processes.join()
    except BaseException as error:
        link.send_end(str(error) or type(error).__name__)
        raise
    finally:
        processes.kill()
        link.close()
