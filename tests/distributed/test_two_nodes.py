"""An engine over two nodes, both of them this machine: one in the test, the other a `fleetfoot worker` command."""

from __future__ import annotations

import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from tests.distributed.small_engines import LONG, PROMPT, SMALL, check_lives, executor_of, running, step_until_dead
from tests.helpers.gate import HANG
from tests.helpers.processes import Watched, running_child
from tests.helpers.schedules import live_alone, random_lives

from fleetfoot.engine.engine import LLMEngine
from fleetfoot.executor import nodes
from fleetfoot.executor.protocol import WorkerError

LIVES = random_lives(9, 2048)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(nodes, "GATHER_S", HANG)
    yield
    assert multiprocessing.active_children() == []


@contextmanager
def second_node(port: int, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """The command; settings as of the engine."""
    flags = []
    for name, value in {**SMALL, **settings, "nnodes": 2, "node_rank": 1, "master_port": port}.items():
        flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    with running_child(sys.executable, "-m", "fleetfoot.cli.main", "worker", *flags) as command:
        yield command


def first_node(port: int, **settings: Any) -> AbstractContextManager[LLMEngine]:
    return running(**settings, nnodes=2, master_port=port)


@pytest.mark.parametrize("way", ["tensor", "pipeline"])
def test_tokens_are_those_of_one_process(way: str, port: int) -> None:
    with running() as engine:
        expected = live_alone(engine, LIVES)
    size = {f"{way}_parallel_size": 2}
    with second_node(port, **size) as command:
        with first_node(port, **size) as engine:
            assert len(executor_of(engine).worker_pids) == 1
            check_lives(engine, LIVES, expected)
        _, errors = command.communicate(timeout=HANG)
    assert (command.returncode, errors) == (0, f"this is node 1 of 2, and waits for node 0 at 127.0.0.1:{port}\n")


def test_different_settings_are_refused_on_both_sides(port: int) -> None:
    size = {"tensor_parallel_size": 2}
    with second_node(port, **size, block_size=8) as command:
        with pytest.raises(ValueError, match=r"node 1 is set up differently.*\n  - block_size: 4 here, 8 there"):
            first_node(port, **size).__enter__()
        _, errors = command.communicate(timeout=HANG)
    assert command.returncode != 0
    assert "node 0 is set up differently" in errors and "block_size: 8 here, 4 there" in errors


def test_lost_node_ends_the_engine(port: int) -> None:
    size = {"pipeline_parallel_size": 2}
    with second_node(port, **size) as command, first_node(port, **size) as engine:
        engine.add_request("a", PROMPT, LONG)
        engine.step()
        workers = Watched(executor_of(engine).worker_pids.values())
        command.kill()
        error = step_until_dead(engine)
        assert isinstance(error.__cause__, WorkerError)
        assert str(error.__cause__) == "node 1: the connection to it has ended"
        workers.wait()


def test_killed_worker_ends_the_other_node(port: int) -> None:
    """A worker of node 0 dies; node 1 reports the reason."""
    size = {"tensor_parallel_size": 2}
    with second_node(port, **size) as command, first_node(port, **size) as engine:
        (pid,) = executor_of(engine).worker_pids.values()
        workers = Watched([pid])
        workers.kill(pid)
        cause = f"worker 0 (process {pid}) was ended by {signal.SIGKILL.name}"
        assert cause in str(step_until_dead(engine))
        _, errors = command.communicate(timeout=HANG)
        assert command.returncode == 1
        assert f"the engine has failed: {cause}" in errors
