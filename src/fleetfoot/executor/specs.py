"""What the workers of a machine are started with."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence

from fleetfoot.executor.channel import WorkerAddresses
from fleetfoot.executor.ranks import node_ranks
from fleetfoot.executor.worker_process import Rendezvous, WorkerSpec
from fleetfoot.plan.plan import EnginePlan


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
