"""The processes of several API servers, which their supervisor starts, and replaces when they end."""

from __future__ import annotations

import asyncio
import pickle
import signal
import subprocess
import sys

from fleetfoot.config import env
from fleetfoot.engine.child_process import process_end
from fleetfoot.server.api_server import Address, ChildSettings, ServerSettings
from fleetfoot.server.connections import Balancer
from fleetfoot.server.own_engine import RestartLimit
from fleetfoot.utils.process import write_to

MAX_RESTARTS = 16
"""Most API servers that are replaced within an hour."""


class ApiServers:
    """API servers, as many as the settings name.

    Args:
        engine: its address.
        store: the address of the store of responses.
        limit: of replacements.
    """

    def __init__(
        self,
        engine: Address,
        store: str,
        settings: ServerSettings,
        balancer: Balancer,
        limit: RestartLimit | None = None,
    ) -> None:
        self._engine, self._store, self._settings, self._balancer = engine, store, settings, balancer
        self._limit = limit or RestartLimit(MAX_RESTARTS)
        self._children: dict[int, subprocess.Popen[bytes]] = {}  # by their number
        self._keepers: list[asyncio.Task[str]] = []
        self._stopping = asyncio.Event()
        self.are_replaced = False
        """Whether one that ends is replaced: once all have been ready."""

    def start(self) -> None:
        """Start the servers. Of two coroutines, `lost` waits for the first that is not replaced, `ended` for all."""
        numbers = range(self._settings.api_server_count)
        self._keepers = [asyncio.ensure_future(self._keep(number)) for number in numbers]

    async def lost(self) -> str:
        """The cause, once a server has ended that is not replaced."""
        done, _ = await asyncio.wait(self._keepers, return_when=asyncio.FIRST_COMPLETED)
        return min(done, key=self._keepers.index).result()

    async def ended(self) -> None:
        """Wait until all have ended."""
        await asyncio.wait(self._keepers)

    async def _keep(self, number: int) -> str:
        while True:
            child = self._children[number] = self._start()
            cause = f"API server {number} has ended with code {await process_end(child)}"
            if self._stopping.is_set() or not self.are_replaced:
                return cause
            waiting = asyncio.ensure_future(self._limit.wait(cause))
            stopping = asyncio.ensure_future(self._stopping.wait())
            await asyncio.wait((waiting, stopping), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not waiting.done():
                waiting.cancel()
                return cause
            if (first := waiting.result()) is not None:
                return f"{first}; {self._limit.most} servers are replaced within an hour at most"

    def _start(self) -> subprocess.Popen[bytes]:
        with self._balancer.add_server() as channel:
            child = subprocess.Popen(
                [sys.executable, "-m", "fleetfoot.server.api_server"],
                stdin=subprocess.PIPE,
                pass_fds=(channel.fileno(),),
                env=env.for_child({}),
                start_new_session=True,  # the terminal's signals reach the supervisor alone
            )
            settings = ChildSettings(self._engine, self._store, self._settings, channel.fileno())
        write_to(child, pickle.dumps(settings))  # its end of file is that of the supervisor
        return child

    def stop(self, number: int) -> None:
        """Send a signal to all; none is replaced any more."""
        self._stopping.set()
        for child in self._children.values():
            child.send_signal(number)

    def fail(self, cause: str) -> None:
        """End all requests with the cause, and the servers."""
        self._stopping.set()
        for child in self._children.values():
            write_to(child, cause.encode())

    def kill(self) -> None:
        """End what is left; none is replaced any more."""
        self._stopping.set()
        for child in self._children.values():
            child.send_signal(signal.SIGKILL)
