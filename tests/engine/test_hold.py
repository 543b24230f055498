"""Holding the step loop: each mode on every face, in lockstep and with steps in flight; errors, pauses, the workers."""

from typing import Any

import pytest
from tests.helpers.engines import ScriptedExecutor, drain, scripted_engine
from tests.helpers.streams import tokens_of

from fleetfoot import EngineDeadError, RequestOutputKind, SamplingParams
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.records.step import ModelRunnerOutput

PARAMS = SamplingParams(max_tokens=6, output_kind=RequestOutputKind.DELTA)
TOKENS = list(range(10, 16))


class Pending:
    """Counts the steps whose results have been read."""

    def __init__(self, executor: "CountingExecutor", output: ModelRunnerOutput) -> None:
        self.executor, self.output = executor, output

    def get(self) -> ModelRunnerOutput:
        self.executor.num_in_flight -= 1
        return self.output


class CountingExecutor(ScriptedExecutor):
    num_in_flight = 0

    def sample_tokens(self, grammar_output: object | None) -> Any:
        self.num_in_flight += 1
        return Pending(self, super().sample_tokens(grammar_output))

    def collective_rpc(self, method: Any, args: Any, kwargs: Any) -> list[Any]:
        assert self.num_in_flight == 0
        return [method(*args, **kwargs)]


def engine_with_three(depth: int) -> LLMEngine:
    """Requests a and b run, and have two tokens or more; c waits for a row."""
    engine = scripted_engine(CountingExecutor(), depth=depth, max_num_seqs=2)
    for name in "abc":
        engine.add_request(name, [5, 6, 7], PARAMS)
    for _ in range(3):
        engine.step()
    return engine


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("mode", ["drain", "wait", "keep", "abort"])
def test_what_requests_do_in_each_mode(mode: str, depth: int) -> None:
    engine = engine_with_three(depth)
    scheduler = engine.core.scheduler

    def function() -> tuple[int, int, int]:
        assert not engine.core.is_in_flight
        engine.check_integrity()
        engine.add_request("d", [5, 6, 7], PARAMS)  # waits until the loop goes on
        stats = scheduler.stats()
        assert engine.collective_rpc(lambda value: value + 1, args=(4,)) == [5]  # within a hold, at once
        return stats.num_running, stats.num_waiting, stats.num_preemptions

    counts = {"drain": (0, 2, 0), "wait": (0, 4, 2), "keep": (2, 2, 0), "abort": (0, 1, 0)}
    assert engine.run_held(function, mode) == counts[mode]
    outputs = drain(engine)
    last = {output.request_id: output for output in outputs if output.finished}
    assert sorted(output.request_id for output in outputs if output.finished) == ["a", "b", "c", "d"]
    aborted = "abc" if mode == "abort" else ""
    for name, output in last.items():
        assert output.outputs[0].finish_reason == ("abort" if name in aborted else "length")
    assert tokens_of([output for output in outputs if output.request_id == "d"]) == TOKENS
    order = [output.request_id for output in outputs]
    if mode == "drain":
        assert order.index("c") > max(index for index, name in enumerate(order) if name in "ab")
    scheduler.check_idle()


def test_an_idle_engine_and_errors() -> None:
    engine = scripted_engine(CountingExecutor())
    assert engine.run_held(lambda: 5) == 5

    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.run_held(fail, "wait")
    with pytest.raises(ValueError, match="mode is 'stop'; it must be one of drain, wait, keep, abort"):
        engine.run_held(fail, "stop")
    with pytest.raises(RuntimeError, match="step was called during a step"):
        engine.run_held(engine.step)
    engine.add_request("a", [5], PARAMS)
    engine.step()
    cancelled = engine.hold(fail)
    engine.step()
    engine.cancel_hold(cancelled)
    assert len(tokens_of(drain(engine))) == 4 and not cancelled.is_done
    later = engine.hold(fail)
    engine.shutdown()
    for refused in (later.result, lambda: engine.hold(fail)):
        with pytest.raises(EngineDeadError, match="was shut down"):
            refused()


def test_a_failing_engine_ends_its_holds() -> None:
    engine = engine_with_three(1)
    hold = engine.hold(lambda: None)
    engine.core.executor.before_step = lambda step: 1 / 0  # type: ignore[attr-defined]
    with pytest.raises(EngineDeadError):
        drain(engine)
    with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
        hold.result()
