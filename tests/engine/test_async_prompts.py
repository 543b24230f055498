"""Long prompts of `AsyncLLM` are tokenized concurrently with steps; requests keep their order."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.helpers.engines import ScriptedExecutor, scripted_engine
from tests.helpers.processes import HANG
from tests.helpers.streams import assert_idle, async_test, run, submit, tokens_of

from fleetfoot import AsyncLLM, EngineDeadError, RequestOutput, RequestOutputKind, SamplingParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.async_llm import LONG_TEXT, _is_long
from fleetfoot.records.step import SchedulerOutput
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


@async_test
async def test_requests_behind_a_long_prompt_wait_for_it(setting: Setting) -> None:
    tasks = [setting.submit("first", LONG), setting.submit("second", PROMPT), setting.submit("third", {"prompt": LONG})]
    await setting.tokenizer.beginning()
    assert not any(task.done() for task in tasks)
    setting.tokenizer.may_end.set()
    assert [tokens_of(outputs) for outputs in await asyncio.gather(*tasks)] == [list(range(10, 15))] * 3
    assert setting.entered == ["first", "second", "third"]


def test_what_is_long() -> None:
    long: list[Any] = [LONG, {"prompt": LONG}, {"prompt": LONG, "prompt_token_ids": None}]
    assert all(map(_is_long, long))
    ids = np.arange(5, 5 + LONG_TEXT)
    for prompt in (LONG[1:], {"prompt": LONG, "prompt_token_ids": ids}, ids, list(ids), {"prompt": 5}, {}, None):
        assert not _is_long(prompt)


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
async def test_a_bad_long_prompt_fails_alone(
    prompt: Any, failure: BaseException | None, message: str, setting: Setting
) -> None:
    setting.tokenizer.failure = failure
    good, bad, behind = setting.submit("good", PROMPT, 60), setting.submit("bad", prompt), setting.submit("c", PROMPT)
    setting.tokenizer.may_end.set()
    with pytest.raises(type(failure) if failure else ValueError, match=message):
        await bad
    assert (len(tokens_of(await good)), len(tokens_of(await behind))) == (60, 5)


@async_test
async def test_an_id_in_use_is_the_first_thing_that_is_wrong(setting: Setting) -> None:
    setting.tokenizer.failure = ValueError("no UTF-8 form")
    first = setting.submit("id", LONG)  # keeps its place, and fails
    second = setting.submit("other", PROMPT, 100)
    third = setting.submit("other", [99999])
    await setting.tokenizer.beginning()  # all three stand in line
    setting.tokenizer.may_end.set()
    with pytest.raises(ValueError, match="no UTF-8 form"):
        await first
    with pytest.raises(ValueError, match="request id 'other' is in use"):
        await third
    assert len(tokens_of(await second)) == 100


@async_test
async def test_a_request_that_is_aborted_while_it_is_tokenized(setting: Setting) -> None:
    aborted = setting.submit("aborted", LONG, 100)
    await setting.tokenizer.beginning()
    await setting.llm.abort("aborted")
    setting.tokenizer.may_end.set()
    (output,) = await aborted
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("abort", [])
    assert setting.entered == []


@async_test
async def test_a_request_that_is_cancelled_while_it_is_tokenized(setting: Setting) -> None:
    cancelled = setting.submit("cancelled", LONG, 100)
    await setting.tokenizer.beginning()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    behind = setting.submit("cancelled", PROMPT)  # the id is free again when its turn comes
    setting.tokenizer.may_end.set()
    assert len(tokens_of(await behind)) == 5
    assert setting.llm.stats().num_finished == {"abort": 1, "length": 1}


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


def test_a_loop_that_ends_in_between_blocks_no_later_request(setting: Setting) -> None:
    async def leave() -> None:
        setting.submit("left", LONG)  # the loop cancels it at its end
        await setting.tokenizer.beginning()
        setting.tokenizer.may_end.set()

    run(leave())
    assert len(run(setting.tokens("next", PROMPT))) == 5
