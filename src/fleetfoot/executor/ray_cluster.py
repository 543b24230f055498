"""Workers on a Ray cluster (the extra ``ray``): an actor for each rank, in a placement group.

Ray finds the places, starts the processes and reports their end. Steps and outputs go over the engine's own sockets, as
between nodes, with a key that the actors get over Ray. So steps go on while the cluster's head is away.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Sequence
from typing import Any

from fleetfoot.config import env
from fleetfoot.config.engine import EngineConfig
from fleetfoot.distributed.stores import make_store
from fleetfoot.executor.messages import WorkerAddresses, worker_keys
from fleetfoot.executor.multiprocess import MultiprocessExecutor
from fleetfoot.executor.processes import SHUTDOWN_S
from fleetfoot.executor.protocol import WorkerError
from fleetfoot.plan.machine import Machine
from fleetfoot.plan.plan import EnginePlan
from fleetfoot.structured.mask_space import MaskMemory
from fleetfoot.utils.cluster_key import ClusterKey
from fleetfoot.utils.network import interface_of, local_address_to
from fleetfoot.utils.validation import FieldError

logger = logging.getLogger(__name__)

PLACE_S = 600.0
"""How long to wait for room in the cluster, which may have to grow first."""
_START_S = 300.0
_GIVE_BACK_S = 10.0
"""How long to wait for a head that is away when places are given back."""
_FIELD = "distributed_executor_backend"


class RayExecutor(MultiprocessExecutor):
    """Implements `fleetfoot.executor.protocol.Executor`. Raises what `MultiprocessExecutor` does, and FieldError: Ray
    is not installed, there is no cluster, or it has no room for all ranks."""

    def _open(self, plan: EnginePlan) -> tuple[RayRendezvous, RayWorkers]:
        if plan.connector is not None:
            raise FieldError(_FIELD, "is 'ray', where KV connectors are not supported; use 'mp'", "ray")
        join_cluster()
        rendezvous = RayRendezvous(plan)
        return rendezvous, RayWorkers(rendezvous.key)


def find_machine(config: EngineConfig) -> Machine:
    """A machine of the cluster that ranks are placed on, by which the engine plans: its own may have no GPU. Raises
    FieldError as `join_cluster`."""
    join_cluster()
    import ray

    has_gpus = config.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    machine: Machine = ray.get(ray.remote(num_cpus=1, num_gpus=int(has_gpus))(_detect).remote())
    return machine


def _detect() -> Machine:
    return Machine.detect()


def join_cluster() -> None:
    """Connect to the cluster of ``RAY_ADDRESS``, or else to that of this machine. Raises FieldError."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        import ray

        if not ray.is_initialized():
            ray.init(address="auto", log_to_driver=True, logging_level=logging.WARNING)
    except ImportError as error:
        raise FieldError(_FIELD, "is 'ray', which is not installed: pip install 'fleetfoot[ray]'", "ray") from error
    except (ConnectionError, RuntimeError) as error:
        advice = "start one (ray start --head), or set RAY_ADDRESS, and RAY_AUTH_MODE=token if it asks for a token"
        text = f"is 'ray', and no cluster can be joined ({error}); {advice}"
        raise FieldError(_FIELD, text, "ray") from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray's own ends the process at once


class RayRendezvous:
    """The address of this machine in the cluster, and what the ranks need to find each other; like
    `fleetfoot.executor.nodes.EngineNodes`. Raises FieldError: the ranks would talk over a network that nothing
    acknowledges to be trusted."""

    descriptors: Sequence[int] = ()

    def __init__(self, plan: EnginePlan) -> None:
        from ray.util import get_node_ip_address

        self.place: str = get_node_ip_address()
        nodes = {node["NodeManagerAddress"] for node in _alive_nodes()}
        if nodes != {self.place}:
            plan.config.check_trusted("the address of this machine in the Ray cluster", self.place)
        self.key = ClusterKey(secrets.token_hex(32).encode())
        self.worker_key = worker_keys(self.key, plan.engine_id)[0]
        self._store = make_store(self.place)
        self.store = (self.place, self._store.port)

    def gather(self, addresses: Sequence[WorkerAddresses]) -> None:
        """Ray starts what is on other machines."""

    def find_loss(self, wait_ms: int = 0) -> str:
        """Empty: `RayWorkers` reports losses."""
        return ""

    def close(self, reason: str) -> None:
        """Nothing is open but the store, which ends with this object."""


def _alive_nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


