"""Drafts in the scheduler: bounds while they are in flight, blocks for all of them, and counts of accepted ones."""

import random
import re
from typing import Any

import pytest
from tests.helpers import schedulers
from tests.helpers.fake_engine import FakeEngine, expected_output
from tests.helpers.schedulers import make_scheduler, schedule, update

from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.scheduler.scheduler import Scheduler, SchedulerConfig


class Switch:
    """A controller that tests set."""

    off_reason = "turned off"

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self.num_decodes: list[int] = []
        self.observed: list[tuple[float, ...]] = []

    def choose(self, num_decodes: int) -> int:
        self.num_decodes.append(num_decodes)
        return self.num_drafts

    def observe(self, *step: float) -> None:
        self.observed.append(step)


def scheduler_of(num_drafts: int = 3, controller: Switch | None = None, **config: Any) -> Scheduler:
    return make_scheduler(num_drafts=num_drafts, controller=controller, **config)


def request_of(name: str, prompt: int = 5, max_tokens: int = 20, **more: Any) -> Request:
    return schedulers.request_of(name, prompt, max_tokens, **more)


def begin(scheduler: Scheduler, *requests: Request) -> None:
    """Compute the prompts."""
    for request in requests:
        scheduler.add_request(request)
    output = scheduler.schedule()
    assert output is not None
    assert (output.num_sampled, output.num_drafts) == (len(requests), 0)
    update(scheduler, output, *[[7]] * len(requests))


def draft_counts(output: SchedulerOutput) -> tuple[int, int, list[int]]:
    return output.num_drafts, output.num_to_propose, output.num_scheduled_tokens


def test_proposed_drafts_are_verified_by_the_next_step() -> None:
    scheduler = scheduler_of()
    scheduler.add_request(request_of("a"))
    output = schedule(scheduler)
    assert draft_counts(output) == (0, 3, [5])
    assert output.new_requests[0].max_total_tokens == 25
    update(scheduler, output, [7])
    output = schedule(scheduler)
    assert draft_counts(output) == (3, 3, [4])
    assert output.total_num_scheduled_tokens == 4
    (result,) = update(scheduler, output, [1, 2])
    assert result.new_token_ids == [1, 2]
    assert (result.request.num_computed, result.request.num_tokens) == (7, 8)
    assert result.request.output_token_ids == [7, 1, 2]


def test_a_controller_turns_drafts_on_and_off() -> None:
    switch = Switch(2)
    scheduler = scheduler_of(2, switch)
    begin(scheduler, request_of("a"), request_of("b"))
    switch.num_drafts = 0
    output = schedule(scheduler)
    assert draft_counts(output) == (2, 0, [3, 3])
    update(scheduler, output, [1, 2, 3], [1], num_drafted=[2, 1])
    scheduler.drafting.observe(output, 0.5)
    switch.num_drafts = 2
    output = schedule(scheduler)
    assert draft_counts(output) == (0, 2, [1, 1])
    update(scheduler, output, [4], [2])
    scheduler.drafting.observe(output, 0.25)
    assert schedule(scheduler).num_drafts == 2
    assert switch.num_decodes == [2, 2, 2, 2]
    assert switch.observed == [(2, 2, 3, 2, 6, 0.5), (2, 0, 0, 0, 2, 0.25)]
    stats = scheduler.stats().drafts
    assert (stats.num_steps, stats.num_rows, stats.num_drafted, stats.num_accepted) == (1, 2, 3, 2)
    assert (stats.acceptance_rate, stats.mean_acceptance_length) == (2 / 3, 2.0)
    assert stats.off == {"turned off": 1}


def test_prefills_have_no_drafts() -> None:
    scheduler = scheduler_of(3, max_num_batched_tokens=16, max_num_seqs=2)
    begin(scheduler, request_of("a"))
    scheduler.add_request(request_of("b", 13))
    output = schedule(scheduler)
    assert (output.num_decodes, output.num_sampled, output.num_scheduled_tokens) == (1, 1, [4, 12])
    update(scheduler, output, [1])
    # one token of the prompt is left: still no decode, which would verify drafts of another request
    output = schedule(scheduler)
    assert (output.num_decodes, output.num_sampled, output.num_scheduled_tokens) == (1, 2, [4, 1])
    scheduler.finish("a", RequestStatus.FINISHED_ABORTED)
    update(scheduler, output, [1], [1])
    assert schedule(scheduler).num_scheduled_tokens == [4]
    alone = scheduler_of(3, max_num_batched_tokens=16)
    alone.add_request(request_of("c", 20))
    output = schedule(alone)
    assert (output.num_to_propose, output.num_drafts) == (0, 0)  # no request samples
    update(alone, output)
    assert schedule(alone).num_drafts == 0


