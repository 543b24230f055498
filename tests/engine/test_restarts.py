"""``on_error="restart"``: after an error the workers are rebuilt, and requests end as if there had been none."""

import asyncio
import gc
import re
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.engines import TEXT_MODEL, ScriptedExecutor, drain, make_engine, prompt_of, scripted_engine
from tests.helpers.faulty_connector import OFFLOADING, Faults, faulty
from tests.helpers.prefill_decode import settle
from tests.helpers.schedules import Life, assert_lives_agree, live_alone, random_lives

from fleetfoot import AsyncLLM, EngineDeadError, LLMEngine, SamplingParams
from fleetfoot.engine.restart import WINDOW_S, FaultSearch
from fleetfoot.executor.protocol import WorkerError
from fleetfoot.executor.worker import Worker
from fleetfoot.kv_transfer.blockstore.connector import BlockStoreScheduler
from fleetfoot.layers.linear import VocabParallelEmbedding
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.kv_connector import NoSchedulerConnector
from fleetfoot.records.request import Request
from fleetfoot.records.sampling_params import RequestOutputKind
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner.base import ModelRunner
from fleetfoot.runner.v1 import runner as v1_runner
from fleetfoot.runner.v1.runner import ModelRunnerV1
from fleetfoot.runner.v2.runner import ModelRunnerV2

VOCAB = TEXT_MODEL["vocab_size"]
TIGHT: dict[str, Any] = {
    "max_num_seqs": 4, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 40, "block_size": 4,
    "max_model_len": 80, "on_error": "restart",
}  # fmt: skip
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
POISON = 1999
"""A token at whose embedding the model fails."""


def make_lives() -> list[Life]:
    lives = random_lives(7, VOCAB, most=40)
    text = SamplingParams(temperature=0.9, seed=3, max_tokens=20, n=2, logprobs=1, output_kind=RequestOutputKind.DELTA)
    return [*lives, Life("text", prompt_of(9, VOCAB), text, arrival=2)]


@pytest.fixture(scope="module")
def lives() -> list[Life]:
    return make_lives()


@pytest.fixture(scope="module")
def expected(text_model: Path, lives: list[Life]) -> dict[str, RequestOutput]:
    """What each gets alone, on an engine without errors."""
    engine = make_engine(text_model, model_runner="v1", **{**TIGHT, "on_error": "raise"})
    return live_alone(engine, lives)


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes a method raise at some of its calls, counted over all workers."""

    def patch(owner: Any, name: str, *calls: int, error: type[Exception] = RuntimeError) -> None:
        method, count = getattr(owner, name), iter(range(1, 1_000_000))

        def called(*arguments: Any, **keywords: Any) -> Any:
            if next(count) in calls:
                raise error(f"injected at {name}")
            return method(*arguments, **keywords)

        monkeypatch.setattr(owner, name, called)

    return patch


PLACES = {
    "forward of V1": (ModelRunnerV1, "_forward", (1, 9), {"model_runner": "v1"}),
    "sampler of V1": (ModelRunnerV1, "_sample_logits", (12, 30), {"model_runner": "v1"}),
    "forward of V2": (ModelRunnerV2, "_forward", (9, 20), {"model_runner": "v2", "async_scheduling": True}),
    "sampler of V2": (ModelRunnerV2, "_sample_logits", (8,), {"model_runner": "v2"}),
    "start": (Worker, "start", (2, 3), {"model_runner": "v2"}),
    "drafter": (v1_runner, "prompt_lookup", (5,), {"model_runner": "v1", "speculative_config": NGRAM}),
}


@pytest.mark.parametrize("place", PLACES)
def test_tokens_are_those_of_an_undisturbed_run(
    place: str, text_model: Path, lives: list[Life], expected: dict[str, RequestOutput], fail: Callable[..., None]
) -> None:
    owner, name, calls, settings = PLACES[place]
    fail(owner, name, *calls, error=torch.OutOfMemoryError if "sampler" in place else RuntimeError)
    if place == "start":
        fail(ModelRunner, "sample_tokens", 7)
    engine = make_engine(text_model, **TIGHT, **settings)
    assert_lives_agree(engine, lives, expected, place)
    assert engine.stats().num_restarts == (1 if place == "start" else len(calls))
    engine.shutdown()


@pytest.mark.parametrize("point", ["update_state_after_alloc", "request_finished", "start_load_kv", "get_finished"])
def test_connectors_start_again(
    point: str, runner: str, text_model: Path, lives: list[Life], expected: dict[str, RequestOutput]
) -> None:
    """Faults of either side, with requests that load, and blocks that are held."""
    faults = Faults(raise_at=point, on_call=3, holds=True)
    settings = {**TIGHT, "model_runner": runner, "num_gpu_blocks_override": 26}
    engine = make_engine(text_model, kv_transfer_config=faulty(OFFLOADING, faults), **settings)
    faults.released.set()
    assert_lives_agree(engine, lives, expected, point)
    assert engine.stats().num_restarts == 1
    settle(engine)
    assert engine.stats().transfers.num_held_blocks == 0
    engine.shutdown()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("point", ["get_num_new_matched_tokens", "request_finished"])
def test_a_request_that_a_connector_cannot_serve_ends_alone(
    point: str, overlap: bool, text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first it is in no step, and others are in flight; in the second it has just ended."""
    method = getattr(BlockStoreScheduler, point)

    def fail_at_poison(self: BlockStoreScheduler, request: Request, *rest: Any) -> Any:
        if request.request_id == "poison":
            raise KeyError("injected")
        return method(self, request, *rest)

    monkeypatch.setattr(BlockStoreScheduler, point, fail_at_poison)
    settings = {**TIGHT, "model_runner": "v2", "async_scheduling": overlap}
    engine = make_engine(text_model, kv_transfer_config=OFFLOADING, **settings)
    for name in "abc":
        engine.add_request(name, prompt_of(9, VOCAB, seed=ord(name)), GREEDY)
    engine.step()
    for name in ("poison", "d"):
        engine.add_request(name, prompt_of(9, VOCAB), GREEDY)
    ends = {output.request_id: output.outputs[0].finish_reason for output in drain(engine) if output.finished}
    assert ends == {**dict.fromkeys("abcd", "length"), "poison": "error"}
    engine.shutdown()


