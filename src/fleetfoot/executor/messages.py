"""Messages between the engine and its worker processes, and the sockets that carry them.

A call goes to all workers, as the same bytes; replies of all workers arrive on one socket. On one machine the sockets
are files in a directory that only the user can enter. Between machines they are TCP with CURVE
(`fleetfoot.utils.curve`): the engine's public key comes with the rendezvous, whose messages are authenticated, and that
of workers follows from the cluster key.

The fields that every step has, numbers and strings, are msgpack with known types. New requests, the metadata of a KV
connector and the functions of `collective_rpc` can be objects of any class, and are pickled by the engine. Replies are
data (`fleetfoot.executor.values`), and never unpickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import numpy as np
import zmq

from fleetfoot.executor.values import error_kind, make_error
from fleetfoot.records.kv_layout import KVLayout
from fleetfoot.records.step import ModelRunnerOutput, SchedulerOutput, TokenMasks
from fleetfoot.structured.mask_space import MaskMemory
from fleetfoot.utils.cluster_key import ClusterKey
from fleetfoot.utils.curve import ClientCheck, KeyPair, connect_with, curve_pair, frames_of, listen_with, message_of

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
        return TokenMasks(rows, memory.at(values, len(rows)), memory.file.words, values)
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
    kind: str = ""
    """What `as_error` makes of it (`fleetfoot.executor.values.error_kind`); empty: nothing."""
    message: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException, trace: str) -> Failure:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        message = error.args[0] if len(error.args) == 1 and isinstance(error.args[0], str) else str(error)
        return cls(rank, text, trace, error_kind(error), message)

    def as_error(self) -> Exception | None:
        """The exception, or the known one that it derives from; None: there is none."""
        return make_error(self.kind, self.message)


class RpcResult(msgspec.Struct, array_like=True, tag=True):
    """The result of a collective call on a rank."""

    rank: int
    number: int
    value: bytes = b""
    """The result, by `encode_value`."""
    failure: Failure | None = None
    """The call has raised; the worker goes on."""


Reply = Ready | StepOutput | RpcResult | Failure
encode_reply = _ENCODER.encode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


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


def worker_keys(key: ClusterKey, engine_id: str) -> KeyPair:
    """The key pair of an engine's workers on other machines."""
    return curve_pair(key, "worker", engine_id.encode())


def _make_context(linger_ms: int) -> zmq.Context[zmq.Socket[bytes]]:
    """Its sockets queue without limit."""
    context = zmq.Context()
    for option, value in {zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.LINGER: linger_ms}.items():
        context.setsockopt(option, value)
    return context


def _parts(message: bytes, *, is_remote: bool) -> list[bytes]:
    return frames_of(message) if is_remote else [message]


class EngineChannel:
    """The engine's end. ``place``: a directory for the sockets, or an IP address of this machine for workers on other
    machines; ``num_workers``: of all nodes; ``worker_key``: their public key, if they are on other machines."""

    def __init__(self, place: Path | str, num_workers: int, worker_key: bytes | None = None) -> None:
        keys = None if worker_key is None else zmq.curve_keypair()
        self._context = _make_context(0)
        self._is_remote = worker_key is not None
        self._check = None if worker_key is None else ClientCheck(self._context, worker_key)

        def bind(kind: int, name: str) -> zmq.Socket[bytes]:
            socket = self._context.socket(kind)
            socket.sndtimeo = _SEND_MS
            if keys is not None:
                listen_with(socket, keys)
            socket.bind(f"ipc://{place / name}" if isinstance(place, Path) else f"tcp://{place}:*")
            return socket

        try:
            self.replies = bind(zmq.PULL, "replies")
            self._calls = [bind(zmq.PUSH, f"calls-{rank}") for rank in range(num_workers)]
        except BaseException:
            if self._check is not None:
                self._check.close()
            self._context.destroy(0)
            raise
        replies, *calls = (socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (self.replies, *self._calls))
        self.addresses = [WorkerAddresses(address, replies, keys[0] if keys else None) for address in calls]

    def send(self, message: bytes, ranks: Iterable[int] | None = None) -> None:
        """Queue a message for the workers of ``ranks``; None: all. Raises ConnectionError if one is not connected."""
        parts = _parts(message, is_remote=self._is_remote)
        for rank in range(len(self._calls)) if ranks is None else ranks:
            try:
                self._calls[rank].send_multipart(parts)
            except zmq.Again as error:
                raise ConnectionError(f"worker {rank} is not connected any more") from error

    def receive(self) -> bytes | None:
        """A reply, if one has arrived."""
        try:
            return message_of(self.replies.recv_multipart(zmq.NOBLOCK))
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
        if self._check is not None:
            self._check.close()
        self._context.term()


class WorkerChannel:
    """A worker's end. Sockets cannot be shared, so each thread that replies opens its own. ``keys``: of `worker_keys`,
    where the addresses have the engine's."""

    def __init__(self, addresses: WorkerAddresses, keys: KeyPair | None = None) -> None:
        self._addresses, self._keys = addresses, keys
        self._context = _make_context(_LINGER_MS)
        self._calls = self._connect(zmq.PULL, addresses.calls)

    def _connect(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        if self._addresses.engine_key is not None and self._keys is not None:
            connect_with(socket, self._keys, self._addresses.engine_key)
        socket.connect(address)
        return socket

    def receive(self) -> bytes:
        """Wait for a call."""
        return message_of(self._calls.recv_multipart())

    @contextmanager
    def open_replies(self) -> Iterator[Callable[[Reply], object]]:
        """What sends the replies of the calling thread."""
        with self._connect(zmq.PUSH, self._addresses.replies) as socket:
            is_remote = self._keys is not None
            yield lambda reply: socket.send_multipart(_parts(encode_reply(reply), is_remote=is_remote))

    def close(self) -> None:
        """Deliver what is queued and close. No other thread may use its socket any more."""
        self._context.destroy(_LINGER_MS)
