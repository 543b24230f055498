"""What is counted about drafts, and how it is shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.test_scheduler_drafts import Switch, begin, request_of, schedule, scheduler_of, update

from fleetfoot.cli.bench import summary
from fleetfoot.cli.bench_load import Samples, results
from fleetfoot.cli.command import drafts_line
from fleetfoot.records.step import ModelRunnerOutput
from fleetfoot.scheduler.stats import DraftStats, SchedulerStats

SOME = DraftStats(
    num_steps=6, num_rows=10, num_drafted=30, num_accepted=15, accepted_at=(8, 5, 2), off={"a whim": 2}, off_reason=""
)


def test_rates_follow_from_counts() -> None:
    assert SOME.acceptance_rates == (0.8, 0.5, 0.2)
    assert SOME.acceptance_rate == 0.5
    assert SOME.mean_acceptance_length == pytest.approx(1 + sum(SOME.acceptance_rates))
    assert DraftStats(accepted_at=(0, 0)).acceptance_rates == ()


def test_what_was_counted_since() -> None:
    later = DraftStats(9, 14, 42, 20, (11, 6, 3), {"a whim": 2, "a mood": 1}, "a mood")
    assert later.since(SOME) == DraftStats(3, 4, 12, 5, (3, 1, 1), {"a mood": 1}, "a mood")
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


def test_a_line_for_people() -> None:
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


def test_a_benchmark_tells_people() -> None:
    samples = measured(DraftStats(accepted_at=(0, 0, 0)), SOME)
    samples.load_duration.append(1.0)
    content = results(samples, with_loads=False)
    content["steps_per_s"] = content["host_time_per_step_us"]["mean"] = 1.0
    last_line = summary(content).splitlines()[-1]
    assert last_line == (
        " drafts: 2.50 tokens a step, 50% of 30 accepted (80, 50, 20% by place); none in 2 steps: a whim]"
    )
