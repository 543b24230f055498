"""`AsyncLLM`: many streams, one engine thread. A gate in the executor controls its steps."""

import asyncio
import contextlib
import copy
import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.engines import TEXT_MODEL, ScriptedExecutor, drain, prompt_of, scripted_engine
from tests.helpers.processes import Gate
from tests.helpers.streams import assert_idle, async_test, collect, gated, run, submit, tokens_of

from fleetfoot import LLM, AsyncLLM, EngineDeadError, LLMEngine, RequestOutputKind, SamplingParams
from fleetfoot.assets import embedded_model_path
from fleetfoot.engine.input_processor import COPY_MARK
from fleetfoot.records.step import EngineOutput, SchedulerOutput
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


def test_collections_leave_the_engine_alone_while_it_runs() -> None:
    async def read(llm: AsyncLLM) -> int:
        await collect(llm.generate(PROMPT, params(3), "a"))
        return gc.get_freeze_count()

    with gated() as (llm, gate):
        gate.open()
        assert run(read(llm)) > 0
    assert gc.get_freeze_count() == 0
    frozen: list[int] = []
    with LLM(embedded_model_path(), max_model_len=64, dtype="float32") as offline:
        step = offline.llm_engine.step
        offline.llm_engine.step = lambda: frozen.append(gc.get_freeze_count()) or step()  # type: ignore[method-assign, func-returns-value]
        offline.generate([[5]], params(2, RequestOutputKind.FINAL_ONLY), use_tqdm=False)
    assert frozen and min(frozen) > 0
    assert gc.get_freeze_count() == 0


@pytest.mark.parametrize("kind", RequestOutputKind)
@async_test
async def test_kinds_of_output(kind: RequestOutputKind, running: AsyncLLM) -> None:
    outputs, copies = [], []
    async for output in running.generate(PROMPT, params(7, kind), "r"):
        outputs.append(output)
        copies.append(copy.deepcopy(output))
    assert outputs == copies  # later steps change no earlier output
    if kind is RequestOutputKind.DELTA:
        assert tokens_of(outputs) == expected_tokens(7)
    else:
        assert outputs[-1].outputs[0].token_ids == expected_tokens(7)
        assert all(output.metrics.num_generation_tokens == len(output.outputs[0].token_ids) for output in outputs)
    assert kind is not RequestOutputKind.FINAL_ONLY or len(outputs) == 1


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
        assert tokens_of([first, *rest]) == script["slow"]
        assert first.outputs[0].text + rest[0].outputs[0].text == text
        assert rest[0].finished and len(first.outputs[0].token_ids) == 1
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


@async_test
async def test_aborts_by_id() -> None:
    with gated() as (llm, gate):
        tasks = {name: submit(llm, PROMPT, params(50), name) for name in "abc"}
        await gate.arrival()
        await llm.abort("a")
        again = submit(llm, PROMPT, params(5), "a")  # the id is free again
        await asyncio.sleep(0)  # lets the new task run up to where it waits
        await llm.abort(["b", "unknown"])
        await llm.abort([])
        wrong: list[Any] = [5, None, [None], [["r"]], ["c", 5]]
        for request_ids in wrong:
            with pytest.raises(TypeError, match="request_id is"):
                await llm.abort(request_ids)
        gate.open()
        for name, reason in {"a": "abort", "b": "abort", "c": "length"}.items():
            outputs = await tasks[name]
            assert (outputs[-1].finished, outputs[-1].outputs[0].finish_reason) == (True, reason)
            tokens = tokens_of(outputs)
            assert tokens == expected_tokens(len(tokens)) and (len(tokens) < 50) == (reason == "abort")
        outputs = await again
        assert (tokens_of(outputs), outputs[-1].outputs[0].finish_reason) == (expected_tokens(5), "length")
        await llm.abort("a")  # long gone
        assert_idle(llm)
        assert llm.stats().num_finished == {"abort": 2, "length": 2}


@pytest.mark.parametrize("is_updated", [False, True])
@async_test
async def test_an_abort_during_the_update_of_the_last_token_wins(is_updated: bool) -> None:
    with gated() as (llm, gate):
        scheduler, loop = llm._engine.core.scheduler, asyncio.get_running_loop()
        update = scheduler.update

        def update_and_abort(*arguments: Any) -> list[EngineOutput]:
            outputs = update(*arguments) if is_updated else []
            b = scheduler.requests.get("b")
            if b is not None and len(b.output_token_ids) == (3 if is_updated else 2):
                asyncio.run_coroutine_threadsafe(llm.abort("a"), loop).result()
            return outputs or update(*arguments)

        scheduler.update = update_and_abort  # type: ignore[method-assign]
        tasks = {name: submit(llm, PROMPT, params(count), name) for name, count in (("a", 3), ("b", 5))}
        gate.open()
        outputs = {name: await task for name, task in tasks.items()}
        assert [output.outputs[0].finish_reason for output in outputs["a"] if output.finished] == ["abort"]
        assert tokens_of(outputs["a"]) == expected_tokens(2)
        assert tokens_of(outputs["b"]) == expected_tokens(5)
        assert_idle(llm)
        assert llm.stats().num_finished == {"abort": 1, "length": 1}


