"""Several connectors at once, and the records that travel."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
from tests.helpers.fake_connector import ScriptedConnector
from tests.helpers.faulty_connector import WORKER_POINTS, Faults, FaultyWorker, InjectedError
from tests.helpers.kv_bench import TOKENS

from fleetfoot.kv_transfer.multi import MultiScheduler, MultiWorker
from fleetfoot.records.kv_layout import ONE_GROUP
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner.step_connector import StepConnector

request_of = partial(Request, prompt_token_ids=TOKENS, params=SamplingParams(), max_tokens=4, seed=0)


def step_of(scheduler: Any, *finished: str) -> SchedulerOutput:
    output = SchedulerOutput(0, [], [], 0, 0, 0, finished_req_ids=set(finished))
    output.kv_connector_metadata = scheduler.build_connector_meta(output)
    return output


def test_blocks_are_held_while_any_part_holds_them() -> None:
    given = [{"a": 1}, None, {"b": 2, "a": 3}]
    sides = [ScriptedConnector(holds={"r", "other"} if params else (), params=params) for params in given]
    scheduler = MultiScheduler(sides, 4, ONE_GROUP)
    parts = [Faults(), Faults(), Faults()]
    step = StepConnector(MultiWorker({str(index): FaultyWorker(None, part) for index, part in enumerate(parts)}))
    for part in parts:
        part.released.set()  # what is in `held` is sent
    parts[0].held = ["r"]
    for name in ("r", "other"):
        assert scheduler.request_finished(request_of(name)) == (True, {"a": 1, "b": 2})
    assert scheduler.has_pending
    assert not scheduler.evict("r") and [side.of("evict") for side in sides] == [[("r",)]] * 3
    assert step.no_forward(step_of(scheduler, "r")) is None
    assert not scheduler.has_pending
    for index, sent, expected in ((2, ["r", "other"], "r"), (0, ["other"], "other")):
        parts[index].held += sent
        output = step.no_forward(step_of(scheduler))
        assert output is not None and output.sent == {expected}


def test_the_order_of_calls_and_a_part_that_raises() -> None:
    one, two = Faults(), Faults()
    step = StepConnector(MultiWorker({"one": FaultyWorker(None, one), "two": FaultyWorker(None, two)}))
    scheduler = MultiScheduler([ScriptedConnector(), ScriptedConnector()], 4, ONE_GROUP)

    def run_step(raising: str) -> None:
        one.calls, two.calls = [], []
        with pytest.raises(InjectedError, match=f"injected at {raising}") if raising else nullcontext():
            step.pre_forward(step_of(scheduler))
            step.post_forward(set())
        assert one.calls[-1] == two.calls[-1] == WORKER_POINTS[-1]
        assert one.calls.count(WORKER_POINTS[-1]) == two.calls.count(WORKER_POINTS[-1]) == 1

    run_step("")
    assert one.calls == two.calls == list(WORKER_POINTS)
    for one.raise_at in WORKER_POINTS[:-1]:
        run_step(one.raise_at)
    one.raise_at, two.raise_at = "", WORKER_POINTS[-1]
    run_step(two.raise_at)
    two.raise_at = "shutdown"
    with pytest.raises(InjectedError, match="injected at shutdown"):
        step.shutdown()
    assert one.calls[-1] == two.calls[-1] == "shutdown"


def test_metadata_of_another_connector() -> None:
    with pytest.raises(TypeError, match="KV connector metadata is a str; it must be MultiMetadata"):
        MultiWorker({}).bind_connector_metadata("something")