class RayWorkers:
    """The actors; like `fleetfoot.executor.processes.WorkerProcesses`. ``key``: of their sockets."""

    def __init__(self, key: ClusterKey) -> None:
        self._key = key
        self._group: Any = None
        self._actors: list[Any] = []
        self._runs: list[Any] = []
        self._ended, self._signal = socket.socketpair()

    def start(
        self, plan: EnginePlan, addresses: list[WorkerAddresses], store: tuple[str, int], masks: MaskMemory | None
    ) -> None:
        """Place and start an actor for each rank. Ranks of a node follow each other, so that tensor groups are on one
        where they fit. Raises FieldError: the cluster has no room."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = {"CPU": 1.0} | ({"GPU": 1.0} if plan.device == "cuda" else {})
        self._group = placement_group([bundle] * plan.config.world_size, strategy="PACK")
        if not self._group.wait(PLACE_S):
            text = f"is 'ray', and the cluster has no room for {plan.config.world_size} ranks of {bundle}"
            raise FieldError(_FIELD, f"{text}: {ray.available_resources()} is free", "ray")
        for index in range(plan.config.world_size):
            placement = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
            kind = ray.remote(num_cpus=1, num_gpus=bundle.get("GPU", 0))(RankActor)
            self._actors.append(kind.options(scheduling_strategy=placement).remote())
        places = ray.get([actor.place.remote() for actor in self._actors], timeout=_START_S)
        order = sorted(range(len(places)), key=lambda index: (places[index][0], index))
        self._actors = [self._actors[index] for index in order]
        places = [places[index] for index in order]
        level = logging.getLogger("fleetfoot").getEffectiveLevel()
        for rank, (actor, (node, _)) in enumerate(zip(self._actors, places, strict=True)):
            beside = [number for number, place in enumerate(places) if place[0] == node]
            gpus = [gpu for number in beside for gpu in places[number][1]]
            own = beside.index(rank)
            self._runs.append(actor.run.remote(plan, rank, addresses[rank], store, self._key, gpus, own, level))
        threading.Thread(target=self._watch, name="fleetfoot-ray", daemon=True).start()

    def _watch(self) -> None:
        import ray

        left = self._runs
        while left:
            _, left = ray.wait(left, num_returns=1, timeout=None)
            try:
                self._signal.send(b"\0")
            except OSError:
                return  # it is closed

    @property
    def sentinels(self) -> list[int]:
        """A descriptor that becomes readable when an actor has ended."""
        return [self._ended.fileno()]

    def find_loss(self, *, only_failed: bool = False) -> str:
        """A sentence about a worker that has ended (``only_failed``: with an error); empty if all are there."""
        import ray

        if not self._runs:
            return ""
        ended, _ = ray.wait(self._runs, num_returns=len(self._runs), timeout=0)
        for rank, run in enumerate(self._runs):
            if run in ended:
                try:
                    ray.get(run)
                except ray.exceptions.RayError as error:
                    return f"worker {rank}, an actor of Ray, has ended: {error}"
                if not only_failed:
                    return f"worker {rank}, an actor of Ray, has ended"
        return ""

    def join(self) -> None:
        """Wait at most `SHUTDOWN_S` until all have ended, and kill those that have not. Raises WorkerError if a worker
        has ended with an error."""
        import ray

        ray.wait(self._runs, num_returns=len(self._runs), timeout=SHUTDOWN_S)
        loss = self.find_loss(only_failed=True)
        self.kill()
        if loss:
            raise WorkerError(f"{loss} when it was to shut down")

    def kill(self) -> None:
        """End all at once, and give their places back. Safe in any thread, and again."""
        giving = threading.Thread(target=_give_back, args=(self._actors, self._group), daemon=True)
        self._actors, self._group = [], None
        giving.start()
        giving.join(_GIVE_BACK_S)
        self._signal.close()
        self._ended.close()


def _give_back(actors: list[Any], group: Any) -> None:
    import ray
    from ray.util.placement_group import remove_placement_group

    with contextlib.suppress(Exception):  # the cluster has ended, and they with it
        for actor in actors:
            ray.kill(actor)
        if group is not None:
            remove_placement_group(group)


class RankActor:
    """A rank, as a class for ``ray.remote``."""

    def place(self) -> tuple[str, list[str]]:
        """Its node, and the GPUs that Ray has given it."""
        import ray

        context = ray.get_runtime_context()
        return context.get_node_id(), context.get_accelerator_ids().get("GPU", [])

    def run(
        self, plan: EnginePlan, rank: int, addresses: WorkerAddresses, store: tuple[str, int], key: ClusterKey,
        gpus: list[str], index: int, log_level: int,
    ) -> None:  # fmt: skip
        """Run steps until the engine ends the worker. ``gpus``: of all ranks on this node, of which it takes number
        ``index``: they reach each other's memory."""
        logging.basicConfig(format=f"%(levelname)s %(name)s (worker {rank}): %(message)s")
        logging.getLogger("fleetfoot").setLevel(log_level)
        variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
        if name := interface_of(local_address_to(store[0])):
            variables |= {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
        with env.defaults(variables), env.variable(env.VISIBLE_GPUS, ",".join(gpus)):
            from fleetfoot.executor.worker_loop import run_worker_loop

            logger.info("worker %d is process %d on %s", rank, os.getpid(), local_address_to(store[0]))
            run_worker_loop(plan, rank, addresses, store, key=key, device_index=index)
