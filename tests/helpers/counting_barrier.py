"""A step barrier that counts, and meets the other ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fleetfoot.kv_transfer.base.connector import TransferContext, WorkerConnector
from fleetfoot.records.step import SchedulerOutput
from fleetfoot.runner import base
from fleetfoot.runner.step_barrier import StepBarrier
from tests.helpers.faulty_connector import OFFLOADING, FaultyConnector, InjectedError, connector, world_rank


class CountingBarrier(StepBarrier):
    """Has the number of each step that it was called in, which has begun before. Between processes, a call returns
    when all ranks have made it, and raises if one is in another step."""

    raise_at: int | None = None
    """The step at which it raises."""
    log: Path | None = None
    """A file for the numbers, which outlives the process."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self._begun: int | None = None

    def begin(self, scheduler_output: SchedulerOutput) -> None:
        assert self._begun is None, f"step {self._begun} has not ended"
        self._begun = scheduler_output.step

    def step(self, scheduler_output: SchedulerOutput) -> None:
        number, begun, self._begun = scheduler_output.step, self._begun, None
        assert number == begun, f"step {number} ends, and {begun} has begun"
        if number == self.raise_at:
            raise InjectedError("the barrier", 0)
        self.steps.append(number)
        if self.log is not None:
            with self.log.open("a") as log:
                log.write(f"{number}\n")
        if dist.is_initialized():
            ends = torch.tensor([number, -number])
            dist.all_reduce(ends, op=dist.ReduceOp.MAX)
            assert ends.tolist() == [number, -number], f"ranks end the steps {-ends[1]} and {ends[0]} together"


def steps_of(worker: Any) -> list[int]:
    """Of a worker's barrier."""
    barrier = worker.runner.barrier
    assert isinstance(barrier, CountingBarrier)
    return barrier.steps


def use_counting_barriers(patch: pytest.MonkeyPatch) -> None:
    """For workers that are made in this process."""
    patch.setattr(base, "NoBarrier", CountingBarrier)


class BarrierConnector(FaultyConnector):
    """A worker process that makes it gets a `CountingBarrier`, before its warm-up."""

    @staticmethod
    def worker_side(context: TransferContext) -> WorkerConnector:
        base.NoBarrier = CountingBarrier  # type: ignore[assignment, misc]
        CountingBarrier.log = Path(context.config.kv_connector_extra_config["folder"]) / str(world_rank(context))
        return FaultyConnector.worker_side(context)


def counting(folder: Path, **faults: Any) -> dict[str, Any]:
    """A kv_transfer_config. ``folder``: for the numbers of each rank; ``faults``: as of `Faults`."""
    faults = {"rank": -1, **faults}
    return connector("BarrierConnector", __name__, inner=OFFLOADING, faults=faults, folder=str(folder))
