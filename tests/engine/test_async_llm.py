"""`AsyncLLM`: many streams, one engine thread. A gate in the executor controls its steps."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.engines import TEXT_MODEL, ScriptedExecutor, prompt_of, scripted_engine
from tests.helpers.gate import HANG, Gate
from tests.helpers.streams import assert_idle, async_test, collect, gated, run, submit, tokens_of

from fleetfoot import LLM, AsyncLLM, EngineDeadError, RequestOutputKind, SamplingParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.tokenizer.tokenizer import Tokenizer

PROMPT = [5, 6]


@pytest.fixture
def running() -> Iterator[AsyncLLM]:
    llm = AsyncLLM.from_engine(scripted_engine(ScriptedExecutor()))
    yield llm
    llm.shutdown()
    assert not llm._thread.is_alive()


def params(max_tokens: int, kind: RequestOutputKind = RequestOutputKind.DELTA, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, output_kind=kind, **more)


def expected_tokens(count: int) -> list[int]:
    return list(range(10, 10 + count))


# --- streams --------------------------------------------------------------------------------------------------------


def test_collections_leave_the_engine_alone_while_it_runs() -> None:
    with gated() as (llm, gate):
        stream = llm.generate(PROMPT, params(3), "a")

        async def read() -> int:
            gate.open()
            _ = [output async for output in stream]
            return gc.get_freeze_count()

        assert run(read()) > 0
    assert gc.get_freeze_count() == 0
    frozen: list[int] = []
    with LLM(embedded_model_path(), max_model_len=64, dtype="float32") as offline:
        step = offline.llm_engine.step
        offline.llm_engine.step = lambda: frozen.append(gc.get_freeze_count()) or step()  # type: ignore[method-assign, func-returns-value]
        offline.generate([[5]], params(2, RequestOutputKind.FINAL_ONLY), use_tqdm=False)
    assert frozen and min(frozen) > 0
    assert gc.get_freeze_count() == 0


@async_test
async def test_many_streams_at_once(running: AsyncLLM) -> None:
    streams = [running.generate(PROMPT, params(1 + number), str(number)) for number in range(30)]
    for number, outputs in enumerate(await asyncio.gather(*map(collect, streams))):
        assert tokens_of(outputs) == expected_tokens(1 + number)
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert {output.request_id for output in outputs} == {str(number)}
        assert outputs[-1].outputs[0].finish_reason == "length"
    assert_idle(running)
    assert running.stats().num_finished == {"length": 30}


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_kinds_of_output(kind: RequestOutputKind, running: AsyncLLM) -> None:
    outputs = run(collect(running.generate(PROMPT, params(7, kind), "r")))
    if kind is RequestOutputKind.DELTA:
        assert tokens_of(outputs) == expected_tokens(7)
    else:
        assert outputs[-1].outputs[0].token_ids == expected_tokens(7)
    if kind is RequestOutputKind.FINAL_ONLY:
        assert len(outputs) == 1


@async_test
async def test_a_slow_reader_gets_what_has_piled_up_as_one() -> None:
    tokenizer = Tokenizer.from_path(embedded_model_path())
    text = "Once upon a time a fox met a cat."
    script = {"slow": tokenizer.encode(text, add_special_tokens=False)}
    with gated(script, tokenizer=tokenizer) as (llm, gate):
        slow = llm.generate(PROMPT, params(len(script["slow"])), "slow")
        first_output = asyncio.ensure_future(anext(slow))
        await gate.arrival()
        marker = submit(llm, PROMPT, params(40), "marker")
        await asyncio.sleep(0)  # lets the marker's task run up to where it waits: it is in the queue then
        gate.step()
        first = await first_output
        gate.open()
        await marker  # it ends later, and outputs come in order: all of the slow one's are there
        rest = [output async for output in slow]
        assert len(rest) == 1
        outputs = [first, *rest]
        assert tokens_of(outputs) == script["slow"]
        assert "".join(output.outputs[0].text for output in outputs) == text
        assert rest[0].finished
        assert len(first.outputs[0].token_ids) == 1
        assert_idle(llm)


@async_test
async def test_merged_deltas_keep_logprobs_and_copies(text_model: Path) -> None:
    wanted: dict[str, Any] = {"n": 2, "seed": 1, "logprobs": 1, "ignore_eos": True}
    with LLM(str(text_model), device="cpu", max_num_seqs=8) as llm:
        (expected,) = llm.generate([PROMPT], params(30, **wanted), use_tqdm=False)
    async with AsyncLLM(str(text_model), device="cpu", max_num_seqs=8) as llm:
        stream = llm.generate(PROMPT, params(30, **wanted), "r")
        outputs = [await anext(stream)]
        await collect(llm.generate(PROMPT, params(60, ignore_eos=True), "marker"))
        outputs += [output async for output in stream]
        for index, whole in enumerate(expected.outputs):
            deltas = [output.outputs[index] for output in outputs]
            assert [token for delta in deltas for token in delta.token_ids] == whole.token_ids
            assert "".join(delta.text for delta in deltas) == whole.text
            entries = [entry for delta in deltas for entry in delta.logprobs or []]
            assert [list(entry) for entry in entries] == [list(entry) for entry in whole.logprobs or []]
            assert deltas[-1].cumulative_logprob == pytest.approx(whole.cumulative_logprob, abs=1e-3)


@async_test
async def test_the_same_tokens_as_offline(text_model: Path) -> None:
    vocab_size = TEXT_MODEL["vocab_size"]
    prompts = [prompt_of(3 + number, vocab_size, seed=number) for number in range(12)]
    wanted = [params(20, RequestOutputKind.CUMULATIVE, seed=number, temperature=number % 3 / 2) for number in range(12)]
    with LLM(str(text_model), device="cpu", max_num_seqs=5) as llm:
        expected = [output.outputs for output in llm.generate(prompts, wanted, use_tqdm=False)]
    async with AsyncLLM(text_model, device="cpu", max_num_seqs=5, max_num_batched_tokens=9) as llm:
        streams = [llm.generate(prompt, wanted[i], str(i)) for i, prompt in enumerate(prompts)]
        outputs = await asyncio.gather(*map(collect, streams))
        assert [stream[-1].outputs for stream in outputs] == expected
        assert llm.runner_name in ("v1", "v2")
        assert llm.get_tokenizer() is not None


def test_two_event_loops_one_after_the_other(running: AsyncLLM) -> None:
    for number in range(2):
        assert tokens_of(run(collect(running.generate(PROMPT, params(5), f"r{number}")))) == expected_tokens(5)
        assert tokens_of(run(collect(running.generate(PROMPT, params(5), "same")))) == expected_tokens(5)


def test_two_event_loops_at_once(running: AsyncLLM) -> None:
    found: dict[int, list[int]] = {}

    def work(number: int) -> None:
        found[number] = tokens_of(run(collect(running.generate(PROMPT, params(20 + number), str(number)))))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
    assert found == {number: expected_tokens(20 + number) for number in range(4)}


# --- leaving --------------------------------------------------------------------------------------------------------


@async_test
async def test_abort_by_id() -> None:
    with gated() as (llm, gate):
        streams = {name: llm.generate(PROMPT, params(50), name) for name in "abc"}
        tasks = {name: asyncio.ensure_future(collect(stream)) for name, stream in streams.items()}
        await gate.arrival()
        await llm.abort("a")
        await llm.abort(["b", "unknown"])
        await llm.abort([])
        gate.open()
        for name in "ab":
            outputs = await tasks[name]
            last = outputs[-1]
            assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")
            count = len(tokens_of(outputs))
            assert count < 50
            assert tokens_of(outputs) == expected_tokens(count)
        assert tokens_of(await tasks["c"]) == expected_tokens(50)
        await llm.abort("a")  # long gone
        assert_idle(llm)
        assert llm.stats().num_finished == {"abort": 2, "length": 1}


@async_test
async def test_an_id_is_free_again_once_its_request_was_aborted() -> None:
    """The abort and the new request reach the engine in the same breath; each gets its own outputs."""
    with gated() as (llm, gate):
        old = submit(llm, PROMPT, params(50), "id")
        await gate.arrival()
        await llm.abort("id")
        new = submit(llm, PROMPT, params(5), "id")
        await asyncio.sleep(0)  # lets the new task run up to where it waits
        gate.open()
        assert (await old)[-1].outputs[0].finish_reason == "abort"
        outputs = await new
        assert (tokens_of(outputs), outputs[-1].outputs[0].finish_reason) == (expected_tokens(5), "length")
        assert_idle(llm)


@pytest.mark.parametrize("how", ["aclose", "break", "cancel", "timeout", "exception"])
@async_test
async def test_leaving_the_generator_aborts_the_request(how: str) -> None:
    with gated() as (llm, gate):
        stream = llm.generate(PROMPT, params(50), "r")
        reading = asyncio.Event()

        async def read() -> None:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    reading.set()
                    if how == "break":
                        break
                    if how == "exception":
                        raise ZeroDivisionError
                    assert not output.finished

        task = asyncio.ensure_future(read())
        await gate.arrival()
        gate.step()
        await reading.wait()
        if how == "aclose":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await stream.aclose()
        elif how == "cancel":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "timeout":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(task, 0)
        elif how == "break":
            await task
        else:
            with pytest.raises(ZeroDivisionError):
                await task
        gate.open()
        # commands run in order: when this request has ended, the other one has been discarded
        assert tokens_of(await collect(llm.generate(PROMPT, params(3), "other"))) == expected_tokens(3)
        assert_idle(llm)
        assert llm.stats().num_finished == {"abort": 1, "length": 1}
        assert llm.stats().num_generation_tokens < 20


@async_test
async def test_cancelled_before_its_first_output() -> None:
    with gated() as (llm, gate):
        running = submit(llm, PROMPT, params(4), "running")
        await gate.arrival()
        waiting = submit(llm, PROMPT, params(50), "waiting")
        await asyncio.sleep(0)  # lets the task submit its request, which the engine has no time for
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.open()
        assert tokens_of(await running) == expected_tokens(4)
        assert_idle(llm)
        assert llm.stats().num_finished == {"length": 1, "abort": 1}


def test_an_event_loop_that_ends_takes_its_requests_along(running: AsyncLLM) -> None:
    async def main() -> None:
        stream = running.generate(PROMPT, params(100), "r")
        await anext(stream)
        main.stream = stream  # type: ignore[attr-defined]  # alive when the loop closes its generators

    run(main())
    assert tokens_of(run(collect(running.generate(PROMPT, params(3), "r")))) == expected_tokens(3)
    assert_idle(running)


@async_test
async def test_a_generator_that_is_never_awaited_is_no_request(running: AsyncLLM) -> None:
    stream = running.generate(PROMPT, params(3), "r")
    await stream.aclose()
    await collect(running.generate(PROMPT, params(3), "r"))
    assert running.stats().num_finished == {"length": 1}


# --- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "wanted", "request_id", "error", "message"),
    [
        ([5, 99999], params(3), "bad", ValueError, r"prompt_token_ids\[1\] is 99999"),
        ([], params(3), "bad", ValueError, "no tokens"),
        (PROMPT, {"max_tokens": 3}, "bad", TypeError, "must be a SamplingParams"),
        (PROMPT, params(3), "good", ValueError, "request id 'good' is in use"),
        (PROMPT, params(3), 7, ValueError, "request_id is 7"),
        (PROMPT, params(3), ["a"], ValueError, r"request_id is \['a'\]"),
        (PROMPT, params(3, stop=["a"]), "bad", ValueError, "needs a tokenizer"),
        ([5] * 128, params(3), "bad", ValueError, "max_model_len=128"),
    ],
    ids=lambda value: repr(value)[:25] if isinstance(value, str) else "",
)
@async_test
async def test_a_bad_request_fails_alone(
    prompt: Any, wanted: Any, request_id: Any, error: type[Exception], message: str
) -> None:
    with gated() as (llm, gate):
        good = submit(llm, PROMPT, params(5), "good")
        await gate.arrival()
        bad = submit(llm, prompt, wanted, request_id)
        await asyncio.sleep(0)  # lets the task submit its request
        gate.open()
        with pytest.raises(error, match=message):
            await bad
        assert tokens_of(await good) == expected_tokens(5)
        assert_idle(llm)
        assert llm.stats().num_finished == {"length": 1}


@async_test
async def test_a_bad_abort_affects_no_request(running: AsyncLLM) -> None:
    for wrong in (5, None, [None], [["r"]], ["r", 5]):
        with pytest.raises(TypeError):
            await running.abort(wrong)  # type: ignore[arg-type]
    assert tokens_of(await collect(running.generate(PROMPT, params(5), "r"))) == expected_tokens(5)


# --- the end --------------------------------------------------------------------------------------------------------


@async_test
async def test_shutdown_ends_pending_generators() -> None:
    gate = Gate()

    def shut_down_in_the_second_step(step: SchedulerOutput) -> None:
        gate(step)
        if step.step == 1:
            llm.shutdown()

    executor = ScriptedExecutor(before_step=shut_down_in_the_second_step)
    llm = AsyncLLM.from_engine(scripted_engine(executor))
    tasks = [submit(llm, PROMPT, params(50), str(i)) for i in range(12)]
    await gate.arrival()
    gate.step()
    await gate.arrival()
    tasks.append(submit(llm, PROMPT, params(50), "late"))
    await asyncio.sleep(0)  # lets the late one submit its request, which the engine will not run
    gate.step()
    for task in tasks:
        with pytest.raises(EngineDeadError, match="the engine was shut down"):
            await task
    assert not llm.is_running
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        await collect(llm.generate(PROMPT, params(1), "too late"))
    await llm.abort("late")
    llm.shutdown()
    assert not llm._thread.is_alive()
    assert executor.is_shut_down
    assert executor.num_steps == 2


@async_test
async def test_a_failure_reaches_everyone_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    cause = RuntimeError("the device fell off the bus")
    gate = Gate()

    def fail(step: SchedulerOutput) -> None:
        gate(step)
        if step.step == 2:
            raise cause

    llm = AsyncLLM.from_engine(scripted_engine(ScriptedExecutor(before_step=fail), max_num_seqs=4))
    tasks = [submit(llm, PROMPT, params(50), str(i)) for i in range(6)]
    for _ in range(2):
        await gate.arrival()
        gate.step()
    await gate.arrival()
    tasks.append(submit(llm, PROMPT, params(50), "pending"))
    await asyncio.sleep(0)  # lets it submit its request, which the engine will not run
    gate.open()
    for task in tasks:
        with pytest.raises(EngineDeadError, match="RuntimeError: the device fell off the bus") as caught:
            await task
        assert caught.value.__cause__ is cause
    assert not llm.is_running
    with pytest.raises(EngineDeadError, match="fell off the bus") as caught:
        await collect(llm.generate(PROMPT, params(1), "later"))
    assert caught.value.__cause__ is cause
    await llm.abort("0")
    llm.shutdown()
    assert not llm._thread.is_alive()
    assert any("fell off the bus" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=lambda error: type(error).__name__)
def test_base_exceptions_end_every_generator(error: BaseException) -> None:
    def fail(step: SchedulerOutput) -> None:
        raise error

    llm = AsyncLLM.from_engine(scripted_engine(ScriptedExecutor(before_step=fail)))
    with pytest.raises(EngineDeadError) as caught:
        run(collect(llm.generate(PROMPT, params(5), "r")))
    assert caught.value.__cause__ is error
    llm.shutdown()


@async_test
async def test_a_command_that_fails_ends_the_commands_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with gated() as (llm, gate):

        def fail(request_ids: Any) -> None:
            raise RuntimeError("the state is inconsistent")

        monkeypatch.setattr(llm._engine, "abort_request", fail)
        before = submit(llm, PROMPT, params(50), "before")
        await gate.arrival()
        await llm.abort("before")
        behind = submit(llm, PROMPT, params(50), "behind")
        await asyncio.sleep(0)  # lets it submit its request: in the queue it stands behind the abort
        gate.open()
        for task in (before, behind):
            with pytest.raises(EngineDeadError, match="the state is inconsistent"):
                await task


def test_as_a_context_manager(text_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> AsyncLLM:
        async with AsyncLLM(str(text_model), device="cpu", max_num_seqs=4) as llm:
            assert llm.is_running
            outputs = await collect(llm.generate("Once upon a time", params(5), "r"))
            assert outputs[-1].finished
            assert outputs[-1].prompt == "Once upon a time"
        assert not llm.is_running
        return llm

    with caplog.at_level(logging.ERROR):
        llm = run(main())
    assert not caplog.records
    with pytest.raises(EngineDeadError, match="shut down"):
        run(collect(llm.generate("a", params(5), "r")))
