"""Serves an engine, or a proxy of two engines, on a TCP port. Behind `fleetfoot engine` and `fleetfoot proxy`.

When requests are accepted, a line ``{"address": "host:port"}`` is written to standard output.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from fleetfoot.config.engine import EngineConfig
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.inputs import PromptType
from fleetfoot.kv_transfer.base.sockets import keep_alive
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.server.disaggregation.client import (
    Engine,
    EngineCall,
    EngineClient,
    Failed,
    Output,
    Report,
    Stats,
    read_message,
    release,
    write_message,
)
from fleetfoot.server.disaggregation.proxy import DisaggregatedLLM

if TYPE_CHECKING:
    from fleetfoot.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

_DRAIN_POLL_SECONDS = 0.02
"""Between checks of whether an engine is drained."""


def serve_engine(config: EngineConfig, host: str, port: int, *, until_stdin_closes: bool = False) -> None:
    """Load an engine and serve it until SIGINT or SIGTERM.

    Args:
        port: 0: any free one.
        until_stdin_closes: stop also when standard input closes, as it does when a parent process ends.

    Raises:
        ValueError: the address cannot be listened on, or settings, model and machine do not fit together.
        EngineDeadError: the engine has failed during a request.
    """
    from fleetfoot.async_llm import AsyncLLM
    from fleetfoot.engine.engine import LLMEngine

    async def run(listener: socket.socket) -> None:
        async with AsyncLLM.from_engine(LLMEngine.from_config(config)) as llm:
            ended = _end_of_serving(until_stdin_closes=until_stdin_closes)

            def fail(error: EngineDeadError) -> None:
                if not ended.done():
                    ended.set_exception(error)

            await _serve(EngineServer(LocalEngine(llm), on_death=fail), listener, ended)

    with reserve(host, port) as listener:
        asyncio.run(run(listener))


def serve_proxy(prefill: str, decode: str, host: str, port: int, *, prefill_timeout: float) -> None:
    """Serve a prefill and a decode engine behind one address.

    Args:
        prefill, decode: addresses of the engines; they may start later, and become unreachable for a while.
        port: 0: any free one.
        prefill_timeout: seconds.

    Raises:
        ValueError: an address is invalid, or cannot be listened on.
    """
    proxy = DisaggregatedLLM(EngineClient(prefill), EngineClient(decode), prefill_timeout=prefill_timeout)

    async def run(listener: socket.socket) -> None:
        await _serve(EngineServer(proxy), listener, _end_of_serving())

    with reserve(host, port) as listener:
        asyncio.run(run(listener))


async def _serve(server: EngineServer, listener: socket.socket, ended: asyncio.Future[None]) -> None:
    await server.start(listener)
    print(json.dumps({"address": server.address}), flush=True)
    try:
        await ended
    finally:
        await server.close()


def _end_of_serving(*, until_stdin_closes: bool = False) -> asyncio.Future[None]:
    """Done after SIGINT or SIGTERM, or when standard input closes."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end)
    if until_stdin_closes:
        loop.add_reader(0, lambda: None if os.read(0, 1) else end())
    return ended


def reserve(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Bind a socket before an engine is loaded, which may take minutes. Connections are refused until it listens.

    Port 0 is any free one. Raises ValueError, with the reason, if the address cannot be bound.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(f"cannot listen on {host}:{port} ({error}); choose another host or port") from error
    return listener


class LocalEngine:
    """An `AsyncLLM` of this process, which the caller shuts down; implements
    `fleetfoot.server.disaggregation.client.Engine`."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    def generate(
        self, prompt: PromptType, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        return self._llm.generate(prompt, sampling_params, request_id, priority=priority)

    async def stats(self) -> dict[str, Any]:
        content: dict[str, Any] = msgspec.to_builtins(self._llm.stats())
        return content

    async def drain(self) -> dict[str, Any]:
        while True:
            stats = self._llm.stats()
            scheduler, transfers = stats.scheduler, stats.transfers
            if not (
                scheduler.num_running or scheduler.num_waiting or transfers.num_loading or transfers.num_held_blocks
            ):
                await self._llm.check_integrity()
                return await self.stats()
            await asyncio.sleep(_DRAIN_POLL_SECONDS)


class EngineServer:
    """Serves an engine, which the caller shuts down, on a socket.

    Args:
        on_death: called when a request raises `EngineDeadError`.
    """

    def __init__(self, engine: Engine, on_death: Callable[[EngineDeadError], None] = lambda error: None) -> None:
        self._engine = engine
        self._on_death = on_death
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    async def start(self, listener: socket.socket) -> None:
        """Listen on a socket of `reserve`, and set `address`."""
        self._server = await asyncio.start_server(self._accept, sock=listener)
        host, port = listener.getsockname()
        self.address = f"{host}:{port}"

    async def close(self) -> None:
        """Close all connections; unfinished requests are aborted."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._handle(reader, writer)
        except asyncio.CancelledError:
            pass  # the server is closed
        except OSError as error:
            logger.debug("a connection has ended: %s", error)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        keep_alive(writer.get_extra_info("socket"))
        try:
            call: EngineCall = await read_message(reader, EngineCall)
        except ValueError as error:
            await write_message(writer, Failed.of(error))
            return
        received = asyncio.ensure_future(reader.read(1))  # an acknowledgement; empty at disconnection
        transfers: list[dict[str, Any]] = []
        work = asyncio.ensure_future(self._reply(call, writer, transfers))
        try:
            await asyncio.wait((work, received), return_when=asyncio.FIRST_COMPLETED)
            if (transfers or received.done()) and await received:
                await work  # all has been sent
                transfers.clear()
        finally:
            work.cancel()  # aborts its request, if it has not finished
            received.cancel()
            await asyncio.gather(work, received, return_exceptions=True)
            await asyncio.gather(*map(release, transfers))

    async def _reply(self, call: EngineCall, writer: asyncio.StreamWriter, transfers: list[dict[str, Any]]) -> None:
        """Append the ``kv_transfer_params`` of the output to ``transfers`` before it is sent."""
        engine = self._engine
        try:
            if isinstance(call, Stats):
                await write_message(writer, Report(await (engine.drain() if call.is_drained else engine.stats())))
                return
            outputs = engine.generate(call.prompt, call.params, call.request_id, priority=call.priority)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    if output.kv_transfer_params is not None:
                        transfers.append(output.kv_transfer_params)
                    await write_message(writer, Output(output))
        except ConnectionError:
            raise  # of the client's connection: no reply is possible
        except Exception as error:
            if isinstance(error, EngineDeadError):
                self._on_death(error)
            await write_message(writer, Failed.of(error))


def main(config: str, host: str, port: str) -> None:
    """The main function of an `EngineProcess`; ``config``: the engine's settings, a JSON object."""
    logging.basicConfig(level=logging.WARNING)
    settings = EngineConfig.from_keywords(json.loads(config), owner="EngineProcess")
    serve_engine(settings, host, int(port), until_stdin_closes=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
