"""Event streams that are written as outputs arrive.

A stream has an event for each token, so what happens for an event decides how many streams a server has. From a
message of the engine to the connection's buffer, events of an `EventSource` pass no task, no queue and no middleware.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from fleetfoot.server.http import EventStream
from fleetfoot.utils.process import as_exception

EXTENSION = "fleetfoot.body_writer"
"""An extension of the ASGI scope: ``{"writer": BodyWriter}``."""


class Outputs(Protocol):
    """The outputs of a request's prompts: `fleetfoot.server.service.RequestOutputs`."""

    @property
    def num_prompts(self) -> int: ...

    def __aiter__(self) -> AsyncIterator[tuple[int, Any]]: ...

    def listen(self, listener: Callable[[int, Any], bool]) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...


class EventSource(Protocol):
    """Makes the events of a response from the outputs of its request. What `feed` and `end` raise is an error of the
    response: `fail` makes its last events."""

    @property
    def outputs(self) -> Outputs: ...

    def feed(self, index: int, output: Any) -> bytes:
        """The events of the next output of prompt ``index``; may be empty."""

    def end(self) -> bytes:
        """The last events, after all outputs."""

    def fail(self, error: Exception) -> bytes:
        """The last events, after an error."""


class BodyWriter:
    """Writes parts of a body to its connection, in HTTP's chunked encoding, after the response has been started.

    Args:
        protocol: uvicorn's, of the connection.
    """

    def __init__(self, protocol: Any) -> None:
        self._transport, self._flow = protocol.transport, protocol.flow

    def write(self, data: bytes) -> bool:
        """Returns whether the client keeps up. Otherwise further data is buffered; `drain` waits for the client."""
        if not self._transport.is_closing():
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return not self._flow.write_paused

    async def drain(self) -> None:
        await self._flow.drain()


class PushedEvents(EventStream):
    """The events of a source. Without the extension of the scope, they are sent as those of any `EventStream`."""

    def __init__(self, source: EventSource, headers: dict[str, str] | None = None) -> None:
        super().__init__(iterate(source), headers)
        self.headers["transfer-encoding"] = "chunked"
        self._source = source
        self._writer: BodyWriter | None = None
        self._num_unfinished = source.outputs.num_prompts
        self._resuming: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        extension = scope.get("extensions", {}).get(EXTENSION)
        if extension is not None:
            self._writer = extension["writer"]
        await super().__call__(scope, receive, send)

    async def send_body(self, send: Send) -> None:
        if self._writer is None:
            await super().send_body(send)
            return
        self._ended = asyncio.get_running_loop().create_future()
        try:
            self._source.outputs.listen(self._take)
            await self._ended
        finally:
            self._source.outputs.close()
            if self._resuming is not None:
                self._resuming.cancel()

    def _take(self, index: int, item: Any) -> bool:
        """The listener. Returns whether to go on with the next output; otherwise `resume` does."""
        if self._ended.done():
            return True
        assert self._writer is not None
        try:
            if isinstance(item, BaseException):
                raise item
            events = self._source.feed(index, item)
            if item.finished:
                self._num_unfinished -= 1
                if not self._num_unfinished:
                    events += self._source.end()
                    self._ended.set_result(None)
        except BaseException as error:
            events = self._source.fail(as_exception(error))
            self._ended.set_result(None)
        if not events:
            return True
        self.has_sent = True
        keeps_up = self._writer.write(events)
        if not keeps_up and self._resuming is None:
            self._resuming = asyncio.ensure_future(self._resume(self._writer))
        return keeps_up

    async def _resume(self, writer: BodyWriter) -> None:
        await writer.drain()
        self._resuming = None
        self._source.outputs.resume()


async def iterate(source: EventSource) -> AsyncIterator[bytes]:
    """The events of a source, one by one."""
    with contextlib.closing(source.outputs):
        try:
            async for index, output in source.outputs:
                if events := source.feed(index, output):
                    yield events
            last = source.end()
        except BaseException as error:
            last = source.fail(as_exception(error))
        yield last
