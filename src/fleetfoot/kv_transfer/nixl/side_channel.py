"""The side channel between two ranks: whether they are compatible, which blocks are held, and whether reads count.

One TCP connection per load, from the consumer (C) to the producer (P), which both prove the cluster key first
(`fleetfoot.utils.sockets`):

    C  Acquire    a lease, with C's description     P  Granted    the held blocks, all written; or Refusal
       (C reads them, through the transfer agent)
    C  Finish                                       P  Accepted   they were held all the time; or Refusal

A lost connection ends the lease that it has acquired, and so does an Acquire of another one. Two messages have no
reply: `Decline`, in place of all this, ends a lease that will not be read; `Renew` extends leases while their requests
wait or load.

Reads are one-sided: the producer does not notice them. So a consumer sends two requests: before the reads, for the
blocks; and after the last read, for whether they were held all the time. Only then does the KV count. Blocks are
released through `Leases.get_finished`, and later consumers are refused, so clocks need not agree, and a late read never
yields wrong KV. A lease that is being read is not declined: it ends with the read or its connection, or expires because
its consumer has stopped renewing it. If it is evicted, the read has `EVICTION_SECONDS` left.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from fleetfoot.kv_transfer.nixl.params import differences
from fleetfoot.utils.cluster_key import ClusterKey
from fleetfoot.utils.sockets import Channel, ConnectionLostError, SocketServer, connect

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

PROTOCOL = "fleetfoot-kv-5"
SIDE_CHANNEL = "kv-side-channel"
"""The purpose that both ends prove the cluster key for."""
CONNECT_SECONDS = 5.0


class Acquire(msgspec.Struct, tag=True, frozen=True):
    """Requests the blocks of a lease."""

    engine_id: str
    """The engine id of the producer that granted it."""
    description: dict[str, Any]
    """What the consumer has, and what must be equal on both ranks."""
    lease: str


class Granted(msgspec.Struct, tag=True, frozen=True):
    """The blocks of a lease, and where they lie."""

    agent: bytes
    """Metadata of the transfer agent."""
    caches: list[int]
    """Addresses of the tensors of its KV cache, which has the consumer's layout."""
    device: int
    num_slabs: int
    """In each of them; with one group, blocks."""
    block_ids: list[list[int]]
    """Held by the lease, in order, of each group of layers."""


class Finish(msgspec.Struct, tag=True, frozen=True):
    """The consumer has read all blocks of the lease that it has acquired."""


class Decline(msgspec.Struct, tag=True, frozen=True):
    """The consumer does not need the blocks."""

    lease: str


class Renew(msgspec.Struct, tag=True, frozen=True):
    """The consumer is alive, and is going to read the blocks of these leases."""

    leases: list[str]


class Accepted(msgspec.Struct, tag=True, frozen=True):
    """The blocks were held until `Finish`."""


class Refusal(msgspec.Struct, tag=True, frozen=True):
    """The producer refuses a request."""

    reason: str


Request = Acquire | Finish | Decline | Renew
Reply = Granted | Accepted | Refusal
_DECODE_REPLY: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_DECODE_REQUEST: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_R = TypeVar("_R", Granted, Accepted)


class RefusedError(RuntimeError):
    """The producer has refused a request, or sent an invalid reply."""


def call(
    channel: Channel, address: str, should_stop: Callable[[], bool], request: Acquire | Finish, kind: type[_R]
) -> _R:
    """Send a request to a producer, and wait for a reply of this kind, while ``should_stop`` returns False.

    Raises:
        ConnectionLostError, RefusedError, StoppedError
    """
    channel.send(msgspec.msgpack.encode(request))
    body = channel.receive(should_stop)
    try:
        reply = _DECODE_REPLY.decode(body)
    except msgspec.DecodeError as error:
        raise RefusedError(f"{address} does not speak {PROTOCOL} ({error})") from error
    if isinstance(reply, Refusal):
        raise RefusedError(f"{address} refuses: {reply.reason}")
    if not isinstance(reply, kind):
        raise RefusedError(f"{address} replied to {type(request).__name__} with {type(reply).__name__}")
    return reply


