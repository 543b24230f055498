"""Drafts in the scheduler: bounds while they are in flight, blocks for all of them, and counts; adaptive drafting: on
where it pays and off elsewhere."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from tests.helpers import schedulers
from tests.helpers.schedulers import make_scheduler, schedule, update

from fleetfoot.cli.bench import summary
from fleetfoot.cli.bench_load import Samples, results
from fleetfoot.cli.command import drafts_line
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.scheduler.scheduler import Scheduler
from fleetfoot.scheduler.stats import DraftStats, SchedulerStats
from fleetfoot.speculative.controller import FIRST_PATIENCE, MEASURING, NUM_SAMPLES, AdaptiveDrafts


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
    scheduler.add_request(request := request_of("a"))
    output = schedule(scheduler)
    assert draft_counts(output) == (0, 3, [5])
    assert output.new_requests[0].max_total_tokens == 25
    update(scheduler, output, [7])
    output = schedule(scheduler)
    assert draft_counts(output) == (3, 3, [4])
    assert output.total_num_scheduled_tokens == 4
    (result,) = update(scheduler, output, [1, 2])
    assert result.new_token_ids == [1, 2]
    assert (request.num_computed, request.num_tokens) == (7, 8)
    assert request.output_token_ids == [7, 1, 2]


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


SOME = DraftStats(
    num_steps=6, num_rows=10, num_drafted=30, num_accepted=15, accepted_at=(8, 5, 2), off={"a whim": 2}, off_reason=""
)


def test_the_line_of_the_command() -> None:
    assert drafts_line(SOME) == "drafts: 2.50 tokens a step, 50% of 30 accepted; none in 2 steps: a whim"
    none = DraftStats(accepted_at=(0,), off={"a whim": 1})
    assert drafts_line(none) == "drafts: none were verified; none in 1 step: a whim"


def measured(before: DraftStats, after: DraftStats) -> Samples:
    """The scheduler's drafts before the first load and after the last one."""
    counters = [SchedulerStats(0, 0, 0.0, 0, 0, 0, drafts=drafts) for drafts in (before, after)]
    return Samples(before=counters[0], after=counters[1])


def test_the_line_of_a_benchmark() -> None:
    samples = measured(DraftStats(accepted_at=(0, 0, 0)), SOME)
    samples.load_duration.append(1.0)
    content = results(samples, with_loads=False)
    content["steps_per_s"] = content["host_time_per_step_us"]["mean"] = 1.0
    line = summary(content).splitlines()[-1]
    assert line == " drafts: 2.50 tokens a step, 50% of 30 accepted (80, 50, 20% by place); none in 2 steps: a whim]"


K = 3


def play(
    controller: AdaptiveDrafts,
    num_steps: int,
    num_decodes: int = 4,
    accepted: float = 2.0,
    seconds: Callable[[], float] = lambda: 1.5,
) -> list[str]:
    """Steps of 1 second, or ``seconds()`` with drafts; returns for each why it had no drafts."""
    reasons = []
    for _ in range(num_steps):
        num_drafts = controller.choose(num_decodes)
        assert num_drafts == (0 if controller.off_reason else K)
        reasons.append(controller.off_reason)
        num_accepted, duration = (round(accepted * num_decodes), seconds()) if num_drafts else (0, 1.0)
        num_tokens = num_decodes * (1 + num_drafts)
        controller.observe(num_decodes, num_drafts, K * num_decodes, num_accepted, num_tokens, duration)
    return reasons


def test_where_drafts_pay_they_are_kept_except_in_tests() -> None:
    reasons = play(AdaptiveDrafts(K), 20 * FIRST_PATIENCE)
    assert set(reasons) == {"", MEASURING}
    assert reasons[:NUM_SAMPLES] == [""] * NUM_SAMPLES
    assert reasons[NUM_SAMPLES : 2 * NUM_SAMPLES] == [MEASURING] * NUM_SAMPLES
    trials = Counter(reasons)[MEASURING] / NUM_SAMPLES
    assert 2 <= trials <= 6  # ever rarer


@pytest.mark.parametrize(
    ("accepted", "longer"), [(0.0, 1.1), (0.25, 1.5), (2.0, 3.5)], ids=["none accepted", "few", "steps too long"]
)
def test_where_they_do_not_pay_they_are_turned_off(accepted: float, longer: float) -> None:
    controller = AdaptiveDrafts(K)
    reasons = play(controller, 2000, accepted=accepted, seconds=lambda: longer)
    assert reasons[-1] == "it does not pay at 4 to 7 requests"
    assert Counter(reasons)[""] <= 4 * NUM_SAMPLES


def test_a_limit_of_requests() -> None:
    controller = AdaptiveDrafts(K, max_num_decodes=8)
    assert controller.choose(8) == K
    assert controller.choose(9) == 0
    assert controller.off_reason == "more than 8 requests"
