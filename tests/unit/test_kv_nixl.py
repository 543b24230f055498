"""KV between engines: it arrives bitwise equal or not at all, and all blocks are released."""

import contextlib
import gc
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch
from tests.helpers.kv_bench import BLOCK_SIZE, FINGERPRINT, LAYOUT, Clock, ManualJobs, same
from tests.helpers.kv_pair import (
    Engine,
    EngineLine,
    Gate,
    changed,
    cluster_key,
    cut_at,
    flip_at,
    join_threads,
    opened,
    whole,
)

from fleetfoot.config.kv_transfer import KVTransferConfig
from fleetfoot.kv_transfer.nixl import consumer as nixl_consumer
from fleetfoot.kv_transfer.nixl import side_channel, transfer_agent
from fleetfoot.kv_transfer.nixl.params import NixlSettings
from fleetfoot.kv_transfer.nixl.side_channel import Acquire, Decline, Granted, LeaseError, Leases, ProducerServer, Renew
from fleetfoot.records.kv_layout import KVCacheSpec, KVLayout
from fleetfoot.utils.sockets import Channel, ConnectionLostError, SocketServer, connect

MakeEngine = Callable[..., Engine]
HELD, LOADED = [3, 7, 1, 12], [9, 8, 2, 0]
"""Blocks of TOKENS on the producer, and on the consumer."""


@pytest.fixture
def make(request: pytest.FixtureRequest) -> MakeEngine:
    def make_engine(**options: Any) -> Engine:
        engine = Engine(**options)
        request.addfinalizer(engine.shutdown)
        return engine

    return make_engine


def failure(consumer: Engine, params: Any, **options: Any) -> str:
    """Why a load fails, which changes no block."""
    before = consumer.contents(range(13))
    output = consumer.load(consumer.remote(params, **options))
    assert output.loaded == set()
    assert same(consumer.contents(range(13)), before)
    return output.failed["r"].reason


