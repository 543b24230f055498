"""Engines over several machines: the rendezvous of the nodes, and what runs on every node but the first.

Node 0 runs the engine and listens at ``master_addr:master_port``. Every other node connects, and both prove the cluster
key (`fleetfoot.utils.sockets`). The node sends its settings. If they agree with node 0's, it receives the
addresses of the engine's sockets with their public key, and the port of the store of torch.distributed. The connection
stays open; its end means that the node has ended. A peer that fails in any of this is dropped and logged, and node 0
goes on waiting.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from queue import Empty, SimpleQueue
from typing import TypeVar

import msgspec

from fleetfoot._version import __version__
from fleetfoot.config.engine import EngineConfig
from fleetfoot.distributed.stores import make_store
from fleetfoot.executor.messages import WorkerAddresses, worker_keys
from fleetfoot.executor.processes import WorkerProcesses
from fleetfoot.executor.protocol import WorkerError
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.plan.resolve import resolve_plan
from fleetfoot.utils.cluster_key import ClusterKey
from fleetfoot.utils.sockets import (
    Channel,
    ConnectionLostError,
    SocketServer,
    StoppedError,
    UntrustedError,
    connect,
)
from fleetfoot.utils.torch_build import torch_build

logger = logging.getLogger(__name__)

GATHER_S = 600.0
"""How long nodes wait for each other when they start."""
_RETRY_S = 0.5
"""Between two attempts to reach a node that may not be listening yet."""
_HELLO_S = 10.0
"""How long a node may take to connect, to prove the key, and to send its first message."""
_PURPOSE = "nodes"
_LOCAL_SETTINGS = (
    *("node_rank", "master_addr", "model", "tokenizer", "skip_tokenizer_init"),
    *("generation_config", "override_generation_config", "cluster_key_file", "trusted_network"),
)
"""Settings that nodes need not share. A model may lie at another path on each node; its content must be the same."""
_SHARED_DECISIONS = ("device", "dtype", "runner", "kernels", "kv_layout", "max_model_len", "max_num_batched_tokens")
"""Fields of the plan that must be equal on all nodes."""

_T = TypeVar("_T")
_NOT_A_NODE = (ConnectionLostError, StoppedError, OSError, ValueError)  # msgspec's errors of decoding are ValueErrors
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
    of_data = f" times data_parallel_size {config.num_data_ranks}" if config.num_data_ranks > 1 else ""
    spread = f", spread over nnodes {config.nnodes}," if config.nnodes > 1 else ""
    raise ValueError(
        f"tensor_parallel_size {config.tensor_parallel_size} times pipeline_parallel_size "
        f"{config.pipeline_parallel_size}{of_data}{spread} needs {config.local_world_size} GPUs on each machine, and "
        f"torch finds {num_gpus} here"
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

    def __init__(self, channel: Channel) -> None:
        if hasattr(socket, "TCP_KEEPCNT"):  # a machine may end without closing it
            channel.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        self._channel = channel
        self.fileno = channel.fileno
        self.close = channel.close

    def send(self, greeting: msgspec.Struct) -> None:
        """Send a greeting; raises ConnectionLostError if the other side has left."""
        self._channel.send(msgspec.msgpack.encode(greeting))

    def receive(self, kind: type[_T], timeout_s: float) -> _T:
        """The other side's greeting; raises one of `_NOT_A_NODE`."""
        until = time.monotonic() + timeout_s
        message = self._channel.receive(lambda: time.monotonic() >= until)
        return msgspec.msgpack.decode(message, type=kind)

    def send_end(self, reason: str) -> None:
        """The last message of this side: why it has failed; empty if it has not. Ignored if the other side has left."""
        with contextlib.suppress(ConnectionLostError, OSError):
            self._channel.send(msgspec.msgpack.encode(reason))
            self._channel.connection.shutdown(socket.SHUT_WR)

    def receive_end(self, lost: str) -> str:
        """Wait for the last message of the other side; ``lost`` if it has left without one."""
        try:
            return msgspec.msgpack.decode(self._channel.receive(), type=str)
        except (ConnectionLostError, OSError, msgspec.DecodeError):
            return lost


