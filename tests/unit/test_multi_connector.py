"""Several connectors at once, and the records that travel."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.fake_connector import ScriptedConnector
from tests.helpers.faulty_connector import WORKER_POINTS, Faults, FaultyWorker, InjectedError
from tests.helpers.kv_bench import TOKENS, Bench, InlineJobs, transfer_config

from fleetfoot.executor.multiprocess import KVOutputMerger
from fleetfoot.kv_transfer.blockstore import worker
from fleetfoot.kv_transfer.multi import MultiScheduler, MultiWorker
from fleetfoot.records.kv_layout import ONE_GROUP
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import KVConnectorOutput, SchedulerOutput, TransferFailure
from fleetfoot.runner.step_connector import StepConnector

OTHERS = list(range(100, 109))


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[..., Bench]:
    """Makes an engine with host memory and files that are written at once, or with files alone."""
    monkeypatch.setattr(worker, "IOThreads", lambda name, num_threads: InlineJobs())

    def make_bench(num_cpu_blocks: int | None = 2) -> Bench:
        config = transfer_config("FilesystemConnector", shared_storage_path=str(tmp_path))
        if num_cpu_blocks is not None:
            offload = transfer_config("OffloadingConnector", num_cpu_blocks=num_cpu_blocks)
            config = transfer_config("MultiConnector", connectors=[offload, config])
        bench = Bench(config)
        request.addfinalizer(bench.shutdown)
        return bench

    return make_bench


request_of = partial(Request, prompt_token_ids=TOKENS, params=SamplingParams(), max_tokens=4, seed=0)


def step_of(scheduler: Any, *finished: str) -> SchedulerOutput:
    output = SchedulerOutput(0, [], [], 0, 0, 0, finished_req_ids=set(finished))
    output.kv_connector_metadata = scheduler.build_connector_meta(output)
    return output


def test_blocks_are_held_while_any_part_holds_them() -> None:
    given = [{"a": 1}, None, {"b": 2, "a": 3}]
    sides = [ScriptedConnector(holds={"r", "other"} if params else (), params=params) for params in given]
    scheduler = MultiScheduler(sides, 4, ONE_GROUP)
    parts = [Faults(), Faults(), Faults()]
    step = StepConnector(MultiWorker({str(index): FaultyWorker(None, part) for index, part in enumerate(parts)}))
    for part in parts:
        part.released.set()  # what is in `held` is sent
    parts[0].held = ["r"]
    for name in ("r", "other"):
        assert scheduler.request_finished(request_of(name)) == (True, {"a": 1, "b": 2})
    assert scheduler.has_pending
    assert not scheduler.evict("r") and [side.of("evict") for side in sides] == [[("r",)]] * 3
    assert step.no_forward(step_of(scheduler, "r")) is None
    assert not scheduler.has_pending
    for index, sent, expected in ((2, ["r", "other"], "r"), (0, ["other"], "other")):
        parts[index].held += sent
        output = step.no_forward(step_of(scheduler))
        assert output is not None and output.sent == {expected}


def test_the_order_of_calls_and_a_part_that_raises() -> None:
    one, two = Faults(), Faults()
    step = StepConnector(MultiWorker({"one": FaultyWorker(None, one), "two": FaultyWorker(None, two)}))
    scheduler = MultiScheduler([ScriptedConnector(), ScriptedConnector()], 4, ONE_GROUP)

    def run_step(raising: str) -> None:
        one.calls, two.calls = [], []
        with pytest.raises(InjectedError, match=f"injected at {raising}") if raising else nullcontext():
            step.pre_forward(step_of(scheduler))
            step.post_forward(set())
        assert one.calls[-1] == two.calls[-1] == WORKER_POINTS[-1]
        assert one.calls.count(WORKER_POINTS[-1]) == two.calls.count(WORKER_POINTS[-1]) == 1

    run_step("")
    assert one.calls == two.calls == list(WORKER_POINTS)
    for one.raise_at in WORKER_POINTS[:-1]:
        run_step(one.raise_at)
    one.raise_at, two.raise_at = "", WORKER_POINTS[-1]
    run_step(two.raise_at)
    two.raise_at = "shutdown"
    with pytest.raises(InjectedError, match="injected at shutdown"):
        step.shutdown()
    assert one.calls[-1] == two.calls[-1] == "shutdown"


def test_metadata_of_another_connector() -> None:
    with pytest.raises(TypeError, match="KV connector metadata is a str; it must be MultiMetadata"):
        MultiWorker({}).bind_connector_metadata("something")


ENDS = st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["loaded", "failed", "sent"]))


@given(order=st.permutations(range(6)), ranks=st.lists(ENDS, min_size=3, max_size=3), size=st.integers(1, 3))
def test_transfers_end_when_ended_everywhere(order: list[int], ranks: list[dict[str, str]], size: int) -> None:
    """Six outputs, two of each rank, with the ends of two requests each."""
    merger, merged = KVOutputMerger(3), KVConnectorOutput(counters={"steps": 0})
    ends = {request_id: [rank.get(request_id, "loaded") for rank in ranks] for request_id in "abcd"}
    ends = {request_id: ["sent"] * 3 if "sent" in what else what for request_id, what in ends.items()}
    outputs = []
    for rank, request_ids in itertools.product(range(3), ("cd", "ab")):
        given = {what: {name for name in request_ids if ends[name][rank] == what} for what in ("loaded", "sent")}
        failed = {name: TransferFailure(f"rank {rank}") for name in request_ids if ends[name][rank] == "failed"}
        outputs.append(KVConnectorOutput(**given, failed=failed, counters={"steps": 1}))
    for begin in range(0, 6, size):
        part = merger.merge([*(outputs[index] for index in order[begin : begin + size]), None])
        assert part is not None
        assert not (merged.loaded & part.loaded or merged.sent & part.sent or merged.failed.keys() & part.failed.keys())
        merged.loaded |= part.loaded
        merged.sent |= part.sent
        merged.failed |= part.failed
        merged.counters["steps"] += part.counters["steps"]
    assert merged.counters == {"steps": 6}
    assert merged.sent == {request_id for request_id, what in ends.items() if "sent" in what}
    assert set(merged.failed) == {request_id for request_id, what in ends.items() if "failed" in what}
    assert merged.loaded == set("abcd") - merged.sent - set(merged.failed)
    assert merger.merge([None, KVConnectorOutput()]) is None
