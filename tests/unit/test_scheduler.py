"""The scheduler, step by step: order, budget, chunks, preemption, ends, and steps that overlap."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.fake_runner import FakeRunner, reference
from tests.helpers.schedulers import Drive, make_scheduler, request_of

from fleetfoot.records.request import RequestStatus
from fleetfoot.records.step import ModelRunnerOutput, SchedulerOutput
from fleetfoot.scheduler.scheduler import Scheduler, SchedulerConfig

VOCAB = 50


def scheduler_of(**config: Any) -> Scheduler:
    return make_scheduler(**{"max_num_batched_tokens": 16, **config})


# --- order and budget -----------------------------------------------------------------------------------------------


def test_prompts_are_cut_to_the_budget_and_decodes_go_first() -> None:
    drive = Drive(scheduler_of(), request_of("a", 6), request_of("b", 20), request_of("c", 3))
    output = drive.schedule()
    assert drive.batch(output) == {"a": 6, "b": 10}
    assert (output.num_decodes, output.num_sampled, output.total_num_scheduled_tokens) == (0, 1, 16)
    assert output.longest_decode == 0
    drive.update(output)
    output = drive.schedule()
    assert drive.batch(output) == {"a": 1, "b": 10, "c": 3}
    assert (output.num_decodes, output.num_sampled, output.total_num_scheduled_tokens) == (1, 3, 14)
    assert output.longest_decode == 7
    drive.update(output)
    output = drive.schedule()
    assert drive.batch(output) == {"a": 1, "b": 1, "c": 1}
    assert output.longest_decode == 0  # which no prefill shares its step with
    drive.update(output)
    stats = drive.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (3, 0, 0)


def test_prompts_that_end_stand_before_those_that_go_on() -> None:
    drive = Drive(scheduler_of(max_num_batched_tokens=10), request_of("a", 25), request_of("b", 3))
    assert drive.step() == {"a": 10}
    assert drive.step() == {"a": 10}
    output = drive.schedule()
    assert drive.batch(output) == {"a": 5, "b": 3}
    assert output.num_sampled == 2


def test_rows_limit_who_runs() -> None:
    drive = Drive(scheduler_of(max_num_seqs=2), *(request_of(name, 2, max_tokens=2) for name in "abc"))
    assert drive.step() == {"a": 2, "b": 2}
    assert drive.step() == {"a": 1, "b": 1}
    output = drive.schedule()
    assert drive.batch(output) == {"c": 2}
    assert {name for name, _ in output.finished} == output.finished_req_ids == {"a", "b"}


def test_nobody_overtakes_a_request_that_does_not_fit() -> None:
    drive = Drive(scheduler_of(num_blocks=6), request_of("a", 12, 8), request_of("b", 13), request_of("c", 1))
    assert drive.step() == {"a": 12}
    assert drive.step() == {"a": 1}  # b would fit into no two free blocks, and c waits behind it
    drive.scheduler.finish("a", RequestStatus.FINISHED_ABORTED)
    assert drive.step() == {"b": 13, "c": 1}


def test_priorities() -> None:
    scheduler = scheduler_of(priority=True, max_num_seqs=1)
    drive = Drive(scheduler, *(request_of(name, 2, 1, priority=p) for name, p in (("a", 2), ("b", 0), ("c", 0))))
    assert [list(drive.step()) for _ in range(3)] == [["b"], ["c"], ["a"]]
    fcfs = Drive(scheduler_of(max_num_seqs=1), request_of("a", 2, 1, priority=2), request_of("b", 2, 1, priority=0))
    assert [list(fcfs.step()) for _ in range(2)] == [["a"], ["b"]]


def test_whole_prompts_without_chunks() -> None:
    drive = Drive(scheduler_of(enable_chunked_prefill=False), request_of("a", 10), request_of("b", 10))
    assert drive.step() == {"a": 10}
    assert drive.step() == {"a": 1, "b": 10}
    with pytest.raises(ValueError, match=r"a prompt of 17 tokens, and a step holds 16.*enable_chunked_prefill=True"):
        drive.scheduler.add_request(request_of("c", 17))


def test_nothing_to_do() -> None:
    scheduler = scheduler_of()
    assert scheduler.schedule() is None
    assert not scheduler.has_unfinished
    scheduler.check_idle()
    scheduler.check_integrity()


# --- refusals -------------------------------------------------------------------------------------------------------


def test_a_budget_below_one_token_for_each() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(3\) must hold .* of max_num_seqs \(4\)"):
        scheduler_of(max_num_batched_tokens=3)


def test_an_id_in_use() -> None:
    drive = Drive(scheduler_of(), request_of("a", 2, 1))
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        drive.scheduler.add_request(request_of("a"))
    drive.step()
    drive.scheduler.add_request(request_of("a", 2, 1))  # it has ended
    assert drive.step() == {"a": 2}


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "fits"), [(16, 1, True), (12, 5, True), (12, 6, False), (17, 1, False)]
)
def test_what_can_never_fit_is_refused(prompt: int, max_tokens: int, fits: bool) -> None:
    scheduler = scheduler_of(num_blocks=4)
    if fits:
        drive = Drive(scheduler, request_of("a", prompt, max_tokens))
        while scheduler.has_unfinished:
            drive.step()
        assert scheduler.stats().num_preemptions == 0
    else:
        most = 17 - prompt
        with pytest.raises(ValueError, match=rf"the whole cache holds 16 \(4 blocks of 4\).*at most {most}"):
            scheduler.add_request(request_of("a", prompt, max_tokens))
        assert not scheduler.has_unfinished
    scheduler.check_idle()


# --- ends -----------------------------------------------------------------------------------------------------------


def test_how_requests_end() -> None:
    requests = [
        request_of("a", 2, 3),
        request_of("b", 2, 9, stop_token_ids=[7]),
        request_of("c", 2, 9, eos_token_ids=frozenset([7])),
        request_of("d", 2, 9, eos_token_ids=frozenset([7]), ignore_eos=True),
    ]
    drive = Drive(scheduler_of(), *requests)
    drive.step()
    assert [request.finish_reason for request in requests] == [None, "stop", "stop", None]
    assert [request.stop_reason for request in requests] == [None, 7, None, None]
    drive.step()
    drive.step()
    assert [request.finish_reason for request in requests] == ["length", "stop", "stop", None]
    assert requests[0].output_token_ids == [7, 7, 7]
    assert drive.scheduler.finish("d", RequestStatus.FINISHED_ABORTED) is requests[3]
    assert drive.scheduler.finish("d", RequestStatus.FINISHED_ABORTED) is None
    assert drive.scheduler.finish("nobody", RequestStatus.FINISHED_ABORTED) is None
    drive.scheduler.check_idle()


def test_a_stop_token_before_min_tokens_does_not_stop() -> None:
    request = request_of("a", 2, 9, stop_token_ids=[7], min_tokens=3)
    drive = Drive(scheduler_of(), request)
    for expected in (None, None, "stop"):
        drive.step()
        assert request.finish_reason == expected


def test_several_tokens_at_once_are_cut_where_the_request_ends() -> None:
    requests = [request_of("a", 2, 3), request_of("b", 2, 9, stop_token_ids=[3]), request_of("c", 2, 9)]
    drive = Drive(scheduler_of(), *requests)
    output = drive.schedule()
    results = drive.scheduler.update(output, ModelRunnerOutput([[1, 2, 3, 4], [1, 3, 3], [1]]))
    assert [result.new_token_ids for result in results] == [[1, 2, 3], [1, 3], [1]]
    assert [request.finish_reason for request in requests] == ["length", "stop", None]


def test_a_token_that_means_nothing_ends_its_request_alone() -> None:
    requests = [request_of("a", 2), request_of("b", 2, 1), request_of("c", 2)]
    drive = Drive(scheduler_of(), *requests)
    output = drive.schedule()
    results = drive.update(output, invalid={0: "NaN", 1: "NaN too"})
    assert [result.new_token_ids for result in results] == [[], [], [7]]
    assert [request.finish_reason for request in requests] == ["error", "error", None]
    assert [request.stop_reason for request in requests] == ["NaN", "NaN too", None]
    assert requests[0].output_token_ids == []
    assert drive.step() == {"c": 1}


def test_aborted_at_every_stage() -> None:
    scheduler = scheduler_of(max_num_seqs=2, max_num_batched_tokens=8)
    drive = Drive(scheduler, request_of("a", 2), request_of("b", 20), request_of("c", 2))
    output = drive.schedule()
    assert drive.batch(output) == {"a": 2, "b": 6}
    scheduler.finish("c", RequestStatus.FINISHED_ABORTED)  # waits
    scheduler.finish("b", RequestStatus.FINISHED_ABORTED)  # in the middle of its prompt, on the device
    scheduler.check_integrity()
    assert scheduler.pool.num_free < scheduler.config.num_blocks - 1
    assert [result.request.request_id for result in drive.update(output)] == ["a"]
    assert scheduler.pool.num_free == scheduler.config.num_blocks - 1
    output = drive.schedule()
    assert output.finished_req_ids == {"b", "c"}
    assert [name for name, _ in output.finished] == ["b"]  # c never had a row
    scheduler.finish("a", RequestStatus.FINISHED_STOPPED, "text")  # with a decode on the device
    assert drive.update(output) == []
    scheduler.check_idle()


def test_aborting_all_who_wait_leaves_nothing_to_schedule() -> None:
    drive = Drive(scheduler_of(max_num_seqs=1), *(request_of(name) for name in "abc"))
    for name in "abc":
        drive.scheduler.finish(name, RequestStatus.FINISHED_ABORTED)
    assert drive.scheduler.schedule() is None
    drive.scheduler.add_request(request_of("d"))
    assert drive.step() == {"d": 5}


# --- preemption -----------------------------------------------------------------------------------------------------


def test_the_last_to_come_is_preempted_and_comes_back_with_all_its_tokens() -> None:
    a, b = request_of("a", 7, 9), request_of("b", 7, 9)
    drive = Drive(scheduler_of(num_blocks=4, enable_prefix_caching=False), a, b)
    assert drive.step() == {"a": 7, "b": 7}
    assert drive.step() == {"a": 1, "b": 1}
    output = drive.schedule()
    assert drive.batch(output) == {"a": 1}
    assert output.finished[0][0] == "b"
    assert output.finished_req_ids == set()  # it has not ended
    assert (b.status, b.num_preemptions, b.block_ids, b.row) == (RequestStatus.PREEMPTED, 1, [], -1)
    assert drive.scheduler.stats().num_preemptions == 1
    drive.update(output)
    while not a.is_finished:
        assert drive.step() == {"a": 1}
    output = drive.schedule()
    (described,) = output.new_requests
    assert described.token_ids.tolist() == [*b.token_ids[:7], 7, 7]
    assert (described.num_prompt_tokens, described.num_computed_tokens) == (7, 0)
    assert drive.batch(output) == {"b": 9}
    drive.update(output)
    while not b.is_finished:
        drive.step()
    assert b.output_token_ids == [7] * 9
    drive.scheduler.check_idle()


def test_a_preempted_request_hits_what_is_left_of_its_own_prefix() -> None:
    a, b = request_of("a", 8, 9), request_of("b", 8, 9)
    drive = Drive(scheduler_of(num_blocks=6), a, b)
    drive.step()
    while not b.num_preemptions:
        drive.step()
    while not a.is_finished:
        drive.step()
    output = drive.schedule()
    (described,) = output.new_requests
    assert described.num_computed_tokens >= 4
    assert b.num_cached_tokens == 0  # of its first admission, which is what a user is told
    drive.update(output)


def test_a_prompt_in_the_middle_gives_way() -> None:
    a, b = request_of("a", 4, 12), request_of("b", 12, 2)
    drive = Drive(scheduler_of(num_blocks=4, max_num_batched_tokens=5), a, b)
    assert drive.step() == {"a": 4, "b": 1}
    output = drive.schedule()
    assert drive.batch(output) == {"a": 1}  # its second block is b's last one
    assert b.status is RequestStatus.PREEMPTED
    drive.update(output)


# --- steps that overlap ---------------------------------------------------------------------------------------------


def test_a_step_is_scheduled_while_the_last_one_runs() -> None:
    a = request_of("a", 3, 3)
    drive = Drive(scheduler_of(), a)
    outputs = [drive.schedule(), drive.schedule(), drive.schedule()]
    assert [drive.batch(output) for output in outputs] == [{"a": 3}, {"a": 1}, {"a": 1}]
    assert drive.scheduler.schedule() is None  # its last token is on its way
    assert len(drive.scheduler._in_flight) == 3
    for output, expected in zip(outputs, (None, None, "length"), strict=True):
        drive.update(output)
        assert a.finish_reason == expected
    drive.scheduler.check_idle()


def test_what_is_in_flight_when_a_request_stops_is_thrown_away() -> None:
    a = request_of("a", 3, 9, stop_token_ids=[7])
    drive = Drive(scheduler_of(), a)
    outputs = [drive.schedule(), drive.schedule()]
    blocks = list(a.block_ids)
    (result,) = drive.update(outputs[0])
    assert (result.new_token_ids, a.finish_reason) == ([7], "stop")
    # the step in flight still writes to its blocks, so nobody else may have them
    assert {drive.scheduler.pool.state(block) for block in blocks} == {"HELD"}
    with pytest.raises(RuntimeError, match="blocks and 1 rows are not free"):
        drive.scheduler.check_idle()
    assert drive.update(outputs[1]) == []
    assert a.output_token_ids == [7]
    drive.scheduler.check_idle()


def test_steps_are_updated_in_their_order() -> None:
    drive = Drive(scheduler_of(), request_of("a", 3))
    drive.schedule()
    second = drive.schedule()
    with pytest.raises(RuntimeError, match="step 1 was updated before step 0"):
        drive.update(second)


def test_a_preempted_request_waits_for_its_step_and_keeps_its_token() -> None:
    a, b = request_of("a", 7, 9), request_of("b", 7, 9)
    drive = Drive(scheduler_of(num_blocks=4, enable_prefix_caching=False), a, b)
    outputs = [drive.schedule(), drive.schedule()]
    assert [drive.batch(output) for output in outputs] == [{"a": 7, "b": 7}, {"a": 1, "b": 1}]
    assert drive.scheduler.schedule() is None  # a needs a block, and waits for those that b gives back
    assert (b.status, a.status) == (RequestStatus.PREEMPTED, RequestStatus.RUNNING)
    assert b.row >= 0  # two steps hold it
    drive.update(outputs[0])
    assert drive.scheduler.schedule() is None
    drive.update(outputs[1])
    assert b.output_token_ids == [7, 7]
    assert b.row == -1
    assert drive.step() == {"a": 1}
    assert b.num_preemptions == drive.scheduler.stats().num_preemptions == 1
    while drive.scheduler.has_unfinished:
        drive.step()
    assert a.output_token_ids == b.output_token_ids == [7] * 9
    drive.scheduler.check_idle()


def test_reset_while_requests_run() -> None:
    a = request_of("a", 9, 20)
    drive = Drive(scheduler_of(), a)
    drive.step()
    drive.scheduler.reset_prefix_cache(reset_connector=True)
    for _ in range(12):
        drive.step()
    drive.scheduler.add_request(request_of("b", list(a.token_ids)))
    output = drive.schedule()
    assert [request.num_computed_tokens for request in output.new_requests] == [0]


# --- everything at random, with tokens that mean nothing and ends from outside --------------------------------------


class PoisonedRunner(FakeRunner):
    """Yields nonsense for some requests' n-th token, as NaN logits do."""

    def __init__(self, block_size: int, vocab_size: int, poison: dict[str, int]) -> None:
        super().__init__(block_size, vocab_size)
        self.poison = poison

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        result = super().run(output)
        for index, row in enumerate(output.rows[: output.num_sampled]):
            request = self.rows[row]
            if self.poison.get(request.request_id) == len(request.token_ids) - request.num_prompt_tokens:
                result.invalid[index] = "nonsense"
        return result


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), depth=st.integers(0, 2))
def test_failures_and_ends_from_outside_at_any_time(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    config = SchedulerConfig(
        num_blocks=rng.randint(8, 20),
        block_size=rng.randint(1, 4),
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.randint(5, 30),
        enable_prefix_caching=rng.random() < 0.7,
        priority=rng.random() < 0.5,
    )
    scheduler = Scheduler(config)
    room = config.num_blocks * config.block_size
    requests = []
    for number in range(rng.randint(1, 10)):
        prompt = [i % 3 for i in range(rng.randint(1, room // 2))]
        max_tokens = rng.randint(1, min(10, room + 1 - len(prompt)))
        requests.append(request_of(str(number), prompt, max_tokens, priority=rng.randint(0, 2)))
    poison = {request.request_id: rng.randint(1, 10) for request in requests if rng.random() < 0.4}
    runner = PoisonedRunner(config.block_size, VOCAB, poison)
    waiting, in_flight, stopped = list(requests), deque[tuple[SchedulerOutput, ModelRunnerOutput]](), set()
    while waiting or scheduler.has_unfinished or in_flight:
        if waiting and rng.random() < 0.6:
            scheduler.add_request(waiting.pop())
        output = scheduler.schedule()
        if output is not None:
            in_flight.append((output, runner.run(output)))
        if in_flight and (len(in_flight) > depth or output is None):
            for result in scheduler.update(*in_flight.popleft()):
                request = result.request
                if not request.is_finished and rng.random() < 0.1:  # as when its text holds a stop string
                    scheduler.finish(request.request_id, RequestStatus.FINISHED_STOPPED, "text")
                    stopped.add(request.request_id)
        if rng.random() < 0.05:
            scheduler.reset_prefix_cache(reset_connector=True)
        scheduler.check_integrity()
    scheduler.check_idle()
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens]
        expected = reference(prompt, request.max_total_tokens - len(prompt), frozenset(), 0, VOCAB)
        bad = poison.get(request.request_id, len(expected) + 1)
        if request.request_id in stopped:
            assert request.finish_reason == "stop"
            assert request.output_token_ids == expected[: request.num_output_tokens]
            assert request.num_output_tokens < bad
        elif bad <= len(expected):
            assert (request.finish_reason, request.stop_reason) == ("error", "nonsense")
            assert request.output_token_ids == expected[: bad - 1]
        else:
            assert (request.finish_reason, request.output_token_ids) == ("length", expected)