def notify(
    addresses: Iterable[str], message: Decline | Renew, key: ClusterKey, timeout: float = CONNECT_SECONDS
) -> int:
    """Send a message without a reply to ranks of a producer. At ranks that cannot be reached the leases expire; their
    number is returned."""
    num_lost = 0
    for address in addresses:
        try:
            with contextlib.closing(connect(address, timeout, key, SIDE_CHANNEL)) as channel:
                channel.send(msgspec.msgpack.encode(message))
        except ConnectionLostError as error:
            logger.info("a lease could not be declined or renewed: %s", error)
            num_lost += 1
    return num_lost


ACQUIRE_SECONDS = 30.0
"""How long a consumer waits here for the step that grants its lease, after other steps of the producer."""
EVICTION_SECONDS = 10.0
"""How long a read under way delays requests that need its blocks."""
NUM_REMEMBERED = 1 << 16
"""Ended leases that are remembered, for late consumers: an unknown one costs each of them `ACQUIRE_SECONDS`."""

SENT, DECLINED, EXPIRED, EVICTED, LOST = "sent", "declined", "expired", "evicted", "lost"
_ENDS = {
    SENT: "it was read before",
    DECLINED: "it was declined",
    EXPIRED: "it was not renewed or not read in time (kv_lease_duration, abort_timeout)",
    EVICTED: "it was evicted, because other requests needed its blocks",
    LOST: "the connection of its reader was lost",
}


class LeaseError(RuntimeError):
    """A lease cannot be read: it does not exist, has ended, or is not for this consumer; the message has the reason."""


@dataclass(slots=True)
class Lease:
    """The held blocks of a request that has ended."""

    request_id: str
    block_ids: list[list[int]]
    written: torch.cuda.Event | None
    """After all work that writes to the blocks; None: they are written."""
    deadline: float
    last_deadline: float
    """It is not renewed beyond."""
    is_acquired: bool = False
    """A consumer may be reading the blocks."""


