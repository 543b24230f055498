"""The engine's loop with a KV connector and with stages: idle steps, lent blocks, steps in flight, and the end."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest
from tests.helpers.engines import ScriptedExecutor, scripted_engine
from tests.helpers.fake_connector import Behaviour, FakeSchedulerConnector
from tests.helpers.fake_engine import VOCAB, FakeDevice, expected_output
from tests.helpers.gate import HANG

from fleetfoot import AsyncLLM, SamplingParams
from fleetfoot.engine.core import EngineCore
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.engine.stats import StatsCollector
from fleetfoot.executor.protocol import Executor
from fleetfoot.records.kv_connector import NoSchedulerConnector
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import KVConnectorOutput, ModelRunnerOutput, SchedulerOutput, TransferFailure
from fleetfoot.scheduler.scheduler import Scheduler, SchedulerConfig


class Lender(NoSchedulerConnector):
    """Loads the first block of prompts that begin with 9, and lends the blocks of every request."""

    is_active = True
    is_shut_down = False

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int:
        return 4 if request.token_ids[0] == 9 and not num_computed_tokens else 0

    def update_state_after_alloc(self, request: Request, num_computed_tokens: int, num_external_tokens: int) -> None:
        pass

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        return True, {"blocks": list(request.block_ids), "tokens": request.num_tokens}

    def shutdown(self) -> None:
        self.is_shut_down = True


class TransferExecutor(ScriptedExecutor):
    """Says in its n-th idle step what has ended."""

    def __init__(self, ended: dict[int, KVConnectorOutput], **more: Any) -> None:
        super().__init__(**more)
        self.ended = ended
        self.num_idle = 0
        self.all_said = threading.Event()

    def sample_tokens(self, grammar_output: object | None) -> ModelRunnerOutput:
        assert self._step is not None
        is_idle = self._step.is_idle
        result = super().sample_tokens(grammar_output)
        if is_idle:
            self.num_idle += 1
            result.kv_connector_output = self.ended.pop(self.num_idle, None)
            if not self.ended:
                self.all_said.set()
        return result


def engine_of(executor: Executor, **more: Any) -> LLMEngine:
    limits = {"num_blocks": 16, "max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64}
    return scripted_engine(executor, **{"connector": Lender(), **limits, **more})


def params(max_tokens: int = 2) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, detokenize=False)


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_idle_steps_while_a_request_loads_and_none_without_a_reason(depth: int) -> None:
    executor = TransferExecutor(
        {3: KVConnectorOutput(loaded={"r"}), 5: KVConnectorOutput(sent={"r"}, counters={"blocks_loaded": 1})}
    )
    engine = engine_of(executor, depth=depth)
    assert engine.step() == []
    assert executor.num_steps == 0  # nothing to do, nothing done
    engine.add_request("r", [9, 5, 6, 7, 8], params())
    for _ in range(3):
        assert engine.has_unfinished_requests()
        engine.step()
        engine.check_integrity()
    assert executor.num_idle == 3
    last = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            last = output
    assert last is not None
    assert (last.finished, last.outputs[0].token_ids, last.num_cached_tokens) == (True, [10, 11], 4)
    assert last.kv_transfer_params is not None
    assert (len(last.kv_transfer_params["blocks"]), last.kv_transfer_params["tokens"]) == (2, 7)
    assert executor.num_idle == 3
    assert engine.has_transfers()  # its blocks are lent
    engine.step()
    assert engine.has_transfers()
    engine.step()
    assert not engine.has_transfers()
    num_steps = executor.num_steps
    engine.step()
    assert executor.num_steps == num_steps
    stats = engine.stats()
    assert (stats.num_idle_steps, stats.num_steps) == (5, 2)
    assert (stats.transfers.loads_done, stats.transfers.counters) == (1, {"blocks_loaded": 1})


def test_a_load_that_fails_reaches_its_user() -> None:
    ended = {1: KVConnectorOutput(failed={"r": TransferFailure("the other side is gone")})}
    engine = engine_of(TransferExecutor(ended), kv_load_failure_policy="fail")
    engine.add_request("r", [9, 5, 6, 7, 8], params())
    (output,) = engine.step()
    assert (output.finished, output.outputs[0].finish_reason) == (True, "error")
    assert output.outputs[0].stop_reason == "its KV could not be loaded: the other side is gone"
    assert not engine.has_unfinished_requests()
    assert engine.stats().num_finished == {"error": 1}


def test_requests_do_not_wait_for_blocks_of_others_to_be_sent() -> None:
    executor = TransferExecutor({})
    engine = engine_of(executor)
    for number in range(3):
        engine.add_request(str(number), [5, 6], params())
        while engine.has_unfinished_requests():
            engine.step()
    assert (executor.num_idle, engine.stats().transfers.num_held_blocks) == (0, 3)


def test_a_request_waits_for_lent_blocks_where_there_are_no_others() -> None:
    executor = TransferExecutor({2: KVConnectorOutput(sent={"a"})})
    engine = engine_of(executor, num_blocks=3)
    engine.add_request("a", [5] * 8, params())
    engine.add_request("b", [6] * 8, params())
    outputs = [output for _ in range(8) for output in engine.step() if output.finished]
    assert [output.request_id for output in outputs] == ["a", "b"]
    assert executor.num_idle > 2


def test_the_asynchronous_engine_steps_on_while_blocks_are_lent_and_then_sleeps() -> None:
    executor = TransferExecutor({4: KVConnectorOutput(sent={"first"})})
    llm = AsyncLLM.from_engine(engine_of(executor))

    async def ask(request_id: str) -> list[int]:
        async for output in llm.generate([5, 6], params(), request_id):
            tokens = output.outputs[0].token_ids
        return tokens

    try:
        assert asyncio.run(asyncio.wait_for(ask("first"), HANG)) == [10, 11]
        assert executor.all_said.wait(HANG)  # nobody asks for anything any more
        executor.ended[executor.num_idle + 1] = KVConnectorOutput(sent={"second"})
        executor.all_said.clear()
        assert asyncio.run(asyncio.wait_for(ask("second"), HANG)) == [10, 11]
        assert executor.all_said.wait(HANG)
    finally:
        llm.shutdown()
    assert executor.num_idle == 5  # not one more than there was a reason for
    assert llm.stats().transfers.num_held_blocks == 0


def test_shutting_down_ends_workers_and_connector_with_blocks_still_lent() -> None:
    executor = TransferExecutor({})
    engine = engine_of(executor)
    connector = engine.core.scheduler.transfers.connector
    assert isinstance(connector, Lender)
    engine.add_request("r", [5, 6], params(1))
    engine.step()
    assert engine.has_transfers()
    engine.shutdown()
    assert executor.is_shut_down
    assert connector.is_shut_down


def test_the_connector_is_shut_down_though_a_worker_cannot_be() -> None:
    class Broken(TransferExecutor):
        def shutdown(self) -> None:
            raise OSError("no answer")

    engine = engine_of(Broken({}))
    connector = engine.core.scheduler.transfers.connector
    with pytest.raises(OSError, match="no answer"):
        engine.shutdown()
    assert isinstance(connector, Lender)
    assert connector.is_shut_down


class Flusher(NoSchedulerConnector):
    """Says that there is something to tell the workers, always, and tells them how many requests have ended."""

    is_active = True
    num_ended = 0
    is_shut_down = False

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self.num_ended += 1
        return False, None

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        return self.num_ended

    @property
    def has_pending(self) -> bool:
        return True

    def shutdown(self) -> None:
        self.is_shut_down = True


class Steps:
    """What a step carries; the idle ones can raise."""

    def __init__(self, error: Exception | None = None) -> None:
        self.metadata: list[Any] = []
        self._error = error

    def __call__(self, output: SchedulerOutput) -> None:
        if output.is_idle:
            self.metadata.append(output.kv_connector_metadata)
            if self._error is not None:
                raise self._error


def test_shutting_down_tells_workers_once_what_the_connector_still_has_to_tell() -> None:
    steps, connector = Steps(), Flusher()
    engine = engine_of(ScriptedExecutor(before_step=steps), connector=connector)
    engine.add_request("r", [5, 6], params(1))
    assert engine.step()[0].finished
    assert steps.metadata == []
    engine.shutdown()
    engine.shutdown()
    assert steps.metadata == [1]  # though there would be more to tell
    assert connector.is_shut_down


def test_shutting_down_reports_the_last_ids_and_does_not_wait_for_lent_blocks() -> None:
    reported: list[set[str]] = []
    executor = TransferExecutor({}, before_step=lambda step: reported.append(step.finished_req_ids))
    engine = engine_of(executor)
    engine.add_request("r", [5, 6], params(1))
    engine.step()
    assert reported == [set()]
    engine.shutdown()
    assert reported == [set(), {"r"}]
    assert engine.has_transfers()


@pytest.mark.parametrize("depth", [1, 3])
def test_shutting_down_waits_for_no_step(depth: int) -> None:
    """What is in flight comes first, and nobody looks at it any more."""
    steps, connector = Steps(), Flusher()
    executor = InFlight(before_step=steps)
    engine = engine_of(executor, connector=connector, depth=depth, num_stages=depth)
    engine.add_request("ended", [5, 6], params(1))
    engine.add_request("running", [5, 6], params(30))
    while not connector.num_ended:
        engine.step()
    num_in_flight = executor.num_in_flight
    assert num_in_flight
    engine.shutdown()
    assert steps.metadata == [2]  # "running" was aborted
    assert executor.num_in_flight == num_in_flight + 1
    assert executor.is_shut_down


def test_what_the_last_step_raises_is_raised_when_all_is_given_back() -> None:
    connector, executor = Flusher(), ScriptedExecutor(before_step=Steps(OSError("the disk is gone")))
    engine = engine_of(executor, connector=connector)
    with pytest.raises(OSError, match="the disk is gone"):
        engine.shutdown()
    assert executor.is_shut_down and connector.is_shut_down
    engine.shutdown()


def test_an_engine_that_has_failed_takes_no_step_more() -> None:
    connector, executor = Flusher(), ScriptedExecutor(before_step=Steps(OSError("the disk is gone")))
    engine = engine_of(executor, connector=connector)
    with pytest.raises(EngineDeadError, match="the disk is gone"):
        engine.step()
    engine.shutdown()
    assert executor.is_shut_down and connector.is_shut_down


class Waiting:
    """A step's output that is asked for later."""

    def __init__(self, executor: InFlight, output: ModelRunnerOutput) -> None:
        self._executor = executor
        self._output = output

    def get(self) -> ModelRunnerOutput:
        self._executor.num_in_flight -= 1
        return self._output


