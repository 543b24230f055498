"""Several connectors at once, and the records that travel."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.faulty_connector import WORKER_POINTS, HookedWorker
from tests.helpers.kv_bench import Bench, InlineJobs, LateCopies, same, transfer_config

from fleetfoot.executor.multiprocess import KVOutputMerger
from fleetfoot.kv_transfer.blockstore import worker
from fleetfoot.kv_transfer.multi import MultiScheduler, MultiWorker
from fleetfoot.records.kv_connector import NoSchedulerConnector
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.request import Request
from fleetfoot.records.step import KVConnectorOutput, SchedulerOutput, TransferFailure
from fleetfoot.runner.step_connector import StepConnector

TOKENS = list(range(17))
OTHERS = list(range(100, 109))
BLOCKS = [3, 7, 1, 12, 5]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(worker, "IOThreads", lambda name, num_threads: InlineJobs())
    parts = [
        {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"num_cpu_blocks": 2}},
        {"kv_connector": "FilesystemConnector", "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}},
    ]
    bench = Bench(transfer_config("MultiConnector", connectors=parts))
    yield bench
    bench.shutdown()


def test_all_save_and_the_one_with_the_most_loads(bench: Bench) -> None:
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


def test_a_block_that_one_flushes_is_not_loaded_into_before(bench: Bench) -> None:
    """The offloading part loads in `start`; the other part must have read the block by then."""
    first, second = bench.request("first", TOKENS[:5], [4]), bench.request("second", [50, *TOKENS[:5]], [4])
    bench.save(second, 0, 1)
    bench.scramble([4])
    contents = bench.contents([4])
    bench.scheduler.blocks_filled(first, 0, 1, by_this_step=False)
    assert bench.load(second).loaded == {"second"}
    bench.shutdown()
    other = Bench(
        transfer_config(
            "SharedStorageConnector",
            **bench.contexts[0].config.kv_connector_extra_config["connectors"][1]["kv_connector_extra_config"],
        )
    )
    assert other.load(other.request("again", TOKENS[:5], [6])).loaded == {"again"}
    assert same(other.contents([6]), contents)
    other.shutdown()


def test_a_block_that_one_still_copies_out_is_not_loaded_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late_copies(kv_caches: Any, layout: KVLayout, *, shares_blocks: bool) -> LateCopies:
        assert shares_blocks
        return LateCopies(kv_caches, layout, SimpleNamespace(random=lambda: 1.0))  # type: ignore[arg-type]

    shared = transfer_config("SharedStorageConnector", shared_storage_path=str(tmp_path))
    earlier = Bench(shared)
    earlier.save(earlier.request("other", OTHERS, [3, 7]), 0, 2)
    others = earlier.contents([3, 7])
    earlier.shutdown()

    monkeypatch.setattr(worker, "IOThreads", lambda name, num_threads: InlineJobs())
    monkeypatch.setattr(worker, "block_copies", late_copies)
    offload = transfer_config("OffloadingConnector", num_cpu_blocks=9)
    bench = Bench(transfer_config("MultiConnector", connectors=[offload, shared]))
    bench.save(bench.request("r", TOKENS, BLOCKS), 0, 2)  # the copies to host memory are still to come
    contents = bench.contents(BLOCKS[:2])
    assert bench.load(bench.request("other", OTHERS, BLOCKS[:2])).loaded == {"other"}
    assert same(bench.contents(BLOCKS[:2]), others)
    assert bench.load(bench.request("again", TOKENS, [9, 8])).loaded == {"again"}
    assert same(bench.contents([9, 8]), contents)
    assert bench.counters["OffloadingConnector.blocks_loaded"] == 2
    bench.shutdown()


class Part(HookedWorker, NoSchedulerConnector):
    """Both sides of a part with given results, which records the calls."""

    def __init__(self, *, holds: bool = False, matches: int = 0, params: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.holds, self.matches, self.params = holds, matches, params
        self.calls: list[str] = []
        self.output = KVConnectorOutput()
        self.raises: set[str] = set()

    def at(self, point: str) -> None:
        self.calls.append(point)
        if point in self.raises:
            raise RuntimeError(f"{point} raises")

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        return self.matches

    def update_state_after_alloc(self, request: Request, num_computed_tokens: int, num_external_tokens: int) -> None:
        self.at("update_state_after_alloc")

    def blocks_reused(self, block_ids: list[int]) -> None:
        self.at(f"reused {block_ids}")

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        return self.holds, self.params

    def get_finished(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        super().get_finished(finished_req_ids)
        output, self.output = self.output, KVConnectorOutput()
        return output


def request_of(request_id: str = "r") -> Request:
    from fleetfoot.records.sampling_params import SamplingParams

    return Request(request_id, TOKENS, SamplingParams(), max_tokens=4, seed=0)


def step_of(scheduler: MultiScheduler, *finished: str) -> SchedulerOutput:
    output = SchedulerOutput(0, [], [], 0, 0, 0, finished_req_ids=set(finished))
    output.kv_connector_metadata = scheduler.build_connector_meta(output)
    return output


def test_blocks_are_held_while_any_part_holds_them() -> None:
    parts = [Part(holds=True, params={"a": 1}), Part(), Part(holds=True, params={"b": 2, "a": 3})]
    scheduler = MultiScheduler(parts, 4)
    step = StepConnector(MultiWorker({str(index): part for index, part in enumerate(parts)}))
    parts[0].output = KVConnectorOutput(sent={"r"})
    assert scheduler.request_finished(request_of()) == (True, {"a": 1, "b": 2})
    assert scheduler.request_finished(request_of("other"))[0]
    assert scheduler.has_pending
    assert step.no_forward(step_of(scheduler, "r")) is None
    assert not scheduler.has_pending
    parts[2].output = KVConnectorOutput(sent={"r", "other"})
    output = step.no_forward(step_of(scheduler))
    assert output is not None and output.sent == {"r"}
    parts[0].output = KVConnectorOutput(sent={"other"})
    output = step.no_forward(step_of(scheduler))
    assert output is not None and output.sent == {"other"}


def test_no_part_holds_blocks() -> None:
    scheduler = MultiScheduler([Part(), Part()], 4)
    assert scheduler.request_finished(request_of()) == (False, None)
    assert step_of(scheduler, "r").kv_connector_metadata is None


def test_the_first_with_the_most_loads() -> None:
    parts = [Part(matches=4), Part(matches=8), Part(matches=8)]
    scheduler = MultiScheduler(parts, 4)
    request = request_of()
    request.block_ids = [7, 5, 3, 1]
    assert scheduler.get_num_new_matched_tokens(request, 4) == 8
    scheduler.update_state_after_alloc(request, 4, 8)
    assert [part.calls for part in parts] == [["reused [5, 3]"], ["update_state_after_alloc"], ["reused [5, 3]"]]


def test_the_order_of_calls_and_a_part_that_raises() -> None:
    one, two = Part(), Part()
    step = StepConnector(MultiWorker({"one": one, "two": two}))
    scheduler = MultiScheduler([one, two], 4)
    step.pre_forward(step_of(scheduler))
    step.post_forward(set())
    assert one.calls == list(WORKER_POINTS)
    for point in WORKER_POINTS[:-1]:
        one.calls, two.calls, one.raises = [], [], {point}
        with pytest.raises(RuntimeError, match=f"{point} raises"):
            step.pre_forward(step_of(scheduler))
            step.post_forward(set())
        assert one.calls[-1] == two.calls[-1] == "clear_connector_metadata"
        assert one.calls.count("clear_connector_metadata") == 1
    one.calls, two.calls, one.raises, two.raises = [], [], set(), {"clear_connector_metadata", "shutdown"}
    step.pre_forward(step_of(scheduler))
    with pytest.raises(RuntimeError, match="clear_connector_metadata raises"):
        step.post_forward(set())
    assert one.calls.count("clear_connector_metadata") == two.calls.count("clear_connector_metadata") == 1
    with pytest.raises(RuntimeError, match="shutdown raises"):
        step.shutdown()
    assert one.calls[-1] == two.calls[-1] == "shutdown"


def test_metadata_of_another_connector() -> None:
    worker = MultiWorker({"one": Part()})
    with pytest.raises(TypeError, match="KV connector metadata is a str; it must be MultiMetadata"):
        worker.bind_connector_metadata("something")


def test_metadata_travels(bench: Bench) -> None:
    bench.scheduler.blocks_filled(bench.request("r", TOKENS, BLOCKS), 0, 2, by_this_step=False)
    metadata = bench.scheduler.build_connector_meta(SchedulerOutput(0, [], [], 0, 0, 0))
    assert pickle.loads(pickle.dumps(metadata)) == metadata is not None


# --- outputs of several ranks ---------------------------------------------------------------------------------------

ENDS = st.dictionaries(st.sampled_from("abcd"), st.sampled_from(["loaded", "failed", "sent"]))


@given(order=st.permutations(range(6)), ranks=st.lists(ENDS, min_size=3, max_size=3), size=st.integers(1, 3))
def test_transfers_end_once_when_they_have_ended_everywhere(
    order: list[int], ranks: list[dict[str, str]], size: int
) -> None:
    """Six outputs, two of each rank: what the first does not say, the second does."""
    merger, merged = KVOutputMerger(3), KVConnectorOutput()
    ends = {request_id: [rank.get(request_id, "loaded") for rank in ranks] for request_id in "abcd"}
    ends = {request_id: ["sent"] * 3 if "sent" in what else what for request_id, what in ends.items()}
    outputs = []
    for index in range(6):
        rank, half = divmod(index, 2)
        output = KVConnectorOutput(counters={"steps": 1})
        for request_id in "ab" if half else "cd":
            what = ends[request_id][rank]
            if what == "failed":
                output.failed[request_id] = TransferFailure(f"rank {rank}")
            else:
                getattr(output, what).add(request_id)
        outputs.append(output)
    queue = [outputs[index] for index in order]
    for begin in range(0, 6, size):
        part = merger.merge([*queue[begin : begin + size], None])
        assert part is not None
        assert not (merged.loaded & part.loaded or merged.sent & part.sent or merged.failed.keys() & part.failed.keys())
        merged.loaded |= part.loaded
        merged.sent |= part.sent
        merged.failed |= part.failed
        merged.counters["steps"] = merged.counters.get("steps", 0) + part.counters["steps"]
    assert merged.counters == {"steps": 6}
    assert merged.sent == {request_id for request_id, what in ends.items() if "sent" in what}
    assert set(merged.failed) == {request_id for request_id, what in ends.items() if "failed" in what}
    assert merged.loaded == set("abcd") - merged.sent - set(merged.failed)
    assert merger.merge([None, KVConnectorOutput()]) is None
