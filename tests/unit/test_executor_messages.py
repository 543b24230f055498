"""Messages between the engine and its workers, and the directory of their sockets."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetfoot.config.engine import EngineConfig
from fleetfoot.executor import messages
from fleetfoot.executor.messages import Failure, Ready, StepOutput, decode_call, decode_reply, encode_call, encode_reply
from fleetfoot.executor.multiprocess import StepOutputs
from fleetfoot.executor.processes import RendezvousDir
from fleetfoot.executor.protocol import WorkerBuild
from fleetfoot.kv_transfer.blockstore.blocks import BlockStoreMetadata, BlockTransfer
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.resolve import resolve_plan
from fleetfoot.records.kv_layout import KVCacheSpec, KVLayout
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import (
    KVConnectorOutput,
    ModelRunnerOutput,
    NewRequest,
    RowLogprobs,
    SchedulerOutput,
    TransferFailure,
    without_token_ids,
)

IDLE = SchedulerOutput(3, [], [], 0, 0, 0)
FULL = SchedulerOutput(
    step=2**40,
    rows=[4, 0],
    num_scheduled_tokens=[3, 70],
    num_decodes=1,
    num_sampled=2,
    total_num_scheduled_tokens=73,
    new_requests=[
        NewRequest(
            request_id="näme",
            row=0,
            token_ids=array("i", [1, 2**31 - 1]),
            num_prompt_tokens=1,
            num_computed_tokens=0,
            block_ids=[7],
            params=SamplingParams(temperature=0.3, logit_bias={5: -1.0}, stop=["x"], seed=2**63 - 1),
            seed=2**64 - 1,
            stop_token_ids=frozenset({1, 2}),
            bad_words_token_ids=[[3, 4]],
        )
    ],
    new_block_ids=[(4, 2, [8, 9])],
    finished=[("gone", 1)],
    finished_req_ids={"gone"},
    num_drafts=2,
    num_to_propose=2,
    awaited_step=2**40 - 2,
    kv_connector_metadata=BlockStoreMetadata("epoch", loads=[("näme", [BlockTransfer(7, b"\0digest")])]),
)
BUILD = WorkerBuild("v2", "torch", "sdpa", "block-contiguous-hnd", "none", "ngram", 2)
OUTPUT = ModelRunnerOutput(
    sampled_token_ids=[[5, 6], []],
    logprobs={0: [RowLogprobs([5, 9], [-0.5, float("-inf")], 3)]},
    prompt_logprobs={1: (64, [RowLogprobs([3], [-1.25], 4)])},
    invalid={1: "logits are not numbers"},
    num_drafted=[2],
    kv_connector_output=KVConnectorOutput({"a"}, {"b": TransferFailure("lost", timed_out=True)}, {"c"}, {"n": 1}),
)
LAYOUT = KVLayout(9, 16, "bfloat16", (KVCacheSpec(2, 64), KVCacheSpec(2, 64, 7)))


@pytest.mark.parametrize("step", [IDLE, FULL], ids=["idle", "full"])
@pytest.mark.parametrize("grammar", [None, {"mask": [1, 2]}])
def test_calls_round_trip(step: SchedulerOutput, grammar: object) -> None:
    assert decode_call(encode_call(17, step, grammar)) == (17, step, grammar)


def test_ranks_that_read_no_tokens_receive_none() -> None:
    (new,) = without_token_ids(FULL).new_requests
    assert (new.token_ids, new.num_tokens) == (array("i"), 2)
    assert dataclasses.replace(new, token_ids=FULL.new_requests[0].token_ids) == FULL.new_requests[0]
    assert without_token_ids(IDLE) is IDLE


def test_plain_step_is_not_pickled() -> None:
    """Pickling costs more than everything else."""
    plain = dataclasses.replace(FULL, new_requests=[], kv_connector_metadata=None)
    assert b"fleetfoot" in encode_call(0, FULL)
    assert b"fleetfoot" not in encode_call(0, plain)
    assert decode_call(encode_call(0, plain))[1] == plain


@pytest.mark.parametrize(
    "reply", [StepOutput(3, 12, OUTPUT), StepOutput(0, 0, ModelRunnerOutput([])), Ready(1, LAYOUT, BUILD)]
)
def test_replies_round_trip(reply: StepOutput | Ready) -> None:
    assert decode_reply(encode_reply(reply)) == reply


class OddError(Exception):
    """Cannot be made from its message."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    ("error", "text", "is_included"),
    [
        (ValueError("bad value"), "ValueError: bad value", True),
        (KeyboardInterrupt(), "KeyboardInterrupt", True),
        (OddError(1, 2), "OddError: 1 and 2", False),
        (ValueError(lambda: 0), "ValueError: <function", False),
    ],
)
def test_failure_includes_an_exception_that_can_be_pickled(error: BaseException, text: str, is_included: bool) -> None:
    failure = decode_reply(encode_reply(Failure.of(2, error, "Traceback ...")))
    assert (failure.rank, failure.trace, bool(failure.error)) == (2, "Traceback ...", is_included)
    assert failure.text.startswith(text)
    if is_included:
        again = pickle.loads(failure.error)
        assert type(again) is type(error) and again.args == error.args