@pytest.mark.parametrize(
    ("how", "error"),
    [("break", None), ("cancel", asyncio.CancelledError), ("timeout", TimeoutError), ("raise", ZeroDivisionError)],
)
@async_test
async def test_leaving_the_generator_aborts_the_request(how: str, error: type[BaseException] | None) -> None:
    with gated() as (llm, gate):
        stream = llm.generate(PROMPT, params(50), "r")
        reading = asyncio.Event()

        async def read() -> None:
            async with contextlib.aclosing(stream):
                async for output in stream:
                    reading.set()
                    if how == "break":
                        break
                    if how == "raise":
                        raise ZeroDivisionError
                    assert not output.finished

        task = asyncio.ensure_future(read())
        await gate.arrival()
        gate.step()
        await reading.wait()
        if how == "cancel":
            task.cancel()
        with contextlib.nullcontext() if error is None else pytest.raises(error):
            await (asyncio.wait_for(task, 0) if how == "timeout" else task)
        await stream.aclose()
        gate.open()
        # commands run in order: when this request has ended, the other one has been discarded
        assert tokens_of(await collect(llm.generate(PROMPT, params(3), "other"))) == expected_tokens(3)
        assert_idle(llm)
        assert llm.stats().num_finished == {"abort": 1, "length": 1}
        assert llm.stats().num_generation_tokens < 20


def test_an_event_loop_that_ends_takes_its_requests_along(running: AsyncLLM) -> None:
    async def main() -> None:
        stream = running.generate(PROMPT, params(100), "r")
        await anext(stream)
        main.stream = stream  # type: ignore[attr-defined]  # alive when the loop closes its generators
        await running.generate(PROMPT, params(3), "never awaited").aclose()  # is no request

    run(main())
    assert tokens_of(run(collect(running.generate(PROMPT, params(3), "r")))) == expected_tokens(3)
    assert_idle(running)
    assert sum(running.stats().num_finished.values()) == 2


async def errors_at(number: int, do: Callable[[AsyncLLM], object]) -> list[EngineDeadError]:
    """Of running, waiting and late requests, and of one after the end, when step ``number`` calls ``do``."""
    gate = Gate()

    def before_step(step: SchedulerOutput) -> None:
        gate(step)
        if step.step == number:
            do(llm)

    executor = ScriptedExecutor(before_step=before_step)
    llm = AsyncLLM.from_engine(scripted_engine(executor, max_num_seqs=4))
    tasks = [submit(llm, PROMPT, params(50), str(i)) for i in range(6)]
    for _ in range(number):
        await gate.arrival()
        gate.step()
    await gate.arrival()
    tasks.append(submit(llm, PROMPT, params(50), "late"))
    await asyncio.sleep(0)  # lets the late one submit its request, which the engine will not run
    gate.open()
    await asyncio.wait(tasks)
    assert not llm.is_running
    tasks.append(submit(llm, PROMPT, params(1), "too late"))
    await asyncio.wait(tasks)
    await llm.abort("late")
    llm.shutdown()
    assert not llm._thread.is_alive()
    assert executor.is_shut_down and executor.num_steps == 2
    return [task.exception() for task in tasks]  # type: ignore[misc]


@async_test
async def test_shutdown_ends_pending_generators() -> None:
    errors = await errors_at(1, AsyncLLM.shutdown)
    assert [(type(error), str(error)) for error in errors] == [(EngineDeadError, "the engine was shut down")] * 8


@async_test
async def test_as_a_context_manager(text_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        async with AsyncLLM(str(text_model), device="cpu", max_num_seqs=4) as llm:
            assert llm.is_running
            outputs = await collect(llm.generate("Once upon a time", params(5), "r"))
            assert outputs[-1].finished
            assert outputs[-1].prompt == "Once upon a time"
    assert not llm.is_running and not caplog.records
    with pytest.raises(EngineDeadError, match="shut down"):
        await collect(llm.generate("a", params(5), "r"))


def copies(count: int, max_tokens: int = 3) -> SamplingParams:
    return params(max_tokens, RequestOutputKind.FINAL_ONLY, n=count)


def with_copies(requests: Mapping[str, int], max_tokens: int = 3) -> LLMEngine:
    engine = scripted_engine(ScriptedExecutor(), max_num_seqs=18)
    for name, count in requests.items():
        engine.add_request(name, PROMPT, copies(count, max_tokens))
    return engine


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("request_id", [f"r{COPY_MARK}0", COPY_MARK, f"{COPY_MARK}r"])
def test_the_mark_of_copies_is_the_engines_own(request_id: str, count: int, running: AsyncLLM) -> None:
    engine = with_copies({"r": 2})
    with pytest.raises(ValueError, match=r"it must not hold the character '\\x1f'"):
        engine.add_request(request_id, PROMPT, copies(count))
    with pytest.raises(ValueError, match="must not hold the character"):
        run(collect(running.generate(PROMPT, copies(count), request_id)))
    assert [output.request_id for output in drain(engine)] == ["r"]
    engine.abort_request(f"r{COPY_MARK}0")  # no id of a user's: ends nothing, and is no error


@pytest.mark.parametrize(("limit", "reason"), [(True, "length"), (1e-9, "abort"), (False, None)])
def test_a_shutdown_drains(limit: bool | float, reason: str | None) -> None:
    async def end(llm: AsyncLLM, gate: Gate) -> list[Any]:
        reads = [asyncio.ensure_future(collect(llm.generate(PROMPT, params(9), name))) for name in "ab"]
        await gate.arrival()
        stop = asyncio.ensure_future(asyncio.to_thread(llm.shutdown, limit))
        while llm.is_running:  # until the thread has begun
            await asyncio.sleep(0)
        with pytest.raises(EngineDeadError, match="was shut down"):
            await collect(llm.generate(PROMPT, params(9), "c"))
        gate.open()
        await stop
        return await asyncio.gather(*reads, return_exceptions=True)

    with gated() as (llm, gate):
        for outputs in run(end(llm, gate)):
            if reason is None:
                assert isinstance(outputs, EngineDeadError)
            else:
                assert outputs[-1].outputs[0].finish_reason == reason
                tokens = [token for output in outputs for token in output.outputs[0].token_ids]
                assert tokens == expected_tokens(9 if reason == "length" else len(tokens))
