"""An abort wins: a request that is aborted before the engine is updated with its last token ends as aborted, once.

After vLLM's test of an abort in the final step. The executor stops a step where it blocks until the abort has arrived.
"""

import asyncio
import functools
import itertools
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.engines import EOS, ScriptedExecutor, scripted_engine
from tests.helpers.processes import HANG, Gate
from tests.helpers.streams import async_test, submit

from fleetfoot import AsyncLLM, SamplingParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.kv_connector import NoSchedulerConnector
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import ModelRunnerOutput, SchedulerOutput
from fleetfoot.tokenizer.tokenizer import Tokenizer

PROMPT = [50, 60, 70]
NUM_TOKENS = 3
"""Steps of the request: the last of them yields its last token."""


class CountingConnector(NoSchedulerConnector):
    """Records `request_finished` calls."""

    is_active = True

    def __init__(self) -> None:
        self.finished: list[tuple[str, RequestStatus]] = []

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        self.finished.append((request.request_id, request.status))
        return False, None


class HeldExecutor(ScriptedExecutor):
    """Stops at a place of a step until its gate opens.

    Args:
        place: ``execute`` (in `execute_model`) or ``result`` (in the output's ``get``).
        step: counts the steps with a forward pass, from 0.
    """

    def __init__(self, script: dict[str, list[int]], place: str, step: int) -> None:
        super().__init__(script)
        self.gate = Gate()
        self.reported: Counter[str] = Counter()
        self._hold_at = place, step
        self._num_computing = 0

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self.reported.update(scheduler_output.finished_req_ids)
        self._num_computing += not scheduler_output.is_idle
        super().execute_model(scheduler_output)
        if ("execute", self._num_computing - 1) == self._hold_at and not scheduler_output.is_idle:
            self.gate(scheduler_output)

    def sample_tokens(self, grammar_output: object | None) -> Any:
        output = super().sample_tokens(grammar_output)
        return SimpleNamespace(get=functools.partial(self._get, self._num_computing, output))

    def _get(self, number: int, output: ModelRunnerOutput) -> ModelRunnerOutput:
        if ("result", number - 1) == self._hold_at:
            self.gate(None)
        return output


TOKENIZER = Tokenizer.from_path(embedded_model_path())
WORD = TOKENIZER.encode(" the", add_special_tokens=False)[-1]
ENDINGS = {
    "length": ([10, 11, 12], SamplingParams(max_tokens=NUM_TOKENS)),
    "stop token": ([10, 11, EOS], SamplingParams(max_tokens=9)),
    "stop string": ([10, 11, WORD], SamplingParams(max_tokens=9, stop=[TOKENIZER.decode([WORD]).strip()])),
}


class World:
    """An asynchronous engine around a held executor."""

    def __init__(
        self, place: str, step: int, depth: int, ending: str = "length", connector: CountingConnector | None = None
    ) -> None:
        self.tokens, self.params = ENDINGS[ending]
        self.executor = HeldExecutor({"r": self.tokens}, place, step)
        self.connector = connector
        engine = scripted_engine(self.executor, tokenizer=TOKENIZER, depth=depth, connector=connector)
        self.llm = AsyncLLM.from_engine(engine)

    def submit(self) -> asyncio.Task[list[RequestOutput]]:
        return submit(self.llm, {"prompt_token_ids": PROMPT}, self.params, "r")

    async def outputs(self, while_held: Callable[[asyncio.Task[list[RequestOutput]]], Any]) -> list[RequestOutput]:
        """Outputs of the request; ``while_held`` runs while the executor is held."""
        task = self.submit()
        await self.executor.gate.arrival()
        await while_held(task)
        self.executor.gate.open()
        return await asyncio.wait_for(task, HANG)

    async def check_end(self) -> None:
        """Shut down; the connector has seen the abort, once."""
        await self.llm.check_integrity()
        await asyncio.to_thread(self.llm.shutdown)
        if self.connector is not None:
            assert self.connector.finished == [("r", RequestStatus.FINISHED_ABORTED)]
            assert self.executor.reported == {"r": 1}


@pytest.mark.parametrize("has_connector", [False, True])
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("step", range(NUM_TOKENS))
@pytest.mark.parametrize("place", ["execute", "result"])
@pytest.mark.parametrize("ending", ENDINGS)
@async_test
async def test_aborted_in_any_step(ending: str, place: str, step: int, depth: int, has_connector: bool) -> None:
    world = World(place, step, depth, ending, CountingConnector() if has_connector else None)
    outputs = await world.outputs(lambda _: world.llm.abort(["unknown", "r"]))
    assert [output.finished for output in outputs].count(True) == 1
    final = outputs[-1].outputs[0]
    assert (final.finish_reason, final.stop_reason) == ("abort", None)
    num_known = max(0, step - depth) if place == "execute" else step
    assert final.token_ids == world.tokens[:num_known]
    assert world.llm.stats().num_finished == {"abort": 1}
    await world.check_end()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("place", ["execute", "result"])
@async_test
async def test_a_client_that_disconnects_in_the_final_step(place: str, depth: int) -> None:
    world = World(place, NUM_TOKENS - 1, depth, connector=CountingConnector())

    async def disconnect(task: asyncio.Task[list[RequestOutput]]) -> None:
        task.cancel()
        await asyncio.wait([task])

    with pytest.raises(asyncio.CancelledError):
        await world.outputs(disconnect)
    await world.check_end()


@pytest.mark.parametrize("depth", [0, 1])
@async_test
async def test_aborted_and_submitted_again_under_the_same_id_within_one_step(depth: int) -> None:
    world = World("result", NUM_TOKENS - 1, depth)
    second: list[asyncio.Task[list[RequestOutput]]] = []

    async def abort_and_submit(_: object) -> None:
        await world.llm.abort("r")
        second.append(world.submit())
        await asyncio.sleep(0)  # the generator submits its request

    first, again = await world.outputs(abort_and_submit), await second[0]
    assert (first[-1].outputs[0].finish_reason, again[-1].outputs[0].finish_reason) == ("abort", "length")
    assert again[-1].outputs[0].token_ids == world.tokens
    await asyncio.to_thread(world.llm.shutdown)


@async_test
async def test_a_connector_that_raises_at_an_abort_ends_the_engine() -> None:
    class Broken(CountingConnector):
        def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
            raise OSError("the store is gone")

    world = World("result", 1, 0, connector=Broken())
    with pytest.raises(EngineDeadError, match=r"^the engine has failed: OSError: the store is gone$"):
        await world.outputs(lambda _: world.llm.abort("r"))
    await asyncio.to_thread(world.llm.shutdown)


@pytest.mark.parametrize("depth", [0, 1])
def test_aborts_of_the_synchronous_engine_before_an_update(depth: int) -> None:
    connector = CountingConnector()
    engine = scripted_engine(ScriptedExecutor(), depth=depth, connector=connector)
    engine.add_request("r", PROMPT, SamplingParams(max_tokens=NUM_TOKENS, detokenize=False))
    results = itertools.count(1)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step(lambda: next(results) == NUM_TOKENS and engine.abort_request("r"))
        engine.check_integrity()
    assert [output.outputs[0].finish_reason for output in outputs if output.finished] == ["abort"]
    assert connector.finished == [("r", RequestStatus.FINISHED_ABORTED)]
    engine.shutdown()
