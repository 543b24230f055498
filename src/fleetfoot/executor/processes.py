"""The worker processes of one machine: started together, watched, and ended together."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import ModuleType

from fleetfoot.config import env
from fleetfoot.executor.errors import WorkerError
from fleetfoot.executor.specs import WorkerSpec
from fleetfoot.executor.worker_process import run_worker

_REAP_S = 5.0
"""How long a process that has closed its files may take to be gone."""


class WorkerProcesses:
    """One process for each spec. They end when this process does, however that happens."""

    def __init__(self, specs: Sequence[WorkerSpec]) -> None:
        context = multiprocessing.get_context("spawn")
        reader, self._lifeline = context.Pipe(duplex=False)
        self._by_rank: dict[int, BaseProcess] = {}
        try:
            with env.defaults(_variables(specs)), _without_program():
                for spec in specs:
                    name = f"fleetfoot-worker-{spec.rank}"
                    process = context.Process(target=run_worker, args=(spec, reader), name=name, daemon=True)
                    process.start()
                    self._by_rank[spec.rank] = process
        except BaseException:
            self.kill()
            raise
        finally:
            reader.close()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids, by rank."""
        return {rank: process.pid for rank, process in self._by_rank.items() if process.pid is not None}

    @property
    def sentinels(self) -> list[int]:
        """File descriptors that can be read once their process has ended."""
        return [process.sentinel for process in self._by_rank.values()]

    def ended(self, *, but_well: bool = False) -> dict[int, str]:
        """A sentence for each rank whose process has ended.

        Args:
            but_well: leave out those that were told to.
        """
        over = set(wait(self.sentinels, timeout=0))
        found = {}
        for rank, process in self._by_rank.items():
            if process.sentinel in over:
                process.join(_REAP_S)
                if but_well and process.exitcode == 0:
                    continue
                found[rank] = f"worker {rank} (process {process.pid}) {_how(process.exitcode)}"
        return found

    def join(self, timeout_s: float) -> None:
        """Wait until all have ended by themselves; those that have not by then are killed.

        Raises:
            WorkerError: one has ended by itself, but not well.
        """
        until = time.monotonic() + timeout_s
        for process in self._by_rank.values():
            process.join(max(0.0, until - time.monotonic()))
        unwell = self.ended(but_well=True)
        self.kill()
        for sentence in unwell.values():
            raise WorkerError(f"{sentence} when it was to shut down: see what it has written to standard error")

    def kill(self) -> None:
        """End all at once. Safe in any thread, and again."""
        self._lifeline.close()
        for process in self._by_rank.values():
            process.kill()
        for process in self._by_rank.values():
            process.join(_REAP_S)


@contextmanager
def _without_program() -> Iterator[None]:
    """Processes that start meanwhile do not run the program's file again, as spawned ones do to find what it defines.

    Workers want nothing of it. So a script may make an engine at its top level, and there need not be a file at all.
    """
    program = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = program


def _how(exit_code: int | None) -> str:
    if exit_code is None:
        return "does not respond"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was ended by signal {-exit_code}"


def _variables(specs: Sequence[WorkerSpec]) -> dict[str, str]:
    """Of the environment of the processes, where nothing else is set."""
    plan = specs[0].plan
    # each queue of a GPU waits for its own work alone: transfers beside steps, sums beside copies
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    if plan.device == "cpu":
        variables["OMP_NUM_THREADS"] = str(max(1, _num_cpus() // len(specs)))
    if plan.config.nnodes == 1 and sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = "lo"  # a machine's name need not lead to an address of its own
    return variables


def _num_cpus() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
