"""The rendezvous of nodes: accepted and refused connections, and the last message of each side."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
from tests.helpers.gate import HANG

from fleetfoot import LLM
from fleetfoot.cli.main import main
from fleetfoot.config.engine import EngineConfig
from fleetfoot.executor import nodes
from fleetfoot.executor.messages import WorkerAddresses
from fleetfoot.executor.multiprocess import MultiprocessExecutor
from fleetfoot.executor.nodes import EngineNodes, Invitation, Link, check_devices, join_engine, run_node
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.plan.resolve import resolve_plan

ADDRESSES = [WorkerAddresses("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", b"key" * 10)] * 3
Join = Callable[..., tuple[Link, Invitation]]
MakePlan = Callable[..., EnginePlan]


@pytest.fixture(scope="module")
def common_plan() -> EnginePlan:
    config = EngineConfig(device="cpu", skip_tokenizer_init=True, nnodes=3, pipeline_parallel_size=3)
    return resolve_plan(config, Machine.detect())


@pytest.fixture
def plan(common_plan: EnginePlan, port: int, monkeypatch: pytest.MonkeyPatch) -> MakePlan:
    """The plan of a node, with a short timeout."""
    monkeypatch.setattr(nodes, "GATHER_S", HANG)

    def make(rank: int, **settings: Any) -> EnginePlan:
        config = dataclasses.replace(common_plan.config, node_rank=rank, master_port=port, **settings)
        return dataclasses.replace(common_plan, config=config)

    return make


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as threads:
        yield threads


@pytest.fixture
def engine(plan: MakePlan) -> Iterator[EngineNodes]:
    engine = EngineNodes(plan(0))
    yield engine
    engine.close("")


@pytest.fixture
def joined(engine: EngineNodes, plan: MakePlan, threads: ThreadPoolExecutor) -> Iterator[list[Link]]:
    """Nodes 1 and 2, connected in reverse order."""
    second, first = (threads.submit(join_engine, plan(rank)) for rank in (2, 1))
    engine.gather(ADDRESSES)
    links = []
    for link, invitation in (first.result(), second.result()):
        assert invitation.engine_id == plan(0).engine_id
        assert invitation.addresses == ADDRESSES
        assert invitation.store == engine.store
        links.append(link)
    assert engine.find_loss() == ""
    yield links
    for link in links:
        link.close()


def test_clean_shutdown_reaches_other_nodes(engine: EngineNodes, joined: list[Link]) -> None:
    engine.close("")
    engine.close("not reported again")
    assert [link.receive_end("lost") for link in joined] == ["", ""]


def test_failure_reason_reaches_other_nodes(engine: EngineNodes, joined: list[Link]) -> None:
    joined[0].send_end("worker 1 is dead")
    assert engine.find_loss(wait_ms=60_000) == "node 1: worker 1 is dead"
    engine.close("node 1: worker 1 is dead")
    assert joined[1].receive_end("lost") == "node 1: worker 1 is dead"


def test_closed_connection_is_a_lost_node(engine: EngineNodes, joined: list[Link]) -> None:
    joined[1].close()
    assert engine.find_loss(wait_ms=60_000) == "node 2: the connection to it has ended"
    for link in engine._links.values():  # as when the process ends
        link.close()
    assert joined[0].receive_end("lost") == "lost"


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


def test_other_connections_are_ignored(
    engine: EngineNodes, plan: MakePlan, port: int, threads: ThreadPoolExecutor
) -> None:
    gathering = threads.submit(engine.gather, ADDRESSES)
    invalid = framed(msgspec.msgpack.encode({"node_rank": "one"}))
    for content in (b"GET / HTTP/1.1\r\n\r\n", framed(b"junk"), invalid, b""):
        with socket.create_connection(("127.0.0.1", port), timeout=HANG) as stranger:
            stranger.sendall(content)
            stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):  # not even read to its end
                assert stranger.recv(100) == b""
    first, _ = join_engine(plan(1))
    with pytest.raises(ValueError, match="node_rank is 1, and another node has it already"):
        join_engine(plan(1))
    second, _ = join_engine(plan(2))
    assert gathering.result() is None
    first.close()
    second.close()


def test_different_settings_are_refused_on_both_sides(
    engine: EngineNodes, plan: MakePlan, threads: ThreadPoolExecutor
) -> None:
    member: Future[Any] = threads.submit(join_engine, plan(1, max_num_seqs=7, model="/elsewhere/model"))
    here = r"^node 1 is set up differently.*:\n  - max_num_seqs: 256 here, 7 there\nstart"
    with pytest.raises(ValueError, match=here):
        engine.gather(ADDRESSES)
    with pytest.raises(ValueError, match=r"^node 0 is set up differently, and the two cannot be one engine:\n  - max"):
        member.result()


def test_timeouts_name_the_missing_node(
    engine: EngineNodes, plan: MakePlan, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "GATHER_S", 0.0)
    with pytest.raises(TimeoutError, match="node 1 has not come"):
        engine.gather(ADDRESSES)
    engine.close("")
    with pytest.raises(TimeoutError, match=f"nothing answers at master_addr 127.0.0.1, master_port {port}"):
        join_engine(plan(1))


def test_node_0_logs_once_which_nodes_are_missing(
    port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nodes, "GATHER_S", 0.0)
    message = (
        f"this is node 0 of 3, and waits at 127.0.0.1:{port} for the others: `fleetfoot worker` with the same settings "
        "and --node-rank 1, 2"
    )
    settings = {"device": "cpu", "nnodes": 3, "pipeline_parallel_size": 3, "master_port": port}
    with pytest.raises(TimeoutError):
        LLM(**settings)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [("WARNING", message)]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    assert main(["generate", "--prompt", "Once", *flags]) == 1
    assert capsys.readouterr().err.count(message) == 1


def test_server_that_is_not_node_0(plan: MakePlan, port: int, threads: ThreadPoolExecutor) -> None:
    with socket.create_server(("127.0.0.1", port)) as server:
        threads.submit(lambda: server.accept()[0].close())
        with pytest.raises(ConnectionError, match=f"what answers at .*{port} is not node 0 of an engine that starts"):
            join_engine(plan(1))


def test_invalid_addresses_and_node_ranks(plan: MakePlan, port: int) -> None:
    for address in ("192.0.2.1", "no such name"):
        with pytest.raises(ValueError, match=f"master_addr is '{address}'"):
            EngineNodes(plan(0, master_addr=address))
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ValueError, match=f"master_port {port}"):
        EngineNodes(plan(0))
    with pytest.raises(ValueError, match="node_rank is 1: the engine starts on node 0"):
        MultiprocessExecutor(plan(1))
    with pytest.raises(ValueError, match=r"node_rank is 0 \(with nnodes 3\): the first node starts the engine"):
        run_node(plan(0).config)


def test_number_of_gpus(plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    check_devices(dataclasses.replace(plan(0), device="cuda"))
    check_devices(plan(0, tensor_parallel_size=2))
    with pytest.raises(ValueError, match="needs 2 GPUs on each machine, and torch finds 1 here"):
        check_devices(dataclasses.replace(plan(0, tensor_parallel_size=2), device="cuda"))
