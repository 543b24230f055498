"""Whatever dies: every request and every call hears why, and no process is left."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.small_engines import LONG, PROMPT, SMALL, executor_of, step_until_dead
from tests.helpers.engines import change_weights, make_text_checkpoint
from tests.helpers.faulty_rank import EXIT_CODE, faulty_rank
from tests.helpers.gate import HANG
from tests.helpers.processes import Watched, running_child

from fleetfoot import LLM, AsyncLLM, EngineDeadError
from fleetfoot.executor.protocol import WorkerError

NOWHERE: dict[str, Any] = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"num_cpu_blocks": 8},
}


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


@contextmanager
def running(**settings: Any) -> Iterator[LLM]:
    llm = LLM(**SMALL, **settings)
    try:
        yield llm
    finally:
        llm.shutdown()


# --- a worker -------------------------------------------------------------------------------------------------------


def test_a_killed_worker_ends_every_call_with_the_cause() -> None:
    with running(pipeline_parallel_size=2) as llm:
        engine, executor = llm.llm_engine, executor_of(llm.llm_engine)
        pids = executor.worker_pids
        engine.add_request("a", PROMPT, LONG)
        engine.step()
        workers = Watched(pids.values())
        workers.kill(pids[1])
        error = step_until_dead(engine)
        said = f"worker 1 (process {pids[1]}) was ended by SIGKILL"
        assert isinstance(error.__cause__, WorkerError)
        assert str(error.__cause__) == said
        workers.wait()
        for call in (engine.step, lambda: engine.add_request("b", PROMPT, LONG), lambda: llm.generate([PROMPT])):
            with pytest.raises(EngineDeadError) as again:
                call()
            assert said in str(again.value)
        with pytest.raises(WorkerError, match="was ended by SIGKILL"):
            executor.execute_model(None)  # type: ignore[arg-type]
        llm.shutdown()
        llm.shutdown()


def test_a_killed_worker_ends_every_stream() -> None:
    async def read(name: str, has_begun: asyncio.Event) -> None:
        """One stream after the other, so that there is always one."""
        for number in count():
            async for _ in llm.generate(PROMPT, LONG, f"{name}-{number}"):
                has_begun.set()

    async def work() -> list[BaseException | None]:
        pid = executor_of(llm._engine).worker_pids[0]
        events = [asyncio.Event() for _ in range(8)]  # more than run at the same time: some wait for their turn
        tasks = [asyncio.ensure_future(read(f"r{i}", event)) for i, event in enumerate(events)]
        await asyncio.wait_for(events[0].wait(), HANG)
        os.kill(pid, signal.SIGKILL)
        ended = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), HANG)
        with pytest.raises(EngineDeadError, match=f"process {pid}. was ended by SIGKILL"):
            await read("late", asyncio.Event())
        return ended

    llm = AsyncLLM(tensor_parallel_size=2, **SMALL)
    try:
        ended = asyncio.run(work())
    finally:
        llm.shutdown()
    for end in ended:
        assert isinstance(end, EngineDeadError)
        assert isinstance(end.__cause__, WorkerError)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_worker_raises_in_a_step_comes_with_its_traceback(rank: int) -> None:
    faulty = faulty_rank(NOWHERE, rank, "step")
    with running(pipeline_parallel_size=2, kv_transfer_config=faulty) as llm:
        error = step_until_dead(llm.llm_engine)
        assert isinstance(error.__cause__, WorkerError)
        said = str(error)
        assert f"worker {rank} failed: InjectedError: injected in a step on rank {rank}" in said
        assert "Traceback (most recent call last)" in said and "faulty_rank.py" in said


def test_what_a_worker_raises_at_its_end_is_heard_of(capfd: pytest.CaptureFixture[str]) -> None:
    llm = LLM(**SMALL, pipeline_parallel_size=2, kv_transfer_config=faulty_rank(NOWHERE, 1, "shutdown"))
    llm.generate([PROMPT], LONG, use_tqdm=False)
    pid = executor_of(llm.llm_engine).worker_pids[1]
    with pytest.raises(WorkerError, match=rf"worker 1 \(process {pid}\) ended with exit code 1 when it was to shut"):
        llm.shutdown()
    llm.shutdown()
    assert "InjectedError: injected at the end on rank 1" in capfd.readouterr().err


def test_what_a_worker_raises_in_its_last_step_ends_it_at_its_end(capfd: pytest.CaptureFixture[str]) -> None:
    llm = LLM(**SMALL, pipeline_parallel_size=2, kv_transfer_config=faulty_rank(NOWHERE, 1, "flush"))
    engine = llm.llm_engine
    engine.add_request("r", PROMPT, LONG)
    while engine.has_unfinished_requests():  # without the idle step that `LLM.generate` ends with
        engine.step()
    with pytest.raises(WorkerError, match="worker 1 ") as caught:
        llm.shutdown()
    said = str(caught.value) + capfd.readouterr().err  # the engine may hear of it before it tells workers to end
    assert "InjectedError: injected in a flush on rank 1" in said


@pytest.mark.parametrize("connector", [None, NOWHERE], ids=["none", "host"])
def test_a_killed_worker_does_not_hold_up_the_end(connector: dict[str, Any] | None) -> None:
    llm = LLM(**SMALL, tensor_parallel_size=2, kv_transfer_config=connector)
    llm.generate([PROMPT], LONG, use_tqdm=False)
    pids = executor_of(llm.llm_engine).worker_pids
    dead, all_workers = Watched([pids[1]]), Watched(pids.values())
    dead.kill(pids[1])
    dead.wait()
    with pytest.raises(WorkerError, match=rf"^worker 1 \(process {pids[1]}\) was ended by SIGKILL$"):
        llm.shutdown()
    all_workers.wait()


# --- starting -------------------------------------------------------------------------------------------------------


def test_weights_that_do_not_fit_are_refused_as_in_one_process(tmp_path: Path) -> None:
    make_text_checkpoint(tmp_path)
    change_weights(tmp_path, lambda weights: weights.pop("model.norm.weight"))
    messages = []
    for size in (1, 2):
        with (
            pytest.raises(ValueError, match=r"model\.norm\.weight") as caught,
            running(model=str(tmp_path), tensor_parallel_size=size),
        ):
            pass
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_what_one_worker_raises_at_its_start_is_raised_while_others_wait_for_it() -> None:
    faulty = faulty_rank(NOWHERE, 1, "start")
    with (
        pytest.raises(ValueError, match="injected at the start of rank 1") as caught,
        running(tensor_parallel_size=2, kv_transfer_config=faulty),
    ):
        pass
    assert isinstance(caught.value.__cause__, WorkerError)
    assert "faulty_rank.py" in str(caught.value.__cause__)


def test_a_worker_that_ends_at_its_start_is_named() -> None:
    faulty = faulty_rank(NOWHERE, 1, "exit")
    ended = rf"worker 1 \(process \d+\) ended with exit code {EXIT_CODE} before it was ready"
    with pytest.raises(WorkerError, match=ended), running(pipeline_parallel_size=2, kv_transfer_config=faulty):
        pass


# --- the engine -----------------------------------------------------------------------------------------------------


def test_an_engine_that_was_forgotten_leaves_no_process() -> None:
    llm: LLM | None = LLM(tensor_parallel_size=2, **SMALL)
    assert llm is not None
    llm.generate([PROMPT], LONG, use_tqdm=False)
    workers = Watched(executor_of(llm.llm_engine).worker_pids.values())
    llm = None
    gc.collect()
    workers.wait()


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_workers_end_with_their_engine(how: str) -> None:
    with running_child(sys.executable, "-m", "tests.distributed.children", "generate_for_ever") as child:
        assert child.stdout is not None
        workers = Watched(int(pid) for pid in child.stdout.readline().split())
        if how == "SIGINT":
            os.killpg(child.pid, signal.SIGINT)  # as a terminal does
        else:
            child.send_signal(signal.Signals[how])
        _, complaints = child.communicate(timeout=HANG)
        workers.wait()
        assert child.returncode == -signal.Signals[how]
        assert ("KeyboardInterrupt" in complaints) == (how == "SIGINT")


def test_workers_end_with_a_program_that_ends_without_shutdown() -> None:
    with running_child(sys.executable, "-m", "tests.distributed.children", "end_without_shutdown") as child:
        assert child.stdout is not None
        workers = Watched(int(pid) for pid in child.stdout.readline().split())
        _, complaints = child.communicate(timeout=HANG)
        workers.wait()
        assert (child.returncode, complaints) == (0, "")
