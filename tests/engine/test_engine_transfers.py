"""The engine's loop with a KV connector and with stages: idle steps, held blocks, steps in flight, and the end."""

import asyncio
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.engines import ScriptedExecutor, drain, scripted_engine
from tests.helpers.fake_connector import Behaviour, FakeSchedulerConnector, ScriptedConnector
from tests.helpers.fake_engine import VOCAB, FakeDevice, expected_output
from tests.helpers.processes import HANG

from fleetfoot import AsyncLLM, SamplingParams
from fleetfoot.engine.core import EngineCore
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.engine.stats import StatsCollector
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import KVConnectorOutput, ModelRunnerOutput, SchedulerOutput, TransferFailure
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


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_idle_steps_while_a_request_loads_and_none_without_a_reason(depth: int) -> None:
    sent = KVConnectorOutput(sent={"r"}, counters={"blocks_loaded": 1})
    executor = TransferExecutor({3: KVConnectorOutput(loaded={"r"}), 5: sent})
    connector = ScriptedConnector({"r": 4}, holds={"r"}, params={"from": "here"})
    engine = engine_of(executor, connector, depth=depth)
    assert engine.step() == []
    assert executor.num_steps == 0
    engine.add_request("r", [9, 5, 6, 7, 8], params())
    for _ in range(3):
        assert engine.has_unfinished_requests()
        engine.step()
        engine.check_integrity()
    assert executor.num_idle == 3
    last = drain(engine)[-1]
    assert (last.finished, last.outputs[0].token_ids, last.num_cached_tokens) == (True, [10, 11], 4)
    assert last.kv_transfer_params == {"from": "here"}
    assert connector.of("finished") == [("r", "length", 2, 7)]
    assert executor.num_idle == 3
    for _ in range(2):
        assert engine.has_transfers()  # its blocks are held
        engine.step()
    assert not engine.has_transfers()
    num_steps = executor.num_steps
    engine.step()
    assert executor.num_steps == num_steps
    stats = engine.stats()
    assert (stats.num_idle_steps, stats.num_steps) == (5, 2)
    assert (stats.transfers.loads_done, stats.transfers.counters) == (1, {"blocks_loaded": 1})


def test_a_load_that_fails_reaches_the_user() -> None:
    ended = {1: KVConnectorOutput(failed={"r": TransferFailure("the other side is gone")})}
    engine = engine_of(TransferExecutor(ended), ScriptedConnector({"r": 4}), kv_load_failure_policy="fail")
    engine.add_request("r", [9, 5, 6, 7, 8], params())
    (output,) = engine.step()
    assert (output.finished, output.outputs[0].finish_reason) == (True, "error")
    assert output.outputs[0].stop_reason == "its KV could not be loaded: the other side is gone"
    assert not engine.has_unfinished_requests()
    assert engine.stats().num_finished == {"error": 1}


def test_requests_do_not_wait_for_blocks_of_others_to_be_sent() -> None:
    executor = TransferExecutor()
    engine = engine_of(executor, ScriptedConnector(holds="012"))
    for name in "012":
        engine.add_request(name, [5, 6], params())
        drain(engine)
    assert (executor.num_idle, engine.stats().transfers.num_held_blocks) == (0, 3)


def test_the_asynchronous_engine_steps_while_blocks_are_held_and_then_sleeps() -> None:
    executor = TransferExecutor()
    llm = AsyncLLM.from_engine(engine_of(executor, ScriptedConnector(holds={"first", "second"})))

    async def ask(request_id: str) -> list[int]:
        async for output in llm.generate([5, 6], params(), request_id):
            tokens = output.outputs[0].token_ids
        return tokens

    try:
        for request_id, step in (("first", 4), ("second", 5)):
            executor.ended[step] = KVConnectorOutput(sent={request_id})
            executor.all_reported.clear()
            assert asyncio.run(asyncio.wait_for(ask(request_id), HANG)) == [10, 11]
            assert executor.all_reported.wait(HANG)  # while there are no requests
    finally:
        llm.shutdown()
    assert executor.num_idle == 5  # not one more than there was a reason for
    assert llm.stats().transfers.num_held_blocks == 0


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


@pytest.mark.parametrize("depth", [1, 3])
def test_shutting_down_waits_for_no_step(depth: int) -> None:
    """The last step is queued behind those in flight, and their outputs are not read."""
    executor, connector = TransferExecutor(), ScriptedConnector(pending=True)
    engine = engine_of(executor, connector, depth=depth, num_stages=depth)
    engine.add_request("ended", [5, 6], params(1))
    engine.add_request("running", [5, 6], params(30))
    while not connector.of("finished"):
        engine.step()
    num_in_flight = executor.num_in_flight
    assert num_in_flight
    engine.shutdown()
    assert [step.kv_connector_metadata[1] for step in executor.idle_steps] == [2]  # "running" was aborted
    assert executor.num_in_flight == num_in_flight + 1
    assert executor.is_shut_down


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


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_one_more_step_than_the_depth_is_in_flight(depth: int) -> None:
    executor = TransferExecutor()
    engine = engine_of(executor, depth=depth, num_stages=max(1, depth))
    for name in "abcd":
        engine.add_request(name, [5, 6], params(8))
    drain(engine)
    assert (executor.most_in_flight, executor.num_in_flight) == (depth + 1, 0)


def test_the_controller_observes_how_long_each_step_took() -> None:
    now = [0.0]

    def work(output: SchedulerOutput) -> None:
        now[0] += 1.0 + len(output.rows)

    seconds: list[float] = []
    observe = {"off_reason": "", "observe": lambda *args: seconds.append(args[-1])}
    controller: Any = SimpleNamespace(choose=lambda num_decodes: 1, **observe)
    scheduler = Scheduler(SchedulerConfig(16, 4, 4, 32, num_drafts=1), controller=controller)
    core = EngineCore(scheduler, ScriptedExecutor(before_step=work), StatsCollector(), clock=lambda: now[0])
    for name in "ab":
        core.scheduler.add_request(Request(name, [5, 6], params(3), max_tokens=3, seed=0))
    core.step()
    now[0] += 100.0  # idle
    core.step()
    core.scheduler.finish("a", RequestStatus.FINISHED_ABORTED)
    core.step()
    assert seconds == [3.0, 3.0, 2.0]


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
