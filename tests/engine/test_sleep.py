"""Pause, sleep and wake-up: memory that is given back and taken again, and what requests and transfers do meanwhile."""

import asyncio
import ctypes
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.engine.test_engine_transfers import TransferExecutor
from tests.helpers.engines import change_weights, drain, prompt_of, scripted_engine
from tests.helpers.fake_connector import ScriptedConnector
from tests.helpers.streams import async_test, collect

from fleetfoot import LLM, AsyncLLM, RequestOutputKind, SamplingParams
from fleetfoot.executor.protocol import WorkerError
from fleetfoot.records.step import KVConnectorOutput, TransferFailure
from fleetfoot.records.weights import WeightError

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_gpu_blocks_override": 256, "max_num_seqs": 4}
PROMPTS: list[Any] = [{"prompt_token_ids": prompt_of(length, 2048, seed=length)} for length in (200, 21, 5)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PAGE = 4096


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def zero_bytes(worker: Any, kind: str) -> float:
    """Of the whole pages of a worker's weights or KV, the share of bytes that are 0."""
    runner = worker.runner
    spans = runner._kv_spans if kind == "kv" else [*runner.weights.stored()]
    content = b""
    for address, size in spans:
        first, last = -(-address // PAGE) * PAGE, (address + size) // PAGE * PAGE
        content += ctypes.string_at(first, max(0, last - first))
    assert content
    return content.count(0) / len(content)


@pytest.mark.parametrize(
    "settings",
    [
        {"model_runner": "v1"},
        {"model_runner": "v2"},
        {"model_runner": "v2", "load_format": "dummy"},
        {"tensor_parallel_size": 2},
        {"speculative_config": "draft"},
        {"kv_offloading_size": 0.01},
    ],
    ids=str,
)
def test_tokens_are_the_same_after_sleep(settings: dict[str, Any], text_model: Path) -> None:
    if "speculative_config" in settings:
        settings = {"speculative_config": {"model": str(text_model), "num_speculative_tokens": 2}}
    with LLM(text_model, **SETTINGS, **settings, enable_sleep_mode=True) as llm:
        expected = tokens(llm)
        for level in (1, 2):
            awake = llm.collective_rpc(zero_bytes, args=("weights",)) + llm.collective_rpc(zero_bytes, args=("kv",))
            assert max(awake) < 1
            llm.sleep(level=level)
            assert llm.is_sleeping() and llm.is_paused()
            assert set(llm.collective_rpc(zero_bytes, args=("kv",))) == {1}
            assert all((share == 1) == (level == 2) for share in llm.collective_rpc(zero_bytes, args=("weights",)))
            with pytest.raises(RuntimeError, match="the engine sleeps; call wake_up"):
                tokens(llm)
            llm.wake_up(tags=["weights"])
            assert llm.is_sleeping()
            llm.wake_up(tags=["kv_cache"])
            assert not llm.is_sleeping() and not llm.is_paused()
            assert tokens(llm) == expected
            llm.llm_engine.check_integrity()


def test_calls_that_are_refused_or_have_no_effect(text_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with LLM(text_model, **SETTINGS) as llm:
        with pytest.raises(ValueError, match="cannot sleep; start it with enable_sleep_mode=True"):
            llm.sleep()
        llm.wake_up()
        assert "awake already" in caplog.text
        for call in (llm.pause_generation, llm.sleep):
            with pytest.raises(ValueError, match=r"mode is 'now'; it can be abort, wait, keep|cannot sleep"):
                call(mode="now")
        llm.pause_generation()
        with pytest.raises(RuntimeError, match=r"generation is paused; call resume_generation\(\) first"):
            tokens(llm)
        llm.resume_generation()
        expected = tokens(llm)
    with LLM(text_model, **SETTINGS, enable_sleep_mode=True) as llm:
        for level in (0, 3, True, "1"):
            with pytest.raises(ValueError, match=r"level is .*; it can be 1 .* or 2"):
                llm.sleep(level=level)  # type: ignore[arg-type]
        llm.sleep()
        llm.sleep(level=2)
        assert "sleeps already" in caplog.text
        for tags in (["weights", "all"], "weights"):
            with pytest.raises(ValueError, match=r"tags is .*; it can be .*a list of weights and kv_cache"):
                llm.wake_up(tags)  # type: ignore[arg-type]
        llm.pause_generation()
        llm.wake_up()
        assert llm.is_paused()  # as it was asked for, while it slept
        llm.resume_generation()
        assert tokens(llm) == expected


@pytest.mark.parametrize("call", ["pause", "sleep"])
@async_test
async def test_running_requests_and_new_ones(call: str, text_model: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    llm = AsyncLLM(text_model, **SETTINGS, enable_sleep_mode=True)

    async def generate(name: str, has_begun: asyncio.Event) -> tuple[list[int], str | None]:
        found: list[int] = []
        async for output in llm.generate(PROMPTS[1], params, name):
            found += output.outputs[0].token_ids
            has_begun.set()
        return found, output.outputs[0].finish_reason

    expected = await generate("alone", asyncio.Event())
    for mode in ("abort", "wait", "keep"):
        has_begun, later = asyncio.Event(), asyncio.Event()
        running = asyncio.ensure_future(generate(f"{mode} running", has_begun))
        await has_begun.wait()
        if call == "pause":
            await llm.pause_generation(mode=mode, clear_cache=mode != "keep")
        else:
            await llm.sleep(level=2, mode=mode)
        waiting = asyncio.ensure_future(generate(f"{mode} new", later))
        assert (await llm.is_sleeping(), await llm.is_paused()) == (call == "sleep", True)
        await llm.run_held(lambda engine: engine.check_integrity(), "keep")
        assert not later.is_set()
        await (llm.resume_generation() if call == "pause" else llm.wake_up())
        found, reason = await running
        assert found == expected[0][: len(found)]
        assert reason == ("abort" if mode == "abort" and len(found) < 40 else "length")
        assert await waiting == expected
    assert not await llm.is_paused()
    await collect(llm.generate(PROMPTS[2], params, "last"))
    llm.shutdown()


class SleepExecutor(TransferExecutor):
    """Records the calls of workers; ``errors``: raised by the call of that name, once."""

    def __init__(self, *arguments: Any, errors: dict[str, Exception] | None = None) -> None:
        super().__init__(*arguments)
        self.calls: list[Any] = []
        self.errors = errors or {}

    def collective_rpc(self, method: str, args: Any = (), kwargs: Any = None) -> list[Any]:
        self.calls.append((method, *args))
        if (error := self.errors.pop(method, None)) is not None:
            raise error
        return [None]


def sleeping_engine(executor: SleepExecutor, **more: Any) -> Any:
    engine = scripted_engine(executor, num_blocks=16, max_num_seqs=4, **more)
    engine.suspension._can_sleep = True
    return engine


def test_transfers_end_before_the_engine_sleeps() -> None:
    ended = {
        2: KVConnectorOutput(loaded={"loads"}),
        3: KVConnectorOutput(failed={"fails": TransferFailure("a fault")}),
        5: KVConnectorOutput(sent={"held"}),
    }
    connector = ScriptedConnector({"loads": 4, "fails": 4}, holds={"held"}, evicts=True)
    executor = SleepExecutor(ended)
    engine = sleeping_engine(executor, connector=connector, kv_load_failure_policy="fail")
    params = SamplingParams(max_tokens=2, detokenize=False)
    engine.add_request("held", [5, 6, 7, 8, 9], params)
    while not engine.core.scheduler.transfers.num_held_blocks:
        engine.step()
    for first, name in enumerate(("loads", "fails"), start=20):
        engine.add_request(name, [first, 6, 7, 8, 9], params)
    engine.step()
    engine.sleep(mode="keep")
    assert executor.calls == [("sleep", 1)] and executor.num_idle >= 5
    assert connector.of("evict") == [("held",)]
    assert not engine.has_transfers() and engine.core.scheduler.transfers.num_loading == 0
    engine.check_integrity()
    engine.wake_up()
    assert executor.calls[1:] == [("wake_up", ["weights", "kv_cache"])]
    executor.ended[executor.num_idle + 1] = KVConnectorOutput(loaded={"loads", "fails"})  # they load again
    assert {output.request_id for output in drain(engine) if output.finished} == {"loads", "fails"}


@pytest.mark.parametrize("method", ["sleep", "wake_up"])
@pytest.mark.parametrize("error", [MemoryError("full"), WorkerError("worker 1 has ended")], ids=repr)
def test_workers_that_fail(method: str, error: Exception) -> None:
    executor = SleepExecutor(errors={method: error})
    engine = sleeping_engine(executor)
    engine.add_request("r", [5], SamplingParams(max_tokens=2, detokenize=False))
    call: Callable[[], None] = engine.wake_up if method == "wake_up" else lambda: engine.sleep(mode="keep")
    if method == "wake_up":
        engine.sleep(mode="keep")
    with pytest.raises(type(error), match=str(error)):
        call()
    sleeps_on = method == "wake_up" and isinstance(error, MemoryError)  # there may be memory later
    assert engine.is_sleeping() == engine.is_paused == sleeps_on
    if sleeps_on:
        engine.wake_up()
    assert drain(engine)[-1].outputs[0].token_ids == [10, 11]


@pytest.mark.parametrize("name", ["sleep", "profile"])
def test_the_examples_of_the_documentation(name: str, text_model: Path, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "sleep.md").read_text(encoding="utf-8")
    (example,) = re.findall(rf"<!-- example: {name} -->\n```python\n(.*?)```", page, re.DOTALL)
    scope: dict[str, Any] = {"LLM": LLM, "model": text_model, "params": GREEDY, "folder": tmp_path}
    exec(example, scope)
    with scope["llm"]:
        if name == "sleep":
            assert scope["before"][0].outputs[0].token_ids == scope["after"][0].outputs[0].token_ids
        else:
            assert [str(path) for path in tmp_path.iterdir()] == scope["paths"]


def test_weights_that_are_replaced_between_sleep_and_wake_up(text_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(text_model, other)
    change_weights(other, lambda weights: weights.update({name: 1.5 * value for name, value in weights.items()}))
    with LLM(other, **SETTINGS) as llm:
        changed = tokens(llm)
    with LLM(text_model, **SETTINGS, enable_sleep_mode=True) as llm:
        expected, sums = tokens(llm), llm.weight_checksums()
        assert expected != changed
        llm.sleep(level=2)
        for call in (llm.reload_weights, llm.weight_checksums):
            with pytest.raises(RuntimeError, match=r"the weights sleep; call wake_up\(tags=\['weights'\]\) first"):
                call()
        llm.wake_up(["weights"])
        patch = {"name": "model.norm.weight", "indices": [3], "values": [2.0]}
        with pytest.raises(WeightError, match=r"model.norm.weight was dropped by sleep; give reload_weights"):
            llm.apply_sparse_weight_patches([patch])
        llm.collective_rpc("reload_weights", args=(other,))
        llm.wake_up(["kv_cache"])
        assert tokens(llm) == changed
        pairs = load_file(text_model / "model.safetensors")
        llm.reload_weights(pairs)
        llm.collective_rpc("sleep", args=(2,))
        with pytest.raises(WeightError, match="tensors that were given as tensors or patches"):
            llm.wake_up()
        assert llm.is_sleeping()
        llm.reload_weights(other)
        llm.wake_up()
        assert tokens(llm) == changed
        llm.reload_weights()
        llm.sleep(level=2)
        llm.wake_up(["weights"])
        llm.reload_weights({"model.norm.weight": pairs["model.norm.weight"]})
        llm.wake_up()  # reads the others
        assert tokens(llm) == expected and llm.weight_checksums() == sums
