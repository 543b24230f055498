"""KV that is loaded before a request runs and held after it has ended: the owners of blocks at every moment."""

from functools import partial
from typing import Any

import pytest
from tests.helpers import schedulers
from tests.helpers.fake_connector import ScriptedConnector

from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import (
    EngineOutput,
    KVConnectorOutput,
    ModelRunnerOutput,
    SchedulerOutput,
    SequenceEnd,
    TransferFailure,
)
from fleetfoot.scheduler.scheduler import Scheduler

LOADING = RequestStatus.LOADING
FAILED = {"a": TransferFailure("the file is too short")}
request_of = partial(schedulers.request_of, prompt=9)


def world(connector: ScriptedConnector, *requests: Request, **config: Any) -> tuple[Scheduler, ScriptedConnector]:
    return schedulers.make_scheduler(*requests, connector=connector, **{"num_blocks": 16, **config}), connector


def schedule(scheduler: Scheduler) -> SchedulerOutput:
    output = schedulers.schedule(scheduler)
    assert output.kv_connector_metadata[0] == output.step
    return output


def update(scheduler: Scheduler, output: SchedulerOutput, **transfers: Any) -> list[EngineOutput]:
    ended = KVConnectorOutput(**transfers) if transfers else None
    return schedulers.update(scheduler, output, kv_connector_output=ended)


def step(scheduler: Scheduler, **transfers: Any) -> tuple[SchedulerOutput, list[EngineOutput]]:
    output = schedule(scheduler)
    return output, update(scheduler, output, **transfers)


def test_a_request_waits_for_its_kv_and_computes_the_rest() -> None:
    a = request_of("a", prompt=11)
    scheduler, connector = world(ScriptedConnector({"a": 8}), a)
    output, _ = step(scheduler)
    assert output.is_idle
    assert (output.num_sampled, output.total_num_scheduled_tokens, output.new_requests) == (0, 0, [])
    assert (a.status, a.row, len(a.block_ids)) == (LOADING, -1, 3)
    assert {scheduler.pool.state(block) for block in a.block_ids} == {"FILLING"}
    assert connector.calls == [("match", "a", 0, 2), ("load", "a", 0, 8, 3)]
    assert scheduler.stats().transfers.num_loading == 1
    step(scheduler, loaded={"a"}, counters={"bytes_loaded": 64})
    assert [scheduler.pool.state(block) for block in a.block_ids] == ["READY", "READY", "FILLING"]
    output, (result,) = step(scheduler)
    (new,) = output.new_requests
    assert (new.num_computed_tokens, new.block_ids, output.num_scheduled_tokens) == (8, a.block_ids, [3])
    assert (result.new_token_ids, a.status, a.num_cached_tokens) == ([7], RequestStatus.RUNNING, 8)
    stats = scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (11, 0)
    transfers = stats.transfers
    assert (transfers.loads_started, transfers.loads_done, transfers.tokens_loaded) == (1, 1, 8)
    assert transfers.counters == {"bytes_loaded": 64}


def test_requests_overtake_a_loading_one_up_to_the_number_of_rows() -> None:
    requests = [request_of("a"), request_of("b"), request_of("x", prompt=3), request_of("c"), request_of("d")]
    scheduler, connector = world(ScriptedConnector({"a": 8, "b": 8, "c": 8, "d": 8}), *requests, max_num_seqs=3)
    output, _ = step(scheduler)
    assert [new.request_id for new in output.new_requests] == ["x"]
    assert [name for name, *_ in connector.of("load")] == ["a", "b"]  # with x that is a row for each
    output, _ = step(scheduler, loaded={"b"})
    assert output.new_requests == []
    output, _ = step(scheduler)
    assert [new.request_id for new in output.new_requests] == ["b"]
    scheduler.finish("x", RequestStatus.FINISHED_ABORTED)
    step(scheduler, loaded={"a"})
    assert [name for name, *_ in connector.of("load")] == ["a", "b", "c"]
    output, _ = step(scheduler)
    assert [new.request_id for new in output.new_requests] == ["a"]


