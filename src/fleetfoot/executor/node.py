"""What runs on a machine that is not the engine's first: its workers, until the engine ends."""

from __future__ import annotations

import dataclasses
import logging
from multiprocessing.connection import wait

from fleetfoot.config.engine import EngineConfig
from fleetfoot.executor.errors import WorkerError
from fleetfoot.executor.nodes import Membership, check_devices
from fleetfoot.executor.processes import WorkerProcesses
from fleetfoot.executor.specs import Rendezvous, worker_specs
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.resolve import resolve_plan

logger = logging.getLogger(__name__)

_SHUTDOWN_S = 10.0
"""How long workers may take to end once the engine has told them to."""


def run_node(config: EngineConfig) -> None:
    """Run the workers of this node; return when the engine has ended well.

    Raises:
        ValueError: the settings name the first node, do not fit together, or are not those of the first node.
        TimeoutError, ConnectionError: the first node does not come, or does not take this one.
        WorkerError: a worker, or another node, has failed.
    """
    if config.node_rank == 0:
        raise ValueError(
            f"node_rank is 0 (with nnodes {config.nnodes}): the first node starts the engine, with `fleetfoot "
            "generate`, `fleetfoot chat` or LLM(...); this command is for the nodes from 1 on"
        )
    plan = resolve_plan(config, Machine.detect())
    plan.decision.check()
    check_devices(plan)
    membership = Membership(plan)
    processes = None
    try:
        plan = dataclasses.replace(plan, engine_id=membership.engine_id)
        rendezvous = Rendezvous(None, membership.address, membership.store_port)
        processes = WorkerProcesses(worker_specs(plan, membership.addresses, rendezvous))
        _watch(membership, processes)
    except BaseException as error:
        membership.failed(str(error) or type(error).__name__)
        raise
    finally:
        if processes is not None:
            processes.kill()
        membership.link.close()


def _watch(membership: Membership, processes: WorkerProcesses) -> None:
    """Until the engine ends, or something here does that should not."""
    ready = wait([membership.link.fileno(), *processes.sentinels])
    # workers may hear that it is over before this process does
    if membership.link.fileno() not in ready and (bad := processes.ended(but_well=True)):
        raise WorkerError(next(iter(bad.values())))
    reason = membership.end()
    if reason is not None:
        raise WorkerError(f"the engine has failed: {reason}")
    processes.join(_SHUTDOWN_S)
