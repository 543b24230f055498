"""`AsyncLLM`: long prompts are tokenized concurrently with steps; an abort before the engine is updated with the last
token wins, once."""

import asyncio
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.engines import EOS, ScriptedExecutor, scripted_engine
from tests.helpers.processes import HANG, Gate
from tests.helpers.streams import assert_idle, async_test, submit, tokens_of

from fleetfoot import AsyncLLM, EngineDeadError, RequestOutput, RequestOutputKind, SamplingParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.engine.input_processor import LONG_TEXT
from fleetfoot.records.kv_connector import NoSchedulerConnector
from fleetfoot.records.request import Request, RequestStatus
from fleetfoot.records.step import ModelRunnerOutput, SchedulerOutput
from fleetfoot.tokenizer.tokenizer import Tokenizer

PROMPT = [5, 6]
LONG = "a" * LONG_TEXT
"""The tokenizer of these tests makes few tokens of it."""


class SlowTokenizer(Tokenizer):
    """Waits before it encodes a long text, and records the threads that encode."""

    max_token_chars = None  # type: ignore[assignment]  # as of a tokenizer that can join characters

    def __init__(self) -> None:
        own = Tokenizer.from_path(embedded_model_path())
        super().__init__(own.backend, own.special_tokens)
        self.threads: dict[str, threading.Thread] = {}
        self.failure: BaseException | None = None
        self.has_begun = threading.Event()
        self.may_end = threading.Event()

    def encode(self, text: str, *arguments: Any, **options: Any) -> list[int]:
        is_long = len(text) >= LONG_TEXT
        self.threads["long" if is_long else text] = threading.current_thread()
        if not is_long:
            return super().encode(text, *arguments, **options)
        self.has_begun.set()
        assert self.may_end.wait(HANG)
        if self.failure is not None:
            raise self.failure
        return [7, 8, 9]

    async def beginning(self) -> None:
        """Until the tokenization of a long text is under way."""
        assert await asyncio.to_thread(self.has_begun.wait, HANG)


class Setting:
    """An engine with a slow tokenizer, and the requests of its steps."""

    def __init__(self) -> None:
        self.tokenizer = SlowTokenizer()
        self.entered: list[str] = []
        executor = ScriptedExecutor(before_step=self._note)
        self.llm = AsyncLLM.from_engine(scripted_engine(executor, tokenizer=self.tokenizer))

    def _note(self, step: SchedulerOutput) -> None:
        self.entered += [request.request_id for request in step.new_requests]

    async def tokens(self, request_id: str, prompt: Any, max_tokens: int = 5) -> list[int]:
        return tokens_of(await self.submit(request_id, prompt, max_tokens))

    def submit(self, request_id: str, prompt: Any, max_tokens: int = 5) -> asyncio.Task[list[RequestOutput]]:
        params = SamplingParams(max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)
        return submit(self.llm, prompt, params, request_id)


@pytest.fixture
def setting() -> Iterator[Setting]:
    setting = Setting()
    yield setting
    setting.tokenizer.may_end.set()
    assert_idle(setting.llm)


@async_test
async def test_steps_go_on_while_a_long_prompt_is_tokenized(setting: Setting) -> None:
    running = setting.submit("running", PROMPT, 60)
    long = setting.submit("long", LONG)
    await setting.tokenizer.beginning()
    assert tokens_of(await running) == list(range(10, 70))  # to its very end
    assert not long.done()
    assert setting.entered == ["running"]
    setting.tokenizer.may_end.set()
    outputs = await long
    assert tokens_of(outputs) == list(range(10, 15))
    assert (outputs[-1].prompt, outputs[-1].prompt_token_ids) == (LONG, [7, 8, 9])
    assert setting.tokenizer.threads["long"] not in (setting.llm._thread, threading.main_thread())


@async_test
async def test_a_short_prompt_is_tokenized_on_the_spot(setting: Setting) -> None:
    assert len(await setting.tokens("r", "Once upon")) == len(await setting.tokens("s", {"prompt": "The fox"})) == 5
    assert list(setting.tokenizer.threads.values()) == [threading.main_thread()] * 2


class PanicError(BaseException):
    """What the `tokenizers` library raises is no Exception."""


@pytest.mark.parametrize(
    ("prompt", "failure", "message"),
    [
        ({"prompt": LONG, "cache_salt": ""}, None, "cache_salt is ''"),
        (LONG, ValueError("no UTF-8 form"), "no UTF-8 form"),
        (LONG, PanicError("index out of bounds"), "index out of bounds"),
    ],
    ids=["invalid", "tokenizer", "panic"],
)
@async_test
async def test_a_bad_prompt_fails(prompt: Any, failure: BaseException | None, message: str, setting: Setting) -> None:
    setting.tokenizer.failure = failure
    good, bad, behind = setting.submit("good", PROMPT, 60), setting.submit("bad", prompt), setting.submit("c", PROMPT)
    setting.tokenizer.may_end.set()
    with pytest.raises(type(failure) if failure else ValueError, match=message):
        await bad
    assert (len(tokens_of(await good)), len(tokens_of(await behind))) == (60, 5)


@async_test
async def test_a_shutdown_does_not_wait_for_a_tokenizer(setting: Setting) -> None:
    long = setting.submit("long", LONG)
    await setting.tokenizer.beginning()
    await asyncio.to_thread(setting.llm.shutdown)
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        await long
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        await setting.submit("late", [99999])
    setting.tokenizer.may_end.set()
    assert setting.entered == []


@async_test
async def test_a_loop_that_has_no_threads_any_more(setting: Setting) -> None:
    setting.tokenizer.may_end.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert len(await setting.tokens("long", LONG)) == 5
    assert setting.tokenizer.threads["long"] is threading.main_thread()


HELD_PROMPT = [50, 60, 70]
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
        return submit(self.llm, {"prompt_token_ids": HELD_PROMPT}, self.params, "r")

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