@pytest.mark.parametrize("matched", [3, 12, -4])
def test_a_connector_that_matches_what_cannot_be(matched: int) -> None:
    scheduler, _ = world(ScriptedConnector({"a": matched}), request_of("a", prompt=12))
    with pytest.raises(RuntimeError, match=rf"connector ScriptedConnector matches {matched} tokens after 0 .* of 12"):
        scheduler.schedule()


def test_a_load_that_failed_fails_its_request_if_it_is_to() -> None:
    a = request_of("a")
    scheduler, connector = world(ScriptedConnector({"a": 8}), a, kv_load_failure_policy="fail")
    _, (result,) = step(scheduler, failed={"a": TransferFailure("60 s are over", timed_out=True)})
    assert (result.number, result.new_token_ids, result.end) == (a.sequence_number, [], SequenceEnd.of(a))
    assert (a.finish_reason, a.stop_reason) == ("error", "its KV could not be loaded: 60 s are over")
    assert not scheduler.has_unfinished
    assert connector.of("finished") == [("a", "error", 3, 9)]
    assert scheduler.stats().transfers.loads_timed_out == 1
    scheduler.check_idle()
    with pytest.raises(ValueError, match="kv_load_failure_policy is 'ignore'; it can be 'recompute' or 'fail'"):
        world(connector, kv_load_failure_policy="ignore")


@pytest.mark.parametrize("ending", [{"loaded": {"a"}}, {"failed": FAILED}], ids=["loaded", "failed"])
def test_aborted_while_loading(ending: dict[str, Any]) -> None:
    a = request_of("a")
    scheduler, connector = world(ScriptedConnector({"a": 8}), a)
    output = schedule(scheduler)
    scheduler.finish("a", RequestStatus.FINISHED_ABORTED)
    assert connector.of("finished") == [("a", "abort", 3, 9)]
    assert not scheduler.has_unfinished
    assert {scheduler.pool.state(block) for block in a.block_ids} == {"HELD"}
    scheduler.check_integrity()
    scheduler.check_idle()
    assert scheduler.stats().transfers.num_held_blocks == 3
    with pytest.raises(ValueError, match="'a' is in use: KV of a request that had it is still being transferred"):
        scheduler.add_request(request_of("a"))
    update(scheduler, output)
    output = schedule(scheduler)  # idle: the load goes on
    assert output.finished_req_ids == {"a"}
    assert update(scheduler, output, **ending) == []
    assert scheduler.pool.num_free == 16
    scheduler.add_request(request_of("a"))


def test_new_weights_while_loading() -> None:
    a, b, c = (request_of(name) for name in "abc")
    scheduler, connector = world(ScriptedConnector({"a": 8, "b": 8, "c": 8}), a, b, c)
    step(scheduler, loaded={"a"})
    scheduler.reset_prefix_cache(reset_connector=True)
    assert connector.calls[-1] == ("reset",)
    assert (a.status, a.block_ids, b.status) == (RequestStatus.WAITING, [], LOADING)
    scheduler.check_integrity()
    scheduler.finish("c", RequestStatus.FINISHED_ABORTED)
    connector.matches.clear()
    output, _ = step(scheduler, loaded={"b", "c"})
    assert [new.num_computed_tokens for new in output.new_requests] == [0]
    assert b.status is RequestStatus.WAITING
    output, _ = step(scheduler)
    assert [(new.request_id, new.num_computed_tokens) for new in output.new_requests] == [("b", 0)]
    assert not scheduler.transfers._stale


