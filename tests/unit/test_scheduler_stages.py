"""Pipelines: steps in flight hold different requests, and no stage computes with tokens that it has not received."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.helpers.fake_engine import FakeEngine, expected_output
from tests.helpers.schedulers import Drive, make_scheduler, request_of

from fleetfoot.records.request import RequestStatus
from fleetfoot.scheduler.scheduler import SchedulerConfig


def drive_of(num_stages: int, names: str, prompt: int = 3, max_tokens: int = 30, **config: Any) -> Drive:
    limits = {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, **config}
    requests = [request_of(name, prompt, max_tokens) for name in names]
    return Drive(make_scheduler(num_stages=num_stages, **limits), *requests)


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
    drive = drive_of(num_stages, "abcde")
    assert drive.queue() == "abcde"
    drive.retire()
    assert [drive.queue() for _ in expected] == expected


def test_remaining_requests_join_another_microbatch() -> None:
    drive = drive_of(2, "abcdef")
    drive.queue()
    drive.retire()
    assert [drive.queue() for _ in range(2)] == ["abc", "def"]
    for name in "de":
        drive.scheduler.finish(name, RequestStatus.FINISHED_ABORTED)
    assert [drive.queue() for _ in range(4)] == ["ab", "cf", "ab", "cf"]


def test_steps_in_flight_are_of_different_requests() -> None:
    drive = drive_of(2, "abcd")
    drive.queue()
    drive.retire()
    microbatches = []
    for _ in range(6):
        microbatches.append(drive.queue())
        if len(drive.in_flight) > 1:
            drive.retire()
    assert microbatches == ["ab", "cd"] * 3


def test_prompts_join_every_microbatch() -> None:
    drive = drive_of(2, "ab", max_num_batched_tokens=12)
    drive.queue()
    drive.retire()
    drive.scheduler.add_request(request_of("c", 30, 30))
    assert [drive.queue() for _ in range(3)] == ["ac", "bc", "ac"]
    assert [output.num_scheduled_tokens for output in drive.in_flight] == [[1, 11], [1, 11], [1, 8]]


def test_a_request_alone_is_in_every_step() -> None:
    drive = drive_of(2, "a", max_tokens=3)
    assert [drive.queue() for _ in range(3)] == ["a", "a", "a"]
    assert drive.scheduler.schedule() is None
    assert [output.awaited_step for output in drive.in_flight] == [-1, 0, 1]


def test_awaited_steps() -> None:
    drive = drive_of(2, "abcd")
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
    single = drive_of(1, "a")
    single.queue()
    single.queue()
    assert [output.awaited_step for output in single.in_flight] == [-1, -1]


def test_drafts_are_verified_by_the_next_step_of_the_same_requests() -> None:
    class Alternating:
        off_reason = "alternating"
        num_calls = 0

        def choose(self, num_decodes: int) -> int:
            self.num_calls += 1
            return 3 * (self.num_calls % 2)

        def observe(self, *observed: Any) -> None:
            pass

    drive = drive_of(2, "ab", num_drafts=3, controller=Alternating())
    assert [drive.queue() for _ in range(5)] == ["ab", "a", "b", "a", "b"]
    assert [output.num_to_propose for output in drive.in_flight] == [3, 0, 3, 0, 3]
    assert [output.num_drafts for output in drive.in_flight] == [0, 3, 3, 0, 3]


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_pipeline_changes_no_token(num_drafts: int) -> None:
    config = SchedulerConfig(14, 4, 4, 24, num_stages=3, num_drafts=num_drafts, num_lookahead=num_drafts)
    engine = FakeEngine(config, random.Random(2), depth=3)
    requests = [request_of(name, 4 + 3 * number, max_tokens=12) for number, name in enumerate("abcdef")]
    for request in requests:
        engine.scheduler.add_request(request)
    engine.settle()
    for request in requests:
        assert request.output_token_ids == expected_output(request)
    assert engine.scheduler.stats().num_preemptions > 0
