"""The engine's process of a server with ``--on-error restart``: it is started again when a signal has ended it.

Requests resume as behind a proxy that has lost an engine: with the tokens that their API server has.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from fleetfoot.config.engine import MAX_RESTARTS, EngineConfig
from fleetfoot.engine.child_process import EngineProcess
from fleetfoot.engine.client import EngineClient
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.engine.wire import EXIT_OTHER_STATE, Call, ClientMessage, Dead, EngineMessage, Failed, Held, Reply, Stop
from fleetfoot.server.engine_group import EngineGroup, GroupLink

logger = logging.getLogger(__name__)

WINDOW_S = 3600.0
"""Processes are replaced a limited number of times within this time."""
_FIRST_DELAY_S = 0.25
_MAX_DELAY_S = 10.0


@dataclass(frozen=True, slots=True)
class OwnEngine:
    """The address of an engine's process that may be started again."""

    address: str


class OwnEngineLink(GroupLink):
    """A link to an engine's process, and to those that follow it at the same address."""

    detects_loss = watches = False  # one that is stopped goes on later; `Liveness` reports it
    no_engine = "the engine's process has ended, and is started again"

    def __init__(self, engine: OwnEngine) -> None:
        super().__init__(EngineGroup((), (engine.address,), engine_timeout=None))
        (self._engine,) = self._engines

    def send(self, message: ClientMessage) -> None:
        if isinstance(message, Stop):
            self._engine.send(message)
        else:
            super().send(message)

    async def _serve(self, engine: Any, link: Any) -> None:
        try:
            await super()._serve(engine, link)
        except (ValueError, msgspec.MsgspecError) as error:
            if not self._has_started:
                raise
            link.send(Stop())  # so that the server ends
            self._report_failure(engine, Dead(f"the new process differs: {error}", ""))
            await asyncio.Event().wait()

    def _take(self, engine: Any, message: EngineMessage) -> None:
        if isinstance(message, Held):
            self._incoming.put_nowait(message)
        else:
            super()._take(engine, message)

    def _leave(self, engine: Any) -> None:
        super()._leave(engine)
        self._incoming.put_nowait(Held(False))

    def _report_failure(self, engine: Any, message: Dead) -> None:
        self._incoming.put_nowait(message)

    async def _call(self, call: Call) -> None:
        """A call that is under way when the process ends fails: the caller decides whether to repeat it."""
        try:
            if self._engine.link is None:
                raise EngineDeadError(self.no_engine)
            reply = Reply(call.number, await self._ask(self._engine, call))
        except (ValueError, TypeError, RuntimeError) as error:
            reply = Reply(call.number, error=Failed.of(error))
        self._incoming.put_nowait(reply)


class RestartLimit:
    """How often, and how soon, processes are started again.

    Args:
        most: restarts within `WINDOW_S`.
        clock: seconds, monotonic.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        most: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.most = most
        self._clock, self._sleep = clock, sleep
        self._times: deque[float] = deque()
        self._first = ""

    async def wait(self, cause: str) -> str | None:
        """Wait before a restart: not at all if the last one is long ago, else twice as long as for the last one.
        Returns the cause of the first restart of the hour if there were too many; None: restart."""
        now = self._clock()
        while self._times and self._times[0] <= now - WINDOW_S:
            self._times.popleft()
        if not self._times:
            self._first = cause
        if len(self._times) >= self.most:
            return self._first
        recent = sum(time > now - 60 for time in self._times)
        self._times.append(now)
        logger.error("%s; it is started again (%d of at most %d times within an hour)", cause, self.count, self.most)
        if recent:
            await self._sleep(min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** (recent - 1)))
        return None

    @property
    def count(self) -> int:
        """Restarts within the last hour."""
        return len(self._times)


class OwnEngineProcess:
    """The process of an engine for a server. With ``on_error`` set to ``restart``, others follow it.

    Args:
        config, log_level, log_format: see `EngineProcess`.
        limit: of restarts; None: that of the settings.
    """

    def __init__(
        self, config: EngineConfig, log_level: int, log_format: str = "text", limit: RestartLimit | None = None
    ) -> None:
        self._process = EngineProcess(config, log_level, log_format)
        self._can_restart = config.on_error == "restart"
        self._limit = limit or RestartLimit(config.max_restarts or MAX_RESTARTS)

    @property
    def address(self) -> str | OwnEngine:
        """The argument of `fleetfoot.server.api_server.connected`."""
        return OwnEngine(self._process.address) if self._can_restart else self._process.address

    async def wait(self, client: EngineClient) -> str:
        """The cause, once the process has ended, and no other one follows it. ``client``: of the engine."""
        while True:
            code = await self._process.wait()
            cause = f"the engine's process has ended with code {code}"
            if not self._can_restart or not client.is_running:
                return cause
            was_ready = client.facts.pid == self._process.pid
            if was_ready and code >= 0:  # an error of the engine, after which it restarts no workers; or its stop
                return cause
            state = client.facts.state
            if state.has_own_weights:
                return (
                    f"{cause}; it is not started again, because its weights of version {state.weight_version} were "
                    "given as tensors or patches, and have ended with it"
                )
            if code == EXIT_OTHER_STATE:
                return f"{cause}: it cannot have the weights, the settings or the sleep of the one before"
            if (first := await self._limit.wait(cause)) is not None:
                return f"{first}; it was started again {self._limit.most} times within an hour, the most (max_restarts)"
            self._process.start_again(state)

    def stop(self) -> int:
        """End the process. Returns the exit code."""
        return self._process.stop()
