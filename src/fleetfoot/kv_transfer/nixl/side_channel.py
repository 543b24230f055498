"""The side channel between two ranks: who the other is, which blocks it lends, and whether what was read counts.

One connection for each load, over TCP, from the reader (R) to the lender (L):

    R  Hello      what R is                L  Welcome    where L's KV lies; or Refusal, if L is something else
    R  Acquire    a lease                  L  Blocks     which blocks those are, all written; or Refusal
       (R reads them, through the transfer agent)
    R  Finish                              L  Accepted   they were lent all the time; or Refusal

A connection that is lost gives up the lease that it has acquired. `Decline`, in place of all this, says that a lease is
not wanted; it has no answer.
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
    """What must be equal at both ends for KV to mean the same."""

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
    """Whom the reader wants to speak to."""


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
    """The other end says no, or something that means nothing."""


def differences(reader: Identity, lender: Identity) -> str:
    """What keeps KV from meaning the same, as the reader is to hear it; empty: nothing. Engines' fingerprints, which
    cover nearly everything, come last, so that what can be said better is said first."""
    return "; ".join(
        f"its {name} is {lent!r}, and {read!r} here"
        for name in Identity.__struct_fields__
        if (read := getattr(reader, name)) != (lent := getattr(lender, name))
    )


def decode_request(body: bytes) -> Request:
    """
    Raises:
        ConnectionLostError: it is no request, so this is no connection of ours.
    """
    try:
        return _DECODE_REQUEST.decode(body)
    except msgspec.DecodeError as error:
        raise ConnectionLostError(f"a message is no request ({error})") from error


def encode(message: Request | Reply) -> bytes:
    return msgspec.msgpack.encode(message)


class SideChannel:
    """The reader's end of a connection.

    Args:
        address: ``host:port`` of the lender's rank.
        should_stop: whether nobody waits for an answer any more.

    Raises:
        ConnectionLostError: it cannot be reached. So do all methods, which also raise RefusedError and StoppedError.
    """

    def __init__(self, address: str, should_stop: Callable[[], bool]) -> None:
        self._address = address
        self._should_stop = should_stop
        self._connection = connect(address, CONNECT_SECONDS)

    def hello(self, identity: Identity, engine_id: str) -> Welcome:
        return self._ask(Hello(identity, engine_id), Welcome)

    def acquire(self, lease: str) -> list[int]:
        return self._ask(Acquire(lease), Blocks).block_ids

    def finish(self, lease: str) -> None:
        self._ask(Finish(lease), Accepted)

    def close(self) -> None:
        self._connection.close()

    def _ask(self, request: Request, kind: type[_R]) -> _R:
        send_message(self._connection, encode(request))
        body = receive_message(self._connection, self._should_stop)
        try:
            reply = _DECODE_REPLY.decode(body)
        except msgspec.DecodeError as error:
            raise RefusedError(f"{self._address} does not speak {PROTOCOL} ({error})") from error
        if isinstance(reply, Refusal):
            raise RefusedError(f"{self._address} refuses: {reply.reason}")
        if not isinstance(reply, kind):
            raise RefusedError(f"{self._address} answers {type(request).__name__} with {type(reply).__name__}")
        return reply


def decline(addresses: Iterable[str], lease: str) -> None:
    """Tell ranks of a lender that nobody comes for what they lend. Those that cannot be told notice by themselves."""
    for address in addresses:
        try:
            with contextlib.closing(connect(address, CONNECT_SECONDS)) as connection:
                send_message(connection, encode(Decline(lease)))
        except ConnectionLostError as error:
            logger.info("a lender is not told that nobody reads from it: %s", error)