OTHER_LAYOUT = KVLayout(16, BLOCK_SIZE, "float32", (*[KVCacheSpec(2, 6)] * 2, KVCacheSpec(2, 4)))
REFUSALS: dict[str, tuple[str, dict[str, Any]]] = {
    "fingerprint": (f"its fingerprint is 'other', and '{FINGERPRINT}' here", {"producer": {"fingerprint": "other"}}),
    "more ranks": ("its tp_size is 1, and 2 here", {"consumer": {"num_ranks": 2}}),
    "fewer ranks": ("its tp_size is 3, and 1 here", {"producer": {"num_ranks": 3}}),  # each declines
    "block size": ("its block_size is 16, and 4 here", {"description": {"block_size": 16}}),
    "dtype": ("its dtype is 'bfloat16', and ", {"description": {"dtype": "bfloat16"}}),
    "an unknown fact": ("its scale is 2, and None here", {"description": {"scale": 2}}),
    "pipeline ranks": ("its pp_size is 2, and 1 here", {"description": {"pp_size": 2}}),
    "layout": (  # the producer refuses it: the descriptions are equal
        f"its layout is '{LAYOUT.fingerprint}', and '{OTHER_LAYOUT.fingerprint}' here",
        {"consumer": {"layout": OTHER_LAYOUT}},
    ),
    "part of a block": ("offers KV of 6 tokens, which are no whole blocks of 4", {"offer": {"num_tokens": 6}}),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refused_loads_write_nothing_and_release_blocks(make: MakeEngine, what: str) -> None:
    reason, options = REFUSALS[what]
    producer, consumer = make(**options.get("producer", {})), make(**options.get("consumer", {}))
    params = producer.hold("p")
    engine = {**opened(params).engine, **options.get("description", {})}
    assert reason in failure(consumer, changed(params, engine=engine, **options.get("offer", {})))
    producer.until_sent("p")
    assert set(producer.counters) == {"sends_declined"}


def test_replaced_weights(make: MakeEngine) -> None:
    producer, consumer = make(), make()
    params = producer.hold("p")
    consumer.scheduler.reset_cache()
    assert "were replaced" in failure(consumer, params)
    producer.until_sent("p")
    producer.scheduler.reset_cache()
    assert producer.hold("again") is None


def test_new_weights_that_both_engines_have(make: MakeEngine) -> None:
    producer, consumer = make(), make()
    old = producer.hold("old")
    for engine in (producer, consumer):
        engine.scheduler.reset_cache("version-1")
    assert f"its fingerprint is '{FINGERPRINT}', and 'version-1' here" in failure(consumer, old)
    producer.until_sent("old")
    assert consumer.load(consumer.remote(producer.hold("new"), "new")).loaded == {"new"}
    producer.until_sent("new")


def test_invalid_kv_transfer_params(make: MakeEngine) -> None:
    producer, consumer = make(role="kv_producer"), make(role="kv_consumer")
    params = producer.hold("p")
    for wrong, message in [
        ({"do_remote": True}, "do_remote"),
        ({"do_remote_decode": 1}, "do_remote_decode is 1; it must be true or false"),
        ({**params, "do_remote_decode": True}, "exclude each other"),
        ({**params, "offer": ""}, "offer is ''; it must be that of the prefill engine's output"),
        ({**params, "remote_addresses": ["127.0.0.1:1"]}, "remote_addresses"),
        ({**params, "remote_host": "127.0.0.1"}, "remote_host is '127.0.0.1'"),
        ({"do_remote_decode": True}, "kv_role is 'kv_consumer' in this engine's"),
    ]:
        with pytest.raises((ValueError, TypeError), match=message):
            consumer.remote(wrong)
    with pytest.raises(ValueError, match="kv_role is 'kv_producer' in this engine's"):
        producer.remote(params)
    assert not consumer.scheduler.has_pending
    request = consumer.remote(
        {"do_remote_prefill": False, "offer": None, "remote_host": None, "remote_block_ids": None}
    )
    assert consumer.matched(request) == 0


def test_the_side_channel_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "10.0.0.7")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
    settings = [
        NixlSettings.of(KVTransferConfig("NixlConnector", kv_role="kv_both", kv_connector_extra_config=extra))
        for extra in ({}, {"side_channel_host": "10.0.0.8", "side_channel_port": 7})
    ]
    assert [(one.side_channel_host, one.side_channel_port) for one in settings] == [("10.0.0.7", 5600), ("10.0.0.8", 7)]
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "x")
    with pytest.raises(ValueError, match="VLLM_NIXL_SIDE_CHANNEL_PORT is 'x'"):
        NixlSettings.of(KVTransferConfig("NixlConnector", kv_role="kv_both"))


def test_port_in_use(make: MakeEngine) -> None:
    port = int(opened(make().hold("p")).addresses[0].split(":")[1])
    with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}"):
        make(extra={"side_channel_port": port})


PROOF = 8 + 32 + 32
"""Bytes that a server sends before the first message."""
SPOIL: dict[str, tuple[Callable[[bytes, int], bytes], str]] = {
    "unproved": (flip_at(50), "has another cluster key"),
    "damaged": (flip_at(PROOF + 500), "is corrupt: its signature is wrong"),
    "cut": (cut_at(PROOF), "closed the connection after 0 of 3,584 bytes"),
    "truncated": (cut_at(PROOF + 1000), "closed the connection after 991 of 3,584 bytes"),
    "of another length": (flip_at(PROOF + 1), "sends 3,585 bytes instead of 3,584"),
}


@pytest.mark.parametrize("how", SPOIL)
def test_corrupt_bytes_never_become_kv(make: MakeEngine, how: str) -> None:
    producer, consumer = make(line=True), make()
    params = producer.hold("p")
    producer.lines[0].spoil, reason = SPOIL[how]
    assert reason in failure(consumer, params)
    producer.until_sent("p")  # the consumer's connection is closed
    assert producer.counters == {"sends_lost": 1}
    producer.lines[0].spoil = whole
    assert consumer.load(consumer.remote(producer.hold("q"))).loaded == {"r"}
    assert same(consumer.contents(LOADED), producer.contents(HELD))


