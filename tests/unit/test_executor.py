"""Messages between the engine and its workers, the directory of their sockets, and the rendezvous of nodes."""

import contextlib
import dataclasses
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch
from tests.helpers.processes import HANG

from fleetfoot.config.engine import EngineConfig
from fleetfoot.executor import messages, nodes
from fleetfoot.executor.messages import Failure, RpcResult, StepOutput, WorkerAddresses
from fleetfoot.executor.multiprocess import MultiprocessExecutor, StepOutputs
from fleetfoot.executor.nodes import EngineNodes, Invitation, Link, check_devices, join_engine, run_node
from fleetfoot.executor.processes import RendezvousDir
from fleetfoot.executor.protocol import PlanMismatchError
from fleetfoot.executor.values import decode_value, encode_value
from fleetfoot.kv_transfer.blockstore.blocks import BlockStoreMetadata, BlockTransfer
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.plan.resolve import resolve_plan
from fleetfoot.records import step as records
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.structured.mask_space import MaskMemory
from fleetfoot.utils import sockets
from fleetfoot.utils.cluster_key import ClusterKey, create_cluster_key
from fleetfoot.utils.sockets import ConnectionLostError, connect
from fleetfoot.weights.store import StageReport

IDLE = records.SchedulerOutput(3, [], [], 0, 0, 0)
PARAMS = SamplingParams(temperature=0.3, logit_bias={5: -1.0}, stop=["x"], seed=2**63 - 1)
TOKENS = array("i", [1, 2**31 - 1])
FULL = dataclasses.replace(
    records.SchedulerOutput(2**40, [4, 0], [3, 70], 1, 2, 73),
    new_requests=[records.NewRequest("näme", 0, TOKENS, 1, 0, [7], PARAMS, 2**64 - 1, frozenset({1, 2}), [[3, 4]])],
    new_block_ids=[(4, 2, [8, 9])],
    finished=[("gone", 1)],
    finished_req_ids={"gone"},
    num_drafts=2,
    num_to_propose=2,
    awaited_step=2**40 - 2,
    kv_connector_metadata=BlockStoreMetadata("epoch", loads=[("näme", [BlockTransfer(7, b"\0digest")])]),
)


@pytest.mark.parametrize("step", [IDLE, FULL], ids=["idle", "full"])
def test_calls_round_trip(step: records.SchedulerOutput) -> None:
    assert messages.decode_call(messages.encode_call(17, step)) == (17, step)


def test_masks_round_trip() -> None:
    """As bytes, and as a place in memory that is shared."""
    memory = MaskMemory(num_words=4, max_masks=5, num_steps=2)
    memory.next(5)
    masks, offset = memory.next(3)
    masks[:] = np.arange(-6, 6, dtype=np.int32).reshape(3, 4)
    step = records.TokenMasks([0, 2, 5], masks, memory.file.words, offset)
    for mapped in (None, memory):
        is_shared = mapped is not None
        assert messages.decode_masks(messages.encode_masks(None, is_shared=is_shared), mapped) is None
        message = messages.encode_masks(step, is_shared=is_shared)
        read = messages.decode_masks(message, mapped)
        assert read is not None and read.rows == [0, 2, 5] and (len(message) < 20) == is_shared
        assert np.array_equal(read.masks, masks)


def test_ranks_that_read_no_tokens_receive_none() -> None:
    (new,) = records.without_token_ids(FULL).new_requests
    assert (new.token_ids, new.num_tokens) == (array("i"), 2)
    assert dataclasses.replace(new, token_ids=TOKENS) == FULL.new_requests[0]
    assert records.without_token_ids(IDLE) is IDLE


def test_plain_step_is_not_pickled() -> None:
    """Pickling costs more than everything else."""
    plain = dataclasses.replace(FULL, new_requests=[], kv_connector_metadata=None)
    assert b"fleetfoot" in messages.encode_call(0, FULL)
    assert b"fleetfoot" not in messages.encode_call(0, plain)
    assert messages.decode_call(messages.encode_call(0, plain))[1] == plain