class InFlight(ScriptedExecutor):
    num_in_flight = 0
    most_in_flight = 0

    def sample_tokens(self, grammar_output: object | None) -> Any:
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        return Waiting(self, super().sample_tokens(grammar_output))


@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_one_more_step_than_the_depth_is_in_flight(depth: int) -> None:
    executor = InFlight()
    engine = engine_of(executor, depth=depth, num_stages=max(1, depth))
    for name in "abcd":
        engine.add_request(name, [5, 6], params(8))
    while engine.has_unfinished_requests():
        engine.step()
        engine.check_integrity()
    assert executor.most_in_flight == depth + 1
    assert executor.num_in_flight == 0


def test_the_controller_hears_how_long_each_step_took() -> None:
    class Listener:
        off_reason = ""

        def __init__(self) -> None:
            self.heard: list[float] = []

        def choose(self, num_decodes: int) -> int:
            return 1

        def observe(self, *args: Any) -> None:
            self.heard.append(args[-1])

    now = [0.0]

    def work(output: SchedulerOutput) -> None:
        now[0] += 1.0 + len(output.rows)

    listener = Listener()
    config = SchedulerConfig(16, 4, 4, 32, num_drafts=1)
    core = EngineCore(
        Scheduler(config, controller=listener),
        ScriptedExecutor(before_step=work),
        StatsCollector(),
        clock=lambda: now[0],
    )
    for name in "ab":
        core.add_request(Request(name, [5, 6], params(3), max_tokens=3, seed=0))
    core.step()
    now[0] += 100.0  # nobody had anything to do
    core.step()
    core.finish("a", RequestStatus.FINISHED_ABORTED)
    core.step()
    assert listener.heard == [3.0, 3.0, 2.0]


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
        core.add_request(request)
    while core.has_work or core.has_transfers:
        core.step()
        scheduler.check_integrity()
    for request in requests:
        assert request.output_token_ids == expected_output(request)
    stats = core.stats.snapshot(scheduler.stats())
    assert stats.transfers.loads_done > 0 < stats.transfers.loads_failed
    assert (stats.drafts.num_accepted > 0) == (num_drafts > 0)
    assert sum(step.num_accepted for step in core.stats.steps) == stats.drafts.num_accepted
    assert sum(step.num_drafted for step in core.stats.steps) == stats.drafts.num_drafted
    assert scheduler.pool.num_free == 24
