"""Serves an engine, or a proxy for two of them, until it is told to stop. Behind `fleetfoot engine` and
`fleetfoot proxy`.

Once requests can come, a line ``{"address": "host:port"}`` is written to standard output.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from typing import TYPE_CHECKING

from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.server.disaggregation.engine_client import EngineClient
from fleetfoot.server.disaggregation.engine_server import EngineServer, reserve
from fleetfoot.server.disaggregation.proxy import DisaggregatedLLM

if TYPE_CHECKING:
    from fleetfoot.config.engine import EngineConfig


def serve_engine(config: EngineConfig, host: str, port: int, *, until_stdin_closes: bool = False) -> None:
    """Load an engine and serve it.

    Args:
        port: 0: any that is free.
        until_stdin_closes: stop also when standard input ends, as it does when a parent process has died.

    Raises:
        ValueError: nobody can listen there, or settings, model and machine do not fit together.
        EngineDeadError: the engine has failed, and a request has met that.
    """
    from fleetfoot.async_llm import AsyncLLM
    from fleetfoot.engine.engine import LLMEngine
    from fleetfoot.server.disaggregation.local_engine import LocalEngine

    async def run(place: socket.socket) -> None:
        async with AsyncLLM.from_engine(LLMEngine.from_config(config)) as llm:
            end = _End(until_stdin_closes=until_stdin_closes)
            await _serve(EngineServer(LocalEngine(llm), on_death=end.failed), place, end)

    with reserve(host, port) as place:
        asyncio.run(run(place))


def serve_proxy(prefill: str, decode: str, host: str, port: int, *, prefill_timeout: float) -> None:
    """Serve two engines as one.

    Args:
        prefill, decode: addresses of the engines, which may come up later and go away for a while.
        port: 0: any that is free.
        prefill_timeout: seconds after which the prefill engine is not waited for any longer.

    Raises:
        ValueError: an address is none, or nobody can listen there.
    """
    proxy = DisaggregatedLLM(EngineClient(prefill), EngineClient(decode), prefill_timeout=prefill_timeout)

    async def run(place: socket.socket) -> None:
        await _serve(EngineServer(proxy), place, _End())

    with reserve(host, port) as place:
        asyncio.run(run(place))


class _End:
    """When to stop: with a signal, with standard input, with the engine."""

    def __init__(self, *, until_stdin_closes: bool = False) -> None:
        self._has_come = asyncio.Event()
        self._error: EngineDeadError | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._has_come.set)
        if until_stdin_closes:
            loop.add_reader(0, lambda: None if os.read(0, 1) else self._has_come.set())

    def failed(self, error: EngineDeadError) -> None:
        self._error = error
        self._has_come.set()

    async def wait(self) -> None:
        """Raises EngineDeadError if that is it."""
        await self._has_come.wait()
        if self._error is not None:
            raise self._error


async def _serve(server: EngineServer, place: socket.socket, end: _End) -> None:
    await server.start(place)
    print(json.dumps({"address": server.address}), flush=True)
    try:
        await end.wait()
    finally:
        await server.close()