def test_drafts_in_flight_count_as_accepted() -> None:
    scheduler, request = scheduler_of(3), request_of("a")
    begin(scheduler, request)
    first, second = schedule(scheduler), schedule(scheduler)
    assert request.num_computed == 5 + 8
    update(scheduler, first, [1, 2])
    assert (request.num_computed, request.num_tokens) == (5 + 8 - 2, 8)
    update(scheduler, second, [3])
    assert (request.num_computed, request.num_tokens) == (8, 9)


def test_several_blocks_at_once() -> None:
    scheduler, request = scheduler_of(5, block_size=2), request_of("a", 5)
    begin(scheduler, request)
    assert len(request.block_ids) == 3
    output = schedule(scheduler)
    assert [(start, len(blocks)) for _, start, blocks in output.new_block_ids] == [(3, 3)]  # 5 + 6 tokens
    update(scheduler, output, [1])
    assert schedule(scheduler).new_block_ids == []  # 6 + 6 tokens


@pytest.mark.parametrize(
    ("max_tokens", "num_blocks"),
    [
        (20, (4, 6)),  # of 5 + 3 and of 5 + 4 + 3 tokens
        (2, (3, 3)),  # positions 0 to 5: the last token is never an input
    ],
)
def test_a_drafter_with_kv_needs_blocks_for_its_proposals(max_tokens: int, num_blocks: tuple[int, int]) -> None:
    scheduler, request = scheduler_of(3, block_size=2, num_lookahead=3), request_of("a", 5, max_tokens)
    begin(scheduler, request)
    assert len(request.block_ids) == num_blocks[0]
    assert schedule(scheduler).num_scheduled_tokens == [4]
    assert len(request.block_ids) == num_blocks[1]
    assert (scheduler.schedule() is None) == (max_tokens == 2)


def test_a_request_that_has_certainly_ended_is_not_scheduled() -> None:
    scheduler, request = scheduler_of(3), request_of("a", 5, max_tokens=4)
    begin(scheduler, request)
    outputs = [schedule(scheduler) for _ in range(3)]
    assert request.num_computed == 5 + 12  # as if all drafts had been accepted
    assert scheduler.schedule() is None
    update(scheduler, outputs[0], [1, 2])
    update(scheduler, outputs[1], [3])
    assert request.finish_reason == "length"
    assert update(scheduler, outputs[2], []) == []  # the device had reached the length
    assert request.output_token_ids == [7, 1, 2, 3]
    scheduler.check_idle()


@pytest.mark.parametrize(
    ("num_drafts", "budget", "message"),
    [
        (0, 3, "(3) must hold a token of each of max_num_seqs (4) requests: raise it to 4"),
        (
            3,
            15,
            "(15) must hold 4 tokens (1 and 3 drafts) of each of max_num_seqs (4) requests: raise it to 16, or set "
            "max_num_seqs to at most 3",
        ),
    ],
)
def test_a_budget_below_a_decode_of_each_request(num_drafts: int, budget: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"max_num_batched_tokens {message}")):
        scheduler_of(num_drafts, max_num_batched_tokens=budget)


def test_drafts_count_against_the_budget() -> None:
    scheduler = scheduler_of(3, max_num_batched_tokens=16)
    begin(scheduler, *(request_of(name, 2) for name in "abcd"))
    assert schedule(scheduler).total_num_scheduled_tokens == 16


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("accuracy", "max_steps"), [(1.0, 1 + 5 + 1), (0.0, 21 + 1)])
def test_drafts_save_steps_and_change_no_token(accuracy: float, max_steps: int, depth: int) -> None:
    config = SchedulerConfig(64, 4, 4, 64, num_drafts=3, num_lookahead=3)
    engine = FakeEngine(config, random.Random(1), accuracy=accuracy, drafting=1.0, depth=depth)
    requests = [request_of(name, 5, max_tokens=21) for name in "ab"]
    for request in requests:
        engine.scheduler.add_request(request)
    engine.settle()
    assert all(request.output_token_ids == expected_output(request) for request in requests)
    assert engine.device.runner.num_steps <= max_steps
    assert engine.scheduler.stats().drafts.acceptance_rate == pytest.approx(accuracy, abs=0.2)
