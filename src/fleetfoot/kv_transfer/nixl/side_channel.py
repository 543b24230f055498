"""The side channel between two ranks: whether they are compatible, which blocks are held, and whether reads count.

One TCP connection per load, from the consumer (C) to the producer (P):

    C  Hello      its identity             P  Welcome    where P's KV lies; or Refusal, if P is incompatible
    C  Acquire    a lease                  P  Blocks     the held blocks, all written; or Refusal
       (C reads them, through the transfer agent)
    C  Finish                              P  Accepted   they were held all the time; or Refusal

A lost connection ends the lease that it has acquired. `Decline`, in place of all this, ends a lease that will not be
read; it has no reply.

Reads are one-sided: the producer does not notice them. So a consumer asks twice: before the reads, for the blocks; and
after the last read, whether they were held all the time. Only then does the KV count. Blocks are released through
`Leases.get_finished`, and later consumers are refused, so clocks need not agree, and a late read never yields wrong KV.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from fleetfoot.kv_transfer.base.sockets import ConnectionLostError, SocketServer, connect, receive_message, send_message

if TYPE_CHECKING:
    import torch

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
    """The consumer's first message."""

    identity: Identity
    engine_id: str
    """Of the producer that is asked for."""


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The producer's reply to `Hello`."""

    agent: bytes
    """Metadata of the transfer agent."""
    layers: list[int]
    """Addresses of the layers' caches."""
    device: int
    num_blocks: int


class Acquire(msgspec.Struct, tag=True, frozen=True):
    """Requests the blocks of a lease."""

    lease: str


class Blocks(msgspec.Struct, tag=True, frozen=True):
    """The blocks of a lease, in order."""

    block_ids: list[int]


class Finish(msgspec.Struct, tag=True, frozen=True):
    """The consumer has read all blocks."""

    lease: str


class Decline(msgspec.Struct, tag=True, frozen=True):
    """The consumer does not need the blocks."""

    lease: str


class Accepted(msgspec.Struct, tag=True, frozen=True):
    """The blocks were held until `Finish` or `Decline`."""


class Refusal(msgspec.Struct, tag=True, frozen=True):
    """The producer refuses a request."""

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


ACQUIRE_SECONDS = 5.0
"""How long a consumer waits here for the step that grants its lease."""
NUM_REMEMBERED = 1024
"""Ended leases that are remembered, for late consumers."""

SENT, DECLINED, EXPIRED, LOST = "sent", "declined", "expired", "lost"
_ENDS = {
    SENT: "it was read before",
    DECLINED: "it was declined",
    EXPIRED: "it was not read in time (abort_timeout)",
    LOST: "the connection of its reader was lost",
}


class LeaseError(RuntimeError):
    """A lease does not exist or has ended; the message says why."""


@dataclass(slots=True)
class Lease:
    """The held blocks of a request that has ended."""

    request_id: str
    block_ids: list[int]
    written: torch.cuda.Event | None
    """After all work that writes to the blocks; None: they are written."""
    deadline: float


