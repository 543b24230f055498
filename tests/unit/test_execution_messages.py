"""Messages between the engine and its workers: nothing gets lost or changed on the way."""

from __future__ import annotations

import dataclasses
import pickle
from array import array

import pytest

from fleetfoot.config.engine import EngineConfig
from fleetfoot.executor import messages
from fleetfoot.executor.messages import (
    Failure,
    Ready,
    StepOutput,
    decode_call,
    decode_reply,
    encode_call,
    encode_reply,
)
from fleetfoot.executor.multiprocess import StepOutputs
from fleetfoot.executor.processes import RendezvousDir
from fleetfoot.executor.protocol import WorkerBuild
from fleetfoot.kv_transfer.blockstore.scheduler import BlockStoreMetadata, BlockTransfer, RequestLoad
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.resolve import resolve_plan
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
    kv_connector_metadata=BlockStoreMetadata("epoch", loads=[RequestLoad("näme", [BlockTransfer(7, b"\0digest")])]),
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


@pytest.mark.parametrize("step", [IDLE, FULL], ids=["idle", "full"])
@pytest.mark.parametrize("grammar", [None, {"mask": [1, 2]}])
def test_a_step_arrives_as_it_was_sent(step: SchedulerOutput, grammar: object) -> None:
    arrived = decode_call(encode_call(17, step, grammar))
    assert arrived.number == 17
    assert arrived.grammar_output == grammar
    for field in dataclasses.fields(SchedulerOutput):
        assert getattr(arrived.scheduler_output, field.name) == getattr(step, field.name), field.name


def test_ranks_that_do_not_read_tokens_get_none() -> None:
    (new,) = without_token_ids(FULL).new_requests
    assert (new.token_ids, new.num_tokens) == (array("i"), 2)
    assert dataclasses.replace(new, token_ids=FULL.new_requests[0].token_ids) == FULL.new_requests[0]
    assert without_token_ids(IDLE) is IDLE


def test_a_plain_step_is_not_pickled() -> None:
    """Pickling costs more than everything else."""
    plain = dataclasses.replace(FULL, new_requests=[], kv_connector_metadata=None)
    assert b"fleetfoot" in encode_call(0, FULL)
    assert b"fleetfoot" not in encode_call(0, plain)
    assert decode_call(encode_call(0, plain)).scheduler_output == plain


@pytest.mark.parametrize(
    "report", [StepOutput(3, 12, OUTPUT), StepOutput(0, 0, ModelRunnerOutput([])), Ready(1, b"x", BUILD)]
)
def test_a_report_arrives_as_it_was_sent(report: StepOutput | Ready) -> None:
    assert decode_reply(encode_reply(report)) == report


class OddError(Exception):
    """Cannot be made from its message."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    ("error", "text", "comes_along"),
    [
        (ValueError("bad value"), "ValueError: bad value", True),
        (KeyboardInterrupt(), "KeyboardInterrupt", True),
        (OddError(1, 2), "OddError: 1 and 2", False),
        (ValueError(lambda: 0), "ValueError: <function", False),
    ],
)
def test_what_a_worker_raised_comes_along_if_it_can(error: BaseException, text: str, comes_along: bool) -> None:
    failure = decode_reply(encode_reply(Failure.of(2, error, "Traceback ...")))
    assert (failure.rank, failure.trace) == (2, "Traceback ...")
    assert failure.text.startswith(text)
    assert bool(failure.error) == comes_along
    if comes_along:
        again = pickle.loads(failure.error)
        assert type(again) is type(error) and again.args == error.args


def outputs_of(*, connector: bool, **sizes: int) -> StepOutputs:
    config = EngineConfig(device="cpu", kv_offloading_size=1 if connector else None, **sizes)
    plan = resolve_plan(config, Machine(16 << 30), environ={})
    return StepOutputs(plan.output_rank, len(plan.reply_ranks))


def test_without_a_connector_one_rank_answers() -> None:
    outputs = outputs_of(connector=False, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert not outputs.is_complete(5)
    outputs.add(StepOutput(2, 5, ModelRunnerOutput([[7]])))  # the first of the last stage
    assert outputs.is_complete(5)
    assert outputs.pop(5) == ModelRunnerOutput([[7]])


def test_what_all_ranks_report_of_transfers_is_merged_in_the_order_of_steps() -> None:
    """Rank 0 is two steps ahead of rank 1, as it may be in a pipeline."""
    outputs = outputs_of(connector=True, pipeline_parallel_size=2)
    lost = TransferFailure("lost")
    from_first = [KVConnectorOutput({"a", "b"}), None, KVConnectorOutput({"c"}, counters={"n": 1})]
    from_last = [None, KVConnectorOutput({"a"}, {"b": lost}), KVConnectorOutput(sent={"d"}, counters={"n": 2})]
    for number, said in enumerate(from_first):
        outputs.add(StepOutput(0, number, ModelRunnerOutput([], kv_connector_output=said)))
        assert not outputs.is_complete(number)
    merged = []
    for number, said in enumerate(from_last):
        outputs.add(StepOutput(1, number, ModelRunnerOutput([[number]], kv_connector_output=said)))
        assert outputs.is_complete(number)
        output = outputs.pop(number)
        assert output.sampled_token_ids == [[number]]
        merged.append(output.kv_connector_output)
    assert merged[0] is None  # nothing has ended on both
    assert merged[1] == KVConnectorOutput({"a"}, {"b": lost})
    assert merged[2] == KVConnectorOutput(counters={"n": 3})


def test_a_message_for_some_ranks() -> None:
    folder = RendezvousDir()
    engine = messages.EngineChannel(folder.path, 3)
    workers = [messages.WorkerChannel(addresses) for addresses in engine.addresses]
    engine.send(b"middle", [1])
    engine.send(b"all")
    assert [worker.receive() for worker in workers] == [b"all", b"middle", b"all"]
    for channel in (*workers, engine):
        channel.close()
    folder.remove()


def test_a_worker_that_is_not_there_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_SEND_MS", 1)
    folder = RendezvousDir()
    engine = messages.EngineChannel(folder.path, 1)
    with pytest.raises(ConnectionError, match="worker 0 is not connected any more"):
        engine.send(b"a step")
    engine.close()
    folder.remove()