class EngineNodes:
    """Node 0's connections to the other nodes. ``place``: the address of this machine for the engine's sockets;
    ``store``: address and port of the store of torch.distributed; ``worker_key``: see `EngineChannel`. Raises
    ValueError if ``master_addr`` is not an address of this machine, or the port is in use; there is no cluster key; or
    nothing acknowledges that the network must be trusted."""

    def __init__(self, plan: EnginePlan) -> None:
        config = plan.config
        config.check_trusted("master_addr", config.master_addr)
        key = config.find_cluster_key(config.master_addr)
        self._plan = plan
        self._links: dict[int, Link] = {}
        self._greetings: SimpleQueue[tuple[Link, Hello]] = SimpleQueue()
        self.worker_key = worker_keys(key, plan.engine_id)[0]
        try:
            self.place = socket.gethostbyname(config.master_addr)
            self._server = SocketServer(self.place, config.master_port, self._greet, _PURPOSE, key)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"master_addr is {config.master_addr!r} and master_port {config.master_port}, and nothing can listen "
                f"there: {error}; it must be an address of node 0, which is this machine, and a port that is free"
            ) from error
        try:
            self._store = make_store(self.place)  # the workers' store of torch.distributed
        except BaseException:
            self._server.close()
            raise
        self.store: tuple[str, int] = (self.place, self._store.port)

    def _greet(self, channel: Channel) -> bool:
        """Take the first message of a peer that has the key; called in the connection's thread."""
        link = Link(channel)
        try:
            self._greetings.put((link, link.receive(Hello, _HELLO_S)))
        except _NOT_A_NODE as error:
            logger.warning("a connection is closed because its first message is no node's: %s", error)
            return False
        return True

    def gather(self, addresses: Sequence[WorkerAddresses]) -> None:
        """Wait for all nodes, and log which: it may take minutes. Raises TimeoutError, with the last refusal, if a node
        does not connect, or has other settings."""
        invitation = Invitation(shared_facts(self._plan), self._plan.engine_id, list(addresses), self.store)
        config = self._plan.config
        expected = range(1, config.nnodes)
        message = (
            "this is node 0 of %d, and waits at %s:%d for the others: `fleetfoot worker` with the same settings and "
            "--node-rank %s"
        )
        others = ", ".join(map(str, expected))
        logger.warning(message, config.nnodes, config.master_addr, config.master_port, others)
        until, refusal = time.monotonic() + GATHER_S, ""
        while missing := sorted(expected - self._links.keys()):
            try:
                link, hello = self._greetings.get(timeout=max(0.001, until - time.monotonic()))
            except Empty as error:
                last = f"; the last one that came was refused: {refusal}" if refusal else ""
                raise TimeoutError(f"node {missing[0]} has not come within {GATHER_S:.0f} s{last}") from error
            if found := self._admit(link, hello, invitation):
                refusal = found
                logger.warning("a node is refused: %s", refusal)

    def _admit(self, link: Link, hello: Hello, invitation: Invitation) -> str:
        """Add a node, or refuse it. Returns why it is refused; empty: it is not."""
        rank, num_nodes = hello.node_rank, self._plan.config.nnodes
        refusal = ""
        if not 0 < rank < num_nodes:
            refusal = f"node_rank is {rank}; with nnodes {num_nodes} on node 0 it can be 1 to {num_nodes - 1}"
        elif rank in self._links and self._links[rank].fileno() not in wait([self._links[rank].fileno()], 0):
            refusal = f"node_rank is {rank}, and another node has it already; each needs its own"
        if not refusal:
            try:
                check_same(invitation.facts, hello.facts, node=rank)
            except ValueError as error:
                refusal = str(error)
        sent = msgspec.structs.replace(invitation, refusal=refusal, addresses=[] if refusal else invitation.addresses)
        try:
            link.send(sent)
        except ConnectionLostError as error:
            refusal = refusal or f"node {rank} has left: {error}"
        if refusal:
            link.close()
            return refusal
        if (previous := self._links.pop(rank, None)) is not None:  # it has ended, and was started again
            previous.close()
        self._links[rank] = link
        return ""

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

    Raises ValueError if the settings differ, another node has this node's rank, there is no cluster key, or nothing
    acknowledges that the network must be trusted; TimeoutError or ConnectionError if node 0 does not answer or does not
    accept this node.
    """
    config = plan.config
    config.check_trusted("master_addr", config.master_addr)
    key = config.find_cluster_key(config.master_addr)
    where = f"master_addr {config.master_addr}, master_port {config.master_port}"
    try:
        address = socket.gethostbyname(config.master_addr)
    except OSError as error:
        raise ValueError(f"master_addr is {config.master_addr!r}, which is no address: {error}") from error
    facts = shared_facts(plan)
    link = Link(_connect(f"{address}:{config.master_port}", key, where))
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


def _connect(address: str, key: ClusterKey, where: str) -> Channel:
    until = time.monotonic() + GATHER_S
    while True:
        try:
            return connect(address, min(_HELLO_S, max(0.001, until - time.monotonic())), key, _PURPOSE)
        except UntrustedError as error:
            raise ConnectionError(f"what answers at {where} is not node 0 of this engine: {error}") from error
        except ConnectionLostError as error:
            if time.monotonic() >= until:
                raise TimeoutError(f"nothing answers at {where}: start node 0, and check both: {error}") from error
            logger.info("node 0 does not answer yet: %s", error)
            time.sleep(_RETRY_S)


def run_node(config: EngineConfig) -> None:
    """Run the workers of this node; return when the engine has shut down.

    Raises ValueError if the settings name the first node, do not fit together, or are not those of the first node;
    TimeoutError or ConnectionError if that does not answer or accept this one; WorkerError if a worker or node fails.
    """
    if config.node_rank == 0:
        raise ValueError(
            f"node_rank is 0 (with nnodes {config.nnodes}): the first node starts the engine, with `fleetfoot "
            "serve` without --headless, `fleetfoot generate` or LLM(...); this command is for the nodes from 1 on"
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
