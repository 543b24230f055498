"""The scheduler, step by step: order, budget, chunks, preemption, ends, steps that overlap, and pipelines."""

from typing import Any

import pytest
from tests.helpers.schedulers import Drive, make_scheduler, request_of

from fleetfoot.records.request import RequestStatus
from fleetfoot.records.step import FEW_DECODES
from fleetfoot.scheduler.scheduler import Scheduler

ABORTED = RequestStatus.FINISHED_ABORTED


def scheduler_of(**config: Any) -> Scheduler:
    return make_scheduler(**{"max_num_batched_tokens": 16, **config})


def test_prompts_are_cut_to_the_budget_and_decodes_go_first() -> None:
    drive = Drive(scheduler_of(), request_of("a", 6), request_of("b", 20), request_of("c", 3))
    steps = [  # batch, num_decodes, num_sampled, longest_decode
        ({"a": 6, "b": 10}, 0, 1, 0),
        ({"a": 1, "b": 10, "c": 3}, 1, 3, 7),
        ({"a": 1, "b": 1, "c": 1}, 3, 3, 21),
    ]
    for batch, num_decodes, num_sampled, longest_decode in steps:
        output = drive.schedule()
        assert drive.batch(output) == batch
        assert (output.num_decodes, output.num_sampled) == (num_decodes, num_sampled)
        assert (output.total_num_scheduled_tokens, output.longest_decode) == (sum(batch.values()), longest_decode)
        drive.update(output)
    stats = drive.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preemptions) == (3, 0, 0)
    assert stats.kv_cache_usage == pytest.approx((2 + 6 + 1) / 32)


def test_the_longest_of_few_decodes_or_beside_a_prompt() -> None:
    count = FEW_DECODES + 1
    names = [f"r{index}" for index in range(count)]
    requests = (request_of(name, 1 + 2 * index, max_tokens=3) for index, name in enumerate(names))
    drive = Drive(scheduler_of(max_num_seqs=count + 1, max_num_batched_tokens=200), *requests)
    drive.step()
    output = drive.schedule()
    assert (output.num_decodes, output.longest_decode) == (count, 0)  # not computed
    drive.update(output)
    drive.scheduler.add_request(request_of("prompt", 5))
    output = drive.schedule()
    assert (output.num_decodes, output.longest_decode) == (count, 2 * count + 1)
    drive.update(output)


def test_prompts_of_several_clients_are_cut_to_a_time() -> None:
    scheduler = scheduler_of(max_num_batched_tokens=1024, num_blocks=4096, prompt_step_s=0.05)
    drive = Drive(scheduler, request_of("long", 2000, 1, flow="a"))
    assert drive.step() == {"long": 1024}  # alone
    for seconds, limit in ((0.2, 384), (0.2, 320), (0.05, 672)):
        scheduler.pace.observe(0, 1024, seconds)
        assert scheduler.pace.limit == limit
    scheduler.pace.observe(4, 0, 0.5)
    scheduler.pace.observe(4, 672, 0.55)  # nearly all of it for decodes
    assert scheduler.pace.limit == 458
    scheduler.add_request(request_of("other", 200, 1, flow="b"))
    assert drive.step() == {"long": 458}
    scheduler.add_request(request_of("small", 2, 1, flow="c"))
    scheduler.add_request(request_of("tiny", 1, 1, flow="d"))
    # the short ones do not wait for the long one, and leave it the rest: no further prompt begins beside it
    assert drive.step() == {"long": 458 - 3 - 2 * 8, "small": 2, "tiny": 1}  # to start one costs as much as 8 tokens
    assert drive.step() == {"long": 79, "other": 200}
    for _ in range(20):
        scheduler.pace.observe(0, 1024, 60)
    assert scheduler.pace.limit == 128
    unpaced = Drive(scheduler_of(max_num_batched_tokens=1024, num_blocks=4096, prompt_step_s=0.05))
    for name in "xy":
        unpaced.scheduler.add_request(request_of(name, 2000, 1))  # of a program, which waits for all
    assert unpaced.step() == {"x": 1024}


def test_flows_of_a_priority_get_equal_shares_of_tokens() -> None:
    scheduler = scheduler_of(priority=True, max_num_seqs=1)
    batch = [request_of(f"batch {name}", 4, 1, flow="batch") for name in "abcd"]
    late = [request_of("small u", 2, 1, flow="small"), request_of("small v", 2, 1, flow="small")]
    drive = Drive(scheduler, *batch)
    assert list(drive.step()) == ["batch a"]
    for request in (*late, request_of("low x", 1, 1, priority=1), request_of("low y", 1, 1, priority=1, flow="small")):
        scheduler.add_request(request)
    order = [name for _ in range(7) for name in drive.step()]
    assert order == ["small u", "batch b", "small v", "batch c", "batch d", "low x", "low y"]
    scheduler.add_request(request_of("batch e", 1, 1, flow="batch"))
    scheduler.add_request(request_of("other f", 1, 1, flow="other"))
    assert [list(drive.step()) for _ in range(2)] == [["batch e"], ["other f"]]


