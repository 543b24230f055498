"""The engine's loop with a KV connector and with stages: idle steps, held blocks, steps in flight, and the end."""

import random
import threading
from typing import Any

import pytest
from tests.helpers.engines import ScriptedExecutor, drain, scripted_engine
from tests.helpers.fake_connector import Behaviour, FakeSchedulerConnector, ScriptedConnector
from tests.helpers.fake_engine import VOCAB, FakeDevice, expected_output

from fleetfoot import SamplingParams
from fleetfoot.engine.core import EngineCore
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.engine.stats import StatsCollector
from fleetfoot.records.request import Request
from fleetfoot.records.step import KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from fleetfoot.scheduler.scheduler import Scheduler, SchedulerConfig


class TransferExecutor(ScriptedExecutor):
    """Counts steps in flight and keeps idle ones, which report ended transfers.

    Args:
        ended: what the n-th idle step reports.
        error: idle steps raise it.
    """

    def __init__(self, ended: dict[int, KVConnectorOutput] | None = None, error: Exception | None = None) -> None:
        super().__init__()
        self.ended, self._error = ended or {}, error
        self.idle_steps: list[SchedulerOutput] = []
        self.all_reported = threading.Event()
        self.num_idle = self.num_in_flight = self.most_in_flight = 0

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        if scheduler_output.is_idle:
            self.num_idle += 1
            self.idle_steps.append(scheduler_output)
            if self._error is not None:
                raise self._error
        super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: object | None) -> Any:
        assert self._step is not None
        is_idle = self._step.is_idle
        output = super().sample_tokens(grammar_output)
        if is_idle:
            output.kv_connector_output = self.ended.pop(self.num_idle, None)
            if not self.ended:
                self.all_reported.set()
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        return InFlight(self, output)


class InFlight:
    """The output of a step in flight."""

    def __init__(self, executor: TransferExecutor, output: ModelRunnerOutput) -> None:
        self._executor, self._output = executor, output

    def get(self) -> ModelRunnerOutput:
        self._executor.num_in_flight -= 1
        return self._output


def engine_of(executor: TransferExecutor, connector: ScriptedConnector | None = None, **more: Any) -> LLMEngine:
    limits = {"num_blocks": 16, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}
    return scripted_engine(executor, connector=connector or ScriptedConnector(), **{**limits, **more})


def params(max_tokens: int = 2) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, detokenize=False)


@pytest.mark.parametrize("case", ["held", "pending"])
def test_shutting_down_takes_one_more_step_and_does_not_wait(case: str) -> None:
    executor = TransferExecutor()
    connector = ScriptedConnector(holds="r") if case == "held" else ScriptedConnector(pending=True)
    engine = engine_of(executor, connector)
    engine.add_request("r", [5, 6], params(1))
    assert engine.step()[0].finished
    assert executor.num_idle == 0
    for _ in range(2):
        engine.shutdown()
        (step,) = executor.idle_steps  # though blocks are held, or more is pending
        assert (step.finished_req_ids, step.kv_connector_metadata[1]) == ({"r"}, 1)
        assert engine.has_transfers()
        assert executor.is_shut_down and connector.of("shutdown") == [()]


@pytest.mark.parametrize("case", ["worker", "last step", "failed before"])
def test_everything_is_shut_down_when_something_raises(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        executor.is_shut_down = True
        raise error

    error = OSError("the disk is gone")
    executor, connector = TransferExecutor(error=error), ScriptedConnector(pending=case != "worker")
    engine = engine_of(executor, connector)
    if case == "failed before":
        with pytest.raises(EngineDeadError, match="the disk is gone"):
            engine.step()
        engine.shutdown()
        assert executor.num_idle == 1  # no step follows
    else:
        if case == "worker":
            monkeypatch.setattr(executor, "shutdown", fail)
        with pytest.raises(OSError, match="the disk is gone"):
            engine.shutdown()
    assert executor.is_shut_down and connector.of("shutdown") == [()]
    engine.shutdown()


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_loop_with_everything_at_once(num_stages: int, num_drafts: int) -> None:
    rng = random.Random(3)
    config = SchedulerConfig(24, 4, 4, 32, num_stages=num_stages, num_drafts=num_drafts, num_lookahead=num_drafts)
    connector = FakeSchedulerConnector(4, rng, Behaviour(fail=0.4, has_all=True))
    scheduler = Scheduler(config, connector=connector)
    core = EngineCore(scheduler, FakeDevice(scheduler, rng, num_ranks=2), StatsCollector(), depth=num_stages)
    requests = [
        Request(str(number), [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))], params(9), max_tokens=9, seed=0)
        for number in range(12)
    ]
    for request in requests:
        core.scheduler.add_request(request)
    while core.has_work or core.scheduler.has_idle_work:
        core.step()
        scheduler.check_integrity()
    for request in requests:
        assert request.output_token_ids == expected_output(request)
    stats = core.stats.snapshot(scheduler.stats())
    assert stats.transfers.loads_done > 0 < stats.transfers.loads_failed
    assert stats.transfers.counters["blocks_loaded"] * 4 == stats.transfers.tokens_loaded
    assert connector.num_metadata == stats.num_steps + stats.num_idle_steps
    assert (stats.drafts.num_accepted > 0) == (num_drafts > 0)
    assert sum(step.num_accepted for step in core.stats.steps) == stats.drafts.num_accepted
    assert sum(step.num_drafted for step in core.stats.steps) == stats.drafts.num_drafted
    assert scheduler.pool.num_free == 24


@pytest.mark.parametrize("depth", [0, 1])
def test_the_last_finished_ids_are_reported_in_an_idle_step(depth: int) -> None:
    executor = TransferExecutor()
    engine = scripted_engine(executor, connector=ScriptedConnector(), depth=depth)
    engine.add_request("a", [5, 6], SamplingParams(max_tokens=2))
    drain(engine)
    for _ in range(2):  # once
        engine.report_finished()
        assert [step.finished_req_ids for step in executor.idle_steps] == [{"a"}]
    engine.shutdown()
