"""An engine behind a TCP port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.kv_transfer.base.sockets import keep_alive
from fleetfoot.server.disaggregation.engine import Engine
from fleetfoot.server.disaggregation.messages import (
    Answer,
    Drain,
    Failed,
    Generate,
    Output,
    Question,
    Report,
    read_message,
    write_message,
)

logger = logging.getLogger(__name__)


def reserve(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A place to listen at, taken before an engine is loaded that may take minutes; until then nobody can connect.

    Args:
        port: 0: any that is free.

    Raises:
        ValueError: nobody can listen there; says why.
    """
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind((host, port))
    except (OSError, OverflowError) as error:
        place.close()
        raise ValueError(f"nobody can listen on {host}:{port} ({error}); choose another host or port") from error
    return place


class EngineServer:
    """Serves an engine, which stays its owner's.

    Args:
        engine: asked by all connections at once.
        on_death: called when a request has met that the engine is dead.
    """

    def __init__(self, engine: Engine, on_death: Callable[[EngineDeadError], None] = lambda error: None) -> None:
        self._engine = engine
        self._on_death = on_death
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    async def start(self, place: socket.socket) -> None:
        """Listen there (`reserve`); `address` says where that is."""
        self._server = await asyncio.start_server(self._accept, sock=place)
        host, port = place.getsockname()
        self.address = f"{host}:{port}"

    async def close(self) -> None:
        """Requests under way are aborted."""
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
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # the server is closed
        except (ConnectionError, OSError) as error:
            logger.debug("a connection has ended: %s", error)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        keep_alive(writer.get_extra_info("socket"))
        try:
            question: Question = await read_message(reader, Question)
        except ValueError as error:
            await _send(writer, Failed.of(error))
            return
        work = asyncio.ensure_future(self._answer(question, writer))
        gone = asyncio.ensure_future(reader.read(1))  # nothing comes any more: this ends when the client has gone
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()  # aborts its request, if it has not ended
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _answer(self, question: Question, writer: asyncio.StreamWriter) -> None:
        try:
            if isinstance(question, Generate):
                await self._generate(question, writer)
            elif isinstance(question, Drain):
                await _send(writer, Report(await self._engine.drain()))
            else:
                await _send(writer, Report(await self._engine.stats()))
        except ConnectionError:
            raise  # the client's: there is nobody to tell
        except Exception as error:
            if isinstance(error, EngineDeadError):
                self._on_death(error)
            await _send(writer, Failed.of(error))

    async def _generate(self, question: Generate, writer: asyncio.StreamWriter) -> None:
        outputs = self._engine.generate(
            question.prompt, question.params, question.request_id, priority=question.priority
        )
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                await _send(writer, Output(output))


async def _send(writer: asyncio.StreamWriter, answer: Answer) -> None:
    write_message(writer, answer)
    await writer.drain()