class Leases:
    """All leases of a rank.

    Args:
        duration: seconds until a lease expires, from its grant, its last renewal or its last acquisition.
        timeout: the same, from its grant or its last acquisition, whether or not it is renewed.
        clock: seconds, monotonic.
    """

    def __init__(self, duration: float, timeout: float, clock: Callable[[], float]) -> None:
        self._duration, self._timeout = duration, timeout
        self._clock = clock
        self._changed = threading.Condition()
        self._live: dict[str, Lease] = {}
        self._ended: list[tuple[Lease, str]] = []  # since the last `get_finished`, with the reason
        self._past: OrderedDict[str, str] = OrderedDict()  # lease id -> reason
        self._is_closed = False

    # --- in the worker's thread -------------------------------------------------------------------------------------

    def grant(
        self, lease_id: str, request_id: str, block_ids: list[list[int]], written: torch.cuda.Event | None
    ) -> None:
        """From now on the blocks may be read, once ``written`` has passed."""
        with self._changed:
            self._live[lease_id] = lease = Lease(request_id, block_ids, written, 0.0, self._clock() + self._timeout)
            self._extend(lease)
            if lease_id in self._past:  # declined before the step that grants it
                self._end(lease_id, self._past[lease_id])
            self._changed.notify_all()

    def get_finished(self) -> list[tuple[Lease, str]]:
        """The leases that have ended since the last call, with the reason; expires leases past their deadlines."""
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

    def acquire(self, lease_id: str, timeout: float) -> list[list[int]]:
        """The blocks of a lease, once they are written; raises LeaseError if no step grants it within ``timeout``."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._is_closed or lease_id in self._live or lease_id in self._past, timeout
            ):
                self._remember(lease_id, DECLINED)  # the consumer gives up, so a later grant must end at once
                raise LeaseError(f"there is no lease {lease_id} here")
            lease = self._find(lease_id)
            if lease.is_acquired:
                raise LeaseError(f"the lease {lease_id} is being read by another consumer")
            lease.is_acquired, lease.last_deadline = True, self._clock() + self._timeout
            self._extend(lease)
        if lease.written is not None:
            lease.written.synchronize()
        return lease.block_ids

    def finish(self, lease_id: str) -> None:
        """End a lease after its blocks were read; raises LeaseError if they were not held until now."""
        with self._changed:
            self._find(lease_id)
            self._end(lease_id, SENT)

    def renew(self, lease_ids: Iterable[str]) -> None:
        """Extend leases. Those that have ended, or are not granted yet, are ignored."""
        with self._changed:
            for lease_id in self._live.keys() & set(lease_ids):
                self._extend(self._live[lease_id])

    def give_up(self, lease_id: str, reason: str) -> None:
        """End a lease that will not be read, or not completely; also one that is granted later. While it is being read,
        only the loss of its reader's connection ends it, and an eviction limits its time."""
        with self._changed:
            lease = self._live.get(lease_id)
            if lease is None:
                self._remember(lease_id, reason)
            elif reason == LOST or not lease.is_acquired:
                self._end(lease_id, reason)
            elif reason == EVICTED:
                lease.last_deadline = min(lease.last_deadline, self._clock() + EVICTION_SECONDS)
                self._extend(lease)

    def _extend(self, lease: Lease) -> None:
        lease.deadline = min(self._clock() + self._duration, lease.last_deadline)

    def _find(self, lease_id: str) -> Lease:
        if lease_id in self._live:
            return self._live[lease_id]
        if lease_id in self._past:
            raise LeaseError(f"the lease {lease_id} has ended: {_ENDS[self._past[lease_id]]}")
        raise LeaseError(f"there is no lease {lease_id} here")

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
        host, port: as of `SocketServer`, which may raise ValueError.
        description: consumers' must equal it.
        granted: the reply to `Acquire`, without block ids.
        key: consumers must have it.
    """

    def __init__(
        self,
        host: str,
        port: int,
        engine_id: str,
        description: dict[str, Any],
        leases: Leases,
        granted: Granted,
        key: ClusterKey,
    ) -> None:
        self._engine_id = engine_id
        self._description = description
        self._leases = leases
        self._granted = granted
        self._server = SocketServer(host, port, self._serve, SIDE_CHANNEL, key)
        self.address = self._server.address
        """``host:port``."""

    def close(self) -> None:
        """Refuse all consumers, and close their connections."""
        self._leases.close()
        self._server.close()

    def _serve(self, channel: Channel) -> None:
        acquired = ""
        try:
            while True:
                request = _DECODE_REQUEST.decode(channel.receive())
                reply: Reply
                try:
                    if isinstance(request, Decline):
                        self._leases.give_up(request.lease, DECLINED)
                        continue
                    if isinstance(request, Renew):
                        self._leases.renew(request.leases)
                        continue
                    if isinstance(request, Acquire):
                        if acquired:
                            self._leases.give_up(acquired, LOST)
                        reply, acquired = self._acquire(request), request.lease
                    else:
                        finished, acquired = acquired, ""
                        self._leases.finish(finished)
                        reply = Accepted()
                except LeaseError as error:
                    reply = Refusal(str(error))
                channel.send(msgspec.msgpack.encode(reply))
        except msgspec.DecodeError as error:
            logger.info("a connection is closed because a message is no request (%s)", error)
        finally:
            if acquired:
                self._leases.give_up(acquired, LOST)

    def _acquire(self, request: Acquire) -> Granted:
        if request.engine_id != self._engine_id:
            raise LeaseError(f"this is engine {self._engine_id!r}, and {request.engine_id!r} was requested")
        # from the consumer's view
        if found := differences(theirs=self._description, ours=request.description):
            raise LeaseError(f"the engines are incompatible: {found}")
        block_ids = self._leases.acquire(request.lease, ACQUIRE_SECONDS)
        return msgspec.structs.replace(self._granted, block_ids=block_ids)
