"""Engines in other processes: the protocol, a client for one behind a port, and a child process that serves one.

Messages are msgpack, each preceded by its length. A connection carries one call. Closing it before the last reply
aborts the request. A reply with ``kv_transfer_params`` is acknowledged by one byte: without it, the KV that the engine
holds is released. No torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, Protocol, TypeVar

import msgspec

from fleetfoot.config import env
from fleetfoot.engine.errors import EngineDeadError
from fleetfoot.inputs import PromptType
from fleetfoot.kv_transfer.base.sockets import keep_alive, parse_address
from fleetfoot.kv_transfer.nixl.params import parse_params
from fleetfoot.kv_transfer.nixl.side_channel import CONNECT_SECONDS, Decline
from fleetfoot.outputs import RequestOutput
from fleetfoot.records.sampling_params import SamplingParams

MAX_MESSAGE_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")


class Engine(Protocol):
    """An engine in this process (`LocalEngine` in `fleetfoot.server.disaggregation.serve`), one in another
    (`EngineClient`), or a prefill and a decode engine (`fleetfoot.server.disaggregation.proxy.DisaggregatedLLM`)."""

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

        Raises RuntimeError if the engine's integrity check fails.
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


class Stats(msgspec.Struct, tag=True, frozen=True):
    """Replies: `Report`, or `Failed`."""

    is_drained: bool
    """Reply when `Engine.drain` has returned."""


class Output(msgspec.Struct, tag=True, frozen=True):
    output: RequestOutput


class Report(msgspec.Struct, tag=True, frozen=True):
    stats: dict[str, Any]
    """`fleetfoot.engine.stats.EngineStats`, as plain data."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """An exception of the engine."""

    kind: str
    """Of the first of `_ERRORS` that it is an instance of."""
    message: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        kind = next((known for known in _ERRORS if isinstance(error, known)), RuntimeError)
        return cls(kind.__name__, str(error) or type(error).__name__)

    def as_error(self) -> Exception:
        kind = next((known for known in _ERRORS if known.__name__ == self.kind), RuntimeError)
        return kind(self.message)


_ERRORS = (EngineDeadError, EngineUnreachableError, ValueError, TypeError, RuntimeError)

EngineCall = Generate | Stats
EngineReply = Output | Report | Failed
_R = TypeVar("_R", Output, Report)


async def write_message(writer: asyncio.StreamWriter, message: EngineCall | EngineReply | Decline) -> None:
    """Write one message; waits while the other end does not read."""
    body = msgspec.msgpack.encode(message)
    writer.write(_LENGTH.pack(len(body)) + body)
    await writer.drain()


async def read_message(reader: asyncio.StreamReader, kind: Any) -> Any:
    """Read one message of the type ``kind``.

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


async def release(transfer: Mapping[str, Any] | None) -> None:
    """Notify a prefill engine that the KV of these ``kv_transfer_params`` will not be loaded."""
    with contextlib.suppress(ValueError, TypeError):  # of another connector, which does not hold blocks for others
        if transfer is not None and (remote := parse_params(transfer)) is not None:
            await asyncio.gather(*(_decline(address, remote.remote_lease) for address in remote.remote_addresses))


async def _decline(address: str, lease: str) -> None:
    """`fleetfoot.kv_transfer.nixl.side_channel.notify` without a thread. A rank that cannot be reached is skipped."""
    with contextlib.suppress(OSError):
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(*parse_address(address))
            with contextlib.closing(writer):
                await write_message(writer, Decline(lease))


class EngineClient:
    """Client of a `fleetfoot.server.disaggregation.serve.EngineServer`; implements `Engine`. Each call opens a
    connection of its own.

    Args:
        address: ``host:port``.
        connect_timeout: seconds.

    Raises:
        ValueError: the address is invalid.
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
            EngineUnreachableError: the engine cannot be reached, or the connection broke.
        """
        async with self._call(Generate(prompt, sampling_params, request_id, priority)) as (reader, writer):
            finished = False
            while not finished:
                output = (await self._read(reader, Output)).output
                finished = output.finished
                if output.kv_transfer_params is not None:
                    writer.write(b"\x06")  # the acknowledgement
                yield output

    async def stats(self) -> dict[str, Any]:
        async with self._call(Stats(is_drained=False)) as (reader, _):
            return (await self._read(reader, Report)).stats

    async def drain(self) -> dict[str, Any]:
        async with self._call(Stats(is_drained=True)) as (reader, _):
            return (await self._read(reader, Report)).stats

    @contextlib.asynccontextmanager
    async def _call(self, call: EngineCall) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        try:
            async with asyncio.timeout(self._connect_timeout):
                reader, writer = await asyncio.open_connection(self._host, self._port)
        except (OSError, TimeoutError) as error:
            raise EngineUnreachableError(f"the engine at {self.address} cannot be reached ({error})") from error
        keep_alive(writer.get_extra_info("socket"))
        try:
            await write_message(writer, call)
            yield reader, writer
        except ConnectionError as error:
            raise EngineUnreachableError(f"the engine at {self.address} has gone away ({error})") from error
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _read(self, reader: asyncio.StreamReader, kind: type[_R]) -> _R:
        reply = await read_message(reader, EngineReply)
        if isinstance(reply, Failed):
            raise reply.as_error()
        if not isinstance(reply, kind):
            raise RuntimeError(f"{self.address} replies with {type(reply).__name__} instead of {kind.__name__}")
        return reply


class EngineProcess:
    """A child process that serves an engine, and ends with its parent. From a shell, use `fleetfoot engine`.

    Args:
        config: the fields of `fleetfoot.config.engine.EngineConfig`, as plain data.
        host, port: where it listens; port 0: any free one.
        environment: variables to set in addition to those of this process.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        module = "fleetfoot.server.disaggregation.serve"
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(dict(config)), host, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env.for_child(environment or {}),
        )
        self._address = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> str:
        """Block until the engine accepts requests; return its address.

        Raises RuntimeError if the process has ended; the reason is on standard error.
        """
        assert self._process.stdout is not None
        while not self._address:
            line = self._process.stdout.readline()
            if not line:
                code = self._process.wait()
                raise RuntimeError(f"the engine's process {self.pid} has ended with code {code} before it was ready")
            if line.startswith(b'{"address"'):
                self._address = json.loads(line)["address"]
        return self._address

    def kill(self) -> None:
        """End the process immediately, without clean-up."""
        self._process.kill()
        self._process.wait()

    def stop(self, timeout: float = 30.0) -> int:
        """Shut the process down, and kill it after ``timeout`` seconds. Returns its exit code."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.returncode
        finally:
            self._process.stdout.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