def test_what_ran_with_old_weights_is_not_found_after_new_ones_even_if_its_step_was_in_flight() -> None:
    a, b = request_of("a", prompt=7, max_tokens=9), request_of("b", prompt=7, max_tokens=2)
    scheduler, connector = world(ScriptedConnector(), a, b, num_blocks=4)
    outputs = [schedule(scheduler), schedule(scheduler)]
    assert scheduler.schedule() is None  # a needs a block
    assert b.status is RequestStatus.PREEMPTED
    scheduler.reset_prefix_cache(reset_connector=True)
    for output in outputs:
        update(scheduler, output)
    assert b.finish_reason == "length"  # its second block is full, of KV that must not be found
    assert connector.of("filled") == [("a", 0, 1, True), ("b", 0, 1, True)]
    scheduler.finish("a", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(request_of("b2", prompt=list(b.token_ids)))
    assert schedule(scheduler).new_requests[0].num_computed_tokens == 0


def test_an_invalid_token_of_a_preempted_request() -> None:
    a, b = request_of("a", prompt=7, max_tokens=9), request_of("b", prompt=7, max_tokens=9)
    scheduler, _ = world(ScriptedConnector(), a, b, num_blocks=4)
    outputs = [schedule(scheduler), schedule(scheduler)]
    assert scheduler.schedule() is None  # a needs a block
    assert b.status is RequestStatus.PREEMPTED
    update(scheduler, outputs[0])
    results = scheduler.update(outputs[1], ModelRunnerOutput([[7], [7]], invalid={1: "NaN"}))
    numbers = [a.sequence_number, b.sequence_number]
    assert [(result.number, result.new_token_ids) for result in results] == [(numbers[0], [7]), (numbers[1], [])]
    assert [result.end for result in results] == [None, SequenceEnd.of(b)]
    assert (b.finish_reason, b.output_token_ids) == ("error", [7])
    scheduler.check_integrity()


def test_blocks_stay_held_until_they_are_sent() -> None:
    a = request_of("a", prompt=9, max_tokens=1)
    scheduler, _ = world(ScriptedConnector(holds={"a"}, params={"from": "a"}), a)
    _, (result,) = step(scheduler)
    assert result.end.kv_transfer_output == {"from": "a"}
    assert a.block_ids == []
    assert not scheduler.has_unfinished
    scheduler.check_idle()
    assert scheduler.pool.num_free == 13
    assert scheduler.stats().transfers.num_held_blocks == 3
    output, _ = step(scheduler)
    assert output.is_idle
    assert [name for name, _ in output.finished] == ["a"]  # its row is free, its blocks are not
    assert output.finished_req_ids == {"a"}
    with pytest.raises(ValueError, match="still being transferred"):
        scheduler.add_request(request_of("a"))
    step(scheduler, sent={"a"})
    assert scheduler.pool.num_free == 16
    assert scheduler.schedule() is None
    scheduler.check_idle()


def test_held_blocks_can_be_hit_and_block_no_request_forever() -> None:
    a = request_of("a", prompt=12, max_tokens=1)
    scheduler, _ = world(ScriptedConnector(holds={"a"}), a, num_blocks=4)
    step(scheduler)
    scheduler.add_request(request_of("b", prompt=a.token_ids[:12], max_tokens=2))
    output, _ = step(scheduler)
    assert output.new_requests[0].num_computed_tokens == 8
    step(scheduler)
    assert not scheduler.has_unfinished
    scheduler.add_request(request_of("c", prompt=12, max_tokens=1))
    output, _ = step(scheduler)
    assert output.is_idle  # it waits for a's blocks
    step(scheduler, sent={"a"})
    assert step(scheduler)[0].num_scheduled_tokens == [12]


def test_reports_of_unknown_requests_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, _ = world(ScriptedConnector(pending=True))
    step(scheduler, loaded={"x"}, failed={"y": TransferFailure("gone")}, sent={"z"})
    assert [record.args for record in caplog.records] == [("x",), ("y",), ("z",)]
    scheduler.check_idle()


def test_no_idle_step_without_a_reason_nor_behind_a_step_in_flight() -> None:
    scheduler, connector = world(ScriptedConnector())
    assert scheduler.schedule() is None
    connector.pending = True
    assert schedule(scheduler).is_idle
    assert scheduler.schedule() is None  # one at a time
    alone = schedulers.make_scheduler(request_of("a", prompt=3, max_tokens=1))
    output = schedulers.schedule(alone)
    assert output.kv_connector_metadata is None
    schedulers.update(alone, output)
    assert alone.schedule() is None


def test_kv_transfer_params_are_checked_when_a_request_comes() -> None:
    scheduler, _ = world(ScriptedConnector(), request_of("a", kv_transfer_params={"good": True}))
    with pytest.raises(ValueError, match="kv_transfer_params is bad"):
        scheduler.add_request(request_of("b", kv_transfer_params={"bad": True}))
    assert list(scheduler.requests) == ["a"]
    with pytest.raises(ValueError, match=r"kv_transfer_params is .*, but this engine has no KV connector"):
        schedulers.make_scheduler(request_of("a", kv_transfer_params={"good": True}))
