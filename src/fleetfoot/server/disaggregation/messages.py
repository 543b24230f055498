"""What engine processes and their clients say to each other: msgpack, each message with its length before it.

A connection carries one request. Whoever closes it before the last output aborts the request. No torch.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgspec

from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.records.outputs import RequestOutput
from fleetfoot.records.sampling_params import SamplingParams

MAX_MESSAGE_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")


class EngineUnreachableError(RuntimeError):
    """The engine's process cannot be reached, or has gone away in the middle of a request."""


class Generate(msgspec.Struct, tag=True, frozen=True):
    """Answered by `Output`, as often as there is news, or by `Failed`."""

    prompt: Any
    """Any form of prompt that is plain data."""
    params: SamplingParams
    request_id: str
    priority: int = 0


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Answered by `Report` once no request is under way, no KV is lent, and the engine's books have been found to add
    up; or by `Failed`."""


class Stats(msgspec.Struct, tag=True, frozen=True):
    """Answered by `Report` at once."""


class Output(msgspec.Struct, tag=True, frozen=True):
    output: RequestOutput


class Report(msgspec.Struct, tag=True, frozen=True):
    stats: dict[str, Any]
    """`fleetfoot.engine.stats.EngineStats`, as plain data."""


class Failed(msgspec.Struct, tag=True, frozen=True):
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

Question = Generate | Drain | Stats
Answer = Output | Report | Failed


def write_message(writer: asyncio.StreamWriter, message: Question | Answer) -> None:
    body = msgspec.msgpack.encode(message)
    writer.write(_LENGTH.pack(len(body)) + body)


async def read_message(reader: asyncio.StreamReader, kind: Any) -> Any:
    """One message of a kind, a type or a union of them.

    Raises:
        ConnectionError: the other end has closed the connection, or sends what is no message.
        ValueError: it is one, but holds what means nothing, sampling parameters out of range for example.
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
        raise ConnectionError(f"what comes is no message ({error})") from error
