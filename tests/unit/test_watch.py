"""What is told of an engine's steps, with an executor that computes nothing and a clock that stands still."""

import itertools
import json
from typing import Any

import pytest
from tests.helpers.engines import ScriptedExecutor, scripted_engine

from fleetfoot.engine.stats import NO_WATCH
from fleetfoot.engine.step_trace import StepTrace, encoded
from fleetfoot.engine.watch import MOST_LANES, MOST_STEPS, PATIENCE_S, Watch
from fleetfoot.records.sampling_params import SamplingParams


class Clock:
    now, tick = 100.0, 0.0

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Any:
    return scripted_engine(ScriptedExecutor(), clock=clock, num_blocks=24, max_num_batched_tokens=16)


def add(engine: Any, name: str, length: int, max_tokens: int = 4) -> None:
    prompt = {"prompt_token_ids": [5 + (7 * place + len(name)) % 90 for place in range(length)]}
    engine.add_request(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True))
    engine.core.scheduler.requests[name].queued_ts = engine.core.clock.now - 1.5


def test_steps_are_kept_while_somebody_looks(engine: Any, clock: Clock) -> None:
    watch = Watch(engine, lambda: {"runner": "v2"})
    add(engine, "before", 20)
    engine.step()
    assert engine.core.watch is NO_WATCH
    first = watch.look("a")
    assert (first["plan"], first["steps"]) == ({"runner": "v2"}, [])
    (lane,) = first["lanes"]
    assert lane[:5] == [0, "p", 20, 16, 0] and lane[-1] == 1.5
    add(engine, "after", 6)
    engine.step()
    second = watch.look("a")
    ((_, _, rows, decodes, prompt, _, _, begun, chunks, left),) = second["steps"]
    assert (rows, decodes, prompt, begun, left) == (2, 0, 10, [(1, 6, 0, 1.5)], [])
    assert chunks == [(0, 4), (1, 6)] and "plan" not in second
    assert [lane[:2] for lane in second["lanes"]] == [[0, "d"], [1, "d"]]
    assert watch.look("b")["steps"] == []  # another viewer, from now on
    while engine.has_unfinished_requests():
        engine.step()
    ends = watch.look("a")
    other = watch.look("b")
    assert ends["steps"] == other["steps"] != [] and ends["ended"] == other["ended"]
    assert ends["lanes"] == [] and sum(step[3] for step in ends["steps"]) == 2 * 3
    assert ends["ended"] == [[0, 4, 0, 0, 0], [1, 4, 0, 0, 0]] and watch.look("a")["ended"] == []
    clock.now += PATIENCE_S + 1
    add(engine, "later", 4, max_tokens=70)
    for _ in range(66):
        engine.step()
    assert engine.core.watch is NO_WATCH  # both have gone
    again = watch.look("a")
    assert "plan" in again and again["steps"] == [] and [lane[0] for lane in again["lanes"]] == [0]


def test_many_steps_and_many_requests_are_counted_and_not_told(engine: Any, clock: Clock) -> None:
    watch = Watch(engine, dict)
    for number in range(MOST_LANES + 9):
        add(engine, f"r{number}", 5, max_tokens=9)
    seen = watch.look("a")
    assert len(seen["lanes"]) == MOST_LANES and seen["waiting"] == MOST_LANES + 9
    assert {lane[1] for lane in seen["lanes"]} == {"w"}
    output = engine.core.scheduler.schedule()
    for _ in range(MOST_STEPS + 5):
        watch.record(output, 0.0, 0.0, (0, 0))
    seen = watch.look("a")
    assert (len(seen["steps"]), seen["missed"]) == (MOST_STEPS, 5)


def test_a_preempted_request_is_told_from_one_that_has_ended(engine: Any) -> None:
    watch = Watch(engine, dict)
    watch.look("a")
    for name in ("one", "two", "three"):
        add(engine, name, 12, max_tokens=25)
    seen: list[dict[str, Any]] = []
    while engine.has_unfinished_requests():
        engine.step()
        seen.append(watch.look("a"))
    left = [entry for look in seen for step in look["steps"] for entry in step[9]]
    num_preemptions = seen[-1]["preemptions"]
    assert num_preemptions > 0 and sum(is_preempted for _, is_preempted in left) == num_preemptions
    assert any(lane[1] == "x" for look in seen for lane in look["lanes"])
    ((kind, used, _, total),) = seen[0]["kv"][0]
    assert (kind, total) == ("all tokens", 24) and 0 < used <= 24


def test_a_trace_for_perfetto_has_steps_phases_of_requests_and_counters(engine: Any, clock: Clock) -> None:
    trace, watch = StepTrace("engine", wall=lambda: 1000.0), Watch(engine, lambda: {"runner": "v2"})
    clock.tick = 0.001
    for name in ("one", "two", "three"):
        add(engine, name, 12, max_tokens=25)
    while True:
        trace.take(watch.look("a"))
        if not engine.has_unfinished_requests():
            break
        clock.now += 2.0
        engine.step()
    for name in ("four", "five"):  # on tracks that are free again
        clock.now += 2.0
        add(engine, name, 5)
    engine.step()
    trace.take(watch.look("a"))
    found = json.loads(encoded([trace]))
    assert found["otherData"]["engine"] == {"runner": "v2", "steps that are missing": 0}
    events = found["traceEvents"]
    steps = [one for one in events if one["name"] == "step"]
    assert sum(one["args"]["decodes"] + one["args"]["prompt tokens"] > 0 for one in steps) == len(steps) > 25
    assert {one["name"] for one in events if one["ph"] == "C"} >= {"requests", "tokens of a step", "KV in use, %"}
    requests = {one["name"]: one for one in events if one["name"].startswith("request ")}
    assert sorted(requests) == [f"request {number}" for number in range(5)]
    assert {one["tid"] for one in requests.values()} == {1, 2, 3}
    assert [requests[f"request {number}"]["args"]["output tokens"] for number in range(3)] == [25] * 3
    preempted = 0
    for request in requests.values():
        begin, end = request["ts"], request["ts"] + request["dur"]
        inside = [
            one for one in events
            if one["ph"] == "X" and one is not request and one["tid"] == request["tid"]
            and begin <= one["ts"] and one["ts"] + one["dur"] <= end
        ]  # fmt: skip
        inside.sort(key=lambda one: (one["ts"], one["dur"]))
        names = [one["name"] for one in inside]
        assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in itertools.pairwise(inside)), names
        assert "prompt" in names and (names[-1] == "decode" or request["name"] in ("request 3", "request 4"))
        preempted += names.count("preempted")
    assert preempted == engine.core.scheduler.stats().num_preemptions > 0