class OddError(Exception):
    """Cannot be made from its message."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    ("error", "text", "again"),
    [
        (ValueError("bad value"), "ValueError: bad value", ValueError("bad value")),
        (KeyError("name"), "KeyError: 'name'", KeyError("name")),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), "UnicodeDecodeError: ", ValueError),
        (torch.OutOfMemoryError("no memory"), "OutOfMemoryError: no memory", torch.OutOfMemoryError("no memory")),
        (PlanMismatchError("not so"), "PlanMismatchError: not so", PlanMismatchError("not so")),
        (KeyboardInterrupt(), "KeyboardInterrupt", None),
        (OddError(1, 2), "OddError: 1 and 2", None),
    ],
)
def test_failures_are_data(error: BaseException, text: str, again: Any) -> None:
    """Known exceptions are made again, others as what they derive from, or not at all."""
    message = messages.encode_reply(Failure.of(2, error, "Traceback ..."))
    failure = messages.decode_reply(message)
    assert isinstance(failure, Failure) and (failure.rank, failure.trace) == (2, "Traceback ...")
    assert failure.text.startswith(text)
    made = failure.as_error()
    if isinstance(again, type):
        assert type(made) is again and str(made) == str(error)
    else:
        assert type(made) is type(again) and (again is None or again.args == made.args)


class Bomb:
    """Its pickle creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_no_reply_is_unpickled(tmp_path: Path) -> None:
    bomb = pickle.dumps(Bomb(tmp_path / "gone off"))
    for forged in (
        Failure(0, "x", "", bomb.hex(), "x"),
        Failure(0, "x", "", "builtins.eval", "x"),
        RpcResult(0, 1, bomb),
    ):
        reply = messages.decode_reply(messages.encode_reply(forged))
        if isinstance(reply, Failure):
            assert reply.as_error() is None
        else:
            assert isinstance(reply, RpcResult)
            with pytest.raises(ValueError):
                decode_value(reply.value)
    with pytest.raises(TypeError, match=r"holds a .*Bomb, which does not leave a worker's process"):
        encode_value([Bomb(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "value",
    [
        None, True, -3, 1 << 63, -(1 << 200), 1.5, "text", b"bytes", [1, [2.0]], (1, (), [()]), {"a": (1,)},
        {(1, 2): {3: 4}},
        {1, 2.5}, frozenset({b"c"}), StageReport({"unknown"}, ["problem"]),
    ],
    ids=str,
)  # fmt: skip
def test_results_are_data(value: Any) -> None:
    again = decode_value(encode_value(value))
    assert again == value and type(again) is type(value)


def test_arrays_and_tensors_are_results() -> None:
    array, scalar = decode_value(encode_value([np.arange(6, dtype="<f4").reshape(2, 3), np.int16(7)]))
    assert array.dtype == np.float32 and array.tolist() == [[0, 1, 2], [3, 4, 5]] and scalar == np.int16(7)
    tensors = [torch.arange(6).reshape(2, 3).T, torch.tensor(1.5, dtype=torch.bfloat16), torch.empty(0, 3)]
    for tensor, again in zip(tensors, decode_value(encode_value(tensors)), strict=True):
        assert again.dtype == tensor.dtype and again.shape == tensor.shape and again.equal(tensor)


def outputs_of(**settings: int) -> StepOutputs:
    plan = resolve_plan(EngineConfig(device="cpu", **settings), Machine(16 << 30), environ={})
    return StepOutputs(plan.output_rank, len(plan.reply_ranks))


def test_connector_outputs_of_all_ranks_are_merged_in_the_order_of_steps() -> None:
    """Rank 0 is two steps ahead of rank 1, as it may be in a pipeline."""
    outputs = outputs_of(kv_offloading_size=1, pipeline_parallel_size=2)
    lost = records.TransferFailure("lost")
    ranks = [
        [records.KVConnectorOutput({"a", "b"}), None, records.KVConnectorOutput({"c"}, counters={"n": 1})],
        [None, records.KVConnectorOutput({"a"}, {"b": lost}), records.KVConnectorOutput(sent={"d"}, counters={"n": 2})],
    ]
    merged = []
    for rank, steps in enumerate(ranks):
        for number, transfers in enumerate(steps):
            result = records.ModelRunnerOutput([[number]] * rank, kv_connector_output=transfers)
            outputs.add(StepOutput(rank, number, result))
            assert outputs.has(number) == (rank == 1)
            if outputs.has(number):
                output = outputs.pop(number)
                assert output.sampled_token_ids == [[number]]
                merged.append(output.kv_connector_output)
    # nothing has ended on both after the first step
    assert merged == [None, records.KVConnectorOutput({"a"}, {"b": lost}), records.KVConnectorOutput(counters={"n": 3})]


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where directories are made, here and in child processes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def rendezvous(parent: Path) -> Iterator[RendezvousDir]:
    with contextlib.closing(RendezvousDir()) as rendezvous:
        yield rendezvous


def test_message_for_some_ranks(rendezvous: RendezvousDir) -> None:
    engine = messages.EngineChannel(rendezvous.place, 3)
    workers = [messages.WorkerChannel(addresses) for addresses in engine.addresses]
    engine.send(b"middle", [1])
    engine.send(b"all")
    assert [worker.receive() for worker in workers] == [b"all", b"middle", b"all"]
    for channel in (*workers, engine):
        channel.close()


def test_missing_worker_is_not_waited_for(rendezvous: RendezvousDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_SEND_MS", 1)
    engine = messages.EngineChannel(rendezvous.place, 1)
    with pytest.raises(ConnectionError, match="worker 0 is not connected any more"):
        engine.send(b"a step")
    engine.close()


def test_directory_is_private_and_removed_with_its_engine(parent: Path, rendezvous: RendezvousDir) -> None:
    assert rendezvous.place.parent == parent
    assert rendezvous.place.stat().st_mode & 0o077 == 0
    rendezvous.close()
    rendezvous.close()
    assert list(parent.iterdir()) == []


def test_directory_of_a_killed_engine_is_removed_by_the_next(parent: Path) -> None:
    program = """
import os, signal
from fleetfoot.executor.processes import RendezvousDir
rendezvous = RendezvousDir()
(rendezvous.place / "calls-0").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    (left,) = parent.iterdir()
    with contextlib.closing(RendezvousDir()) as second:
        assert left != second.place and list(parent.iterdir()) == [second.place]


ADDRESSES = [WorkerAddresses("tcp://127.0.0.1:1", "tcp://127.0.0.1:2", b"key" * 10)] * 3
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
def joined(engine: EngineNodes, plan: MakePlan, threads: ThreadPoolExecutor) -> Iterator[tuple[Link, ...]]:
    """Nodes 1 and 2, connected in reverse order."""
    second, first = (threads.submit(join_engine, plan(rank)) for rank in (2, 1))
    engine.gather(ADDRESSES)
    links, invitations = zip(first.result(), second.result(), strict=True)
    for invitation in invitations:
        assert invitation.engine_id == plan(0).engine_id
        assert invitation.addresses == ADDRESSES
        assert invitation.store == engine.store
    assert engine.find_loss() == ""
    yield links
    for link in links:
        link.close()


def test_clean_shutdown_reaches_other_nodes(engine: EngineNodes, joined: tuple[Link, ...]) -> None:
    engine.close("")
    engine.close("not reported again")
    assert [link.receive_end("lost") for link in joined] == ["", ""]


def test_closed_connection_is_a_lost_node(engine: EngineNodes, joined: tuple[Link, ...]) -> None:
    joined[1].close()
    assert engine.find_loss(wait_ms=60_000) == "node 2: the connection to it has ended"
    for link in engine._links.values():  # as when the process ends
        link.close()
    assert joined[0].receive_end("lost") == "lost"


def test_strangers_do_not_end_the_start(
    engine: EngineNodes,
    plan: MakePlan,
    port: int,
    threads: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Those without the key, with another one, with garbage after the proof, with ranks that the plan does not have,
    and with other settings: each is dropped, and the right nodes join, one of them again after it has ended."""
    monkeypatch.setattr(sockets, "PROOF_SECONDS", HANG)
    gathering = threads.submit(engine.gather, ADDRESSES)
    loris = [socket.create_connection(("127.0.0.1", port)) for _ in range(2 * sockets.MAX_PENDING)]
    for content in (b"GET / HTTP/1.1\r\n\r\n" * 4, b"\xff\xff\xff\xff" * 1000, b""):
        with socket.create_connection(("127.0.0.1", port), timeout=HANG) as stranger:
            stranger.sendall(content)
            with contextlib.suppress(OSError):  # the connection is closed, not even read to its end
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(100):
                    pass
    with pytest.raises(ConnectionError, match="has another cluster key"):
        create_cluster_key(tmp_path / "other")
        join_engine(plan(1, cluster_key_file=str(tmp_path / "other")))
    key = plan(0).config.find_cluster_key("127.0.0.1")
    for body in (b"junk", msgspec.msgpack.encode({"node_rank": "one"}), pickle.dumps(ValueError("forged"))):
        with contextlib.closing(connect(f"127.0.0.1:{port}", HANG, key, "nodes")) as member:
            member.send(body)
            with pytest.raises(ConnectionLostError):
                member.receive()
    facts = nodes.shared_facts(plan(1))
    for rank in (-1, 0, 3, 2**40):
        with contextlib.closing(connect(f"127.0.0.1:{port}", HANG, key, "nodes")) as member:
            member.send(msgspec.msgpack.encode(nodes.Hello(rank, facts)))
            invitation = msgspec.msgpack.decode(member.receive(), type=Invitation)
            assert invitation.refusal.startswith(f"node_rank is {rank}") and not invitation.addresses
    with pytest.raises(ValueError, match=r"^node 0 is set up differently, and the two cannot be one engine:\n  - max"):
        join_engine(plan(1, max_num_seqs=7, model="/elsewhere/model"))
    first, _ = join_engine(plan(1))
    with pytest.raises(ValueError, match="node_rank is 1, and another node has it already"):
        join_engine(plan(1))
    first.close()
    first, _ = join_engine(plan(1))
    second, _ = join_engine(plan(2))
    assert gathering.result() is None
    for link in (first, second, *loris):
        link.close()


def test_the_last_refusal_is_in_the_timeout(
    plan: MakePlan, engine: EngineNodes, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    greetings = engine._greetings
    waits = [greetings.get, Mock(side_effect=Empty)]
    get = lambda timeout: waits.pop(0)(timeout=timeout)  # noqa: E731
    monkeypatch.setattr(engine, "_greetings", SimpleNamespace(get=get, put=greetings.put))
    member: Future[Any] = threads.submit(join_engine, plan(1, max_num_seqs=7))
    with pytest.raises(
        TimeoutError, match=r"node 1 has not come .* refused: node 1 is set up differently(.|\n)* 7 there"
    ):
        engine.gather(ADDRESSES)
    with pytest.raises(ValueError, match="node 0 is set up differently"):
        member.result()


def test_a_network_must_be_trusted_and_a_key_given(plan: MakePlan, monkeypatch: pytest.MonkeyPatch) -> None:
    for start in (EngineNodes, join_engine):
        with pytest.raises(ValueError, match=r"trusted_network is not set, and master_addr is '192\.0\.2\.1'"):
            start(plan(0, master_addr="192.0.2.1"))
        monkeypatch.delenv("FLEETFOOT_CLUSTER_KEY")
        with pytest.raises(ValueError, match=r"cluster_key_file is not set, and 192\.0\.2\.1 can be reached"):
            start(plan(0, master_addr="192.0.2.1", trusted_network=True))
        monkeypatch.setenv("FLEETFOOT_CLUSTER_KEY", "a key of tests alone")


def test_a_worker_must_have_the_key() -> None:
    """Calls reach the worker with the derived key alone, and a stranger's reply is not read, whatever is in it."""
    key, other = (ClusterKey(text) for text in (b"one key of tests", b"another of tests"))
    long = bytes(range(256)) * 4096
    with contextlib.ExitStack() as stack:
        channel = messages.EngineChannel("127.0.0.1", 1, messages.worker_keys(key, "an engine")[0])
        stack.callback(channel.close)
        (address,) = channel.addresses

        def connected(keys: Any, address: WorkerAddresses = address) -> messages.WorkerChannel:
            end = messages.WorkerChannel(address, keys)
            stack.callback(end._context.destroy, 0)
            return end

        strangers = [
            connected(messages.worker_keys(other, "an engine")),
            connected(messages.worker_keys(key, "another engine")),
            connected(None, dataclasses.replace(address, engine_key=None)),
        ]
        for stranger in strangers:
            reply = stack.enter_context(stranger.open_replies())
            reply(RpcResult(0, 666, b""))
        worker = connected(messages.worker_keys(key, "an engine"))
        channel.send(long)
        assert worker.receive() == long
        reply = stack.enter_context(worker.open_replies())
        reply(RpcResult(0, 7, long))
        while (message := channel.receive()) is None:
            assert channel.replies.poll(HANG * 1000)
        assert messages.decode_reply(message) == RpcResult(0, 7, long)
        assert channel.receive() is None


def test_timeouts_name_nodes(engine: EngineNodes, plan: MakePlan, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "GATHER_S", 0.0)
    with pytest.raises(TimeoutError, match="node 1 has not come"):
        engine.gather(ADDRESSES)
    engine.close("")
    with pytest.raises(TimeoutError, match=f"nothing answers at master_addr 127.0.0.1, master_port {port}"):
        join_engine(plan(1))


def test_server_that_is_not_node_0(plan: MakePlan, port: int, threads: ThreadPoolExecutor) -> None:
    with socket.create_server(("127.0.0.1", port)) as server:

        def answer() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n".ljust(40))

        threads.submit(answer)
        with pytest.raises(ConnectionError, match=f"what answers at .*{port} is not node 0 of this engine"):
            join_engine(plan(1))


def test_invalid_addresses_and_node_ranks(plan: MakePlan, port: int) -> None:
    for address in ("192.0.2.1", "no such name"):
        with pytest.raises(ValueError, match=f"master_addr is '{address}'"):
            EngineNodes(plan(0, master_addr=address, trusted_network=True))
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ValueError, match=f"master_port {port}"):
        EngineNodes(plan(0))
    with pytest.raises(ValueError, match="node_rank is 1: the engine starts on node 0"):
        MultiprocessExecutor(plan(1))
    with pytest.raises(ValueError, match=r"node_rank is 0 \(with nnodes 3\): the first node starts the engine"):
        run_node(plan(0).config)


def test_number_of_gpus(plan: MakePlan) -> None:
    on_gpu = {"device": "cuda", "machine": Machine(16 << 30, "a GPU", 80 << 30, num_gpus=1)}
    check_devices(dataclasses.replace(plan(0), **on_gpu))
    check_devices(plan(0, tensor_parallel_size=2))
    with pytest.raises(ValueError, match="needs 2 GPUs on each machine, and torch finds 1 here"):
        check_devices(dataclasses.replace(plan(0, tensor_parallel_size=2), **on_gpu))
