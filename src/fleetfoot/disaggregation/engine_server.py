"""An `AsyncLLM` behind a TCP port."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import msgspec

from fleetfoot.disaggregation.messages import (
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
from fleetfoot.engine.async_llm import AsyncLLM
from fleetfoot.engine.stats import EngineStats

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.02
"""Between looks at an engine that is to be drained."""


class EngineServer:
    """Serves an engine, which stays its owner's.

    Args:
        llm: the engine.
    """

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listen; port 0: any that is free. `address` says where.

        Raises:
            OSError: nobody can listen there.
        """
        self._server = await asyncio.start_server(self._accept, host, port)
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

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
            work.cancel()
            gone.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work  # aborts its request

    async def _answer(self, question: Question, writer: asyncio.StreamWriter) -> None:
        try:
            if isinstance(question, Generate):
                await self._generate(question, writer)
            elif isinstance(question, Drain):
                await _send(writer, _report(await self._drained()))
            else:
                await _send(writer, _report(self._llm.stats()))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:
            await _send(writer, Failed.of(error))

    async def _generate(self, question: Generate, writer: asyncio.StreamWriter) -> None:
        outputs = self._llm.generate(question.prompt, question.params, question.request_id, priority=question.priority)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                await _send(writer, Output(output))

    async def _drained(self) -> EngineStats:
        while True:
            stats = self._llm.stats()
            transfers = stats.transfers
            num_requests = stats.scheduler.num_running + stats.scheduler.num_waiting + transfers.num_loading
            if not (num_requests or transfers.num_lent_blocks):
                await self._llm.check_integrity()
                return stats
            await asyncio.sleep(_LOOK_SECONDS)


def _report(stats: EngineStats) -> Report:
    return Report(msgspec.to_builtins(stats))


async def _send(writer: asyncio.StreamWriter, answer: Answer) -> None:
    write_message(writer, answer)
    await writer.drain()
