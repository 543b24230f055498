"""Faults and ends of engines, workers and nodes: every request and call raises the cause, and no process is left."""

import asyncio
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.distributed.ranks import LONG, PROMPT, SHORT, SMALL, pids_of, running
from tests.helpers.engines import change_weights
from tests.helpers.faulty_connector import EXIT_CODE, OFFLOADING, faulty
from tests.helpers.processes import HANG, Watched, running_child
from tests.helpers.schedules import assert_lives_agree, live_alone, random_lives

from fleetfoot import LLM, AsyncLLM, EngineDeadError
from fleetfoot.config.engine import EngineConfig
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.executor import nodes
from fleetfoot.executor.protocol import WorkerError


@pytest.fixture(autouse=True)
def no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(nodes, "GATHER_S", HANG)
    yield
    assert multiprocessing.active_children() == []


def faulty_rank(rank: int, point: str, **options: Any) -> dict[str, Any]:
    """The kv_transfer_config of OFFLOADING with an error on one rank."""
    return faulty(OFFLOADING, {"rank": rank, "raise_at": point, **options})


def step_until_dead(engine: LLMEngine) -> EngineDeadError:
    """There are always requests that run."""
    with pytest.raises(EngineDeadError) as caught:
        while True:
            if not engine.has_unfinished_requests():
                engine.add_request("again", PROMPT, LONG)
            engine.step()
    return caught.value


def test_killed_worker_ends_every_call_with_the_cause() -> None:
    llm = LLM(**SMALL, pipeline_parallel_size=2)
    engine = llm.llm_engine
    pids = pids_of(engine)
    engine.add_request("a", PROMPT, LONG)
    engine.step()
    workers = Watched(pids.values())
    workers.kill(pids[1])
    error = step_until_dead(engine)
    message = f"worker 1 (process {pids[1]}) was ended by SIGKILL"
    assert isinstance(error.__cause__, WorkerError)
    assert str(error.__cause__) == message
    workers.wait()
    for call in (engine.step, lambda: engine.add_request("b", PROMPT, LONG), lambda: llm.generate([PROMPT])):
        with pytest.raises(EngineDeadError) as again:
            call()
        assert message in str(again.value)
    with pytest.raises(WorkerError, match="was ended by SIGKILL"):
        engine.core.executor.execute_model(None)  # type: ignore[arg-type]
    llm.shutdown()
    llm.shutdown()


def test_killed_worker_ends_every_stream() -> None:
    async def read(name: str, has_begun: asyncio.Event) -> None:
        """One stream after the other, so that there is always one."""
        for number in count():
            async for _ in llm.generate(PROMPT, LONG, f"{name}-{number}"):
                has_begun.set()

    async def work() -> list[BaseException | None]:
        pid = pids_of(llm._engine)[0]
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


RESTARTS = {
    "killed": ({"pipeline_parallel_size": 2}, 1, "save_kv", {"error": "kill", "on_call": 7}),
    "exited": ({"distributed_executor_backend": "mp"}, 0, "start_load_kv", {"error": "exit", "on_call": 4}),
}


