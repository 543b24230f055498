"""Worlds of processes: one function runs on every rank, over gloo."""

import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
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
    with pytest.MonkeyPatch.context() as patch:  # spawned processes get the environment of their parent
        for name, value in variables.items():
            patch.setenv(name, value)
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
