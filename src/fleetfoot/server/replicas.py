"""The processes of several engines with the same settings as one backend of a server: data parallelism.

Requests go to the engine that has most of their prompt in its prefix cache, unless another one has much less to do. A
replica that is lost is one less until another process has taken its place; its requests continue elsewhere, with the
tokens that they have.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fleetfoot.config import env
from fleetfoot.config.engine import MAX_RESTARTS, EngineConfig
from fleetfoot.engine.child_process import EngineProcess
from fleetfoot.engine.client import EngineClient
from fleetfoot.engine.input_processor import EngineRequest
from fleetfoot.engine.wire import ClientMessage, Stop
from fleetfoot.plan.machine import Machine
from fleetfoot.scheduler.prefix_routing import PrefixRouting
from fleetfoot.server.engine_group import EngineGroup, GroupLink
from fleetfoot.server.liveness import LONG_STEP_S, ProcessWork, cpu_use
from fleetfoot.server.own_engine import RestartLimit
from fleetfoot.utils.process import num_cores
from fleetfoot.utils.validation import FieldError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Replicas:
    """The addresses of engines that end with the server."""

    addresses: tuple[str, ...]


class ReplicasLink(GroupLink):
    """A link to all replicas as one engine."""

    detects_loss = False  # processes of this machine
    sees_work = True
    no_engine = "the processes of all engines have ended, and are started again"

    def __init__(self, replicas: Replicas, cpu_use: Callable[[int], tuple[float, bool]] = cpu_use) -> None:
        """``cpu_use``: see `fleetfoot.server.liveness.ProcessWork`."""
        super().__init__(EngineGroup((), replicas.addresses, engine_timeout=None))
        self._work: dict[Any, ProcessWork] = {engine: ProcessWork(cpu_use) for engine in self._engines}
        self._routing: PrefixRouting[Any] = PrefixRouting()
        for index, engine in enumerate(self._engines):
            engine.name = f"replica-{index}"

    def send(self, message: ClientMessage) -> None:
        if isinstance(message, Stop):
            for engine in self._engines:
                engine.send(message)
        else:
            super().send(message)

    def _generating_engine(self, request: EngineRequest) -> Any:
        """The engine with the longest beginning of the prompt, unless it is far busier than the least busy one. That of
        the request's rank, unless it is lost."""
        asked = [self._engines[request.rank]] if request.rank >= 0 else self._engines
        usable = [one for one in asked if one.is_usable] or [one for one in self._engines if one.is_usable]
        if not usable:
            return None
        loads = {engine: engine.load for engine in usable}
        return self._routing.choose(request.prompt_token_ids.tobytes(), loads, request.session)

    def _works(self, engine: Any, now: float) -> bool:
        """A step on a CPU may be long."""
        works = self._work[engine].look(now, engine.facts.pid) and engine.facts.computes_on_cpu
        return works and now - engine.last_message_ts < LONG_STEP_S

    def _leave(self, engine: Any) -> None:
        self._routing.forget(engine)
        super()._leave(engine)


def _of_replica(config: EngineConfig, number: int) -> EngineConfig:
    events = config.kv_events_config
    return config if events is None else replace(config, kv_events_config=events.moved(number))


class ReplicaProcesses:
    """The engines' processes for a server; implements `fleetfoot.server.serve.Backend`. Each has GPUs of its own.

    Args:
        config: of all of them together.
        log_level, log_format: see `EngineProcess`.
        limit: of processes that are started again; None: that of the settings.

    Raises:
        FieldError: there are fewer GPUs than all ranks need.
    """

    def __init__(
        self, config: EngineConfig, log_level: int, log_format: str = "text", limit: RestartLimit | None = None
    ) -> None:
        machine, own = Machine.detect(), replace(config, data_parallel_size=1)
        count, size = config.data_parallel_size, config.world_size
        is_here = config.distributed_executor_backend != "ray"
        has_gpus = is_here and machine.choose_device(config.device) == "cuda"
        if has_gpus and machine.num_gpus < count * size:
            raise FieldError(
                "data_parallel_size",
                f"is {count}, and each replica takes {size} of {machine.num_gpus} GPUs; it can be at most "
                f"{machine.num_gpus // size}",
                count,
            )
        self._limit = limit or RestartLimit(config.max_restarts or MAX_RESTARTS)
        threads = env.share_of_threads(max(1, num_cores() // count))
        self._processes = [
            EngineProcess(
                _of_replica(own, index), log_level, log_format, devices_of(index, size) if has_gpus else threads
            )
            for index in range(count)
        ]
        self._exit_code = 0

    @property
    def address(self) -> Replicas:
        """The argument of `fleetfoot.server.api_server.connected`."""
        return Replicas(tuple(process.address for process in self._processes))

    async def wait(self, client: EngineClient) -> str:
        """The cause, once no process is left, or one has ended while the server starts or ends."""
        waiting = {asyncio.ensure_future(process.wait()): process for process in self._processes}
        while True:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                process = waiting.pop(task)
                code = task.result()
                number = self._processes.index(process)
                cause = f"the process of replica {number} has ended with code {code}"
                if not client.is_running:
                    self._exit_code = code
                    return cause
                if await self._limit.wait(cause) is None:
                    state = client.facts.state
                    process.start_again(None if state.has_own_weights else state)
                    waiting[asyncio.ensure_future(process.wait())] = process
                elif not waiting:
                    return f"{cause}, and no other one is left"
                else:
                    logger.error("%s; it is not started again: too many were within an hour (max_restarts)", cause)

    def stop(self) -> int:
        """End all processes. Returns the exit code of the one that ended first, or another one's that has failed."""
        codes = [process.stop() for process in self._processes]
        return self._exit_code or next(filter(None, codes), 0)


def devices_of(index: int, size: int) -> dict[str, str]:
    """The variable for a replica that takes ``size`` GPUs, of those of this process."""
    all_devices = env.visible_gpus() or list(map(str, range((index + 1) * size)))
    return {env.VISIBLE_GPUS: ",".join(all_devices[index * size : (index + 1) * size])}