@pytest.mark.parametrize("way", RESTARTS)
def test_requests_resume_after_a_restart(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the old workers is left: no process, file descriptor or folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    size, rank, point, fault = RESTARTS[way]
    faults = faulty_rank(rank, point, once=str(tmp_path / "once"), **fault)
    lives = random_lives(9, 2048)
    with running() as engine:
        expected = live_alone(engine, lives)
    with running(**size, kv_transfer_config=faults, on_error="restart") as engine:
        gc.collect()
        descriptors = os.listdir("/proc/self/fd")
        first = Watched(pids_of(engine).values())
        assert_lives_agree(engine, lives, expected, way, tolerance=1e-4)
        assert engine.stats().num_restarts == 1
        first.wait()
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == len(descriptors)
        assert len(list(tmp_path.glob("fleetfoot-*"))) == 1
    assert list(tmp_path.glob("fleetfoot-*")) == []


def test_error_of_a_shutdown_is_raised(capfd: pytest.CaptureFixture[str]) -> None:
    llm = LLM(**SMALL, pipeline_parallel_size=2, kv_transfer_config=faulty_rank(1, "shutdown"))
    llm.generate([PROMPT], SHORT, use_tqdm=False)
    pid = pids_of(llm.llm_engine)[1]
    with pytest.raises(WorkerError, match=rf"worker 1 \(process {pid}\) ended with exit code 1 when it was to shut"):
        llm.shutdown()
    llm.shutdown()
    assert "InjectedError: injected at shutdown on rank 1" in capfd.readouterr().err


def test_error_of_the_last_step_is_raised_at_the_shutdown(capfd: pytest.CaptureFixture[str]) -> None:
    faulty = faulty_rank(1, "flushes")
    with (
        pytest.raises(WorkerError, match="worker 1 ") as caught,
        running(pipeline_parallel_size=2, kv_transfer_config=faulty) as engine,
    ):
        engine.add_request("r", PROMPT, LONG)
        while engine.has_unfinished_requests():  # without the idle step that `LLM.generate` ends with
            engine.step()
    messages = str(caught.value) + capfd.readouterr().err  # the engine may receive it before it ends the workers
    assert "InjectedError: injected at flushes on rank 1" in messages


@pytest.mark.parametrize("connector", [None, OFFLOADING], ids=["none", "host"])
def test_killed_worker_does_not_delay_the_shutdown(connector: dict[str, Any] | None) -> None:
    llm = LLM(**SMALL, tensor_parallel_size=2, kv_transfer_config=connector)
    llm.generate([PROMPT], SHORT, use_tqdm=False)
    pids = pids_of(llm.llm_engine)
    dead, all_workers = Watched([pids[1]]), Watched(pids.values())
    dead.kill(pids[1])
    dead.wait()
    with pytest.raises(WorkerError, match=rf"^worker 1 \(process {pids[1]}\) was ended by SIGKILL$"):
        llm.shutdown()
    all_workers.wait()


def test_invalid_weights_are_refused_as_in_one_process(tmp_path: Path) -> None:
    folder = shutil.copytree(SMALL["model"], tmp_path / "model")
    change_weights(folder, lambda weights: weights.pop("model.norm.weight"))
    messages = []
    for size in (1, 2):
        with pytest.raises(ValueError, match=r"model\.norm\.weight") as caught:
            LLM(**{**SMALL, "model": str(folder)}, tensor_parallel_size=size)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_error_of_a_start_is_raised_while_other_workers_wait() -> None:
    with pytest.raises(ValueError, match="injected at register_kv_caches") as caught:
        LLM(
            **SMALL, tensor_parallel_size=2, kv_transfer_config=faulty_rank(1, "register_kv_caches", error="ValueError")
        )
    assert isinstance(caught.value.__cause__, WorkerError)
    assert "faulty_connector.py" in str(caught.value.__cause__)


def test_worker_that_ends_at_its_start_is_named() -> None:
    ended = rf"worker 1 \(process \d+\) ended with exit code {EXIT_CODE} before it was ready"
    with pytest.raises(WorkerError, match=ended):
        LLM(**SMALL, pipeline_parallel_size=2, kv_transfer_config=faulty_rank(1, "register_kv_caches", error="exit"))


def test_collected_engine_leaves_no_process() -> None:
    llm = LLM(tensor_parallel_size=2, **SMALL)
    llm.generate([PROMPT], SHORT, use_tqdm=False)
    workers = Watched(pids_of(llm.llm_engine).values())
    del llm
    gc.collect()
    workers.wait()


PROGRAM = f"""
print("begins", flush=True)
from fleetfoot import LLM, SamplingParams
class Params(SamplingParams):
    pass
llm = LLM(tensor_parallel_size=2, **{SMALL})
print(*[process.pid for process in llm.llm_engine.core.executor._processes.by_rank.values()], flush=True)
def generate(max_tokens):
    llm.generate([{PROMPT}] * 4, Params(max_tokens=max_tokens, ignore_eos=True), use_tqdm=False)
"""


@contextmanager
def running_program(
    folder: Path, end: str, *python: str, from_stdin: bool = False
) -> Iterator[tuple[subprocess.Popen[str], Watched]]:
    """A program that starts an engine at its top level, which workers do not run again; and its workers. ``python``: an
    interpreter that is not forked."""
    path = folder / "program.py"
    path.write_text(PROGRAM + end)
    with (
        path.open() as file,
        running_child(*(python or [sys.executable]), "-" if from_stdin else str(path), stdin=file) as child,
    ):
        assert child.stdout is not None
        assert child.stdout.readline() == "begins\n"
        yield child, Watched(int(pid) for pid in child.stdout.readline().split())


@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_workers_end_with_their_engine(how: str, tmp_path: Path) -> None:
    interruptible = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"  # as in a terminal
    with running_program(tmp_path, f"{interruptible}while True: generate(60)") as (child, workers):
        if how == "SIGINT":
            os.killpg(child.pid, signal.SIGINT)
        else:
            child.send_signal(signal.Signals[how])
        _, errors = child.communicate(timeout=HANG)
        workers.wait()
        assert child.returncode == -signal.Signals[how]
        assert ("KeyboardInterrupt" in errors) == (how == "SIGINT")


@pytest.mark.parametrize("from_stdin", [False, True])
def test_workers_end_with_a_program_that_ends_without_shutdown(from_stdin: bool, tmp_path: Path) -> None:
    """A program that is not forked has not imported torch: it computes nothing itself."""
    python = ("env", sys.executable) if from_stdin else ()
    end = "generate(3)" + ("\nimport sys\nassert 'torch' not in sys.modules" if from_stdin else "")
    with running_program(tmp_path, end, *python, from_stdin=from_stdin) as (child, workers):
        output, errors = child.communicate(timeout=HANG)
        workers.wait()
        assert (child.returncode, output, errors) == (0, "", "")


@contextmanager
def second_node(port: int, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """The command; settings as of the engine."""
    flags = []
    for name, value in {**SMALL, **settings, "nnodes": 2, "node_rank": 1, "master_port": port}.items():
        flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    with running_child(sys.executable, "-m", "fleetfoot.cli.main", "worker", *flags) as command:
        yield command


@pytest.mark.parametrize("way", ["tensor", "pipeline"])
def test_tokens_are_those_of_one_process(way: str, port: int) -> None:
    lives = random_lives(9, 2048)
    with running() as engine:
        expected = live_alone(engine, lives)
    size = {f"{way}_parallel_size": 2}
    with second_node(port, **size) as command:
        with running(**size, nnodes=2, master_port=port) as engine:
            assert len(pids_of(engine)) == 1
            assert_lives_agree(engine, lives, expected, way, tolerance=1e-4)
        _, errors = command.communicate(timeout=HANG)
    assert (command.returncode, errors) == (0, f"this is node 1 of 2, and waits for node 0 at 127.0.0.1:{port}\n")


def test_a_node_with_other_settings_is_refused_and_the_start_goes_on(port: int) -> None:
    size = {"tensor_parallel_size": 2}
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(LLMEngine.from_config, EngineConfig(**SMALL, **size, nnodes=2, master_port=port))
        with second_node(port, **size, block_size=8) as command:
            _, errors = command.communicate(timeout=HANG)
        assert command.returncode != 0
        assert "node 0 is set up differently" in errors and "block_size: 8 here, 4 there" in errors
        with second_node(port, **size) as command:
            starting.result().shutdown()
            assert command.wait(HANG) == 0


def test_lost_node_ends_the_engine(port: int) -> None:
    size = {"pipeline_parallel_size": 2}
    with second_node(port, **size) as command, running(**size, nnodes=2, master_port=port) as engine:
        engine.add_request("a", PROMPT, LONG)
        engine.step()
        workers = Watched(pids_of(engine).values())
        command.kill()
        error = step_until_dead(engine)
        assert isinstance(error.__cause__, WorkerError)
        assert str(error.__cause__) == "node 1: the connection to it has ended"
        workers.wait()


def test_killed_worker_ends_the_other_node(port: int) -> None:
    """A worker of node 0 dies; node 1 reports the reason."""
    size = {"tensor_parallel_size": 2}
    with second_node(port, **size) as command, running(**size, nnodes=2, master_port=port) as engine:
        (pid,) = pids_of(engine).values()
        workers = Watched([pid])
        workers.kill(pid)
        cause = f"worker 0 (process {pid}) was ended by {signal.SIGKILL.name}"
        assert cause in str(step_until_dead(engine))
        _, errors = command.communicate(timeout=HANG)
        assert command.returncode == 1
        assert f"the engine has failed: {cause}" in errors
