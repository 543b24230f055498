"""Messages between the engine and its worker processes, and the sockets that carry them.

A call goes to all workers, as the same bytes; replies of all workers arrive on one socket. On one machine the sockets
are files in a directory that only the user can enter. Between machines they are TCP with CURVE (http://curvezmq.org):
encrypted, and only usable with the engine's public key, which nodes receive at the rendezvous.

The fields that every step has, numbers and strings, are msgpack with known types. New requests and the metadata of a KV
connector can hold objects of any class and are pickled. Both ends belong to one engine: processes that it started, or
nodes that `fleetfoot.executor.nodes` has accepted. Messages from anywhere else are never unpickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np
import zmq

from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
from fleetfoot.structured.mask_space import MaskMemory

_LINGER_MS = 2000
"""How long a worker that ends keeps trying to send its last reply."""
_SEND_MS = 10_000
"""How long the engine waits for a worker's connection; it is there unless the worker has ended."""

_PICKLED = ("new_requests", "kv_connector_metadata")
_PLAIN = tuple(field.name for field in fields(SchedulerOutput) if field.name not in _PICKLED)
"""The fields of `SchedulerOutput` that are numbers and strings."""

_ENCODER = msgspec.msgpack.Encoder()
_HINTS = get_type_hints(SchedulerOutput)
_CALL_TYPES: Any = tuple.__class_getitem__((int, bytes, *[_HINTS[name] for name in _PLAIN]))
"""The types of a call: the step's number; the values of _PICKLED, pickled, or nothing if all of them are empty; the
values of _PLAIN."""
_CALL_DECODER = msgspec.msgpack.Decoder(_CALL_TYPES)


def encode_call(number: int, output: SchedulerOutput) -> bytes:
    """A step as bytes. An empty message ends a worker. ``number``: counts all steps, idle ones too."""
    pickled = b""
    if output.new_requests or output.kv_connector_metadata is not None:
        rare = [getattr(output, name) for name in _PICKLED]
        pickled = pickle.dumps(rare, protocol=pickle.HIGHEST_PROTOCOL)
    return _ENCODER.encode((number, pickled, *[getattr(output, name) for name in _PLAIN]))


def decode_call(message: bytes) -> tuple[int, SchedulerOutput]:
    """The arguments of `encode_call`."""
    number, pickled, *plain = _CALL_DECODER.decode(message)
    output = SchedulerOutput(**dict(zip(_PLAIN, plain, strict=True)))
    if pickled:
        for name, value in zip(_PICKLED, pickle.loads(pickled), strict=True):
            setattr(output, name, value)
    return number, output


def encode_masks(masks: TokenMasks | None, *, is_shared: bool) -> bytes:
    """The message that follows a step with ``structured`` requests. ``is_shared``: workers have mapped the memory that
    masks are computed in."""
    if masks is None:
        return _ENCODER.encode(None)
    return _ENCODER.encode((masks.rows, masks.offset if is_shared else masks.masks.tobytes()))


def decode_masks(message: bytes, memory: MaskMemory | None) -> TokenMasks | None:
    """The argument of `encode_masks`. ``memory``: what the engine computes masks in; None: it is not shared."""
    content = msgspec.msgpack.decode(message)
    if content is None:
        return None
    rows, values = content
    if memory is not None:
        return TokenMasks(rows, memory.at(values, len(rows)), memory.words, values)
    return TokenMasks(rows, np.frombuffer(values, np.int32).reshape(len(rows), -1))


# --- collective calls -----------------------------------------------------------------------------------------------

_RPC_MARK = b"\xc1"
"""A byte that begins no msgpack value."""