def outputs_of(*, connector: bool, **sizes: int) -> StepOutputs:
    config = EngineConfig(device="cpu", kv_offloading_size=1 if connector else None, **sizes)
    plan = resolve_plan(config, Machine(16 << 30), environ={})
    return StepOutputs(plan.output_rank, len(plan.reply_ranks))


def test_without_a_connector_one_rank_replies() -> None:
    outputs = outputs_of(connector=False, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert outputs.pop(5) is None
    outputs.add(StepOutput(2, 5, ModelRunnerOutput([[7]])))  # the first of the last stage
    assert outputs.pop(5) == ModelRunnerOutput([[7]])


def test_connector_outputs_of_all_ranks_are_merged_in_the_order_of_steps() -> None:
    """Rank 0 is two steps ahead of rank 1, as it may be in a pipeline."""
    outputs = outputs_of(connector=True, pipeline_parallel_size=2)
    lost = TransferFailure("lost")
    ranks = [
        [KVConnectorOutput({"a", "b"}), None, KVConnectorOutput({"c"}, counters={"n": 1})],
        [None, KVConnectorOutput({"a"}, {"b": lost}), KVConnectorOutput(sent={"d"}, counters={"n": 2})],
    ]
    merged = []
    for rank, steps in enumerate(ranks):
        for number, transfers in enumerate(steps):
            outputs.add(StepOutput(rank, number, ModelRunnerOutput([[number]] * rank, kv_connector_output=transfers)))
            output = outputs.pop(number)
            assert (output is None) == (rank == 0)
            if output is not None:
                assert output.sampled_token_ids == [[number]]
                merged.append(output.kv_connector_output)
    # nothing has ended on both after the first step
    assert merged == [None, KVConnectorOutput({"a"}, {"b": lost}), KVConnectorOutput(counters={"n": 3})]


# --- sockets and their directory ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where directories are made, here and in child processes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def rendezvous(parent: Path) -> Iterator[RendezvousDir]:
    rendezvous = RendezvousDir()
    yield rendezvous
    rendezvous.close()


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


def age(folder: Path) -> None:
    """Make it look an hour old."""
    lock = folder / "lock"
    os.utime(lock, (lock.stat().st_atime, lock.stat().st_mtime - 3600))


def test_directory_is_private_and_removed_with_its_engine(parent: Path, rendezvous: RendezvousDir) -> None:
    assert rendezvous.place.parent == parent
    assert rendezvous.place.stat().st_mode & 0o077 == 0
    rendezvous.close()
    rendezvous.close()
    assert list(parent.iterdir()) == []


KILLED = """
import os, signal
from fleetfoot.executor.processes import RendezvousDir
rendezvous = RendezvousDir()
(rendezvous.place / "calls-0").touch()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_directory_of_a_killed_engine_is_removed_by_the_next(parent: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = parent.iterdir()
    first = RendezvousDir()
    assert left.exists()  # it might be that of an engine that is about to lock it
    age(left)
    second = RendezvousDir()
    assert set(parent.iterdir()) == {first.place, second.place}
    first.close()
    second.close()


def test_directories_in_use_and_others_stay(parent: Path, rendezvous: RendezvousDir) -> None:
    age(rendezvous.place)
    other = parent / "fleetfoot-notes"
    other.mkdir()
    RendezvousDir().close()
    assert set(parent.iterdir()) == {rendezvous.place, other}
