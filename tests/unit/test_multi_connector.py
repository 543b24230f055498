"""Several connectors at once, and the records that travel."""

import itertools
import pickle
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
from tests.helpers.kv_bench import BLOCKS, TOKENS, Bench, InlineJobs, LateCopies, same, transfer_config

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


def test_all_save_and_the_one_with_the_most_loads(make: Callable[..., Bench]) -> None:
    bench = make()
    request = bench.request("r", TOKENS, BLOCKS)
    bench.save(request, 0, 2)
    contents = bench.contents(BLOCKS[:2])
    bench.step()
    assert bench.counters["OffloadingConnector.blocks_saved"] == 2
    assert bench.counters["FilesystemConnector.blocks_saved"] == 2
    bench.scramble(BLOCKS)
    again = bench.request("again", TOKENS, [9, 8])
    assert bench.load(again).loaded == {"again"}  # both have as much: the first loads
    assert bench.counters["OffloadingConnector.blocks_loaded"] == 2
    assert same(bench.contents([9, 8]), contents)

    bench.save(bench.request("other", [99, *TOKENS], [2, 0]), 0, 1)  # one block leaves host memory
    third = bench.request("third", TOKENS, [10, 11])
    assert bench.load(third).loaded == {"third"}
    assert bench.counters["FilesystemConnector.blocks_loaded"] == 2
    assert same(bench.contents([10, 11]), contents)


def test_a_block_that_one_flushes_is_not_loaded_into_before(make: Callable[..., Bench]) -> None:
    """The offloading part loads in `start_load_kv`; the other part must have read the block by then."""
    bench = make()
    first, second = bench.request("first", TOKENS[:5], [4]), bench.request("second", [50, *TOKENS[:5]], [4])
    bench.save(second, 0, 1)
    bench.scramble([4])
    contents = bench.contents([4])
    bench.scheduler.blocks_filled(first, 0, 1, by_this_step=False)
    assert bench.load(second).loaded == {"second"}
    other = make(None)
    assert other.load(other.request("again", TOKENS[:5], [6])).loaded == {"again"}
    assert same(other.contents([6]), contents)


def test_blocks_being_copied_out_are_not_loaded(make: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = make(None)
    earlier.save(earlier.request("other", OTHERS, [3, 7]), 0, 2)
    others = earlier.contents([3, 7])

    def late_copies(*arguments: Any, shares_blocks: bool) -> LateCopies:
        assert shares_blocks
        return LateCopies(*arguments)

    monkeypatch.setattr(worker, "block_copies", late_copies)
    bench = make(9)
    bench.save(bench.request("r", TOKENS, BLOCKS), 0, 2)  # the copies to host memory are still to come
    contents = bench.contents(BLOCKS[:2])
    assert bench.load(bench.request("other", OTHERS, BLOCKS[:2])).loaded == {"other"}
    assert same(bench.contents(BLOCKS[:2]), others)
    assert bench.load(bench.request("again", TOKENS, [9, 8])).loaded == {"again"}
    assert same(bench.contents([9, 8]), contents)
    assert bench.counters["OffloadingConnector.blocks_loaded"] == 2


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


def test_the_first_with_the_most_loads() -> None:
    parts = [ScriptedConnector({"r": num_tokens}) for num_tokens in (4, 8, 8)]
    scheduler = MultiScheduler(parts, 4, ONE_GROUP)
    request = request_of("r")
    request.block_ids = [7, 5, 3, 1]
    assert scheduler.get_num_new_matched_tokens(request, 4) == 8
    scheduler.update_state_after_alloc(request, 4, 8)
    assert [part.of("reused") for part in parts] == [[([3, 5],)], [], [([3, 5],)]]
    assert [part.of("load") for part in parts] == [[], [("r", 4, 8, 4)], []]


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


def test_metadata_travels(make: Callable[..., Bench]) -> None:
    bench = make()
    assert bench.scheduler.request_finished(request_of("r")) == (False, None)  # no part holds its blocks
    assert step_of(bench.scheduler, "r").kv_connector_metadata is None
    bench.scheduler.blocks_filled(bench.request("r", TOKENS, BLOCKS), 0, 2, by_this_step=False)
    metadata = bench.scheduler.build_connector_meta(SchedulerOutput(0, [], [], 0, 0, 0))
    assert pickle.loads(pickle.dumps(metadata)) == metadata is not None


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
