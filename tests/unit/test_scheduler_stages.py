"""Pipelines: the steps in flight are of different requests, and no stage computes with tokens that it has not heard."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.helpers.fake_engine import FakeEngine, expected_output

from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import ModelRunnerOutput, SchedulerOutput
from fleetfoot.scheduler.scheduler import Scheduler, SchedulerConfig


def scheduler_of(num_stages: int, **config: Any) -> Scheduler:
    defaults = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return Scheduler(SchedulerConfig(**{**defaults, **config}, num_stages=num_stages))


def request_of(name: str, prompt: int = 3, max_tokens: int = 30) -> Request:
    tokens = [1000 * (1 + ord(name[-1])) + i for i in range(prompt)]
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens), max_tokens=max_tokens, seed=0)


class Drive:
    """Keeps steps in flight; knows which row is whose."""

    def __init__(self, scheduler: Scheduler, names: str, **more: Any) -> None:
        self.scheduler = scheduler
        self.names: dict[int, str] = {}
        self.in_flight: list[SchedulerOutput] = []
        for name in names:
            scheduler.add_request(request_of(name, **more))

    def schedule(self) -> str:
        output = self.scheduler.schedule()
        assert output is not None
        for request in output.new_requests:
            self.names[request.row] = request.request_id
        self.in_flight.append(output)
        self.scheduler.check_integrity()
        return "".join(self.names[row] for row in output.rows)

    def retire(self) -> None:
        output = self.in_flight.pop(0)
        self.scheduler.update(output, ModelRunnerOutput([[7]] * output.num_sampled))


@pytest.mark.parametrize(
    ("num_stages", "expected"),
    [
        (1, ["abcde"] * 4),
        (2, ["abc", "de", "abc", "de"]),
        (3, ["ab", "cd", "e", "ab", "cd"]),
        (5, ["a", "b", "c", "d", "e", "a"]),
        (7, ["a", "b", "c", "d", "e", "a"]),  # nobody else is left
    ],
)
def test_decodes_are_dealt_out(num_stages: int, expected: list[str]) -> None:
    drive = Drive(scheduler_of(num_stages), "abcde")
    assert drive.schedule() == "abcde"
    drive.retire()
    assert [drive.schedule() for _ in expected] == expected


def test_who_is_left_over_joins_another_turn() -> None:
    drive = Drive(scheduler_of(2), "abcdef")
    drive.schedule()
    drive.retire()
    assert [drive.schedule() for _ in range(2)] == ["abc", "def"]
    for name in "de":
        drive.scheduler.finish(name, RequestStatus.FINISHED_ABORTED)
    assert [drive.schedule() for _ in range(4)] == ["ab", "cf", "ab", "cf"]


def test_steps_in_flight_are_of_different_requests() -> None:
    drive = Drive(scheduler_of(2), "abcd")
    drive.schedule()
    drive.retire()
    turns = []
    for _ in range(6):
        turns.append(drive.schedule())
        if len(drive.in_flight) > 1:
            drive.retire()
    assert turns == ["ab", "cd"] * 3


def test_prompts_need_no_turn() -> None:
    drive = Drive(scheduler_of(2, max_num_batched_tokens=12), "ab")
    drive.schedule()
    drive.retire()
    drive.scheduler.add_request(request_of("c", 30))
    assert [drive.schedule() for _ in range(3)] == ["ac", "bc", "ac"]
    assert [output.num_scheduled_tokens for output in drive.in_flight] == [[1, 11], [1, 11], [1, 8]]


def test_a_request_alone_is_in_every_step() -> None:
    drive = Drive(scheduler_of(2), "a", max_tokens=3)
    assert [drive.schedule() for _ in range(3)] == ["a", "a", "a"]
    assert drive.scheduler.schedule() is None
    assert [output.awaited_step for output in drive.in_flight] == [-1, 0, 1]


def test_awaited_steps() -> None:
    drive = Drive(scheduler_of(2), "abcd")
    for _ in range(4):
        drive.schedule()
    # step 0 computes the prompts; 1: a and b, 2: c and d, 3: a and b again
    assert [output.awaited_step for output in drive.in_flight] == [-1, 0, 0, 1]
    drive.retire()
    drive.retire()
    drive.retire()
    assert drive.schedule() == "cd"
    assert drive.in_flight[-1].awaited_step == 2
    drive.retire()
    drive.scheduler.add_request(request_of("e"))
    drive.schedule()
    assert drive.in_flight[-1].awaited_step == 3  # the host has seen it: to hear of it costs no waiting
    single = Drive(scheduler_of(1), "a")
    single.schedule()
    single.schedule()
    assert [output.awaited_step for output in single.in_flight] == [-1, -1]


def test_drafts_are_verified_by_the_next_step_of_the_same_requests() -> None:
    class Alternating:
        off_reason = "it was the other's turn"
        num_asked = 0

        def choose(self, num_decodes: int) -> int:
            self.num_asked += 1
            return 3 * (self.num_asked % 2)

        def observe(self, *observed: Any) -> None:
            pass

    config = SchedulerConfig(64, 4, 8, 64, num_stages=2, num_drafts=3)
    drive = Drive(Scheduler(config, controller=Alternating()), "ab")
    assert [drive.schedule() for _ in range(5)] == ["ab", "a", "b", "a", "b"]
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
