"""The side channel between two ranks: whether they are compatible, which blocks are held, and whether reads count.

One TCP connection per load, from the consumer (C) to the producer (P):

    C  Hello      its identity             P  Welcome    where P's KV lies; or Refusal, if P is incompatible
    C  Acquire    a lease                  P  Blocks     the held blocks, all written; or Refusal
       (C reads them, through the transfer agent)
    C  Finish                              P  Accepted   they were held all the time; or Refusal

A lost connection ends the lease that it has acquired. `Decline`, in place of all this, ends a lease that will not be
read; it has no reply.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from fleetfoot.kv_transfer.base.sockets import ConnectionLostError, connect, receive_message, send_message

logger = logging.getLogger(__name__)

PROTOCOL = "fleetfoot-kv-1"
CONNECT_SECONDS = 5.0


class Identity(msgspec.Struct, frozen=True):
    """What must be equal on both ranks."""

    protocol: str
    backend: str
    block_size: int
    dtype: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    rank: int
    layout: str
    """The fingerprint of the rank's KV layout."""
    fingerprint: str
    """Of the engine."""


class Hello(msgspec.Struct, tag=True, frozen=True):
    identity: Identity
    engine_id: str
    """Of the producer that is asked for."""


class Welcome(msgspec.Struct, tag=True, frozen=True):
    agent: bytes
    """Metadata of the transfer agent."""
    layers: list[int]
    """Addresses of the layers' caches."""
    device: int
    num_blocks: int


class Acquire(msgspec.Struct, tag=True, frozen=True):
    lease: str


class Blocks(msgspec.Struct, tag=True, frozen=True):
    block_ids: list[int]


class Finish(msgspec.Struct, tag=True, frozen=True):
    lease: str


class Decline(msgspec.Struct, tag=True, frozen=True):
    lease: str


class Accepted(msgspec.Struct, tag=True, frozen=True):
    pass


class Refusal(msgspec.Struct, tag=True, frozen=True):
    reason: str


Request = Hello | Acquire | Finish | Decline
Reply = Welcome | Blocks | Accepted | Refusal
_DECODE_REPLY: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_DECODE_REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_R = TypeVar("_R", Welcome, Blocks, Accepted)


class RefusedError(RuntimeError):
    """The producer has refused a request, or sent an invalid reply."""


def differences(consumer: Identity, producer: Identity) -> str:
    """How two identities differ, from the consumer's view; empty: they are equal. The engines' fingerprints, which
    cover nearly everything, come last, so that more specific differences come first."""
    return "; ".join(
        f"its {name} is {theirs!r}, and {ours!r} here"
        for name in Identity.__struct_fields__
        if (ours := getattr(consumer, name)) != (theirs := getattr(producer, name))
    )


def decode_request(body: bytes) -> Request:
    """
    Raises:
        ConnectionLostError: the message is no request.
    """
    try:
        return _DECODE_REQUEST.decode(body)
    except msgspec.DecodeError as error:
        raise ConnectionLostError(f"a message is no request ({error})") from error


def encode(message: Request | Reply) -> bytes:
    return msgspec.msgpack.encode(message)


class SideChannel:
    """The consumer's end of a connection.

    Args:
        address: ``host:port`` of the producer's rank.
        should_stop: polled while waiting for a reply; True raises StoppedError.

    Raises (all methods):
        ConnectionLostError: the producer cannot be reached.
        RefusedError, StoppedError
    """

    def __init__(self, address: str, should_stop: Callable[[], bool]) -> None:
        self._address = address
        self._should_stop = should_stop
        self._connection = connect(address, CONNECT_SECONDS)

    def hello(self, identity: Identity, engine_id: str) -> Welcome:
        return self._call(Hello(identity, engine_id), Welcome)

    def acquire(self, lease: str) -> list[int]:
        return self._call(Acquire(lease), Blocks).block_ids

    def finish(self, lease: str) -> None:
        self._call(Finish(lease), Accepted)

    def close(self) -> None:
        self._connection.close()

    def _call(self, request: Request, kind: type[_R]) -> _R:
        send_message(self._connection, encode(request))
        body = receive_message(self._connection, self._should_stop)
        try:
            reply = _DECODE_REPLY.decode(body)
        except msgspec.DecodeError as error:
            raise RefusedError(f"{self._address} does not speak {PROTOCOL} ({error})") from error
        if isinstance(reply, Refusal):
            raise RefusedError(f"{self._address} refuses: {reply.reason}")
        if not isinstance(reply, kind):
            raise RefusedError(f"{self._address} replied to {type(request).__name__} with {type(reply).__name__}")
        return reply


def decline(addresses: Iterable[str], lease: str) -> None:
    """Tell ranks of a producer that a lease will not be read. At ranks that cannot be reached it expires."""
    for address in addresses:
        try:
            with contextlib.closing(connect(address, CONNECT_SECONDS)) as connection:
                send_message(connection, encode(Decline(lease)))
        except ConnectionLostError as error:
            logger.info("a lease could not be declined: %s", error)