def test_a_preempted_request_comes_before_others_of_its_flow_and_of_new_ones() -> None:
    requests = [request_of(name, 7, 6, flow="batch") for name in "abc"]
    drive = Drive(scheduler_of(num_blocks=5, max_num_seqs=2), *requests)
    for _ in range(3):
        drive.step()
    assert requests[1].status is RequestStatus.PREEMPTED
    drive.scheduler.add_request(request_of("new d", 1, 1, flow="new"))
    while not requests[0].is_finished:
        assert list(drive.step()) == ["a"]
    assert next(iter(drive.step())) == "b"


@pytest.mark.parametrize("limits", [{"max_num_seqs": 2, "num_blocks": 64}, {"num_blocks": 15}], ids=["rows", "blocks"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_flow_with_all_rows_or_blocks_makes_way_for_others(limits: dict[str, int], depth: int) -> None:
    """One of its requests, which goes on when theirs have run."""
    long = [request_of(name, 9, 40, flow="long") for name in "abcd"]
    drive = Drive(scheduler_of(**limits), *long)
    for _ in range(6):
        drive.step()
    running = [request for request in long if request.row >= 0]
    small = [request_of(name, 2, 1, flow=flow) for name, flow in (("x", "small"), ("y", "small"), ("z", "other"))]
    for request in small:
        drive.scheduler.add_request(request)
    num_steps = 0
    while not all(request.is_finished for request in small):
        while len(drive.in_flight) < depth and (output := drive.scheduler.schedule()) is not None:
            drive.in_flight.append(output)
        drive.update(drive.in_flight.pop(0))
        num_steps += 1
    assert num_steps <= 4 * (1 + depth) and not any(request.is_finished for request in long)
    if "max_num_seqs" in limits:
        assert sum(request.num_preemptions for request in running) <= len(small)
    while drive.scheduler.requests:
        if (output := drive.scheduler.schedule()) is not None:
            drive.in_flight.append(output)
        drive.update(drive.in_flight.pop(0))
    assert all(len(request.output_token_ids) == 40 for request in long)


def test_flows_that_have_had_their_turns_are_forgotten() -> None:
    drive = Drive(scheduler_of(priority=True))
    for number in range(1000):
        drive.scheduler.add_request(request_of(f"r{number} a", 3, 1, priority=number, flow=str(number)))
        drive.step()
    waiting = drive.scheduler._waiting
    assert len(waiting._last_turns) + len(waiting._now) < 200


def test_whole_prompts_without_chunks() -> None:
    drive = Drive(scheduler_of(enable_chunked_prefill=False), request_of("a", 10), request_of("b", 10))
    assert drive.step() == {"a": 10}
    assert drive.step() == {"a": 1, "b": 10}
    with pytest.raises(ValueError, match=r"a prompt of 17 tokens, and a step holds 16.*enable_chunked_prefill=True"):
        drive.scheduler.add_request(request_of("c", 17))


def test_an_id_in_use() -> None:
    drive = Drive(scheduler_of(), request_of("a", 2, 1))
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        drive.scheduler.add_request(request_of("a"))
    drive.step()
    drive.scheduler.add_request(request_of("a", 2, 1))  # it has ended
    assert drive.step() == {"a": 2}


@pytest.mark.parametrize(("size", "max_tokens", "fits"), [(16, 1, True), (12, 5, True), (12, 6, False), (17, 1, False)])
def test_what_can_never_fit_is_refused(size: int, max_tokens: int, fits: bool) -> None:
    scheduler = scheduler_of(num_blocks=4)
    if fits:
        Drive(scheduler, request_of("a", size, max_tokens)).run()
        assert scheduler.stats().num_preemptions == 0
    else:
        with pytest.raises(ValueError, match=rf"the whole cache holds 16 \(4 blocks of 4\).*at most {17 - size}"):
            scheduler.add_request(request_of("a", size, max_tokens))
        assert not scheduler.has_unfinished
    scheduler.check_idle()


def test_blocks_that_a_step_in_flight_held_are_counted_as_freed_once() -> None:
    a, b, c = request_of("a", 8), request_of("b", 11, 8), request_of("c", 11, 8)
    drive = Drive(scheduler_of(num_blocks=6, max_num_batched_tokens=32), a)
    assert drive.queue() == "a"
    drive.scheduler.finish("a", ABORTED)
    drive.retire()
    for request in (b, c):
        drive.scheduler.add_request(request)
    assert [drive.step(), drive.step()] == [{"b": 11, "c": 11}, {"b": 1, "c": 1}]
    assert drive.step() == {"b": 1}  # no step frees the block that it needs, so c is preempted
    assert c.status is RequestStatus.PREEMPTED
    drive.run()


def test_blocks_of_earlier_weights_are_not_cached_when_their_request_ends() -> None:
    prompt = list(range(100, 108))
    drive = Drive(scheduler_of(), request_of("a", prompt, max_tokens=12))
    drive.step()
    drive.scheduler.change_weights("new")
    drive.scheduler.add_request(request_of("b", prompt, max_tokens=1))
    drive.run()  # b caches the prompt's two blocks; what a has generated follows it
    drive.scheduler.add_request(request_of("c", [*prompt, *[7] * 9]))
    assert drive.step() == {"c": 17 - len(prompt)}


def test_steps_are_updated_in_order() -> None:
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
    assert drive.scheduler.schedule() is None  # a waits for the blocks that b will free
    assert (b.status, a.status) == (RequestStatus.PREEMPTED, RequestStatus.RUNNING)
    assert b.row >= 0  # two steps hold it
    drive.update(outputs[0])
    assert drive.scheduler.schedule() is None
    drive.update(outputs[1])
    assert b.output_token_ids == [7, 7]
    assert b.row == -1
    assert drive.step() == {"a": 1}
    assert b.num_preemptions == drive.scheduler.stats().num_preemptions == 1
    drive.run()
    assert a.output_token_ids == b.output_token_ids == [7] * 9


def pipeline_of(num_stages: int, names: str, *, max_tokens: int = 30, **config: Any) -> Drive:
    limits = {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, **config}
    return Drive(make_scheduler(num_stages=num_stages, **limits), *(request_of(name, 3, max_tokens) for name in names))


def prefilled(num_stages: int, names: str, **config: Any) -> Drive:
    """A pipeline after the step of the prompts."""
    drive = pipeline_of(num_stages, names, **config)
    assert drive.queue() == names
    drive.retire()
    return drive


@pytest.mark.parametrize(
    ("num_stages", "expected"),
    [
        (1, ["abcde"] * 4),
        (2, ["abc", "de", "abc", "de"]),
        (3, ["ab", "cd", "e", "ab", "cd"]),
        (5, ["a", "b", "c", "d", "e", "a"]),
        (7, ["a", "b", "c", "d", "e", "a"]),  # no others are left
    ],
)
def test_decodes_are_spread_over_the_stages(num_stages: int, expected: list[str]) -> None:
    drive = prefilled(num_stages, "abcde")
    assert [drive.queue() for _ in expected] == expected


@pytest.mark.parametrize(
    ("num_stages", "prompts", "config", "expected"),
    [
        (1, [5000], {}, [[5000]]),
        (2, [5000], {}, [[2048], [1476], [738], [512], [226]]),
        (4, [5000], {}, [[1024], [994], [746], [559], [512], [512], [512], [141]]),
        (2, [600, 600], {}, [[600], [512], [88]]),
        (2, [600, 800, 600], {}, [[600, 400], [400, 112], [488]]),
        (2, [600, 800, 600], {"max_num_seqs": 1}, [[512], [88]]),  # the others cannot run yet
        (2, [5000], {"enable_chunked_prefill": False}, [[5000]]),
        (2, [2000], {"max_num_batched_tokens": 800}, [[800], [600], [512], [88]]),
        (32, [2000], {}, [[512], [512], [512], [464]]),
    ],
)
def test_prompts_are_spread_over_the_stages(
    num_stages: int, prompts: list[int], config: dict[str, Any], expected: list[list[int]]
) -> None:
    limits = {"num_blocks": 2000, "max_num_batched_tokens": 8192, "max_num_seqs": 8, **config}
    requests = (request_of(str(index), size, max_tokens=1) for index, size in enumerate(prompts))
    drive = Drive(make_scheduler(num_stages=num_stages, **limits), *requests)
    for _ in expected:
        drive.queue()
    assert [output.num_scheduled_tokens for output in drive.in_flight] == expected
    assert [output.total_num_scheduled_tokens for output in drive.in_flight] == [sum(step) for step in expected]
    assert drive.scheduler.schedule() is None


def test_awaited_steps() -> None:
    drive = pipeline_of(2, "abcd")
    for _ in range(4):
        drive.queue()
    # step 0 computes the prompts; 1: a and b, 2: c and d, 3: a and b again
    assert [output.awaited_step for output in drive.in_flight] == [-1, 0, 0, 1]
    drive.retire()
    drive.retire()
    drive.retire()
    assert drive.queue() == "cd"
    assert drive.in_flight[-1].awaited_step == 2
    drive.retire()
    drive.scheduler.add_request(request_of("e", 3, 30))
    drive.queue()
    assert drive.in_flight[-1].awaited_step == 3  # the host has seen it, so it costs no waiting
    single = pipeline_of(1, "a")
    single.queue()
    single.queue()
    assert [output.awaited_step for output in single.in_flight] == [-1, -1]
