"""Asks an engine in another process. No torch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fleetfoot.kv_transfer.base.sockets import keep_alive, parse_address
from fleetfoot.records.outputs import RequestOutput
from fleetfoot.records.prompts import PromptType
from fleetfoot.records.sampling_params import SamplingParams
from fleetfoot.server.disaggregation.messages import (
    Answer,
    Drain,
    EngineUnreachableError,
    Failed,
    Generate,
    Output,
    Question,
    Report,
    Stats,
    read_message,
    write_message,
)


class EngineClient:
    """A `fleetfoot.server.disaggregation.engine_server.EngineServer`, from outside: implements
    `fleetfoot.server.disaggregation.engine.Engine`. Keeps no connection open.

    Args:
        address: ``host:port``.
        connect_timeout: seconds.

    Raises:
        ValueError: the address is none.
    """

    def __init__(self, address: str, *, connect_timeout: float = 5.0) -> None:
        self.address = address
        self._host, self._port = parse_address(address)
        self._connect_timeout = connect_timeout

    async def generate(
        self, prompt: PromptType, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `fleetfoot.AsyncLLM.generate`; leaving it early aborts the request.

        Raises:
            ValueError, TypeError, EngineDeadError: as there.
            EngineUnreachableError: nobody is there, or not any more.
        """
        question = Generate(prompt, sampling_params, request_id, priority)
        async with self._ask(question) as reader:
            finished = False
            while not finished:
                answer = await self._read(reader)
                if not isinstance(answer, Output):
                    raise RuntimeError(f"{self.address} answers a request with {type(answer).__name__}")
                finished = answer.output.finished
                yield answer.output

    async def stats(self) -> dict[str, Any]:
        return await self._report(Stats())

    async def drain(self) -> dict[str, Any]:
        return await self._report(Drain())

    async def _report(self, question: Question) -> dict[str, Any]:
        async with self._ask(question) as reader:
            answer = await self._read(reader)
            if not isinstance(answer, Report):
                raise RuntimeError(f"{self.address} answers with {type(answer).__name__}")
            return answer.stats

    @contextlib.asynccontextmanager
    async def _ask(self, question: Question) -> AsyncIterator[asyncio.StreamReader]:
        try:
            async with asyncio.timeout(self._connect_timeout):
                reader, writer = await asyncio.open_connection(self._host, self._port)
        except (OSError, TimeoutError) as error:
            raise EngineUnreachableError(f"the engine at {self.address} cannot be reached ({error})") from error
        keep_alive(writer.get_extra_info("socket"))
        try:
            write_message(writer, question)
            await writer.drain()
            yield reader
        except ConnectionError as error:
            raise EngineUnreachableError(f"the engine at {self.address} has gone away ({error})") from error
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader) -> Answer:
        answer: Answer = await read_message(reader, Answer)
        if isinstance(answer, Failed):
            raise answer.as_error()
        return answer