def encode_rpc(number: int, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """A call of a worker's method, or of a function of the worker. Raises ValueError: it cannot be pickled."""
    try:
        payload = pickle.dumps((method, args, kwargs), protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{method!r} and its arguments cannot be sent to the workers, which run in other processes: {error}; give "
            "the name of a worker's method, or a function of an importable module"
        ) from error
    return _RPC_MARK + _ENCODER.encode((number, payload))


def is_rpc(message: bytes) -> bool:
    """Whether a message is of `encode_rpc`, and not of `encode_call`."""
    return message.startswith(_RPC_MARK)


def decode_rpc(message: bytes) -> tuple[int, bytes]:
    """The call's number, and the rest, pickled."""
    number, payload = msgspec.msgpack.decode(message[1:])
    return number, payload


# --- replies --------------------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, array_like=True, tag=True):
    """A worker has loaded its part and can take steps."""

    rank: int
    layout: KVLayout
    runner: str
    """``v1`` or ``v2``."""


class Compiled(msgspec.Struct, array_like=True, tag=True):
    """A rank has compiled kernels beside the steps."""

    rank: int
    number: int
    """Kernels compiled so far, up to the first one that is not, in the order in which they were queued."""


class StepOutput(msgspec.Struct, array_like=True, tag=True):
    """The output of a step on a rank."""

    rank: int
    number: int
    output: ModelRunnerOutput


class Failure(msgspec.Struct, array_like=True, tag=True):
    """A worker has raised; it executes nothing any more."""

    rank: int
    text: str
    """Type and message of the exception."""
    trace: str
    """The traceback, as Python prints it."""
    error: bytes = b""
    """The exception, pickled; empty if it cannot be."""

    @classmethod
    def of(cls, rank: int, error: BaseException, trace: str) -> Failure:
        """The exception itself is included if it survives being pickled."""
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        try:
            pickled = pickle.dumps(error)
            is_whole = str(pickle.loads(pickled)) == str(error)  # a constructor may require other arguments
        except Exception:
            is_whole = False
        return cls(rank, text, trace, pickled if is_whole else b"")


class RpcResult(msgspec.Struct, array_like=True, tag=True):
    """The result of a collective call on a rank."""

    rank: int
    number: int
    value: bytes = b""
    """Pickled."""
    failure: Failure | None = None
    """The call has raised; the worker goes on."""


encode_reply = _ENCODER.encode
decode_reply = msgspec.msgpack.Decoder(Ready | Compiled | StepOutput | RpcResult | Failure).decode


# --- sockets --------------------------------------------------------------------------------------------------------

Store = str | tuple[str, int]
"""Where torch.distributed finds the ranks: a file on one machine, or the address and port of node 0's store."""


@dataclass(frozen=True, slots=True)
class WorkerAddresses:
    """The sockets at which a worker reaches the engine."""

    calls: str
    replies: str
    engine_key: bytes | None
    """Public; None: no encryption."""


def _make_context(linger_ms: int, keys: tuple[bytes, bytes] | None) -> zmq.Context[zmq.Socket[bytes]]:
    """Its sockets queue without limit, and encrypt if there are ``keys``, a public and a secret one."""
    context = zmq.Context()
    options: dict[int, Any] = {zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.LINGER: linger_ms}
    if keys is not None:
        options |= {zmq.CURVE_PUBLICKEY: keys[0], zmq.CURVE_SECRETKEY: keys[1]}
    for option, value in options.items():
        context.setsockopt(option, value)
    return context


class EngineChannel:
    """The engine's end. ``place``: a directory for the sockets, or an IP address of this machine for workers on other
    machines; ``num_workers``: of all nodes."""

    def __init__(self, place: Path | str, num_workers: int) -> None:
        keys = None if isinstance(place, Path) else zmq.curve_keypair()
        self._context = _make_context(0, keys)

        def bind(kind: int, name: str) -> zmq.Socket[bytes]:
            socket = self._context.socket(kind)
            socket.sndtimeo = _SEND_MS
            socket.curve_server = keys is not None
            socket.bind(f"ipc://{place / name}" if isinstance(place, Path) else f"tcp://{place}:*")
            return socket

        self.replies = bind(zmq.PULL, "replies")
        self._calls = [bind(zmq.PUSH, f"calls-{rank}") for rank in range(num_workers)]
        replies, *calls = (socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (self.replies, *self._calls))
        self.addresses = [WorkerAddresses(address, replies, keys[0] if keys else None) for address in calls]

    def send(self, message: bytes, ranks: Iterable[int] | None = None) -> None:
        """Queue a message for the workers of ``ranks``; None: all. Raises ConnectionError if one is not connected."""
        for rank in range(len(self._calls)) if ranks is None else ranks:
            try:
                self._calls[rank].send(message)
            except zmq.Again as error:
                raise ConnectionError(f"worker {rank} is not connected any more") from error

    def receive(self) -> bytes | None:
        """A reply, if one has arrived."""
        try:
            return self.replies.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def flush(self) -> None:
        """Let `close` deliver what was sent, for at most `_LINGER_MS`."""
        for socket in self._calls:
            socket.linger = _LINGER_MS

    def close(self) -> None:
        """Safe to call again, and from any thread once no other thread uses the channel."""
        for socket in (*self._calls, self.replies):
            socket.close()
        self._context.term()


class WorkerChannel:
    """A worker's end. Sockets cannot be shared, so each thread that replies opens its own."""

    def __init__(self, addresses: WorkerAddresses) -> None:
        self._addresses = addresses
        self._context = _make_context(_LINGER_MS, zmq.curve_keypair() if addresses.engine_key else None)
        self._calls = self._connect(zmq.PULL, addresses.calls)

    def _connect(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        if self._addresses.engine_key is not None:
            socket.curve_serverkey = self._addresses.engine_key
        socket.connect(address)
        return socket

    def receive(self) -> bytes:
        """Wait for a call."""
        return self._calls.recv()

    def open_replies(self) -> zmq.Socket[bytes]:
        """A socket for the replies of the calling thread."""
        return self._connect(zmq.PUSH, self._addresses.replies)

    def close(self) -> None:
        """Deliver what is queued and close. No other thread may use its socket any more."""
        self._context.destroy(_LINGER_MS)
