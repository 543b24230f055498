"""Worlds of processes for tests: each runs one function on every rank, over gloo, and gives back what that returned."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_world(folder: Path, size: int, function: Callable[..., Any], *arguments: Any, **variables: str) -> list[Any]:
    """``function(rank, *arguments)`` on each rank of a world of ``size`` spawned processes; their results, by rank.

    What a rank raises is raised here, with its traceback. A world that waits for a rank that is gone gives up after a
    minute.

    Args:
        folder: for the meeting point and the results.
        variables: of the processes' environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _environment(variables):
        mp.spawn(_run, (folder, size, function, arguments), nprocs=size)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _run(rank: int, folder: Path, size: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    meeting_point = f"file://{folder / 'meeting-point'}"
    dist.init_process_group("gloo", init_method=meeting_point, world_size=size, rank=rank, timeout=timedelta(minutes=1))
    try:
        torch.save(function(rank, *arguments), folder / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


@contextmanager
def _environment(variables: dict[str, str]) -> Any:
    """Spawned processes get the environment of their parent."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