@pytest.mark.parametrize("spoil", [cut_at(PROOF + 10), flip_at(PROOF + 6)], ids=["cut", "garbage"])
def test_corrupt_side_channel(make: MakeEngine, spoil: Callable[[bytes, int], bytes]) -> None:
    producer, consumer = make(), make()
    params = producer.hold("p")
    with EngineLine(opened(params).addresses[0]) as line:
        line.spoil = spoil
        assert failure(consumer, changed(params, addresses=[line.address]))
    producer.until_sent("p")


def test_only_registered_memory_is_read() -> None:
    agents = [transfer_agent.TcpAgent(name, "127.0.0.1", cluster_key()) for name in "ab"]
    memory = [torch.zeros(64, dtype=torch.uint8) for _ in agents]
    for agent, tensor in zip(agents, memory, strict=True):
        agent.register([tensor])
    theirs, ours = np.array([[memory[0].data_ptr() + 1, 64]]), np.array([[memory[1].data_ptr(), 64]])
    transfer = agents[1].read(agents[1].connect(agents[0].metadata), theirs, ours, 0)
    with pytest.raises(transfer_agent.TransferError, match="has not registered the memory"):
        while not transfer.poll():
            transfer.wait(30.0)
    transfer.release()
    for agent in agents:
        agent.close()


Stalled = tuple[Engine, Engine, Gate, Clock, Any]


@pytest.fixture
def stalled(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stalled]:
    """A producer and a consumer with a load that is under way and stalled. No renewal arrives, early or late."""
    monkeypatch.setattr(side_channel, "notify", lambda *_: 0)
    clock, gate = Clock(), Gate()
    producer, consumer = make(line=True, clock=clock), make(clock=clock, timeout=20.0)
    producer.lines[0].spoil = lambda content, offset: gate(content, offset) if offset >= PROOF else content
    request = consumer.remote(producer.hold("p"))
    consumer.begin(request)
    assert consumer.step(["r"]).is_empty  # an earlier request of this id has ended
    assert gate.reached.wait(30)
    yield producer, consumer, gate, clock, request
    gate.opened.set()


def test_request_that_ends_while_it_loads(stalled: Stalled) -> None:
    producer, consumer, _, _, _ = stalled
    output = consumer.step(["r"])
    assert "ended before its KV arrived" in output.failed["r"].reason
    producer.until_sent("p")
    assert producer.counters == {"sends_lost": 1}


EXPIRED = "has ended: it was not renewed or not read in time (kv_lease_duration, abort_timeout)"


def ended(leases: Leases) -> dict[str, str]:
    return {lease.request_id: how for lease, how in leases.get_finished()}


def test_lease_declined_before_it_is_granted() -> None:
    """Its consumer is faster than the step that grants it."""
    leases = Leases(30.0, 480.0, Clock())
    leases.give_up("early", side_channel.DECLINED)
    with pytest.raises(LeaseError, match="it was declined"):
        leases.acquire("early", 30.0)
    leases.grant("early", "p", [1, 2], None)
    leases.grant("other", "q", [3], None)
    assert ended(leases) == {"p": side_channel.DECLINED}
    assert leases.acquire("other", 0.0) == [3]
    with pytest.raises(LeaseError, match="there is no lease late here"):
        leases.acquire("late", 0.0)  # no step has granted it within the timeout
    leases.grant("late", "r", [4], None)
    assert ended(leases) == {"r": side_channel.DECLINED}
    for number in range(side_channel.NUM_REMEMBERED):
        leases.give_up(str(number), side_channel.DECLINED)
    assert len(leases._past) == side_channel.NUM_REMEMBERED


def side_channel_to(address: str) -> Channel:
    return connect(address, 30.0, cluster_key(), side_channel.SIDE_CHANNEL)


def tell(address: str, *messages: Decline | Renew) -> None:
    """Send messages without a reply, and wait until they were processed."""
    with contextlib.closing(side_channel_to(address)) as channel:
        for message in (*messages, Acquire("gone", {}, "")):
            channel.send(msgspec.msgpack.encode(message))
        channel.receive()


