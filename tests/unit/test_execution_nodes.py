"""The rendezvous of nodes: accepted and refused connections, and the last message of each side."""

from __future__ import annotations

import dataclasses
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import pytest
from tests.helpers.gate import HANG

from fleetfoot import LLM
from fleetfoot.cli.main import main
from fleetfoot.config.engine import EngineConfig
from fleetfoot.executor import nodes
from fleetfoot.executor.messages import WorkerAddresses
from fleetfoot.executor.nodes import EngineNodes, Membership, check_devices, check_is_first_node, run_node
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.plan.resolve import resolve_plan

ADDRESSES = [WorkerAddresses("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", b"key" * 10)] * 3


@pytest.fixture(scope="module")
def plan() -> EnginePlan:
    config = EngineConfig(device="cpu", skip_tokenizer_init=True, nnodes=3, pipeline_parallel_size=3)
    return resolve_plan(config, Machine.detect())


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "GATHER_S", HANG)


def on_node(plan: EnginePlan, port: int, rank: int, **settings: Any) -> EnginePlan:
    return dataclasses.replace(
        plan, config=dataclasses.replace(plan.config, node_rank=rank, master_port=port, **settings)
    )


class Thread(threading.Thread):
    """Keeps what it returns, or raises."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.start()

    def run(self) -> None:
        try:
            self._result: Any = self._call()
        except BaseException as error:
            self._result = error

    def result(self) -> Any:
        self.join(HANG)
        return self._result


@pytest.fixture
def engine(plan: EnginePlan, port: int) -> Iterator[EngineNodes]:
    engine = EngineNodes(on_node(plan, port, 0))
    yield engine
    engine.close("")


@pytest.fixture
def joined(engine: EngineNodes, plan: EnginePlan, port: int) -> Iterator[list[Membership]]:
    """Nodes 1 and 2, connected in reverse order."""
    second, first = (Thread(partial(Membership, on_node(plan, port, rank))) for rank in (2, 1))
    engine.gather(ADDRESSES)
    members = [first.result(), second.result()]
    yield members
    for member in members:
        member.link.close()


def test_nodes_receive_invitation_and_shutdown(engine: EngineNodes, joined: list[Membership], plan: EnginePlan) -> None:
    for member in joined:
        assert member.engine_id == plan.engine_id
        assert member.addresses == ADDRESSES
        assert (member.address, member.store_port) == (engine.address, engine.store_port)
    assert engine.find_loss() == ""
    engine.send_shutdown()
    engine.close("not said again")
    assert [member.wait_for_end() for member in joined] == [None, None]


def test_failure_reason_reaches_other_nodes(engine: EngineNodes, joined: list[Membership]) -> None:
    joined[0].send_failure("worker 1 is dead")
    assert engine.find_loss(wait_ms=60_000) == "node 1: worker 1 is dead"
    engine.close("node 1: worker 1 is dead")
    assert joined[1].wait_for_end() == "node 1: worker 1 is dead"


def test_closed_connection_is_a_lost_node(engine: EngineNodes, joined: list[Membership]) -> None:
    joined[1].link.close()
    assert engine.find_loss(wait_ms=60_000) == "node 2: the connection to it has ended"
    engine.close("")
    assert joined[0].wait_for_end() == "node 0 is gone"


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def test_other_connections_are_ignored(engine: EngineNodes, plan: EnginePlan, port: int) -> None:
    def knock() -> list[bytes]:
        answers = []
        for said in (
            b"GET / HTTP/1.1\r\n\r\n",
            framed(b"junk"),
            framed(msgspec.msgpack.encode({"node_rank": "one"})),
            b"",
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=HANG) as stranger:
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
                try:
                    answers.append(stranger.recv(100))
                except ConnectionResetError:  # not even read to its end
                    answers.append(b"")
        return answers

    gathering = Thread(lambda: engine.gather(ADDRESSES))
    assert knock() == [b""] * 4
    first = Membership(on_node(plan, port, 1))
    with pytest.raises(ValueError, match="node_rank is 1, and another node has it already"):
        Membership(on_node(plan, port, 1))
    second = Membership(on_node(plan, port, 2))
    assert gathering.result() is None
    first.link.close()
    second.link.close()


def test_different_settings_are_refused_on_both_sides(engine: EngineNodes, plan: EnginePlan, port: int) -> None:
    member = Thread(lambda: Membership(on_node(plan, port, 1, max_num_seqs=7, model="/elsewhere/model")))
    with pytest.raises(
        ValueError, match=r"^node 1 is set up differently.*:\n  - max_num_seqs: 256 here, 7 there\nstart"
    ):
        engine.gather(ADDRESSES)
    assert str(member.result()).startswith("node 0 is set up differently, and the two cannot be one engine:\n  - max")


def test_timeouts_name_the_missing_node(
    engine: EngineNodes, plan: EnginePlan, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "GATHER_S", 0.0)
    with pytest.raises(TimeoutError, match="node 1 has not come"):
        engine.gather(ADDRESSES)
    engine.close("")
    with pytest.raises(TimeoutError, match=f"nothing answers at master_addr 127.0.0.1, master_port {port}"):
        Membership(on_node(plan, port, 1))


def test_node_0_logs_once_which_nodes_are_missing(
    port: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(nodes, "GATHER_S", 0.0)
    said = (
        f"this is node 0 of 3, and waits at 127.0.0.1:{port} for the others: `fleetfoot worker` with the same settings "
        "and --node-rank 1, 2"
    )
    settings = {"device": "cpu", "nnodes": 3, "pipeline_parallel_size": 3, "master_port": port}
    with pytest.raises(TimeoutError):
        LLM(**settings)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", said)]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    assert main(["generate", "--prompt", "Once", *flags]) == 1
    assert capsys.readouterr().err.count(said) == 1


def test_server_that_is_not_node_0(plan: EnginePlan, port: int) -> None:
    def hang_up() -> None:
        with socket.create_server(("127.0.0.1", port)) as server:
            listening.set()
            server.accept()[0].close()

    listening = threading.Event()
    Thread(hang_up)
    assert listening.wait(HANG)
    with pytest.raises(ConnectionError, match=f"what answers at .*{port} is not node 0 of an engine that starts"):
        Membership(on_node(plan, port, 1))


def test_invalid_master_address(plan: EnginePlan, port: int) -> None:
    for address in ("192.0.2.1", "no such name"):
        with pytest.raises(ValueError, match=f"master_addr is '{address}'"):
            EngineNodes(on_node(plan, port, 0, master_addr=address))
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ValueError, match=f"master_port {port}"):
        EngineNodes(on_node(plan, port, 0))


def test_wrong_node_rank_for_a_command(plan: EnginePlan, port: int) -> None:
    with pytest.raises(ValueError, match="node_rank is 1: the engine starts on node 0"):
        check_is_first_node(on_node(plan, port, 1).config)
    with pytest.raises(ValueError, match=r"node_rank is 0 \(with nnodes 3\): the first node starts the engine"):
        run_node(plan.config)


def test_number_of_gpus(plan: EnginePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check_devices(dataclasses.replace(plan, device="cuda"))
    config = dataclasses.replace(plan.config, tensor_parallel_size=2)
    check_devices(dataclasses.replace(plan, config=config))
    with pytest.raises(ValueError, match="needs 2 GPUs on each machine, and torch finds 1 here"):
        check_devices(dataclasses.replace(plan, config=config, device="cuda"))