class Leases:
    """All leases of a rank.

    Args:
        timeout: seconds until a lease expires, from its grant or its last acquisition.
        clock: seconds, monotonic.
    """

    def __init__(self, timeout: float, clock: Callable[[], float]) -> None:
        self._timeout = timeout
        self._clock = clock
        self._changed = threading.Condition()
        self._live: dict[str, Lease] = {}
        self._ended: list[tuple[Lease, str]] = []  # since the last `get_finished`, with the reason
        self._past: OrderedDict[str, str] = OrderedDict()  # lease id -> reason
        self._is_closed = False

    # --- in the worker's thread -------------------------------------------------------------------------------------

    def grant(self, lease_id: str, request_id: str, block_ids: list[int], written: torch.cuda.Event | None) -> None:
        """From now on the blocks may be read, once ``written`` has passed."""
        with self._changed:
            self._live[lease_id] = Lease(request_id, block_ids, written, self._clock() + self._timeout)
            if lease_id in self._past:  # declined before the step that grants it
                self._end(lease_id, self._past[lease_id])
            self._changed.notify_all()

    def get_finished(self) -> list[tuple[Lease, str]]:
        """The leases that have ended since the last call, with the reason; expires leases whose deadline has passed."""
        with self._changed:
            now = self._clock()
            for lease_id in [lease_id for lease_id, lease in self._live.items() if now >= lease.deadline]:
                self._end(lease_id, EXPIRED)
            ended, self._ended = self._ended, []
            return ended

    def wait(self, seconds: float) -> None:
        """Return when a lease has ended, or after ``seconds``; at once without leases."""
        with self._changed:
            if self._live and not self._ended:
                self._changed.wait_for(lambda: bool(self._ended), seconds)

    def close(self) -> None:
        """Refuse all consumers."""
        with self._changed:
            self._is_closed = True
            self._live.clear()
            self._changed.notify_all()

    # --- in consumers' threads --------------------------------------------------------------------------------------

    def acquire(self, lease_id: str, timeout: float) -> list[int]:
        """The blocks of a lease, once they are written.

        Args:
            timeout: seconds to wait for the step that grants the lease.

        Raises:
            LeaseError: there is no such lease.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_known(lease_id), timeout):
                self._remember(lease_id, DECLINED)  # the consumer gives up, so a later grant must end at once
                raise LeaseError(f"there is no lease {lease_id} here")
            lease = self._find(lease_id)
            lease.deadline = self._clock() + self._timeout
        if lease.written is not None:
            lease.written.synchronize()
        return lease.block_ids

    def finish(self, lease_id: str) -> None:
        """End a lease whose blocks were read. If it returns, they were held until now.

        Raises:
            LeaseError: they were not.
        """
        with self._changed:
            self._find(lease_id)
            self._end(lease_id, SENT)

    def give_up(self, lease_id: str, reason: str) -> None:
        """End a lease that will not be read, or not completely; also one that is granted later."""
        with self._changed:
            if lease_id in self._live:
                self._end(lease_id, reason)
            else:
                self._remember(lease_id, reason)

    def _is_known(self, lease_id: str) -> bool:
        return self._is_closed or lease_id in self._live or lease_id in self._past

    def _find(self, lease_id: str) -> Lease:
        if lease_id in self._live:
            return self._live[lease_id]
        reason = self._past.get(lease_id)
        if reason is None:
            raise LeaseError(f"there is no lease {lease_id} here")
        raise LeaseError(f"the lease {lease_id} has ended: {_ENDS[reason]}")

    def _end(self, lease_id: str, reason: str) -> None:
        self._ended.append((self._live.pop(lease_id), reason))
        self._remember(lease_id, reason)

    def _remember(self, lease_id: str, reason: str) -> None:
        self._past.setdefault(lease_id, reason)
        if len(self._past) > NUM_REMEMBERED:
            self._past.popitem(last=False)
        self._changed.notify_all()


class ProducerServer:
    """Serves the side channel, each consumer in its own thread.

    Args:
        host, port: where it listens; port 0: any free port.
        engine_id: which consumers must ask for.
        identity: which consumers' identities must equal.

    Raises:
        ValueError: the address cannot be listened on.
    """

    def __init__(
        self, host: str, port: int, engine_id: str, identity: Identity, leases: Leases, welcome: Welcome
    ) -> None:
        self._engine_id = engine_id
        self._identity = identity
        self._leases = leases
        self._welcome = welcome
        self._server = SocketServer(host, port, self._serve, "kv-side-channel")

    @property
    def address(self) -> str:
        """``host:port``."""
        return self._server.address

    def close(self) -> None:
        self._leases.close()
        self._server.close()

    def _serve(self, connection: socket.socket) -> None:
        acquired: set[str] = set()
        is_welcome = False
        try:
            while True:
                request = decode_request(receive_message(connection))
                if isinstance(request, Decline):
                    self._leases.give_up(request.lease, DECLINED)
                    continue
                if isinstance(request, Hello):
                    reply = self._greet(request)
                    is_welcome = isinstance(reply, Welcome)
                elif is_welcome:
                    reply = self._reply(request, acquired)
                else:
                    reply = Refusal("a Hello that was welcome must come first")
                send_message(connection, encode(reply))
        finally:
            for lease in acquired:
                self._leases.give_up(lease, LOST)

    def _greet(self, hello: Hello) -> Reply:
        if hello.engine_id != self._engine_id:
            return Refusal(f"this is engine {self._engine_id!r}, and {hello.engine_id!r} was asked for")
        if found := differences(consumer=hello.identity, producer=self._identity):
            return Refusal(f"the engines are incompatible: {found}")
        return self._welcome

    def _reply(self, request: Acquire | Finish, acquired: set[str]) -> Reply:
        try:
            if isinstance(request, Acquire):
                block_ids = self._leases.acquire(request.lease, ACQUIRE_SECONDS)
                acquired.add(request.lease)
                return Blocks(block_ids)
            acquired.discard(request.lease)
            self._leases.finish(request.lease)
        except LeaseError as error:
            return Refusal(str(error))
        return Accepted()