def test_lease_lasts_while_it_is_renewed(make: MakeEngine) -> None:
    producer, consumer = make(clock=(clock := Clock()), extra={"abort_timeout": 100}), make()
    params, ended = [producer.hold(name) for name in ("renewed", "forgotten")], {}
    for clock.now in range(110, 210, 10):
        tell(opened(params[0]).addresses[0], Renew([opened(params[0]).lease, "unknown"]))
        ended |= dict.fromkeys(producer.step(idle=True).sent, clock.now)
    assert ended == {"forgotten": 130, "renewed": 200}  # in any case after abort_timeout
    assert EXPIRED in consumer.load(consumer.remote(params[0])).failed["r"].reason
    assert producer.counters == {"sends_expired": 2}


def test_lease_that_is_being_read_is_neither_evicted_nor_declined(stalled: Stalled) -> None:
    producer, consumer, gate, _, request = stalled
    assert producer.scheduler.evict("p")
    offer = opened(request.kv_transfer_params)
    tell(offer.addresses[0], Decline(offer.lease))
    assert not producer.step().sent
    gate.opened.set()
    assert consumer.until_ended(request).loaded == {"r"}
    producer.until_sent("p")
    assert producer.counters["sends_sent"] == 1


def test_leases_that_are_being_read() -> None:
    """Each has one reader, each connection reads one, and an eviction leaves a read seconds."""
    leases = Leases(30.0, 60.0, clock := Clock())
    server = ProducerServer("127.0.0.1", 0, "p", {}, leases, Granted(b"", [], 0, 1, []), cluster_key())
    for lease in "abc":
        leases.grant(lease, lease, [[1]], None)
    with contextlib.closing(side_channel_to(server.address)) as channel:
        for request in (Acquire("p", {}, "a"), Acquire("p", {}, "b")):
            channel.send(msgspec.msgpack.encode(request))
            assert b"Granted" in channel.receive()
        channel.connection.sendall(b"\xff" * 8)  # no message
        with pytest.raises(ConnectionLostError):
            channel.receive()
    assert ended(leases) == {"a": side_channel.LOST, "b": side_channel.LOST}
    clock.now += 20
    assert leases.acquire("c", 0.0) == [[1]]
    with pytest.raises(LeaseError, match="the lease c is being read by another consumer"):
        leases.acquire("c", 0.0)
    for seconds in (25, 20):  # both limits count from there
        clock.now += seconds
        assert not ended(leases)
        leases.renew("c")
    leases.give_up("c", side_channel.EVICTED)
    clock.now += 9
    leases.renew("c")
    assert not ended(leases)
    clock.now += 1
    assert ended(leases) == {"c": side_channel.EXPIRED}
    server.close()


def test_server_survives_a_failure_to_start_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    served = threading.Event()
    server = SocketServer("127.0.0.1", 0, lambda channel: served.set(), "kv-test", cluster_key())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(ConnectionLostError):
            connect(server.address, 30.0, cluster_key(), "kv-test")
    connect(server.address, 30.0, cluster_key(), "kv-test").close()
    assert served.wait(30)
    server.close()


def test_grants_are_checked(make: MakeEngine) -> None:
    producer, consumer = make(), make()
    params, worker = producer.hold("p"), producer.steps[0]._connector
    worker._leases._live[opened(params).lease].block_ids[0].pop()
    assert "[4] blocks of each group are needed, and [3] are held" in failure(consumer, params)
    worker._server._granted = msgspec.structs.replace(worker._server._granted, num_slabs=max(HELD))
    assert "block ids beyond the producer's 12 blocks or slabs are held" in failure(consumer, producer.hold("q"))


