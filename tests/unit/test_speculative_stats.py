"""Adaptive drafting: on where it pays and off elsewhere; the counters of drafts, and how they are shown."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.test_scheduler_drafts import Switch, begin, request_of, schedule, scheduler_of, update

from fleetfoot.cli.bench import summary
from fleetfoot.cli.bench_load import Samples, results
from fleetfoot.cli.command import drafts_line
from fleetfoot.records.step import ModelRunnerOutput
from fleetfoot.scheduler.stats import DraftStats, SchedulerStats
from fleetfoot.speculative.controller import FIRST_PATIENCE, LONGEST_PATIENCE, MEASURING, NUM_SAMPLES, AdaptiveDrafts

SOME = DraftStats(
    num_steps=6, num_rows=10, num_drafted=30, num_accepted=15, accepted_at=(8, 5, 2), off={"a whim": 2}, off_reason=""
)


def test_rates_follow_from_counts() -> None:
    assert SOME.acceptance_rates == (0.8, 0.5, 0.2)
    assert SOME.acceptance_rate == 0.5
    assert SOME.mean_acceptance_length == pytest.approx(1 + sum(SOME.acceptance_rates))
    assert DraftStats(accepted_at=(0, 0)).acceptance_rates == ()


def test_what_was_counted_since() -> None:
    later = DraftStats(9, 14, 42, 20, (11, 6, 3), {"a whim": 2, "another": 1}, "another")
    assert later.since(SOME) == DraftStats(3, 4, 12, 5, (3, 1, 1), {"another": 1}, "another")
    assert later.since(DraftStats()) == later


def test_counts_of_places_and_requests() -> None:
    controller = Switch(3)
    scheduler = scheduler_of(3, controller)
    first, second = request_of("a"), request_of("b")
    begin(scheduler, first, second)
    for tokens, drafted in (([[1, 2, 3, 4], [5]], [3, 3]), ([[6, 7], [8]], [3, 0])):
        output = schedule(scheduler)
        scheduler.update(output, ModelRunnerOutput(tokens, num_drafted=drafted))
    stats = scheduler.stats().drafts
    assert (stats.num_steps, stats.num_rows, stats.num_drafted, stats.num_accepted) == (2, 3, 9, 4)
    assert stats.accepted_at == (2, 1, 1)
    assert (first.num_drafted, first.num_accepted) == (6, 4)
    assert (second.num_drafted, second.num_accepted) == (3, 0)
    assert stats.off_reason == ""

    controller.num_drafts = 0
    update(scheduler, schedule(scheduler), [9, 9, 9, 9], [9])
    stats = scheduler.stats().drafts
    assert (stats.off, stats.off_reason) == ({"turned off": 1}, "turned off")
    controller.num_drafts = 3
    update(scheduler, schedule(scheduler), [9], [9])
    assert scheduler.stats().drafts.off_reason == ""


def test_what_comes_behind_a_requests_end_is_not_counted() -> None:
    scheduler = scheduler_of(3)
    request = request_of("a", stop_token_ids=[99])
    begin(scheduler, request)
    in_flight = [schedule(scheduler), schedule(scheduler)]
    update(scheduler, in_flight[0], [1, 99])
    assert request.is_finished
    update(scheduler, in_flight[1], [1, 2, 3, 4])
    assert scheduler.stats().drafts.accepted_at == (1, 0, 0)
    assert (request.num_drafted, request.num_accepted) == (3, 1)


def test_the_line_of_the_command() -> None:
    assert drafts_line(SOME) == "drafts: 2.50 tokens a step, 50% of 30 accepted; none in 2 steps: a whim"
    assert drafts_line(DraftStats(accepted_at=(0,), off={"a whim": 1})) == (
        "drafts: none were verified; none in 1 step: a whim"
    )


def measured(before: DraftStats, after: DraftStats) -> Samples:
    """The scheduler's drafts before the first load and after the last one."""
    counters = [SchedulerStats(0, 0, 0.0, 0, 0, 0, drafts=drafts) for drafts in (before, after)]
    return Samples(before=counters[0], after=counters[1])


def test_a_benchmark_counts_from_its_first_load() -> None:
    last = DraftStats(10, 15, 45, 23, (12, 7, 4), {"a whim": 3})
    content = results(measured(SOME, last), with_loads=False)["drafts"]
    assert content == {
        "num_steps": 4,
        "num_drafted_tokens": 15,
        "num_accepted_tokens": 8,
        "mean_acceptance_length": 1 + 8 / 5,
        "acceptance_rate": 8 / 15,
        "acceptance_rate_at": [4 / 5, 2 / 5, 2 / 5],
        "steps_without": {"a whim": 1},
        "off_reason": None,
    }
    page = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for name in content:
        assert f"`{name}`" in page


def test_a_benchmark_without_drafts_has_none() -> None:
    assert results(measured(DraftStats(), DraftStats()), with_loads=False)["drafts"] is None
    nothing = DraftStats(accepted_at=(0, 0))
    content = results(measured(nothing, nothing), with_loads=False)["drafts"]
    assert content["acceptance_rate"] is content["mean_acceptance_length"] is content["acceptance_rate_at"] is None


def test_the_line_of_a_benchmark() -> None:
    samples = measured(DraftStats(accepted_at=(0, 0, 0)), SOME)
    samples.load_duration.append(1.0)
    content = results(samples, with_loads=False)
    content["steps_per_s"] = content["host_time_per_step_us"]["mean"] = 1.0
    last_line = summary(content).splitlines()[-1]
    assert last_line == (
        " drafts: 2.50 tokens a step, 50% of 30 accepted (80, 50, 20% by place); none in 2 steps: a whim]"
    )


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


def test_it_looks_again_when_the_text_changes() -> None:
    controller = AdaptiveDrafts(K)
    play(controller, 400, accepted=0.0)
    reasons = play(controller, 2 * FIRST_PATIENCE + 4 * NUM_SAMPLES, accepted=2.5)
    assert reasons[0] == "it does not pay at 4 to 7 requests"
    assert reasons[-1] == ""
    assert LONGEST_PATIENCE >= FIRST_PATIENCE


def test_batch_sizes_are_judged_apart() -> None:
    controller = AdaptiveDrafts(K)
    play(controller, 100, num_decodes=64, seconds=lambda: 4.0)
    play(controller, 100, num_decodes=2)
    assert controller.choose(64) == 0
    assert controller.off_reason == "it does not pay at 64 to 127 requests"
    assert controller.choose(100) == 0
    assert controller.choose(2) == K
    assert controller.off_reason == ""


def test_a_slow_step_now_and_then_is_not_held_against_drafts() -> None:
    controller, numbers = AdaptiveDrafts(K), iter(range(10**6))
    play(controller, 300, seconds=lambda: 1.2 if next(numbers) % 4 else 100.0)
    assert controller.choose(4) == K


def test_a_limit_of_requests() -> None:
    controller = AdaptiveDrafts(K, max_num_decodes=8)
    assert controller.choose(8) == K
    assert controller.choose(9) == 0
    assert controller.off_reason == "more than 8 requests"


def test_steps_with_prefills_are_not_compared() -> None:
    controller = AdaptiveDrafts(K)
    for _ in range(10 * NUM_SAMPLES):
        controller.observe(4, K, 4 * K, 0, 4 * (1 + K) + 100, 50.0)
    assert play(controller, NUM_SAMPLES + 1)[-1] == MEASURING
