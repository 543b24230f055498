"""Engines of worker processes, and worlds of processes in which one function runs on every rank, over gloo."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fleetfoot.config.engine import EngineConfig
from fleetfoot.distributed.peer_memory import PeerMemory
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.executor.multiprocess import MultiprocessExecutor
from fleetfoot.records.sampling_params import SamplingParams

SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 80,
    "max_num_seqs": 4,
    "num_gpu_blocks_override": 64,
    "block_size": 4,
    "skip_tokenizer_init": True,
}
PROMPT = [5, 6, 7]
LONG = SamplingParams(max_tokens=60, ignore_eos=True)
"""Nearly as long as requests can be."""


@contextmanager
def running(**settings: Any) -> Iterator[LLMEngine]:
    """An engine that is shut down in the end."""
    engine = LLMEngine.from_config(EngineConfig(**{**SMALL, **settings}))
    try:
        yield engine
    finally:
        engine.shutdown()


def pids_of(engine: LLMEngine) -> dict[int, int | None]:
    executor = engine.core.executor
    assert isinstance(executor, MultiprocessExecutor)
    return {rank: process.pid for rank, process in executor._processes.by_rank.items()}


def run_world(folder: Path, size: int, function: Callable[..., Any], *arguments: Any, **variables: str) -> list[Any]:
    """``function(rank, *arguments)`` on each rank of a world of ``size`` spawned processes with these environment
    variables; their results, by rank. What a rank raises is raised here, with its traceback. A world that waits for a
    rank that is gone gives up after a minute."""
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


def shared_memory(folder: Path, rank: int, size: int, num_words: int) -> PeerMemory:
    """Files that all ranks have mapped, in place of memory of GPUs."""
    files = (str(folder / f"memory-{peer}") for peer in range(size))
    maps = [torch.from_file(file, shared=True, size=num_words, dtype=torch.int64) for file in files]
    dist.barrier()
    return PeerMemory(maps[rank], torch.tensor([each.data_ptr() for each in maps]), keep=maps)