def test_an_abort_that_fails_ends_its_request_alone(text_model: Path) -> None:
    faults = Faults(raise_at="request_finished", on_call=1)
    engine = make_engine(text_model, kv_transfer_config=faulty(OFFLOADING, faults), **TIGHT)
    for name in "ab":
        engine.add_request(name, [5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))
    engine.step()
    engine.abort_request("a")
    reasons = {output.request_id: output.outputs[0].finish_reason for output in drain(engine) if output.finished}
    assert reasons == {"a": "abort", "b": "length"}
    assert engine.stats().num_restarts == 1
    engine.shutdown()


def spoil_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = VocabParallelEmbedding.forward

    def fail_at_poison(self: VocabParallelEmbedding, input_ids: torch.Tensor) -> torch.Tensor:
        if (input_ids == POISON).any():
            raise RuntimeError("the poison is computed")
        return forward(self, input_ids)

    monkeypatch.setattr(VocabParallelEmbedding, "forward", fail_at_poison)


@pytest.mark.parametrize("late", [False, True])
def test_a_request_that_fails_again_ends_alone(
    late: bool, runner: str, text_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``late``: it fails at its second step, and others arrive during the search."""
    roomy = {**TIGHT, "max_num_seqs": 8, "max_num_batched_tokens": 200, "num_gpu_blocks_override": 100}
    requests = {name: (prompt_of(5 + index, VOCAB, seed=index), GREEDY) for index, name in enumerate("abcdefgh")}
    engine = make_engine(text_model, model_runner=runner, **roomy)
    alone: dict[str, RequestOutput] = {}
    for name, request in requests.items():
        engine.add_request(name, *request)
        alone |= {output.request_id: output for output in drain(engine) if output.finished}
    spoil_embedding(monkeypatch)
    forced = SamplingParams(max_tokens=12, allowed_token_ids=[POISON])
    requests["f"] = ([5, 6], forced) if late else ([5, POISON], GREEDY)
    for name in "abcdef":
        engine.add_request(name, *requests[name])
    ends: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        if engine.stats().num_restarts == 2 and "g" not in ends:
            for name in "gh":
                engine.add_request(name, *requests[name])
                ends[name] = []
        for output in engine.step():
            if output.finished:
                ends.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    assert all(len(outputs) == 1 for outputs in ends.values()) and ends.keys() == requests.keys()
    failed = ends.pop("f")[0].outputs[0]
    assert failed.finish_reason == "error" and failed.token_ids == [POISON] * late
    assert "RuntimeError: the poison is computed" in str(failed.stop_reason)
    for name, (output,) in ends.items():
        assert output.outputs[0].token_ids == alone[name].outputs[0].token_ids
    assert engine.stats().num_restarts == 3  # all, all again, f; a b c and d e progress
    assert engine.stats().num_finished["error"] == 1
    engine.shutdown()


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def failing_engine(clock: _Clock, **settings: Any) -> tuple[LLMEngine, list[str]]:
    """Its steps raise the first of the errors in the list, while there is one."""
    errors: list[str] = []

    def fail(step: SchedulerOutput) -> None:
        if errors:
            raise RuntimeError(errors.pop(0))

    def rebuild() -> tuple[Any, Any, int]:
        if errors and errors[0].startswith("start"):
            raise ValueError(errors.pop(0))
        return ScriptedExecutor(before_step=fail), NoSchedulerConnector(), 128

    return scripted_engine(ScriptedExecutor(before_step=fail), rebuild=rebuild, clock=clock, **settings), errors


def test_too_many_restarts_raise_the_first_cause() -> None:
    clock = _Clock()
    engine, errors = failing_engine(clock, max_restarts=2)
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    for name in "ab":
        engine.add_request(name, [5, 6], long)
    for _ in range(4):  # restarts of an hour ago do not count
        errors.append("now and then")
        for _ in range(5):
            engine.step()
        clock.now += WINDOW_S / 2
    errors[:] = ["the cause", "start fails", "again"]
    with pytest.raises(EngineDeadError, match=r"failed: RuntimeError: the cause$") as caught:
        for _ in range(4):
            engine.step()
    assert "restarted 2 times before" in str(getattr(caught.value.__cause__, "__notes__", ""))
    assert caught.value.__cause__ is not None and caught.value.__cause__.__traceback__ is not None
    assert engine.stats().num_restarts == 4
    with pytest.raises(EngineDeadError, match="the cause"):
        engine.add_request("c", [5, 6], long)


def test_workers_that_end_between_steps_are_restarted_by_the_next_call() -> None:
    engine, _ = failing_engine(_Clock())

    def fail() -> None:
        raise WorkerError("worker 0 was ended by SIGKILL")

    with pytest.raises(WorkerError, match="SIGKILL"):
        engine.run_held(fail)
    assert engine.stats().num_restarts == 0
    assert engine.run_held(lambda: "called") == "called"
    assert engine.stats().num_restarts == 1
    with pytest.raises(KeyError):
        engine.run_held(lambda: {}["missing"])
    assert engine.run_held(lambda: "again") == "again"
    assert engine.stats().num_restarts == 1


def test_a_connector_that_fails_while_transfers_end_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, errors = failing_engine(_Clock())
    steps = iter([SchedulerOutput(1, [], [], 0, 0, 0)])
    monkeypatch.setattr(engine.core.scheduler, "schedule_transfers", lambda: next(steps, None))
    errors.append("the connector")
    with pytest.raises(WorkerError, match="RuntimeError: the connector"):
        engine.run_held(engine.core.settle_transfers)
    assert (engine.run_held(lambda: "called"), engine.stats().num_restarts) == ("called", 1)


def test_waiting_requests_are_kept_in_their_order() -> None:
    engine, errors = failing_engine(_Clock(), max_num_seqs=2)
    for name in "abcdef":
        engine.add_request(name, [5, 6], SamplingParams(max_tokens=6, ignore_eos=True))
    finished = []
    while engine.has_unfinished_requests():
        if engine.stats().num_steps in (3, 8) and engine.stats().num_restarts < engine.stats().num_steps // 3:
            errors.append("now and then")
        finished += [output for output in engine.step() if output.finished]
        engine.check_integrity()
    assert [output.request_id for output in finished] == list("abcdef")
    assert all(output.outputs[0].token_ids == [10, 11, 12, 13, 14, 15] for output in finished)
    assert engine.stats().num_restarts == 2
    engine.core.scheduler.check_idle()


@pytest.mark.parametrize("num_requests", [1, 2, 5, 32])
def test_the_search_finds_each_culprit_and_clears_the_others(num_requests: int) -> None:
    for culprit in range(num_requests):
        requests = [Request(str(number), [5], SamplingParams(), max_tokens=9, seed=0) for number in range(num_requests)]
        search, found, num_failures = FaultSearch(2), None, 0
        while found is None:
            search.update()
            ids = search.selected
            tried = [request for request in requests if ids is None or request.request_id in ids]
            if requests[culprit] in tried:
                found = search.fail(tried)
                search.set_goals()
                num_failures += 1
            for request in [] if requests[culprit] in tried else tried:
                request.output_token_ids += [7, 7]
        assert found is requests[culprit] and not search.is_active
        assert 2 <= num_failures <= 2 + num_requests.bit_length()


def test_an_error_of_each_time_clears_everything() -> None:
    """Errors that do not follow each other at once are not of a request."""
    requests = [Request(str(number), [5], SamplingParams(), max_tokens=9, seed=0) for number in range(4)]
    search = FaultSearch(1)
    for _ in range(3):
        assert search.fail(requests) is None
        search.set_goals()
        assert search.is_active and search.selected is None
        for request in requests:
            request.output_token_ids.append(7)
        search.update()
        assert not search.is_active


def test_streams_go_on_without_repeats(text_model: Path, fail: Callable[..., None]) -> None:
    async def read(llm: AsyncLLM, name: str, prompt: list[int], kind: RequestOutputKind) -> list[int]:
        params = SamplingParams(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True, output_kind=kind)
        tokens: list[int] = []
        async for output in llm.generate(prompt, params, name):
            new = output.outputs[0].token_ids
            assert kind is RequestOutputKind.DELTA or new[: len(tokens)] == tokens
            tokens = tokens + new if kind is RequestOutputKind.DELTA else new
        return tokens

    async def read_all() -> tuple[list[list[int]], int]:
        kinds = [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY] * 2
        async with AsyncLLM(str(text_model), device="cpu", **TIGHT) as llm:
            reads = [read(llm, str(n), prompt_of(4 + n, VOCAB, seed=n), kind) for n, kind in enumerate(kinds)]
            return list(await asyncio.gather(*reads)), llm.stats().num_restarts

    undisturbed, _ = asyncio.run(read_all())
    fail(ModelRunner, "execute_model", 2, 17, 30)
    assert asyncio.run(read_all()) == (undisturbed, 3)


def test_what_an_error_refers_to_is_freed(text_model: Path, fail: Callable[..., None]) -> None:
    """The workers of before a restart are collected, and their models with them."""
    fail(ModelRunner, "execute_model", 2, 9)
    engine = make_engine(text_model, **TIGHT)
    engine.add_request("a", [5, 6], SamplingParams(max_tokens=20, ignore_eos=True))
    drain(engine)
    gc.collect()
    assert sum(type(thing) is Worker for thing in gc.get_objects()) == 1
    engine.shutdown()


def test_an_engine_that_has_failed_gives_its_memory_back(text_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the error is referenced, whose traceback leads through the layers."""
    spoil_embedding(monkeypatch)
    engine = make_engine(text_model, **{**TIGHT, "on_error": "raise"})
    engine.add_request("a", [5, POISON], GREEDY)
    model = weakref.ref(engine.core.executor.runner._model)  # type: ignore[attr-defined]
    with pytest.raises(EngineDeadError, match="the poison is computed") as caught:
        engine.step()
    engine.shutdown()
    gc.collect()
    assert model() is None
    lines = traceback.format_exception(caught.value)
    assert any("in fail_at_poison" in line for line in lines)


def test_the_example_of_the_docs(fail: Callable[..., None]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.S)
    results: list[dict[str, Any]] = [{}, {}]
    exec(code, results[0])
    fail(ModelRunner, "execute_model", 9)
    exec(code, results[1])
    texts = [[output.outputs[0].text for output in result["outputs"]] for result in results]
    assert texts[0] == texts[1]
    assert [result["num_restarts"] for result in results] == [0, 1]
