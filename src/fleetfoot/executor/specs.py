"""What the workers of a machine are started with."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fleetfoot.executor.channel import WorkerAddresses
from fleetfoot.executor.ranks import node_ranks
from fleetfoot.plan.plan import EnginePlan

if TYPE_CHECKING:
    from fleetfoot.executor.channel import WorkerAddresses


def worker_specs(plan: EnginePlan, addresses: Sequence[WorkerAddresses], rendezvous: Rendezvous) -> list[WorkerSpec]:
    """One for each rank of this machine.

    Args:
        addresses: of all ranks of the world.
    """
    return [
        WorkerSpec(
            plan=plan,
            rank=rank,
            local_rank=local_rank,
            addresses=addresses[rank],
            rendezvous=rendezvous,
            parent=os.getpid(),
            ends_with_thread=threading.current_thread() is threading.main_thread(),
            log_level=logging.getLogger("fleetfoot").getEffectiveLevel(),
        )
        for local_rank, rank in enumerate(node_ranks(plan.config))
    ]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the workers of a world find each other: a file on one machine, or the store of node 0."""

    path: str | None
    address: str = ""
    port: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker's process is started with."""

    plan: EnginePlan
    rank: int
    """In the world."""
    local_rank: int
    """On this machine: the number of its GPU."""
    addresses: WorkerAddresses
    rendezvous: Rendezvous
    parent: int
    """Process id."""
    ends_with_thread: bool
    """Whether the thread that starts the process lives as long as its own process."""
    log_level: int