def test_load_that_is_given_up_when_all_has_arrived(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer = make(), make()
    poll = transfer_agent._TcpTransfer.poll

    def last_poll(transfer: Any) -> bool:
        if has_ended := poll(transfer):
            consumer.steps[0]._connector._loads._loads[0].give_up()
        return has_ended

    monkeypatch.setattr(transfer_agent._TcpTransfer, "poll", last_poll)
    assert failure(consumer, producer.hold("p")) == "the load was given up"


def test_peers_are_connected_again_after_a_failed_read() -> None:
    agent = Mock(connect=Mock(return_value="peer"))
    peers = nixl_consumer.Peers(agent)
    peers.acquire(b"")
    peers.release(peers.acquire(b""), is_broken=True)
    with pytest.raises(transfer_agent.TransferError, match="other reads from peer have just failed"):
        peers.acquire(b"")
    assert not agent.disconnect.called
    peers.release("peer", is_broken=False)
    agent.disconnect.assert_called_once_with("peer")
    assert peers.acquire(b"") == "peer"


def num_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_connections_and_threads_end() -> None:
    """After loads of every outcome."""
    join_threads()  # of the tests before
    before = num_descriptors()
    producer, consumer = Engine(line=True), Engine(extra={"num_threads": 2})
    for number in range(5):
        for spoil in (whole, lambda content, offset: content[:-1] + bytes([content[-1] ^ 1]), cut_at(0)):
            producer.lines[0].spoil = spoil
            output = consumer.load(consumer.remote(producer.hold(name := f"{number}")))
            assert bool(output.loaded) == (spoil is whole)
            producer.until_sent(name)
            producer.sent.clear()
        gone = Engine()
        params = gone.hold("p")
        gone.shutdown()
        assert "cannot be reached" in failure(consumer, params)
    join_threads("line", "kv-tcp-agent", "kv-side-channel")  # each has served a connection
    busy = num_descriptors()
    consumer.shutdown()
    producer.shutdown()
    join_threads()
    assert num_descriptors() == before
    assert busy < before + 20  # 20 loads, of which most have failed


def test_loads_that_wait_for_a_thread(make: MakeEngine) -> None:
    jobs = ManualJobs()
    producer, consumer = make(), make(jobs=jobs, clock=(clock := Clock()), timeout=5.0)
    for name in ("one", "two"):
        consumer.begin(consumer.remote(producer.hold(name), name))
    assert consumer.step().is_empty
    jobs.run(1)
    assert consumer.step().loaded == {"one"}
    clock.now += 5
    assert set(consumer.step().failed) == {"two"}
    producer.until_sent("one")
    producer.until_sent("two")  # the load was given up, so its lease is declined
    jobs.run()
    assert consumer.step().is_empty
    assert producer.counters["sends_sent"] == producer.counters["sends_declined"] == 1
    consumer.begin(consumer.remote(producer.hold("three"), "three"))
    consumer.step()
    consumer.shutdown()
    producer.until_sent("three")
    assert producer.counters["sends_declined"] == 2


@pytest.mark.parametrize(("set_before", "devices"), [(None, ["lo", "mlx5_0:1"]), ("eth7", ["eth7"])])
def test_ucx_uses_the_interface_of_the_address_alone(
    monkeypatch: pytest.MonkeyPatch, set_before: str | None, devices: list[str]
) -> None:
    found: list[list[str]] = []

    def nixl_agent(name: str, config: object) -> object:
        found.append(os.environ["UCX_NET_DEVICES"].split(","))
        return SimpleNamespace(backends=["UCX"])

    sync = SimpleNamespace(NIXL_THREAD_SYNC_STRICT=0)
    api = SimpleNamespace(nixl_agent_config=Mock(), nixl_thread_sync_t=sync, nixl_agent=nixl_agent)
    monkeypatch.setattr(transfer_agent, "nixl_api", lambda: api)
    monkeypatch.setattr(transfer_agent, "rdma_ports", lambda: ["mlx5_0:1"])
    if set_before is None:
        monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    else:
        monkeypatch.setenv("UCX_NET_DEVICES", set_before)
    transfer_agent.NixlAgent("a", "127.0.0.1")
    assert found == [devices]
    assert os.environ.get("UCX_NET_DEVICES") == set_before
