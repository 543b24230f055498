"""Engines of worker processes, worlds of processes in which one function runs on every rank, over gloo, and ranks that
take turns in one process."""

import json
import threading
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
from safetensors.torch import load_file, save_file

from fleetfoot.assets import embedded_model_path
from fleetfoot.config.engine import EngineConfig
from fleetfoot.distributed.groups import TorchTensorGroup
from fleetfoot.distributed.peer_memory import PeerMemory
from fleetfoot.engine.engine import LLMEngine
from fleetfoot.executor.multiprocess import MultiprocessExecutor
from fleetfoot.records.sampling_params import SamplingParams

SMALL: dict[str, Any] = {
    "model": str(Path(__file__).parents[1] / "assets" / "story-draft"),  # two layers, so few messages
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
SHORT = SamplingParams(max_tokens=2, ignore_eos=True)


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


class Turns:
    """Ranks that run in turns, each until it has handed over its part of a gather: a message of gloo between processes
    takes a processor about a millisecond, with its switches.

    The parts of a round stay in place until every rank has read them.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._turns = [threading.Semaphore(0) for _ in range(size)]
        self._rounds: list[list[torch.Tensor]] = []
        self._is_over = False

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """``function(rank)`` on every rank, which all gather equally often; their results. Raises what one raises."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                self._wait(rank)
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                self._is_over = True
                for turn in self._turns:
                    turn.release()
            self._turns[(rank + 1) % self.size].release()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        assert all(len(parts) == self.size for parts in self._rounds)
        return results

    def gather(self, rank: int, number: int, part: torch.Tensor) -> torch.Tensor:
        """The parts of all ranks in their gather of this number, ``[size, *part.shape]``."""
        if rank == 0:
            self._rounds.append([])
        parts = self._rounds[number]
        parts.append(part.clone())
        self._turns[(rank + 1) % self.size].release()
        self._wait(rank)
        return torch.stack(parts)

    def _wait(self, rank: int) -> None:
        self._turns[rank].acquire()
        if self._is_over:
            raise RuntimeError("another rank has failed")


class TurnsGroup(TorchTensorGroup):
    """The place of one rank among those that take turns."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self.rank, self.size = rank, turns.size
        self._turns, self._num_gathers = turns, 0

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        self._num_gathers += 1
        return self._turns.gather(self.rank, self._num_gathers - 1, x)


def shorten_story(folder: Path, layers: tuple[int, ...]) -> None:
    """Write the embedded model with these layers alone: each of a step takes tensor ranks two messages."""
    source, prefix = embedded_model_path(), "model.layers."
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(layers)}))
    weights = {}
    for name, weight in load_file(source / "model.safetensors").items():
        number, _, rest = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix):
            weights[name] = weight
        elif int(number) in layers:
            weights[f"{prefix}{layers.index(int(number))}.{rest}"] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def shared_memory(folder: Path, rank: int, size: int, num_words: int) -> PeerMemory:
    """Files that the first ``size`` ranks have mapped, in place of memory of GPUs; the others get those of the last."""
    folder.mkdir(parents=True, exist_ok=True)
    files = (str(folder / f"memory-{peer}") for peer in range(size))
    maps = [torch.from_file(file, shared=True, size=num_words, dtype=torch.int64) for file in files]
    dist.barrier()
    return PeerMemory(maps[min(rank, size - 1)], torch.tensor([each.data_ptr() for each in maps]), keep=maps)
