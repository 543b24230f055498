"""The protocol between engine processes and their clients, and the interface that both sides implement. No torch.

Messages are msgpack, each preceded by its length. A connection carries one call. Closing it before the last reply
aborts the request.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import msgspec

from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.records.outputs import RequestOutput
from fleetfoot.records.prompts import PromptType
from fleetfoot.records.sampling_params import SamplingParams

MAX_MESSAGE_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")


class Engine(Protocol):
    """An engine in this process (`fleetfoot.server.disaggregation.serve.LocalEngine`), one in another process
    (`fleetfoot.server.disaggregation.client.EngineClient`), or a prefill and a decode engine behind one interface
    (`fleetfoot.server.disaggregation.proxy.DisaggregatedLLM`)."""

    def generate(
        self, prompt: PromptType, sampling_params: SamplingParams, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `fleetfoot.AsyncLLM.generate`; leaving it early aborts the request."""
        ...

    async def stats(self) -> dict[str, Any]:
        """`fleetfoot.engine.stats.EngineStats` as plain data; a proxy has statistics of its own."""
        ...

    async def drain(self) -> dict[str, Any]:
        """Wait until no request is unfinished and no KV is held for a transfer; then return the statistics.

        Raises:
            RuntimeError: the engine's integrity check fails.
        """
        ...


class EngineUnreachableError(RuntimeError):
    """The engine's process cannot be reached, or the connection broke during a request."""


class Generate(msgspec.Struct, tag=True, frozen=True):
    """Replies: any number of `Output`, or `Failed`."""

    prompt: Any
    """Any form of prompt that is plain data."""
    params: SamplingParams
    request_id: str
    priority: int = 0


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Replies: `Report` when `Engine.drain` has returned, or `Failed`."""


class Stats(msgspec.Struct, tag=True, frozen=True):
    """Replies: `Report`."""


class Output(msgspec.Struct, tag=True, frozen=True):
    output: RequestOutput


class Report(msgspec.Struct, tag=True, frozen=True):
    stats: dict[str, Any]
    """`fleetfoot.engine.stats.EngineStats`, as plain data."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """An exception of the engine."""

    kind: str
    """One of `_KINDS`."""
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        kind = next((name for name, known in _KINDS.items() if isinstance(error, known)), "RuntimeError")
        return cls(kind, str(error) or type(error).__name__)

    def as_error(self) -> Exception:
        return _KINDS.get(self.kind, RuntimeError)(self.message)


_KINDS: dict[str, type[Exception]] = {
    "EngineDeadError": EngineDeadError,
    "EngineUnreachableError": EngineUnreachableError,
    "ValueError": ValueError,
    "TypeError": TypeError,
    "RuntimeError": RuntimeError,
}

EngineCall = Generate | Drain | Stats
EngineReply = Output | Report | Failed


def write_message(writer: asyncio.StreamWriter, message: EngineCall | EngineReply) -> None:
    body = msgspec.msgpack.encode(message)
    writer.write(_LENGTH.pack(len(body)) + body)


async def read_message(reader: asyncio.StreamReader, kind: Any) -> Any:
    """Read one message.

    Args:
        kind: the expected type, or a union of types.

    Raises:
        ConnectionError: the other end has closed the connection, or sends data that is not a message.
        ValueError: a value in the message is invalid, for example a sampling parameter out of range.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_MESSAGE_BYTES:
            raise ConnectionError(f"a message of {length:,} bytes is announced; {MAX_MESSAGE_BYTES:,} is the most")
        body = await reader.readexactly(length)
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("the other end has closed the connection") from error
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
    except msgspec.DecodeError as error:
        raise ConnectionError(f"received data that is not a message ({error})") from error
