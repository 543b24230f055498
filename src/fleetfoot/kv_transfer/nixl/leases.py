"""What a producer's rank has lent: which blocks a peer may read, for how long, and whether what it read still counts.

Reads are one-sided: nobody here sees them. So a reader asks twice. Before, to learn the blocks; and behind its last
read, whether they were lent all the time. Only if they were, does what it has read count. Blocks come back to the
scheduler through `get_finished`, and whoever asks later is refused, so no clocks need to agree and no late reader gets
wrong KV.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

NUM_REMEMBERED = 1024
"""Ended leases whose end is remembered, for those who come too late."""

SENT, DECLINED, EXPIRED, LOST = "sent", "declined", "expired", "lost"
_ENDS = {
    SENT: "it was read before",
    DECLINED: "its reader has given it up",
    EXPIRED: "nobody read it in time (abort_timeout)",
    LOST: "the connection of its reader was lost",
}


class LeaseError(RuntimeError):
    """There is no such lease, or no longer; says why."""


class Event(Protocol):
    """A point in the device's work."""

    def synchronize(self) -> None:
        """Block the calling thread until it has come."""
        ...


@dataclass(slots=True)
class Lease:
    """The blocks of a request that has ended."""

    request_id: str
    block_ids: list[int]
    written: Event | None
    """Behind everything that writes to the blocks; None: they are written."""
    deadline: float


class Leases:
    """All leases of a rank. Readers are in threads of their own; the rest happens in the worker's.

    Args:
        timeout: seconds that a lease lasts, begun anew when its reader asks for it.
        clock: seconds, monotonic.
    """

    def __init__(self, timeout: float, clock: Callable[[], float]) -> None:
        self._timeout = timeout
        self._clock = clock
        self._changed = threading.Condition()
        self._live: dict[str, Lease] = {}
        self._ended: list[tuple[Lease, str]] = []  # since the last `get_finished`, and how
        self._past: OrderedDict[str, str] = OrderedDict()  # lease id -> how it ended
        self._is_closed = False

    # --- in the worker's thread -------------------------------------------------------------------------------------

    def grant(self, lease_id: str, request_id: str, block_ids: list[int], written: Event | None) -> None:
        """From now on the blocks may be read, once what is queued for them has been done."""
        with self._changed:
            self._live[lease_id] = Lease(request_id, block_ids, written, self._clock() + self._timeout)
            if lease_id in self._past:  # its reader has declined it, and was faster than the step that tells of it
                self._end(lease_id, self._past[lease_id])
            self._changed.notify_all()

    def get_finished(self) -> list[tuple[Lease, str]]:
        """The leases that have ended since the last call, with how, those that expire with this call among them."""
        with self._changed:
            now = self._clock()
            for lease_id in [lease_id for lease_id, lease in self._live.items() if now >= lease.deadline]:
                self._end(lease_id, EXPIRED)
            ended, self._ended = self._ended, []
            return ended

    def wait(self, seconds: float) -> None:
        """Return when a lease has ended, or after so long; at once if there is none."""
        with self._changed:
            if self._live and not self._ended:
                self._changed.wait_for(lambda: bool(self._ended), seconds)

    def close(self) -> None:
        """Refuse everybody."""
        with self._changed:
            self._is_closed = True
            self._live.clear()
            self._changed.notify_all()

    # --- in readers' threads ----------------------------------------------------------------------------------------

    def acquire(self, lease_id: str, patience: float) -> list[int]:
        """The blocks, all written. A reader may be faster than the step that tells of the lease: it waits for that.

        Args:
            patience: seconds that it waits at most.

        Raises:
            LeaseError: there is no such lease.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_known(lease_id), patience):
                self._remember(lease_id, DECLINED)  # the reader goes: should it come after all, nobody wants it
                raise LeaseError(f"there is no lease {lease_id} here")
            lease = self._find(lease_id)
            lease.deadline = self._clock() + self._timeout
        if lease.written is not None:
            lease.written.synchronize()
        return lease.block_ids

    def finish(self, lease_id: str) -> None:
        """A reader has read all. When this returns, the blocks were lent until now.

        Raises:
            LeaseError: they were not.
        """
        with self._changed:
            self._find(lease_id)
            self._end(lease_id, SENT)

    def give_up(self, lease_id: str, how: str) -> None:
        """A reader will not read, or read on. For a lease that is not known yet, this holds when it comes."""
        with self._changed:
            if lease_id in self._live:
                self._end(lease_id, how)
            else:
                self._remember(lease_id, how)

    def _is_known(self, lease_id: str) -> bool:
        return self._is_closed or lease_id in self._live or lease_id in self._past

    def _find(self, lease_id: str) -> Lease:
        if lease_id in self._live:
            return self._live[lease_id]
        how = self._past.get(lease_id)
        if how is None:
            raise LeaseError(f"there is no lease {lease_id} here")
        raise LeaseError(f"the lease {lease_id} has ended: {_ENDS[how]}")

    def _end(self, lease_id: str, how: str) -> None:
        self._ended.append((self._live.pop(lease_id), how))
        self._remember(lease_id, how)

    def _remember(self, lease_id: str, how: str) -> None:
        self._past.setdefault(lease_id, how)
        if len(self._past) > NUM_REMEMBERED:
            self._past.popitem(last=False)
        self._changed.notify_all()
