"""Serves an engine, or a proxy of two engines, on a TCP port. Behind `fleetfoot engine` and `fleetfoot proxy`.

When requests are accepted, a line ``{"address": "host:port"}`` is written to standard output.
"""

from __future__ import annotations

import argparse
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
    Drain,
    Engine,
    EngineCall,
    EngineClient,
    EngineReply,
    Failed,
    Generate,
    Output,
    Report,
    read_message,
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
            shutdown = _Shutdown(until_stdin_closes=until_stdin_closes)
            await _serve(EngineServer(LocalEngine(llm), on_death=shutdown.fail), listener, shutdown)

    with reserve(host, port) as listener:
        asyncio.run(run(listener))


def serve_proxy(prefill: str, decode: str, host: str, port: int, *, prefill_timeout: float) -> None:
    """Serve a prefill and a decode engine behind one address.

    Args:
        prefill, decode: addresses of the engines; they may start later, and become unreachable for a while.
        port: 0: any free one.
        prefill_timeout: seconds to wait for the prefill engine.

    Raises:
        ValueError: an address is invalid, or cannot be listened on.
    """
    proxy = DisaggregatedLLM(EngineClient(prefill), EngineClient(decode), prefill_timeout=prefill_timeout)

    async def run(listener: socket.socket) -> None:
        await _serve(EngineServer(proxy), listener, _Shutdown())

    with reserve(host, port) as listener:
        asyncio.run(run(listener))


async def _serve(server: EngineServer, listener: socket.socket, shutdown: _Shutdown) -> None:
    await server.start(listener)
    print(json.dumps({"address": server.address}), flush=True)
    try:
        await shutdown.wait()
    finally:
        await server.close()


def reserve(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Bind a socket before an engine is loaded, which may take minutes. Connections are refused until it listens.

    Args:
        port: 0: any free one.

    Raises:
        ValueError: the address cannot be bound; the message has the reason.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ValueError(f"cannot listen on {host}:{port} ({error}); choose another host or port") from error
    return listener


class _Shutdown:
    """Waits for a signal, the end of standard input, or the death of the engine."""

    def __init__(self, *, until_stdin_closes: bool = False) -> None:
        self._event = asyncio.Event()
        self._error: EngineDeadError | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._event.set)
        if until_stdin_closes:
            loop.add_reader(0, lambda: None if os.read(0, 1) else self._event.set())

    def fail(self, error: EngineDeadError) -> None:
        self._error = error
        self._event.set()

    async def wait(self) -> None:
        """Raises the error of `fail`."""
        await self._event.wait()
        if self._error is not None:
            raise self._error


class LocalEngine:
    """An `AsyncLLM` of this process as a `fleetfoot.server.disaggregation.client.Engine`.

    Args:
        llm: the engine; shutting it down remains the caller's task.
    """

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
        while not self._is_drained():
            await asyncio.sleep(_DRAIN_POLL_SECONDS)
        await self._llm.check_integrity()
        return await self.stats()

    def _is_drained(self) -> bool:
        scheduler, transfers = self._llm.stats().scheduler, self._llm.stats().transfers
        return not (
            scheduler.num_running or scheduler.num_waiting or transfers.num_loading or transfers.num_held_blocks
        )


class EngineServer:
    """Serves an engine on a socket.

    Args:
        engine: used by all connections; shutting it down remains the caller's task.
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
        except (ConnectionError, OSError) as error:
            logger.debug("a connection has ended: %s", error)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        keep_alive(writer.get_extra_info("socket"))
        try:
            call: EngineCall = await read_message(reader, EngineCall)
        except ValueError as error:
            await _send(writer, Failed.of(error))
            return
        work = asyncio.ensure_future(self._reply(call, writer))
        disconnected = asyncio.ensure_future(reader.read(1))  # clients send nothing else: returns at disconnection
        try:
            await asyncio.wait((work, disconnected), return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()  # aborts its request, if it has not finished
            disconnected.cancel()
            await asyncio.gather(work, disconnected, return_exceptions=True)

    async def _reply(self, call: EngineCall, writer: asyncio.StreamWriter) -> None:
        try:
            if isinstance(call, Generate):
                await self._generate(call, writer)
            elif isinstance(call, Drain):
                await _send(writer, Report(await self._engine.drain()))
            else:
                await _send(writer, Report(await self._engine.stats()))
        except ConnectionError:
            raise  # of the client's connection: no reply is possible
        except Exception as error:
            if isinstance(error, EngineDeadError):
                self._on_death(error)
            await _send(writer, Failed.of(error))

    async def _generate(self, call: Generate, writer: asyncio.StreamWriter) -> None:
        outputs = self._engine.generate(call.prompt, call.params, call.request_id, priority=call.priority)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                await _send(writer, Output(output))


async def _send(writer: asyncio.StreamWriter, reply: EngineReply) -> None:
    write_message(writer, reply)
    await writer.drain()


def main(arguments: list[str] | None = None) -> int:
    """Entry point of `fleetfoot.server.disaggregation.client.EngineProcess`'s child process."""
    parser = argparse.ArgumentParser(prog="python -m fleetfoot.server.disaggregation.serve")
    parser.add_argument("config", type=json.loads, help="the engine's settings, a JSON object")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=0, help="port to listen on; 0: any that is free")
    parser.add_argument("--until-stdin-closes", action="store_true", help="end with the end of standard input")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    config = EngineConfig.from_keywords(options.config, owner="EngineProcess")
    serve_engine(config, options.host, options.port, until_stdin_closes=options.until_stdin_closes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
